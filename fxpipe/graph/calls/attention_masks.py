"""The mask functions of transformers, as one call each in the graph.

`create_causal_mask` and its relatives look at values when they can: where nothing is
padded they return None, and attention calls its kernel with `is_causal=True` instead of a
mask. On fake tensors they build the whole mask. So a trace does not look into them. The
stage calls the function with its own tensors, and its layers call the kernels that the
plain model calls.

Code that was opened has seen a mask, not None. Where such code uses the value, or where
it is sent to another stage, `whole` is called instead, which always builds the mask.

For flex attention the functions make a block mask, which is made of functions and cannot be
traced. A trace sees a tensor of true and false in its place, and a kernel that knows only
sizes; the stages call both as they are.
"""

from __future__ import annotations

import functools
import inspect
import operator
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import fx, nn

from fxpipe.errors import TraceError
from fxpipe.graph.calls.graph_calls import GraphCall
from fxpipe.graph.nested import Args, Kwargs
from fxpipe.graph.sandbox.patches import patched
from fxpipe.torch_inside import FakeTensor

__all__ = ["MaskCall", "mask_call", "masks_of", "may_be_none", "watched_masks"]

_HOMES = ("transformers.masking_utils", "transformers.modeling_attn_mask_utils")
_NAMES = ("create_", "_prepare_4d_")
_FLEX_HOME = "transformers.integrations.flex_attention"
_FLEX_KERNEL = "compile_friendly_flex_attention"
# Arguments of which only size, dtype and device are read.
_SHOWN = ("inputs_embeds", "input_embeds", "encoder_hidden_states")
_IN_FLEX = (
    "code that is split calls flex attention, uses its block mask, or sends it to another stage\n"
    "cut between the layers of the model, or use sdpa attention"
)
_lock = threading.RLock()

OnMask = Callable[["MaskCall", Args, Kwargs], object]


class MaskCall(GraphCall):
    """A callable that makes an attention mask, or None where attention needs none."""

    def __init__(self, function: Callable[..., object], is_flex: bool = False) -> None:
        super().__init__(function.__name__)
        self._function = function
        self.is_flex = is_flex

    def __eq__(self, other: object) -> bool:
        # A trace in each mode makes a call of its own: they are the same.
        return type(other) is type(self) and other._key == self._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[Callable[..., object], bool]:
        return self._function, self.is_flex

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self._function(*args, **kwargs)

    def shown(self, args: Any, kwargs: Mapping[str, Any]) -> list[Any]:
        """Return the tensors among the arguments, or their nodes, whose values do not matter."""
        bound = inspect.signature(self._function).bind_partial(*args, **kwargs).arguments
        found = [bound.get(name) for name in _SHOWN]
        return [value for value in found if isinstance(value, (torch.Tensor, fx.Node))]

    @property
    def whole(self) -> MaskCall:
        """The same function where a mask is needed in any case."""
        if self.is_flex:
            raise TraceError(_IN_FLEX)
        return _WholeMaskCall(self._function)


class _WholeMaskCall(MaskCall):
    def __call__(self, *args: object, **kwargs: object) -> object:
        # What these functions do for tensors without values, they do for others then.
        home = sys.modules[self._function.__module__]
        with _lock, patched(home, "is_tracing", lambda *_: True):
            return self._function(*args, **kwargs)


def mask_call(node: fx.Node) -> fx.Node | None:
    """Return the call that made a mask, alone or under a name among others; None for no mask."""
    source = node.args[0] if _is_named_part(node) else node
    is_mask = isinstance(source, fx.Node) and isinstance(source.target, MaskCall)
    return source if is_mask else None  # type: ignore[return-value]


def masks_of(node: fx.Node) -> list[fx.Node]:
    """Return what a call of a mask function makes: itself, or the masks by name."""
    return [user for user in node.users if _is_named_part(user)] or [node]


def may_be_none(node: fx.Node) -> bool:
    """Say whether only modules that are not opened, which look for themselves, get a mask."""
    if not isinstance(node.target, MaskCall):
        return False
    masks = masks_of(node)
    users = [user for mask in masks for user in mask.users]
    is_whole = masks == [node] or set(masks) == set(node.users)
    return is_whole and all(user.op == "call_module" for user in users)


def _is_named_part(node: fx.Node) -> bool:
    return node.target is operator.getitem and isinstance(node.args[1], str)


@contextmanager
def watched_masks(
    module: nn.Module, on_mask: OnMask, is_opened: Callable[[], bool]
) -> Iterator[None]:
    """Have the model's code call `on_mask` in place of the mask functions, until exit."""
    with ExitStack() as stack:
        homes = {kind.__module__ for part in module.modules() for kind in type(part).__mro__}
        for home in sorted(homes):
            place = sys.modules.get(home)
            for name, value in list(vars(place).items()) if place is not None else ():
                if _makes_mask(value):
                    stack.enter_context(patched(place, name, _watched(value, on_mask)))
        stack.enter_context(_flex_by_sizes(is_opened))
        yield


def _makes_mask(value: object) -> bool:
    if getattr(value, "__module__", None) not in _HOMES or not inspect.isfunction(value):
        return False
    return value.__name__.startswith(_NAMES) and "is_tracing" in value.__globals__


def _watched(function: Callable[..., object], on_mask: OnMask) -> Callable[..., object]:
    @functools.wraps(function)
    def call(*args: object, **kwargs: object) -> object:
        config = kwargs.get("config", args[0] if args else None)
        is_flex = getattr(config, "_attn_implementation", None) == "flex_attention"
        return on_mask(MaskCall(function, is_flex), args, kwargs)

    return call


@contextmanager
def _flex_by_sizes(is_opened: Callable[[], bool]) -> Iterator[None]:
    """Have flex attention take any mask and return fake tensors, until exit."""
    masks, kernels = sys.modules.get(_HOMES[0]), sys.modules.get(_FLEX_HOME)
    if masks is None or kernels is None:
        yield
        return
    kinds = masks.ALL_MASK_ATTENTION_FUNCTIONS
    own = kinds["flex_attention"]
    known: Callable[..., object] = getattr(kernels, _FLEX_KERNEL)

    def kernel(query: Any, key: Any, value: Any, **options: object) -> object:
        if is_opened():
            raise TraceError(_IN_FLEX)
        if not isinstance(query, FakeTensor):
            return known(query, key, value, **options)
        output = query.sum(-1, keepdim=True) + value.sum() + key.sum()
        output = output.expand(*query.shape[:-1], value.shape[-1]).to(query.dtype)
        sums = types.SimpleNamespace(lse=output.sum(-1).float())
        return (output, sums) if options.get("return_aux") is not None else output

    kinds["flex_attention"] = kinds["sdpa"]
    try:
        with patched(kernels, _FLEX_KERNEL, kernel):
            yield
    finally:
        kinds["flex_attention"] = own
