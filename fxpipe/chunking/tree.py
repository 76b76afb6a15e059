"""Open and close containers of any kind, one level at a time, with readable paths.

A container is anything `torch.utils._pytree` knows (registered classes included) and,
beyond that, every dataclass, mutable mapping and list subclass: users pass those without
registering them, and what is not opened cannot be split. Tensors, `BlockMask`s (also
where someone registered them) and all else are leaves.

Outputs may hold key-value caches of Hugging Face models. Those that grow are opened
(`open_cache`): of these every attribute is known. One with a fixed number of rows, quantized or
offloaded keys, or another class is a leaf like any object, and is refused by name.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.attention.flex_attention import BlockMask

from fxpipe.torch_inside import pytree

__all__ = ["Node", "Path", "Template", "build", "open_cache", "open_node", "path_text"]


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
