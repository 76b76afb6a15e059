"""Which Hugging Face architectures are measured, and what is special about each.

Every model type that transformers lists is a case: the class with a head where
there is one, a tiny configuration from `shrink`, inputs of a kind that follows from
the task. `EXCEPTIONS` holds what a small model of that type needs beyond the rules.
"""

import inspect
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.graph.hf.inputs import Shape, make_inputs
from tests.graph.hf.shrink import DROP, shrink

__all__ = ["Case", "all_cases", "case"]

# The first task that lists a model type gives its class and the kind of inputs.
TASKS = (
    ("SEQ_TO_SEQ_CAUSAL_LM", "seq2seq"),
    ("MASKED_LM", "text"),
    ("CAUSAL_LM", "text"),
    ("IMAGE_CLASSIFICATION", "image"),
    ("ZERO_SHOT_IMAGE_CLASSIFICATION", "image_text"),
    ("SPEECH_SEQ_2_SEQ", "speech2seq"),
    ("CTC", "audio"),
    ("AUDIO_CLASSIFICATION", "audio"),
    ("IMAGE_TEXT_TO_TEXT", "image_tokens"),
    ("MULTIMODAL_LM", "image_tokens"),
    ("VIDEO_CLASSIFICATION", "video"),
    ("DEPTH_ESTIMATION", "image"),
    ("SEMANTIC_SEGMENTATION", "image"),
    ("UNIVERSAL_SEGMENTATION", "image"),
    ("OBJECT_DETECTION", "image"),
    ("IMAGE_TO_IMAGE", "image"),
    ("ZERO_SHOT_OBJECT_DETECTION", "image_text"),
    ("MASK_GENERATION", "segments"),
    ("VISUAL_QUESTION_ANSWERING", "image_text"),
)
MAIN_INPUT = {
    "input_ids": "text",
    "pixel_values": "image",
    "input_values": "audio",
    "input_features": "audio",
    "pixel_values_videos": "video",
}

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_HYBRID = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8}
_MOE = {"num_experts_per_tok": 2, "n_routed_experts": 4, "n_shared_experts": 1}
_SWIN = {
    "embed_dim": 24,
    "num_heads": [1, 2, 3, 6],
    "depths": [1, 1, 2, 1],
    "patch_size": 2,
    "window_size": 4,
    "image_size": 64,
}
_MROPE = {"text_config.rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2]}}

EXCEPTIONS: dict[str, dict[str, Any]] = {
    "bamba": {**_HYBRID, "attn_layer_indices": [1, 3]},
    "falcon_h1": {**_HYBRID, "mamba_d_ssm": 64},
    "granitemoehybrid": _HYBRID,
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "ministral": {"head_dim": 8},
    "esm": {"vocab_size": 96, "mask_token_id": 4, "pad_token_id": 0},
    "reformer": {
        "axial_pos_shape": [8, 8],
        "axial_pos_embds_dim": [16, 16],
        "attn_layers": ["local", "lsh", "local", "lsh"],
        "num_buckets": 2,
        "hash_seed": 0,
    },
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "deepseek_v2": {**_MOE, "first_k_dense_replace": 1},
    "deepseek_v3": {"first_k_dense_replace": 1},
    "dots1": {**_MOE, "first_k_dense_replace": 1},
    "gpt_neo": {
        "attention_types": [[["global", "local"], 2]],
        "attention_layers": ["global", "local", "global", "local"],
        "window_size": 4,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "longcat_flash": {
        "qk_head_dim": 16,
        "expert_ffn_hidden_size": 16,
        "zero_expert_num": 2,
        "num_layers": 4,
    },
    "xlnet": {"d_head": 8},
    "zamba": {
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "n_mamba_heads": 2,
        "mamba_dt_rank": 8,
        "use_mamba_kernels": False,
        "num_hidden_layers": 6,
        "layers_block_type": [
            "linear_attention",
            "hybrid",
            "linear_attention",
            "linear_attention",
            "hybrid",
            "linear_attention",
        ],
    },
    "zamba2": {
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "mamba_headdim": 16,
        "use_mamba_kernels": False,
        "num_hidden_layers": 6,
        "adapter_rank": 4,
        "num_query_groups": 4,
        "kv_channels": 8,
        "layers_block_type": [
            "linear_attention",
            "hybrid",
            "linear_attention",
            "linear_attention",
            "hybrid",
            "linear_attention",
        ],
    },
    "nemotron_h": {"mamba_num_heads": 4, "mamba_head_dim": 16, "expand": 2},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
    "laguna": {"num_attention_heads_per_layer": [4, 4, 4, 4]},
    "cpmant": {"dim_head": 8, "dim_ff": 48, "prompt_length": 4, "prompt_types": 4},
    "perceiver": {
        "num_latents": 8,
        "d_latents": 32,
        "num_self_attends_per_block": 4,
        "num_self_attention_heads": 4,
        "num_cross_attention_heads": 4,
        "vocab_size": 96,
    },
    "squeezebert": {
        "q_groups": 2,
        "k_groups": 2,
        "v_groups": 2,
        "post_attention_groups": 1,
        "intermediate_groups": 2,
        "output_groups": 2,
    },
    "mobilebert": {
        "embedding_size": 16,
        "intra_bottleneck_size": 16,
        "true_hidden_size": 16,
        "num_feedforward_networks": 2,
    },
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0}},
    "swin": _SWIN,
    "swinv2": _SWIN,
    "donut-swin": _SWIN,
    "maskformer-swin": _SWIN,
    "swin2sr": {"embed_dim": 24, "num_heads": [2, 2], "depths": [2, 2], "upscale": 2},
    "levit": {
        "image_size": 64,
        "patch_size": 16,
        "hidden_sizes": [16, 32, 48],
        "num_attention_heads": [2, 2, 4],
        "key_dim": [8, 8, 8],
        "depths": [2, 2, 2],
        "down_ops": DROP,
    },
    "mobilevit": {
        "image_size": 64,
        "patch_size": 2,
        "hidden_sizes": [16, 24, 32],
        "neck_hidden_sizes": [8, 8, 16, 16, 24, 24, 32],
    },
    "mobilevitv2": {"image_size": 64, "patch_size": 2, "base_attn_unit_dims": [16, 16, 24]},
    "efficientnet": {
        "image_size": 64,
        "width_coefficient": 0.5,
        "depth_coefficient": 1.0,
        "in_channels": [32, 16, 16, 32],
        "out_channels": [16, 16, 32, 32],
        "kernel_sizes": [3, 3, 5, 3],
        "strides": [1, 2, 2, 1],
        "num_block_repeats": [1, 2, 2, 1],
        "expand_ratios": [1, 2, 2, 2],
        "hidden_dim": 640,
    },
    "segformer": {"hidden_sizes": [8, 16, 24, 32], "num_attention_heads": [1, 2, 3, 4]},
    "pvt": {"hidden_sizes": [8, 16, 24, 32], "num_attention_heads": [1, 2, 3, 4], "patch_size": 4},
    "pvt_v2": {"hidden_sizes": [8, 16, 24, 32], "num_attention_heads": [1, 2, 3, 4]},
    "hiera": {"image_size": [64, 64], "patch_size": [7, 7], "embed_dim": 8},
    "focalnet": {"embed_dim": 16, "patch_size": 2, "hidden_sizes": [16, 16, 16, 16]},
    "regnet": {"hidden_sizes": [16, 24, 32, 48]},
    "mobilenet_v1": {"depth_multiplier": 0.25, "min_depth": 8},
    "mobilenet_v2": {"depth_multiplier": 0.25, "min_depth": 8},
    "siglip2": {"vision_config.num_patches": 16, "text_config.projection_size": 32},
    "wav2vec2-bert": {"vocab_size": 96, "feature_projection_input_dim": 16},
    "wav2vec2-conformer": {"vocab_size": 96},
    "speech_to_text": {"conv_channels": 32, "input_feat_per_channel": 16},
    "audio-spectrogram-transformer": {"max_length": 64, "num_mel_bins": 16},
    "whisper": {"max_source_positions": 32},
    "moonshine": {"encoder_num_key_value_heads": 4, "decoder_num_key_value_heads": 4},
    "qwen2_vl": _MROPE,
    "qwen2_5_vl": {**_MROPE, "vision_config.fullatt_block_indexes": [1, 3]},
    "qwen2_5_vl_text": {"rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2]}},
    "qwen2_vl_text": {"rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2]}},
    **dict.fromkeys(("glm46v", "glm4v", "glm4v_moe", "glm_ocr", "glmga"), _MROPE),
    "llava": {"vision_feature_layer": -2},
    "vipllava": {"vision_feature_layers": [-1, -2, 1]},
    "gemma3n_text": {
        "intermediate_size": 48,
        "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
        "num_kv_shared_layers": 1,
        "layer_types": [
            "sliding_attention",
            "full_attention",
            "sliding_attention",
            "full_attention",
        ],
        "laurel_rank": 8,
    },
    "hgnet_v2": {
        "stem_channels": [3, 8, 16],
        "stage_in_channels": [16, 16, 32, 32],
        "stage_mid_channels": [8, 8, 16, 16],
        "stage_out_channels": [16, 32, 32, 48],
        "hidden_sizes": [16, 32, 32, 48],
        "stage_num_blocks": [1, 1, 2, 1],
        "stage_numb_of_layers": [2, 2, 2, 2],
    },
    "encodec": {"num_filters": 4, "hidden_size": 32, "codebook_dim": 32},
    "mimi": {"num_filters": 4, "upsample_groups": 32, "vector_quantization_hidden_dimension": 32},
    "sam": {"mask_decoder_config.num_hidden_layers": 2, "vision_config.output_channels": 32},
    "sam_hq": {"mask_decoder_config.num_hidden_layers": 2, "vision_config.output_channels": 32},
    "depth_anything": {"neck_hidden_sizes": [16, 16, 16, 16], "reassemble_hidden_size": 32},
    "bridgetower": {
        "vision_config.hidden_size": 64,
        "text_config.hidden_size": 32,
        "vision_config.patch_size": 8,
    },
    "convnext": {"image_size": 64},
    "convnextv2": {"image_size": 64},
    "cvt": {
        "embed_dim": [8, 16, 24],
        "num_heads": [1, 2, 3],
        "depth": [1, 2, 3],
        "drop_path_rate": [0.0, 0.0, 0.0],
        "patch_sizes": [7, 3, 3],
    },
    "textnet": {"hidden_sizes": [16, 16, 16, 16, 16], "stem_num_channels": 3},
    "align": {
        "vision_config.width_coefficient": 0.25,
        "vision_config.depth_coefficient": 0.3,
        "vision_config.image_size": 64,
        "vision_config.hidden_dim": 32,
    },
    "autoformer": {"prediction_length": 4, "context_length": 16, "cardinality": [4]},
    "informer": {"prediction_length": 4, "context_length": 16, "cardinality": [4]},
    "time_series_transformer": {
        "prediction_length": 4,
        "context_length": 16,
        "cardinality": [4],
    },
    "granite_speech5_ctc": {"context_size": 32},
    "dpt": {"backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [16, 16, 32, 32]},
    "lilt": {"hidden_size": 24, "channel_shrink_ratio": 4},
    "layoutlmv3": {"coordinate_size": 6, "shape_size": 4},
}
# What the rules cannot guess about the inputs: model type -> kind.
KINDS: dict[str, str] = {
    "imagegpt": "text",
    "audio-spectrogram-transformer": "spectrogram",
    "whisper": "whisper",
    "siglip2": "image_patches",
    "siglip2_vision_model": "image_patches",
    "lfm2_vl": "image_patches",
    "groupvit": "image_text",
    "aimv2": "image_text",
    "xclip": "video_text",
    "videoprism_vision_model": "video_named",
    "vjepa2": "video_named",
    "vision-text-dual-encoder": "image_text",
    "bros": "boxes",
    "lilt": "boxes",
    "layoutlm": "boxes",
    "lxmert": "regions",
    "autoformer": "lagged_series",
    "informer": "lagged_series",
    "time_series_transformer": "lagged_series",
    "encodec": "codec",
    "dac": "codec",
    "mimi": "codec",
    "xcodec": "codec",
    "idefics": "many_images",
    "idefics2": "many_images",
    "idefics3": "many_images",
    "smolvlm": "many_images",
    "qwen2_audio": "sound_tokens",
    "audioflamingo3": "sound_tokens",
    "voxtral": "sound_tokens",
    "shieldgemma2": "image_tokens",
    "sam3": "image_text",
    "mistral3": "sized_images",
    "lighton_ocr": "sized_images",
    "bridgetower": "masked_image_text",
    "sam3_lite_text": "image_text",
    **dict.fromkeys(
        (
            "qwen2_vl",
            "qwen2_5_vl",
            "qwen3_vl",
            "qwen3_vl_moe",
            "qwen3_5",
            "qwen3_5_moe",
            "qwen2_5_omni_thinker",
            "qwen3_omni_moe_thinker",
            "glm46v",
            "glm4v",
            "glm4v_moe",
            "glm_ocr",
            "glmga",
            "exaone4_5",
            "paddleocr_vl",
            "cosmos3_omni",
            "kimi_k25",
            "minimax_m3_vl",
            "video_llama_3",
            "hyperclovax_vision_v2",
        ),
        "image_grid",
    ),
}
CLASSES: dict[str, str] = {
    "siglip2": "Siglip2Model",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "llama4": "Llama4ForConditionalGeneration",
    "whisper": "WhisperForConditionalGeneration",
    "emu3": "Emu3ForConditionalGeneration",
    "musicgen": "MusicgenForConditionalGeneration",
    "gemma3n": "Gemma3nForConditionalGeneration",
    "blip-2": "Blip2ForConditionalGeneration",
}
# How many features one image (or sound) becomes.
IMAGE_TOKENS: dict[str, int] = {
    "aya_vision": 4,
    "cohere2_vision": 4,
    "deepseek_vl": 16,
    "florence2": 2,
    "got_ocr2": 1,
    "idefics2": 64,
    "idefics3": 4,
    "internvl": 4,
    "lighton_ocr": 4,
    "llava": 16,
    "mistral3": 4,
    "ovis2": 16,
    "paligemma": 16,
    "pp_chart2table": 1,
    "qianfan_ocr": 4,
    "qwen2_audio": 1,
    "smolvlm": 4,
    "video_llava": 16,
    "vipllava": 16,
}


@dataclass(frozen=True, slots=True)
class Case:
    """One architecture: how to build it and what to feed it."""

    model_type: str
    class_name: str
    kind: str | None
    exceptions: dict[str, Any] = field(default_factory=dict)
    image_tokens: int = 0

    def config(self) -> Any:
        """The tiny configuration."""
        return shrink(CONFIG_MAPPING[self.model_type], self.exceptions)

    def build(self, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
        """The tiny model, in training mode."""
        torch.manual_seed(seed)
        model: nn.Module = getattr(transformers, self.class_name)(self.config())
        return model.to(dtype).train()

    def inputs(self, model: nn.Module, shape: Shape) -> dict[str, Any]:
        """Keyword inputs for one forward."""
        return make_inputs(model, self.kind or _kind(model), shape, image_tokens=self.image_tokens)


@cache
def all_cases() -> dict[str, Case]:
    """Every model type that transformers lists, by name."""
    found: dict[str, tuple[str, str | None]] = {}
    for task, kind in TASKS:
        names = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES")
        for model_type, class_name in names.items():
            found.setdefault(model_type, (class_name, kind))
    for model_type, class_name in modeling_auto.MODEL_MAPPING_NAMES.items():
        found.setdefault(model_type, (class_name, None))
    return {
        model_type: Case(
            model_type,
            CLASSES.get(model_type, _first(class_name)),
            KINDS.get(model_type, kind),
            EXCEPTIONS.get(model_type, {}),
            IMAGE_TOKENS.get(model_type, 0),
        )
        for model_type, (class_name, kind) in found.items()
    }


def case(model_type: str) -> Case:
    """The case of one model type."""
    return all_cases()[model_type]


def _first(name: str | tuple[str, ...] | list[str]) -> str:
    return name if isinstance(name, str) else name[0]


def _kind(model: Any) -> str:
    """The kind of a model without a task, from its main input."""
    kind = MAIN_INPUT.get(model.main_input_name, model.main_input_name)
    is_pair = "decoder_input_ids" in inspect.signature(model.forward).parameters
    return {"text": "seq2seq", "audio": "speech2seq"}.get(kind, kind) if is_pair else kind
