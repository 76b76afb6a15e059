"""The mask functions of transformers, as one call each in the graph.

`create_causal_mask` and its relatives look at values when they can: where nothing is
padded they return None, and attention calls its kernel with `is_causal=True` instead of a
mask. On fake tensors they build the whole mask. So a trace does not look into them. The
stage calls the function with its own tensors, and its layers call the kernels that the
plain model calls.

Code that was opened has seen a mask, not None. Where such code uses the value, or where
it is sent to another stage, `whole` is called instead, which always builds the mask.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import fx, nn

from fxpipe.graph.record.graph_calls import GraphCall
from fxpipe.graph.sandbox.patches import patched

__all__ = ["MaskCall", "may_be_none", "watched_masks"]

_HOMES = ("transformers.masking_utils", "transformers.modeling_attn_mask_utils")
_NAMES = ("create_", "_prepare_4d_")
# Arguments of which only size, dtype and device are read.
_SHOWN = ("inputs_embeds", "input_embeds", "encoder_hidden_states")
_lock = threading.RLock()

OnMask = Callable[["MaskCall", Any, Any], Any]


class MaskCall(GraphCall):
    """A callable that makes an attention mask, or None where attention needs none."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function.__name__)
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def shown(self, args: Any, kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """Return the tensors among the arguments whose values do not matter."""
        bound = inspect.signature(self._function).bind_partial(*args, **kwargs).arguments
        found = [bound.get(name) for name in _SHOWN]
        return [value for value in found if isinstance(value, torch.Tensor)]

    @property
    def whole(self) -> MaskCall:
        """The same function where a mask is needed in any case."""
        return _WholeMaskCall(self._function)


class _WholeMaskCall(MaskCall):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # What these functions do for tensors without values, they do for others then.
        home = sys.modules[self._function.__module__]
        with _lock, patched(home, "is_tracing", lambda *_: True):
            return self._function(*args, **kwargs)


def may_be_none(node: fx.Node) -> bool:
    """Say whether only modules that are not opened, which look for themselves, get a mask."""
    return isinstance(node.target, MaskCall) and all(u.op == "call_module" for u in node.users)


@contextmanager
def watched_masks(module: nn.Module, on_mask: OnMask) -> Iterator[None]:
    """Have the model's code call `on_mask` in place of the mask functions, until exit."""
    with ExitStack() as stack:
        homes = {kind.__module__ for part in module.modules() for kind in type(part).__mro__}
        for home in sorted(homes):
            place = sys.modules.get(home)
            for name, value in list(vars(place).items()) if place is not None else ():
                if _makes_mask(value):
                    stack.enter_context(patched(place, name, _watched(value, on_mask)))
        yield


def _makes_mask(value: Any) -> bool:
    if getattr(value, "__module__", None) not in _HOMES or not inspect.isfunction(value):
        return False
    return value.__name__.startswith(_NAMES) and "is_tracing" in value.__globals__


def _watched(function: Callable[..., Any], on_mask: OnMask) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _is_flex(args, kwargs):
            return function(*args, **kwargs)
        return on_mask(MaskCall(function), args, kwargs)

    return call


def _is_flex(args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Say whether the mask is for flex attention: a block mask, which is made of functions."""
    config = kwargs.get("config", args[0] if args else None)
    return getattr(config, "_attn_implementation", None) == "flex_attention"
