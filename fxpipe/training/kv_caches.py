"""Whether the layers of a stage can keep keys and values, so that a token costs one row, not all.

A token that goes in alone meets the tokens before it in attention, and nowhere else. So caches give
the plain model's tokens only where every layer is causal attention over all tokens or over the
latest ones. Hugging Face models say so in their config, and transformers makes the cache that fits
it. Where a layer mixes tokens in another way (chunks, convolutions, states of Mamba), or says
nothing, the whole sequence goes in for each token: slower, and right.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from typing import Any

from fxpipe.errors import PipeliningShapeError
from fxpipe.runtime.parameters.tied import plain_name
from fxpipe.runtime.stage.stage_kind import TracedFront
from fxpipe.stage import PipelineStage

__all__ = ["cached_layers", "make_caches", "why_whole_sequences"]

_KINDS = ("DynamicLayer", "DynamicSlidingWindowLayer")


def cached_layers(stages: Iterable[PipelineStage]) -> dict[str, Any]:
    """The innermost modules that write to a cache, by path."""
    return {
        path: module
        for stage in stages
        for path, module in stage.submod.named_modules()
        if hasattr(module, "layer_idx")
        and "past_key_values" in inspect.signature(module.forward).parameters
        and not any(hasattr(child, "layer_idx") for child in list(module.modules())[1:])
    }


def make_caches(layers: Mapping[str, Any], count: int) -> list[Any]:
    """Empty caches of the kind that these layers need."""
    from transformers import DynamicCache

    config = next((layer.config for layer in layers.values()), None)
    return [DynamicCache(config=config) for _ in range(count)]


def why_whole_sequences(
    layers: Mapping[str, Any], front: TracedFront, inputs: Mapping[str, Any], longest: int
) -> str | None:
    """Why this process cannot take tokens one by one; None if it can.

    `inputs` are those of one token; sequences get up to `longest` tokens long.
    """
    from transformers import DynamicCache, PreTrainedConfig

    kinds = {_kind(path) for path in layers}
    for path in sorted(front.info.opened):
        if _kind(path) in kinds:
            return f"a cut falls into {path}, which then has no cache: cut between layers"
    try:
        front.info.bind_inputs((), inputs)
    except PipeliningShapeError:
        return "the model was traced for more than one token"
    for path, layer in layers.items():
        is_known = isinstance(getattr(layer, "config", None), PreTrainedConfig)
        if not (is_known and getattr(layer, "is_causal", False)):
            return f"{path} ({type(layer).__name__}) is not known to be causal attention"
    configs = {id(layer.config): layer.config for layer in layers.values()}
    if len(configs) > 1:
        return "its layers have several configs"
    for config in configs.values():
        chunk = getattr(config, "attention_chunk_size", None)
        if chunk is not None and chunk < longest:
            return f"attention looks at chunks of {chunk} of {longest} tokens"
        found = {type(one).__name__ for one in DynamicCache(config=config).layers}
        if others := sorted(found.difference(_KINDS)):
            return f"its layers keep other states than keys and values ({', '.join(others)})"
    return None


def _kind(path: str) -> str:
    """The path without the number of the layer: all layers of a kind have the same."""
    return re.sub(r"\d+", "#", plain_name(path))
