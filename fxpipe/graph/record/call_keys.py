"""When two calls are equal, so that one run tells what both return.

Equal are calls of the same function, or of modules that are alike, with arguments of the same
kind: sizes as formulas, dtypes, devices, plain values. `FunctionRuns` remembers what torch's
functions returned. A function that changes an argument, returns a view of one, or makes
sizes out of values runs each time.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Hashable, Mapping
from types import CodeType, FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from fxpipe.graph import markers
from fxpipe.graph.nested import SYMBOLIC, Args, Kwargs, walk
from fxpipe.graph.record.torch_functions import run_following
from fxpipe.graph.sandbox.made_up import empty
from fxpipe.graph.sandbox.restore import device_kinds
from fxpipe.graph.sizes.symbols import flat
from fxpipe.torch_inside import (
    FakeTensor,
    buffers_of,
    memory_of,
    own_attributes,
    parameters_of,
    version_of,
)

__all__ = ["FunctionRuns", "call_key", "module_key", "storage_of"]


class FunctionRuns:
    """Runs torch's functions on fake tensors; equal calls run once."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Any] = {}

    def forget(self) -> None:
        """Run everything again: conditions on sizes that runs have met are gone."""
        self._known.clear()

    def run(self, func: Callable[..., object], args: Args, kwargs: Kwargs) -> object:
        """Return what a function returns."""
        tensors = [leaf for _, leaf in walk((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        key = self._key(func, args, kwargs, tensors)
        if key is None:
            return run_following(func, args, kwargs)
        if key in self._known:
            return _made(self._known[key])
        versions = [version_of(tensor) for tensor in tensors]
        output = run_following(func, args, kwargs)
        if [version_of(tensor) for tensor in tensors] == versions and _is_new(output, tensors):
            self._known[key] = _described(output)
            return output if _is_flat(output) else _made(self._known[key])
        return output

    def _key(
        self, func: object, args: object, kwargs: object, tensors: list[torch.Tensor]
    ) -> Hashable:
        home = getattr(func, "__module__", None) or "torch"
        if not home.startswith("torch") or not tensors or not all(map(_is_plain, tensors)):
            return None
        key = call_key(func, args, kwargs, by_identity=False)
        return None if key is None else (key, torch.get_default_dtype())


def _is_plain(tensor: torch.Tensor) -> bool:
    """Say whether all that a function can see of a tensor is its sizes and its kind."""
    is_fake = isinstance(tensor, FakeTensor) and tensor.layout is torch.strided
    return is_fake and getattr(tensor, "constant", None) is None


def _is_new(output: Any, tensors: list[torch.Tensor]) -> bool:
    """Say whether tensors with memory of their own and sizes of the arguments were returned."""
    parts = output if type(output) in (tuple, list) else (output,)
    if not parts or not all(isinstance(part, FakeTensor) and _is_plain(part) for part in parts):
        return False
    held = {storage_of(tensor) for tensor in tensors}
    own = [storage_of(part) for part in parts]
    if held & set(own) or len(set(own)) < len(own):
        return False
    known = {s for tensor in tensors for size in tensor.shape for s in _symbols(size)}
    return all(_symbols(size) <= known for part in parts for size in part.shape)


def _symbols(size: object) -> set[object]:
    return set(size.node.expr.free_symbols) if isinstance(size, torch.SymInt) else set()


def _described(output: Any) -> Any:
    if type(output) in (tuple, list):
        return type(output)(map(_described, output))
    shape, stride = torch.Size(map(flat, output.shape)), tuple(map(flat, output.stride()))
    return (shape, stride, output.dtype, output.device, output.requires_grad)


def _is_flat(output: Any) -> bool:
    parts = output if type(output) in (tuple, list) else (output,)
    return all(flat(size) is size for part in parts for size in part.shape)


def _made(known: Any) -> object:
    if isinstance(known[0], torch.Size):
        return empty(*known)
    return type(known)(map(_made, known))


def storage_of(tensor: torch.Tensor) -> int:
    """Return what tells whether two tensors share memory."""
    try:
        return memory_of(tensor)
    except NotImplementedError:  # sparse
        return id(tensor)


def call_key(what: Hashable, args: object, kwargs: object, *, by_identity: bool = True) -> Hashable:
    """Return what equal calls have in common; None if that cannot be said.

    Other objects than plain values are told apart by identity, or make no key.
    """
    described: list[Hashable] = []
    for path, leaf in walk((args, kwargs)):
        if isinstance(leaf, torch.Tensor):
            described.append((path, _tensor_key(leaf)))
        elif isinstance(leaf, SYMBOLIC):
            described.append((path, leaf.node.expr))
        elif by_identity or isinstance(leaf, _PLAIN):
            described.append((path, _value_key(leaf)))
        else:
            return None
    ambient = (torch.is_grad_enabled(), _autocast_key())
    key = (what, ambient, tuple(described))
    try:
        hash(key)
    except TypeError:
        return None
    return key


_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)


def module_key(module: nn.Module) -> Hashable:
    """Return what modules that are alike have in common."""
    parts = list(module.modules())
    if any(map(_may_split, {type(part) for part in parts})):
        return id(module)
    if any(value is markers.pipe_split for part in parts for value in vars(part).values()):
        return id(module)
    return tuple((name, _one_module_key(part)) for name, part in module.named_modules())


def _tensor_key(tensor: torch.Tensor) -> Hashable:
    sizes = tuple(_number(size) for size in (*tensor.shape, *tensor.stride()))
    return (
        sizes,
        tensor.dtype,
        tensor.requires_grad,
        tensor.device,
        isinstance(tensor, FakeTensor),
    )


def _number(size: int | torch.SymInt) -> object:
    return size.node.expr if isinstance(size, torch.SymInt) else int(size)


def _autocast_key() -> Hashable:
    return tuple(
        (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in device_kinds()
    )


_INDEX_LIKE = {
    "layer_idx", "layer_id", "layer_index", "layer_number", "layer_num", "idx", "index",
    "block_idx", "block_id", "block_index", "depth_idx", "i",
}  # fmt: skip
_RATED = tuple(f"torch.nn.modules.{name}" for name in ("dropout", "batchnorm", "normalization"))
_OWN = own_attributes()


def _one_module_key(module: nn.Module) -> Hashable:
    tensors = tuple(
        (name, tensor.shape, tensor.dtype)
        for place in (parameters_of(module), buffers_of(module))
        for name, tensor in place.items()
        if tensor is not None
    )
    # A rate or an epsilon of torch's own layers decides no size.
    is_rated = type(module).__module__ in _RATED
    attributes = tuple(
        (name, _value_key(value))
        for name, value in vars(module).items()
        if name not in _OWN
        and name not in _INDEX_LIKE
        and not isinstance(value, torch.Tensor)
        and not (is_rated and isinstance(value, float))
    )
    return (type(module), tensors, attributes)


def _value_key(value: object) -> Hashable:
    if isinstance(value, (bool, int, str, type(None), torch.dtype, torch.device, type)):
        return (type(value).__name__, value)
    if isinstance(value, float):
        return ("float", value)
    if isinstance(value, (tuple, list)) and len(value) < 64:
        return (type(value).__name__, tuple(_value_key(part) for part in value))
    if isinstance(value, dict) and len(value) < 64:
        return tuple((str(key), _value_key(part)) for key, part in value.items())
    return ("object", id(value))


_splitting: WeakKeyDictionary[type, bool] = WeakKeyDictionary()


def _may_split(kind: type) -> bool:
    """Say whether code of a class, or of the file that defines it, mentions `pipe_split`."""
    if kind not in _splitting:
        own = [k for k in kind.__mro__ if not k.__module__.startswith(("torch.", "transformers."))]
        files = {k.__module__: sys.modules.get(k.__module__) for k in own}
        scopes = [vars(place) for place in (*own, *files.values()) if place is not None]
        _splitting[kind] = any(map(_mentions_split, scopes))
    return _splitting[kind]


def _mentions_split(scope: Mapping[str, object]) -> bool:
    values = list(scope.values())
    values += [part for value in values if isinstance(value, type) for part in vars(value).values()]
    known = {name for name, value in scope.items() if value is markers.pipe_split}
    known.add(markers.pipe_split.__name__)
    codes = [found.__code__ for found in map(_function, values) if found is not None]
    while codes:
        code = codes.pop()
        if known.intersection((*code.co_names, *code.co_freevars)):
            return True
        codes += [part for part in code.co_consts if isinstance(part, CodeType)]
    return False


def _function(value: Any) -> FunctionType | None:
    """Return the function behind decorators and methods of a class, if it is one, and not ours."""
    while not isinstance(value, FunctionType) and hasattr(type(value), "__wrapped__"):
        value = value.__wrapped__  # of a staticmethod or classmethod
    found = inspect.unwrap(value) if isinstance(value, FunctionType) else None
    is_ours = str(getattr(found, "__module__", "")).startswith("fxpipe.")
    return found if isinstance(found, FunctionType) and not is_ours else None
