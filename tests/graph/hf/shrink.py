"""Make any Hugging Face configuration tiny, by the names of its fields.

In:  a configuration class of transformers, and exceptions for a few models.
Out: an instance whose model has some thousand parameters and four layers.

Widths that meet each other get the same number everywhere (32, with 4 heads of 8),
so that a model fits together without being known. What does not follow from a
field's name is listed in `registry.EXCEPTIONS`.
"""

import re
from collections.abc import Mapping
from typing import Any

__all__ = ["LAYERS", "VOCAB", "WIDTH", "shrink"]

WIDTH = 32
HEADS = 4
KV_HEADS = 2
HEAD = WIDTH // HEADS
FEED = 48
LAYERS = 4
VOCAB = 96
POSITIONS = 64
IMAGE = 32
PATCH = 8
EXPERTS = 4

# The first pattern that matches the whole name decides.
RULES: tuple[tuple[str, int], ...] = (
    (r"vocab_size|.*_vocab_size|vocab_size_per_layer_input|.*num_embeddings_text", VOCAB),
    (r"type_vocab_size", 2),
    (
        r"hidden_size|d_model|n_embd|embed_dim|dim|hidden_dim|embedding_size|emb_dim|"
        r"projection_dim|out_hidden_size|text_hidden_size|encoder_hidden_size|encoder_width|"
        r"decoder_hidden_size|embedding_dim|word_embed_proj_dim|n_embed|output_hidden_size|"
        r"text_embed_dim|hidden_size_global|attention_hidden_size|d_embed|attention_dim|"
        r"vision_output_dim|output_dim|text_dim|vision_hidden_size|lru_width|width|"
        r"multimodal_hidden_size|proj_dim|cross_attention_hidden_size|mm_hidden_size|"
        r"embed_size|conv_encoder_hidden|audio_hidden_size|projector_input_dim|"
        r"backbone_hidden_size|qformer_hidden_size|projector_hidden_size",
        WIDTH,
    ),
    (
        r"intermediate_size|.*_intermediate_size|ffn_dim|.*_ffn_dim|d_ff|n_inner|mlp_dim|"
        r"d_inner|dim_feedforward|feed_forward_size|ffn_hidden_size|feedforward_dim|"
        r"feature_projection_dim|intermediate_dim|feed_forward_proj_dim",
        FEED,
    ),
    (r".*num_key_value_heads|num_kv_heads|n_head_kv|multi_query_group_num", KV_HEADS),
    (
        r"num_attention_heads|num_heads|n_head|n_heads|.*_attention_heads|attention_heads|"
        r"nhead|heads|num_head|.*_num_heads",
        HEADS,
    ),
    (r"head_dim|d_kv|head_size|.*_head_dim|attention_head_size|.*_head_size", HEAD),
    (
        r"num_hidden_layers|num_layers|n_layer|n_layers|encoder_layers|decoder_layers|"
        r"num_decoder_layers|num_encoder_layers|depth|num_blocks|layers|max_window_layers|"
        r".*_num_hidden_layers|decoder_num_layers|num_hidden_layers_.*",
        LAYERS,
    ),
    (
        r"max_position_embeddings|n_positions|max_seq_len|max_seq_length|max_target_positions|"
        r"max_source_positions|seq_length|original_max_position_embeddings|block_size|"
        r"max_sequence_length|context_length",
        POSITIONS,
    ),
    (r"max_2d_position_embeddings", 1024),
    (
        r"num_experts|num_local_experts|n_routed_experts|moe_num_experts|num_routed_experts",
        EXPERTS,
    ),
    (r"num_experts_per_tok|moe_k|num_experts_per_token|moe_topk|top_k_experts", 2),
    (r"n_group|topk_group|expert_groups", 1),
    (r"vision_feature_layer", 2),
    (r"num_query_tokens|image_text_hidden_size", 4),
    (r"image_size|pretrain_image_size|input_image_size", IMAGE),
    (r"patch_size", PATCH),
    (r"q_lora_rank|kv_lora_rank|.*_lora_rank|o_lora_rank", 16),
    (r"mamba_d_state|state_size|ssm_state_size|mamba_d_ssm", 8),
    (r"num_labels|num_classes", 5),
    (r"sliding_window|local_attention|attention_window_size|window", 4),
    (r"num_queries", 6),
    (r"num_mel_bins", 16),
    (r"codebook_size|codebook_dim", 32),
    (r"hidden_size_per_layer_input", 8),
    (r"index_topk", 4),
    (r"index_n_heads", 2),
    (r"chunk_size|mamba_chunk_size|lsh_attn_chunk_length|local_attn_chunk_length", 8),
    (r"mamba_n_heads|mamba_num_heads|n_mamba_heads|linear_num_heads", 4),
    (r"mamba_d_head|mamba_headdim", 16),
    (r"mamba_n_groups|mamba_ngroups|n_groups", 1),
    (r"linear_num_key_heads|linear_num_value_heads", 4),
    (r"rotary_dim", 4),
    (r"num_groups", 2),
    (r"groups_width", 8),
    (r"num_conv_pos_embeddings", 16),
    (r"num_conv_pos_embedding_groups", 4),
    (r"aspp_out_channels", 16),
    (r"fusion_hidden_size|fpn_hidden_size", 16),
)
# Spatial pyramids: widths start at 16 and keep their proportions, depths end at 2.
PYRAMID = re.compile(
    r"hidden_sizes|embed_dims|neck_hidden_sizes|encoder_hidden_sizes|stage_.*channels|embed_dim|"
    r"decoder_hidden_sizes|conv_dim|base_attn_unit_dims|embed_dim_per_stage|"
    r"backbone_channel_list|tdnn_dim|patch_embed_channels"
)
DEPTHS = re.compile(
    r"depths|depth|n_attn_blocks|blocks_per_stage|num_block_repeats|stage_num_blocks"
)
# Derived fields: the configuration makes them again from the others.
DERIVED = (
    "stage_names",
    "out_features",
    "out_indices",
    "per_layer_config",
    "hybrid_layer_ids",
    "num_attention_heads_per_layer",
)
OMITTED = ("transformers_version", "architectures", "_name_or_path", "dtype", *DERIVED)
# Random numbers decide here which layers run; a pipeline needs all of them.
LAYER_DROP = re.compile(r"layerdrop|.*_layerdrop|layer_drop|drop_path_rate|stochastic_depth.*")
SPECIAL = re.compile(r"(pad|bos|eos|sep|cls|mask|unk|decoder_start|forced_eos|forced_bos)_token_id")
PER_LAYER = re.compile(r".*layer_types|layers_block_type|no_rope_layers|indexer_types|block_types")


def shrink(config_class: Any, exceptions: Mapping[str, Any] | None = None) -> Any:
    """A tiny configuration of the class; `exceptions` go into it as they are.

    A key with dots reaches into a part: `{"text_config.num_hidden_layers": 2}`.
    """
    small = _shrunk(config_class().to_dict())
    for path, value in (exceptions or {}).items():
        *parents, last = path.split(".")
        place = small
        for parent in parents:
            place = place.setdefault(parent, {})
        if value is DROP:
            place.pop(last, None)
        else:
            place[last] = value
    return config_class(**small)


class _Drop:
    """Take a field's default instead of what the rules say."""


DROP = _Drop()


def _shrunk(values: dict[str, Any]) -> dict[str, Any]:
    small: dict[str, Any] = {}
    for name, value in values.items():
        if name in OMITTED:
            continue
        small[name] = _one(name, value)
    for index, name in enumerate(_placeholders(small)):
        small[name] = VOCAB - 1 - index
    specials = [name for name in small if SPECIAL.fullmatch(name) and small[name] is not None]
    for index, name in enumerate(sorted(specials)):
        small[name] = 0 if name.startswith("pad") else min(1 + index, 5)
    for name in ("use_cache", "apply_spec_augment"):
        if name in small:
            small[name] = False
    if "num_attention_heads" in small and "num_key_value_heads" in small:
        same = values["num_attention_heads"] == values["num_key_value_heads"]
        small["num_key_value_heads"] = HEADS if same else KV_HEADS
    return small


def _one(name: str, value: Any) -> Any:
    if isinstance(value, dict):
        if name == "rope_parameters":
            return _rope(value)
        return _shrunk(value) if "config" in name or "model_type" in value else value
    if PER_LAYER.fullmatch(name) and isinstance(value, list):
        return _few(value)
    if LAYER_DROP.fullmatch(name) and value is not None:
        return [0.0] * len(value) if isinstance(value, list) else type(value)(0)
    if isinstance(value, list):
        return _few_numbers(name, value)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        return value
    for pattern, number in RULES:
        if re.fullmatch(pattern, name):
            return number
    return value


def _placeholders(values: dict[str, Any]) -> list[str]:
    """Fields with ids of tokens that stand for an image or a sound: the last of the vocabulary."""
    return [
        name
        for name, value in values.items()
        if re.fullmatch(r".*(token_id|token_index)", name)
        and not SPECIAL.fullmatch(name)
        and isinstance(value, int)
        and value >= 8
    ]


def _few_numbers(name: str, values: list[Any]) -> list[Any]:
    if not values or not all(isinstance(value, int) for value in values):
        return values
    if DEPTHS.fullmatch(name):
        return [min(value, 2) for value in values]
    if PYRAMID.fullmatch(name):
        return [max(8, value * 16 // min(values) // 8 * 8) for value in values]
    if name in ("image_size", "input_size"):
        return [IMAGE] * len(values)
    if name == "patch_size" and len(set(values)) == 1:
        return [PATCH] * len(values)
    return values


def _rope(values: dict[str, Any]) -> dict[str, Any]:
    """Rotary settings; multimodal sections must add up to half a head."""
    small = {}
    for name, value in values.items():
        if isinstance(value, dict):
            small[name] = _rope(value)
        elif name == "mrope_section" and value:
            small[name] = [1] * (len(value) - 1) + [HEAD // 2 - len(value) + 1]
        elif name in ("original_max_position_embeddings", "max_position_embeddings"):
            small[name] = POSITIONS
        else:
            small[name] = value
    return small


def _few(kinds: list[Any]) -> list[Any]:
    """Four entries that still show every kind, in the order in which they first appear."""
    few = kinds[:LAYERS]
    missing = [kind for kind in dict.fromkeys(kinds) if kind not in few]
    return few[: LAYERS - len(missing)] + missing if missing else few
