"""Take nested values apart and put them together again, whatever they are made of.

Models pass tensors inside tuples, dicts, dataclasses, Hugging Face outputs and
plain objects such as an attention `BlockMask`. `branch` describes one level of
such a value: how to reach each child, the children, and how to build an equal
value from other children. Everything else (walking, replacing tensors, writing
graph code that rebuilds a value) is a recursion over `branch`.

Tensors and symbolic numbers are leaves. So is every value without tensors in
it: it is a constant. Modules and classes are constants even if they hold tensors. A
Python function is taken apart into what it closes over, if tensors are among it.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import enum
import functools
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import torch
from torch import nn

from fxpipe.torch_inside import pytree

__all__ = [
    "Accessor",
    "Args",
    "Branch",
    "Kwargs",
    "Size",
    "Symbolic",
    "branch",
    "closed_over",
    "contents",
    "copied",
    "has_tensor",
    "is_atom",
    "map_leaves",
    "mutable_parts",
    "snapshot",
    "walk",
]

# What a call is given: any values, of which nothing is known before someone looks.
Args = tuple[object, ...]
Kwargs = dict[str, object]

# How to get from a value to its child: ("item", key), ("attr", name), ("child", index)
# or, for what a function closes over, ("cell", index).
Accessor = tuple[str, Any]

Size: TypeAlias = int | torch.SymInt
Symbolic: TypeAlias = torch.SymInt | torch.SymFloat | torch.SymBool
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_ATOMS = (
    type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size,
    torch.layout, torch.memory_format, torch.Generator, slice, type(Ellipsis), type,
    types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType,
    functools.partial, nn.Module, torch.Tensor, *SYMBOLIC,
)  # fmt: skip
_PLAIN = (
    bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout,
    torch.memory_format, slice, type(Ellipsis), type, range,
)  # fmt: skip
_NUMBERS = (torch.Tensor, *SYMBOLIC)
_SLICE = (("attr", "start"), ("attr", "stop"), ("attr", "step"))
_DEEPEST = 12


@dataclasses.dataclass(frozen=True, slots=True)
class Branch:
    """One level of a nested value."""

    accessors: tuple[Accessor, ...]
    children: tuple[object, ...]
    make: Callable[[tuple[object, ...]], object]
    is_plain: bool  # tuple, list or dict: graph code can write it directly


def branch(value: Any) -> Branch | None:
    """Describe one level of a value; None for a leaf or a constant."""
    kind = type(value)
    if kind in (tuple, list):
        return Branch(_items(range(len(value))), tuple(value), kind, True)
    if kind is dict:
        keys = tuple(value)
        return Branch(_items(keys), tuple(value.values()), _dict_maker(keys), True)
    if kind is torch.Size and any(isinstance(size, torch.SymInt) for size in value):
        return Branch(_items(range(len(value))), tuple(value), _size, False)
    if kind is slice and any(isinstance(end, _NUMBERS) for end in _ends(value)):
        return Branch(_SLICE, _ends(value), lambda ends: slice(*ends), False)
    if kind is types.FunctionType and has_tensor(value):
        return _closure(value)
    if isinstance(value, _ATOMS) or getattr(kind, "is_atom", False):
        return None
    if isinstance(value, tuple):
        return Branch(_items(range(len(value))), tuple(value), _tuple_maker(kind), False)
    if kind in pytree.SUPPORTED_NODES:
        return _registered(value)
    if dataclasses.is_dataclass(value):
        names = (field.name for field in dataclasses.fields(value))
        return _attributes(value, tuple(name for name in names if _is_readable(value, name)))
    if kind in (collections.OrderedDict, collections.defaultdict, collections.deque):
        return _registered(value)
    if isinstance(value, (dict, list)) and has_tensor(value):
        return _derived(value)
    if hasattr(value, "__dict__") and has_tensor(value):
        return _attributes(value, tuple(vars(value)))
    return None


def _ends(value: slice) -> tuple[object, ...]:
    return (value.start, value.stop, value.step)


def is_atom(value: object) -> bool:
    """Say whether a value has no parts that could change: a number, a text, a dtype, None."""
    if isinstance(value, (tuple, frozenset)):
        return all(map(is_atom, value))
    return isinstance(value, (*_PLAIN, enum.Enum)) or value is None


def walk(
    value: object, path: tuple[Accessor, ...] = ()
) -> Iterator[tuple[tuple[Accessor, ...], object]]:
    """Yield every leaf and constant of a value, with the way to reach it."""
    found = branch(value)
    if found is None:
        yield path, value
        return
    for accessor, child in zip(found.accessors, found.children, strict=True):
        yield from walk(child, (*path, accessor))


def map_leaves(change: Callable[[Any], object], value: object) -> Any:
    """Return the value with `change` applied to each leaf and constant.

    A part in which nothing changes is returned as the same object.
    """
    found = branch(value)
    if found is None:
        return change(value)
    children = tuple(map_leaves(change, child) for child in found.children)
    if all(new is old for new, old in zip(children, found.children, strict=True)):
        return value
    return found.make(children)


def has_tensor(value: object, _depth: int = 0, _seen: set[int] | None = None) -> bool:
    """Say whether a tensor or a symbolic number is anywhere inside a value."""
    if isinstance(value, _NUMBERS) or getattr(type(value), "is_atom", False):
        return True
    seen = set() if _seen is None else _seen
    if isinstance(value, slice):
        return any(isinstance(end, _NUMBERS) for end in _ends(value))
    is_closure = type(value) is types.FunctionType and bool(value.__closure__)
    if _depth > _DEEPEST or id(value) in seen:
        return False
    if isinstance(value, _ATOMS) and not is_closure:
        return False
    seen.add(id(value))
    if is_closure:
        inner: Iterable[object] = closed_over(value)
    elif isinstance(value, dict):
        inner = value.values()
    elif isinstance(value, (tuple, list, collections.deque)):
        inner = value
    elif hasattr(value, "__dict__"):
        inner = vars(value).values()
    else:
        return False
    return any(has_tensor(part, _depth + 1, seen) for part in inner)


def snapshot(value: object) -> Any:
    """Return the value with the same leaves in new containers and objects."""
    found = branch(value)
    if found is not None:
        return found.make(tuple(map(snapshot, found.children)))
    return copied(value) if any(True for _ in mutable_parts(value)) else value


def copied(value: object) -> object:
    """Return a deep copy, or the value itself if it cannot be copied."""
    try:
        return copy.deepcopy(value)
    except Exception:
        return value


def mutable_parts(value: object) -> Iterator[object]:
    """Yield what a callee could change: plain lists and dicts, and objects as a whole."""
    if isinstance(value, (*_ATOMS, enum.Enum)) or getattr(type(value), "is_atom", False):
        return
    if type(value) in (tuple, list, dict):
        if type(value) is not tuple:
            yield value
        for part in _parts(value) or ():
            yield from mutable_parts(part)
    elif isinstance(value, tuple):
        for part in value:
            yield from mutable_parts(part)
    elif _parts(value) is not None:
        yield value


def contents(value: object, _depth: int = 0) -> object:
    """Describe what is inside a value, so that two descriptions show whether it changed.

    For a plain list or dict only which things are in it, not what those hold.
    """
    if _depth == 0 and type(value) in (list, dict):
        return (
            tuple(value) if isinstance(value, dict) else (),
            tuple(map(id, _parts(value) or ())),
        )
    if isinstance(value, (bool, int, float, str, type(None))):
        return value
    if isinstance(value, _ATOMS) or getattr(type(value), "is_atom", False) or _depth > _DEEPEST:
        return id(value)
    parts = _parts(value)
    if parts is None:
        return id(value)
    keys = tuple(value) if isinstance(value, dict) else ()
    identity = None if isinstance(value, tuple) else id(value)
    return (identity, keys, tuple(contents(part, _depth + 1) for part in parts))


def _parts(value: object) -> tuple[object, ...] | None:
    if isinstance(value, dict):
        extra = tuple(vars(value).values()) if hasattr(value, "__dict__") else ()
        return (*value.values(), *extra)
    if isinstance(value, (tuple, list, set, frozenset, collections.deque)):
        return tuple(value)
    return tuple(vars(value).values()) if hasattr(value, "__dict__") else None


def closed_over(function: object) -> tuple[object, ...]:
    """Return what a function closes over; a name that has no value yet is left out."""
    found = []
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):
            found.append(cell.cell_contents)
    return tuple(found)


def _closure(function: Any) -> Branch | None:
    children = closed_over(function)
    if len(children) != len(function.__closure__) or _holds(function, children):
        return None

    def make(new: tuple[object, ...]) -> object:
        made = types.FunctionType(
            function.__code__,
            function.__globals__,
            function.__name__,
            function.__defaults__,
            tuple(map(types.CellType, new)),
        )
        made.__kwdefaults__ = function.__kwdefaults__
        made.__qualname__ = function.__qualname__
        return made

    return Branch(tuple(("cell", index) for index in range(len(children))), children, make, False)


def _holds(function: object, values: tuple[Any, ...], _depth: int = 0) -> bool:
    """Say whether a function is among what it closes over, however deep."""
    if _depth > _DEEPEST:
        return True
    for value in values:
        if value is function:
            return True
        inner = closed_over(value) if type(value) is types.FunctionType else ()
        if type(value) in (tuple, list):
            inner = tuple(value)
        if inner and _holds(function, inner, _depth + 1):
            return True
    return False


def _items(keys: Iterable[object]) -> tuple[Accessor, ...]:
    return tuple(("item", key) for key in keys)


def _size(sizes: tuple[Any, ...]) -> object:
    is_real = all(isinstance(size, (int, torch.SymInt)) for size in sizes)
    return torch.Size(sizes) if is_real else sizes


def _dict_maker(keys: tuple[object, ...]) -> Callable[[tuple[object, ...]], object]:
    return lambda children: dict(zip(keys, children, strict=True))


def _tuple_maker(kind: type) -> Callable[[tuple[object, ...]], object]:
    if hasattr(kind, "_make"):
        return lambda children: kind._make(children)
    return lambda children: kind(children)


def _registered(value: object) -> Branch:
    node = pytree.SUPPORTED_NODES[type(value)]
    flat, context = node.flatten_fn(value)
    children = tuple(flat)
    accessors = _items(value) if isinstance(value, dict) else _registered_paths(node, value)
    if len(accessors) != len(children):
        accessors = tuple(("child", index) for index in range(len(children)))
    return Branch(accessors, children, lambda new: node.unflatten_fn(list(new), context), False)


def _registered_paths(node: Any, value: object) -> tuple[Accessor, ...]:
    if node.flatten_with_keys_fn is None:
        return ()
    accessors: list[Accessor] = []
    for key, _ in node.flatten_with_keys_fn(value)[0]:
        match key:
            case pytree.MappingKey(key=name):
                accessors.append(("item", name))
            case pytree.SequenceKey(idx=index):
                accessors.append(("item", index))
            case pytree.GetAttrKey(name=name):
                accessors.append(("attr", name))
            case _:
                return ()
    return tuple(accessors)


def _derived(value: Any) -> Branch:
    """Describe an object of a class derived from dict or list."""
    kind: Any = type(value)
    keys = tuple(value) if isinstance(value, dict) else tuple(range(len(value)))
    own = {k: v for k, v in getattr(value, "__dict__", {}).items() if not has_tensor(v)}

    def make(new: tuple[object, ...]) -> object:
        made = kind.__new__(kind)
        if isinstance(made, dict):
            dict.update(made, zip(keys, new, strict=True))
        else:
            list.extend(made, new)
        getattr(made, "__dict__", {}).update(own)
        return made

    children = tuple(value.values()) if isinstance(value, dict) else tuple(value)
    return Branch(_items(keys), children, make, False)


def _attributes(value: object, names: tuple[str, ...]) -> Branch:
    children = tuple(getattr(value, name) for name in names)
    template = _shallow(value)
    for name, child in zip(names, children, strict=True):
        if has_tensor(child):
            object.__setattr__(template, name, None)

    def make(new: tuple[object, ...]) -> object:
        made = _shallow(template)
        for name, child in zip(names, new, strict=True):
            object.__setattr__(made, name, child)
        return made

    return Branch(tuple(("attr", name) for name in names), children, make, False)


def _is_readable(value: object, name: str) -> bool:
    """Say whether a field has a value; a configuration may have one per layer, and tell none."""
    try:
        getattr(value, name)
    except Exception:
        return False
    return True


def _shallow(value: object) -> object:
    """Return a copy with the same attributes; a class's own `__copy__` may expect more of them."""
    kind: Any = type(value)
    has_slots = any(getattr(parent, "__slots__", ()) for parent in kind.__mro__)
    if has_slots or not hasattr(value, "__dict__") or kind.__new__ is not object.__new__:
        return copy.copy(value)
    made = object.__new__(kind)
    vars(made).update(vars(value))
    return made
