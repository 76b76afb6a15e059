"""Open key-value caches of Hugging Face models, so that those of microbatches become one.

Only caches that grow: of these every attribute is known. One with a fixed number of rows, quantized
or offloaded keys, or another class is a leaf like any object, and is refused by name.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

from fxpipe.chunking.tree import Node

__all__ = ["open_cache"]

_GROWING = ("DynamicCache", "EncoderDecoderCache", "DynamicLayer", "DynamicSlidingWindowLayer")


def open_cache(value: Any) -> Node | None:
    """The attributes of a cache, or of a layer of one; None for all else."""
    module = sys.modules.get("transformers.cache_utils")
    kinds = [getattr(module, name, None) for name in _GROWING] if module else []
    if type(value) not in kinds or getattr(value, "offloading", False):
        return None
    names = list(vars(value))

    def rebuild(new: list[Any]) -> Any:
        made = copy.copy(value)
        vars(made).update(zip(names, new, strict=True))
        return made

    return Node("attr", names, list(vars(value).values()), rebuild)
