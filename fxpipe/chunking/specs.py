"""What a user may say about a leaf, and which leaf it was said about.

A spec tree follows the tree of values, but may stop early: one spec for a nested argument
holds for every tensor below it. None means "by the default rule". Names are matched as
names (a dict, dataclass or NamedTuple of specs, in any order; what is not named follows
the default rule), positions as positions (a tuple or list of the same length).
"""

from __future__ import annotations

import difflib
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fxpipe.chunking.tree import Node, Path, open_node
from fxpipe.errors import InputError

__all__ = [
    "CustomReducer",
    "LossReducer",
    "Replicate",
    "TensorChunkSpec",
    "child_specs",
    "leaf_spec",
    "not_a_spec",
    "spec_text",
    "sum_reducer",
]


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
