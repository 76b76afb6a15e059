"""Models to price: all of models/ and some tiny Hugging Face configurations."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn

import models

__all__ = ["HF", "NAMES", "Example", "example"]


@dataclass(frozen=True, slots=True)
class Example:
    """A model with one microbatch of inputs."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def _ids(batch: int, length: int, vocab: int = 96) -> torch.Tensor:
    return torch.randint(vocab, (batch, length), generator=torch.Generator().manual_seed(0))


def _causal(kind: str, **fields: Any) -> Callable[[int], Example]:
    def build(batch: int) -> Example:
        config = transformers.AutoConfig.for_model(kind, **fields)
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
        return Example(model, (), {"input_ids": _ids(batch, 12), "use_cache": False})

    return build


def _bert(batch: int) -> Example:
    config = transformers.BertConfig(
        vocab_size=96, hidden_size=32, num_hidden_layers=4, num_attention_heads=4,
        intermediate_size=48, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.BertForMaskedLM(config).eval()
    return Example(model, (), {"input_ids": _ids(batch, 12)})


def _t5(batch: int) -> Example:
    config = transformers.T5Config(
        vocab_size=96, d_model=32, d_kv=8, d_ff=48, num_layers=3, num_heads=4, dropout_rate=0.0
    )
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(config)
    ids = {"input_ids": _ids(batch, 12), "decoder_input_ids": _ids(batch, 7)}
    return Example(model, (), {**ids, "use_cache": False})


def _vit(batch: int) -> Example:
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=48,
        image_size=32, patch_size=8,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.ViTForImageClassification(config)
    generator = torch.Generator().manual_seed(0)
    return Example(model, (torch.randn(batch, 3, 32, 32, generator=generator),), {})


_SIZES = {
    "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 64,
}  # fmt: skip

HF: dict[str, Callable[[int], Example]] = {
    "hf-llama": _causal("llama", **_SIZES),
    "hf-qwen3": _causal("qwen3", **_SIZES, head_dim=8),
    "hf-gpt2": _causal("gpt2", vocab_size=96, n_embd=32, n_layer=4, n_head=4, n_positions=64,
                       resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
    "hf-bert": _bert,
    "hf-t5": _t5,
    "hf-vit": _vit,
}  # fmt: skip

NAMES = (*models.NAMES, *HF)


def example(name: str, batch: int = 4) -> Example:
    """A model by name, in training mode unless it says otherwise."""
    if name in HF:
        return HF[name](batch)
    module = models.load(name)
    args, kwargs = module.example_inputs(batch)
    return Example(module.build(), args, kwargs)
