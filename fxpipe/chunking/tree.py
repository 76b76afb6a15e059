"""Open and close containers of any kind, with readable paths; what a user may say of a leaf.

A container is anything `torch.utils._pytree` knows (registered classes included) and,
beyond that, every dataclass, mutable mapping and list subclass: users pass those without
registering them, and what is not opened cannot be split. Tensors, `BlockMask`s (also
where someone registered them) and all else are leaves.

Outputs may hold key-value caches of Hugging Face models. Those that grow are opened
(`open_cache`): of these every attribute is known. One with a fixed number of rows, quantized or
offloaded keys, or another class is a leaf like any object, and is refused by name.

A spec says how to treat a leaf. A tree of specs follows the tree of values, but may stop early: one
spec for a nested argument holds for every tensor below it. None means "by the default rule". Names
are matched as names (a dict, dataclass or NamedTuple of specs, in any order; what is not named
follows the default rule), positions as positions (a tuple or list of the same length).
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import operator
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn.attention.flex_attention import BlockMask

from fxpipe.errors import InputError
from fxpipe.torch_inside import pytree

__all__ = [
    "CustomReducer",
    "LossReducer",
    "Node",
    "Path",
    "Replicate",
    "Template",
    "TensorChunkSpec",
    "build",
    "child_specs",
    "leaf_spec",
    "not_a_spec",
    "open_cache",
    "open_node",
    "path_text",
    "spec_text",
    "sum_reducer",
]


class Node(NamedTuple):
    """One opened container: its children, how they are called, and how to close it again."""

    style: str  # "index", "key" or "attr": how a child is written in a path
    keys: Sequence[Any]
    children: Sequence[Any]
    rebuild: Callable[[list[Any]], Any]
    absent: Sequence[Any] = ()  # fields that are None and that its class leaves out


Path = tuple[tuple[Node, int], ...]

# A tree with its leaves taken out: None for a leaf, else the node and its children.
Template = tuple[Node, list[Any]] | None


def open_node(value: Any) -> Node | None:
    """The children of a container, or None if `value` is a leaf."""
    kind = type(value)
    if kind is dict:
        keys = list(value)
        return Node(
            "key", keys, list(value.values()), lambda new: dict(zip(keys, new, strict=True))
        )
    if kind is tuple or kind is list:
        return Node("index", range(len(value)), value, kind)
    if isinstance(value, torch.Tensor | BlockMask | torch.Size):  # a Size would become a tuple
        return None
    if pytree.is_namedtuple_instance(value):
        return Node("attr", kind._fields, value, kind._make)
    if kind in pytree.SUPPORTED_NODES:
        return _open_registered(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        children = [getattr(value, name) for name in names]
        return Node("attr", names, children, lambda new: _replace_fields(value, names, new))
    if isinstance(value, MutableMapping):
        keys = list(value)
        return Node(
            "key", keys, [value[key] for key in keys], lambda new: _replace_items(value, keys, new)
        )
    if isinstance(value, list):
        return Node(
            "index",
            range(len(value)),
            value,
            lambda new: _replace_items(value, [slice(None)], [new]),
        )
    return None


def build(template: Template, columns: Iterator[Sequence[Any]], count: int) -> Sequence[Any]:
    """`count` trees like the one that was taken apart, given a column of leaves for each leaf."""
    if template is None:
        return next(columns)
    node, children = template
    if not children:
        return [node.rebuild([]) for _ in range(count)]
    rows = zip(*[build(child, columns, count) for child in children], strict=True)
    return [node.rebuild(list(row)) for row in rows]


def path_text(root: str, path: Path) -> str:
    """A path as a user would write it: `kwargs['packed'].lengths[0]`."""
    steps = (
        f".{node.keys[index]}" if node.style == "attr" else f"[{node.keys[index]!r}]"
        for node, index in path
    )
    return root + "".join(steps)


def _open_registered(value: Any) -> Node:
    definition = pytree.SUPPORTED_NODES[type(value)]
    children, context = definition.flatten_fn(value)
    style = "index"
    keys: list[Any] = list(range(len(children)))
    if definition.flatten_with_keys_fn is not None:
        entries: list[Any] = [key for key, _ in definition.flatten_with_keys_fn(value)[0]]
        if all(isinstance(entry, pytree.MappingKey) for entry in entries):
            style, keys = "key", [entry.key for entry in entries]
        elif all(isinstance(entry, pytree.GetAttrKey) for entry in entries):
            style, keys = "attr", [entry.name for entry in entries]
    absent = []
    if dataclasses.is_dataclass(value):
        absent = [field.name for field in dataclasses.fields(value) if field.name not in keys]
    return Node(style, keys, children, lambda new: definition.unflatten_fn(new, context), absent)


def _replace_fields(value: Any, names: list[str], new: list[Any]) -> Any:
    # Not dataclasses.replace: it refuses fields with init=False and runs
    # __post_init__ on a microbatch as if it were a new batch.
    result = copy.copy(value)
    for name, child in zip(names, new, strict=True):
        object.__setattr__(result, name, child)
    return result


def _replace_items(value: Any, keys: list[Any], new: list[Any]) -> Any:
    result = copy.copy(value)
    for key, child in zip(keys, new, strict=True):
        result[key] = child
    return result


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


@dataclass(frozen=True, slots=True, repr=False)
class TensorChunkSpec:
    """Split a tensor along `split_dim`; for an output, concatenate along it.

    Negative dimensions count from the end, for every tensor by itself.
    """

    split_dim: int

    def __post_init__(self) -> None:
        if not isinstance(self.split_dim, int) or isinstance(self.split_dim, bool):
            raise InputError(f"TensorChunkSpec needs a dimension (an int), got {self.split_dim!r}")

    def __repr__(self) -> str:
        return f"TensorChunkSpec({self.split_dim})"

    @staticmethod
    def from_tuple(chunk_dims: Sequence[Any]) -> tuple[Any, ...]:
        """Specs for positional arguments: `(0, 0, 1)` gives three `TensorChunkSpec`s.

        Entries may be nested, and may be None (the default rule) or specs already.
        """
        return tuple(_from_dims(dims) for dims in chunk_dims)

    @staticmethod
    def from_dict(chunk_dims: Mapping[str, Any]) -> dict[str, Any]:
        """Specs for keyword arguments: `{"ids": 0, "mask": 1}`; entries as in `from_tuple`."""
        return {name: _from_dims(dims) for name, dims in chunk_dims.items()}


@dataclass(frozen=True, slots=True, repr=False)
class Replicate:
    """Give every microbatch the whole value; for an output, check that all agree on it."""

    def __repr__(self) -> str:
        return "Replicate()"


@dataclass(frozen=True, eq=False)
class CustomReducer:
    """Merge an output by `reduce_fn(reduce_fn(init_value, first), second)` and so on."""

    init_value: Any
    reduce_fn: Callable[[Any, Any], Any]


@dataclass(frozen=True, eq=False)
class LossReducer(CustomReducer):
    """A `CustomReducer` for losses."""


# The number 0 and not a tensor: adding it changes neither dtype nor device.
sum_reducer = LossReducer(0, operator.add)


def leaf_spec(spec: Any) -> Any:
    """`spec` if it is one spec, made an object if it is the class; None if it is a tree."""
    if spec is Replicate:
        return Replicate()
    return spec if isinstance(spec, TensorChunkSpec | Replicate | CustomReducer) else None


def child_specs(spec: Any, node: Node, *, said: str, of: str, faults: list[str]) -> list[Any]:
    """One spec for every child of `node`; adds to `faults` what does not fit.

    `said` and `of` name the spec and the value it was written for in messages.
    """
    count = len(node.children)
    if spec is None or leaf_spec(spec) is not None:
        return [spec] * count
    given = open_node(spec)
    if given is None:
        faults.append(not_a_spec(spec, said))
    elif given.style == "index" and node.style == "key":
        faults.append(f"{said} is a {type(spec).__name__}, but {of} has names: write a dict")
    elif given.style == "index" and len(given.children) != count:
        faults.append(f"{said} has {len(given.children)} entries, but {of} has {count}")
    elif given.style == "index":
        return list(given.children)
    else:
        by_key = dict(zip(given.keys, given.children, strict=True))
        unknown = [key for key in by_key if key not in node.keys and key not in node.absent]
        faults.extend(f"{said} names {key!r}, but {of} {_has(key, node)}" for key in unknown)
        return [by_key.get(key) for key in node.keys]
    return [None] * count


def not_a_spec(spec: Any, said: str) -> str:
    """What to say about something else where a spec should be."""
    if isinstance(spec, int) and not isinstance(spec, bool):
        return f"{said} is the number {spec}: write TensorChunkSpec({spec})"
    kind = f"{type(spec).__module__}.{type(spec).__qualname__}"
    return (
        f"{said} is {spec!r} ({kind}): a spec is TensorChunkSpec(dim), Replicate(), None, "
        "a reducer (for outputs), or a tree of these, from fxpipe.microbatch"
    )


def spec_text(paths: Sequence[Path], given: Any, text: str, depth: int = 0) -> str:
    """The spec tree to write: `text` at the end of every path, what was `given` elsewhere."""
    if any(len(path) == depth for path in paths):
        return text
    node = paths[0][depth][0]
    specs = child_specs(given, node, said="", of="", faults=[])
    entries: list[tuple[Any, str]] = []
    for index, (key, spec) in enumerate(zip(node.keys, specs, strict=True)):
        below = [path for path in paths if path[depth][1] == index]
        if below:
            entries.append((key, spec_text(below, spec, text, depth + 1)))
        elif node.style == "index" or spec is not None:
            entries.append((key, repr(spec)))
    if node.style == "index":
        return f"({', '.join(entry for _, entry in entries)}{',' if len(entries) == 1 else ''})"
    return "{" + ", ".join(f"{key!r}: {entry}" for key, entry in entries) + "}"


def _from_dims(dims: Any) -> Any:
    if dims is None or leaf_spec(dims) is not None:
        return leaf_spec(dims)
    node = open_node(dims)
    if node is None:
        return TensorChunkSpec(dims)
    return node.rebuild([_from_dims(child) for child in node.children])


def _has(key: Any, node: Node) -> str:
    names = ", ".join(repr(name) for name in node.keys) or "nothing"
    close = difflib.get_close_matches(str(key), [str(name) for name in node.keys], n=1)
    return f"has {names}" + (f": did you mean {close[0]!r}?" if close else "")
