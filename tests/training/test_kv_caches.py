"""Caches are used where they give the tokens of a model that has none, and nowhere else."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fxpipe import LocalGroup, Pipeline, generate

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False,
}  # fmt: skip
IDS = torch.arange(36).view(4, 9) * 7 % 61 + 3
POSITIONS = torch.arange(9).expand(4, 9)


def made(kind: str, config: str = "", **more: Any) -> Callable[[], Any]:
    def make() -> Any:
        import transformers

        sizes = getattr(transformers, config or f"{kind}Config")(**{**SIZES, **more})
        return getattr(transformers, f"{kind}ForCausalLM")(sizes)

    return make


# What the layers look at is shorter than the sequences: 4 of up to 17 tokens. These gave other
# tokens in silence once: their masks are made outside attention, for the one token that goes in.
WINDOWS = {
    "all layers slide": made("Mistral", sliding_window=4),
    "some layers slide": made("Gemma2", sliding_window=4, head_dim=8),
    "eager attention": made("Mistral", sliding_window=4, attn_implementation="eager"),
    "full attention": made("Qwen3", head_dim=8),
    "masks in the model": made("OPT", ffn_dim=64, word_embed_proj_dim=32, num_hidden_layers=2),
}


def asks_for_tokens() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    class Asks(LlamaForCausalLM):
        def forward(self, input_ids: torch.Tensor, **options: Any) -> Any:
            found = super().forward(input_ids, **options)
            found.logits = found.logits * (2.0 if input_ids.shape[1] > 1 else 3.0)
            return found

    return Asks(LlamaConfig(**SIZES))


NO_CACHES = {
    "chunks of 4": made(
        "Llama4", "Llama4TextConfig", attention_chunk_size=4, head_dim=8, num_local_experts=2,
        intermediate_size_mlp=64, num_hidden_layers=2,
    ),
    "LinearAttentionLayer": made(
        "Jamba", attn_layer_period=2, attn_layer_offset=1, num_experts=2, mamba_d_state=4,
        num_hidden_layers=2,
    ),
    "Lfm2ShortConv": made(
        "Lfm2", full_attn_idxs=[1], block_auto_adjust_ff_dim=False, num_hidden_layers=2
    ),
    "more than one token": asks_for_tokens,
}  # fmt: skip


def found_and_plain(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Generated tokens, and those of the plain model that computes everything anew for each."""
    model.eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0 if parameter.dim() > 1 else 1.0)  # so that tokens differ
        example = {"input_ids": IDS[:2], "position_ids": POSITIONS[:2]}
        options = {"loss_fn": None, "n_microbatches": 2, "split": {"num_stages": 2, "check": False}}
        pipe = Pipeline.build(model, (), example, group=LocalGroup(2), **options)
        found = torch.stack(generate(pipe, IDS, max_new_tokens=8))
        plain = IDS
        for _ in range(8):
            positions = torch.arange(plain.shape[1]).expand(4, -1)
            logits = model(input_ids=plain, position_ids=positions).logits
            plain = torch.cat([plain, logits[:, -1:].argmax(-1)], 1)
    return found, plain


@pytest.mark.parametrize("name", WINDOWS)
def test_windows_are_kept(name: str, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)

    with caplog.at_level(logging.WARNING, "fxpipe"):
        found, plain = found_and_plain(WINDOWS[name]())

    assert torch.equal(found, plain)
    assert not caplog.records


@pytest.mark.parametrize("reason", NO_CACHES)
def test_other_layers_get_whole_sequences(reason: str, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)

    with caplog.at_level(logging.WARNING, "fxpipe"):
        found, plain = found_and_plain(NO_CACHES[reason]())

    assert torch.equal(found, plain)
    assert reason in caplog.text
