"""Read what a user wants of the input sizes: the `dynamic_shapes` of `pipeline()`.

In:  `dynamic_shapes` in one of its forms, and the example inputs by name.
Out: `Wishes`: which input dimensions get a symbol, which of those the model must
     leave open, bounds as conditions, and for the others why they are fixed.

    None                          every dimension that the model allows
    "batch"                       dimension 0 of every tensor input
    {"batch": 0, "sequence": 1}   the same for any dimension
    {"ids": {0: Dim("batch", max=8), 1: Dim.AUTO}, "mask": None}
    ({0: Dim.DYNAMIC}, None)      as `torch.export` takes it, by name or by position

Dimensions that an explicit form does not mention are fixed. Equal sizes at the
same position are one size unless they get `Dim`s of different names.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import sympy
import torch
from torch import nn
from torch.export import AdditionalInputs, Dim, ShapesCollection

from fxpipe.errors import InputError
from fxpipe.graph.dims import free_names, solve, symbol, text
from fxpipe.graph.inputs import InputSize, parameters_of, path_text
from fxpipe.graph.interface import TensorSpec
from fxpipe.graph.nested import Accessor, Args, Kwargs, branch, walk
from fxpipe.graph.sizes.symbols import InputDim, all_dims
from fxpipe.graph.source_line import Place

__all__ = ["Wishes", "read_wishes"]

_UNNAMED = "not named in dynamic_shapes"
_ASKED = "asked for by dynamic_shapes"
_BROADCAST = "a size of 1 next to others is taken to be broadcast"
_HINT = type(Dim.AUTO)


@dataclasses.dataclass(frozen=True, slots=True)
class Wishes:
    """What is wanted of each input dimension.

    `dims` get a symbol (or an expression of one); `required` are those that the model
    may not fix; `named` are the symbols that the user named; `reasons` says for every
    other dimension why it is fixed.
    """

    dims: Mapping[InputDim, sympy.Expr]
    required: frozenset[InputDim]
    named: frozenset[str]
    conditions: tuple[sympy.Basic, ...]
    reasons: Mapping[InputDim, str]

    def fewer(self, reason: str) -> Wishes | None:
        """Return the next best wishes: the batch of what is optional, then nothing of it."""
        optional = [place for place in self.dims if place not in self.required]
        dropped = [place for place in optional if place.dim != 0] or optional
        return self._fixed(dict.fromkeys(dropped, reason)) if dropped else None

    def fixed(self, reason: str) -> Wishes:
        """Return no wishes at all."""
        return self._fixed(dict.fromkeys(self.dims, reason))

    def fixing(self, names: Collection[str], reason: str) -> Wishes:
        """Return the wishes without the dimensions in which one of some sizes occurs."""
        places = [place for place, size in self.dims.items() if free_names(size) & set(names)]
        return self._fixed(dict.fromkeys(places, reason))

    def without(self, sizes: Iterable[InputSize]) -> Wishes:
        """Return the wishes without the dimensions that turned out to be fixed."""
        reasons = {(size.input, size.dim): size.reason for size in sizes}
        found = {p: reasons[_key(p)] for p in self.dims if _key(p) in reasons}
        return self._fixed(found) if found else self.fixed("training and evaluation differ")

    def _fixed(self, reasons: Mapping[InputDim, str]) -> Wishes:
        dims = {place: size for place, size in self.dims.items() if place not in reasons}
        return dataclasses.replace(self, dims=dims, reasons={**self.reasons, **reasons})

    def outcome(
        self, example: Mapping[str, object], place_of: Callable[[str], Place | None]
    ) -> tuple[InputSize, ...]:
        """Describe each input dimension after a trace; `example` holds the specs."""
        found = []
        for path, spec in walk(dict(example)):
            for dim, size in enumerate(spec.shape) if isinstance(spec, TensorSpec) else ():
                place = InputDim(path, dim)
                reason = self.reasons.get(place, "")
                if place in self.dims and size != self.dims[place]:
                    reason = _settled(self.dims[place], place_of)
                found.append(InputSize(path_text(path), dim, size, reason))
        return tuple(found)

    def faults(self, sizes: Iterable[InputSize], *, required_only: bool = False) -> list[str]:
        """Say which required dimensions a trace fixed; unless told, also the batch."""
        outcome = {(size.input, size.dim): size for size in sizes}
        faults: list[str] = []
        for place, wanted in self.dims.items():
            found = outcome[_key(place)]
            if place not in self.required and (required_only or wanted != symbol("batch")):
                continue
            if isinstance(found.size, int):
                faults.append(f"{place} ({text(wanted)}) is always {found.size}: {found.reason}")
            elif (free_names(found.size) - free_names(wanted)) & self.named:
                faults.append(
                    f"{place} ({text(wanted)}) is always {text(found.size)}: {found.reason}"
                )
        return faults


def _key(place: InputDim) -> tuple[str, int]:
    return path_text(place.path), place.dim


def _settled(wanted: sympy.Expr, place_of: Callable[[str], Place | None]) -> str:
    places = [place for name in sorted(free_names(wanted)) if (place := place_of(name))]
    return "the model fixes it" + "".join(f" at {place}: {place.source}" for place in places)


def read_wishes(
    dynamic_shapes: Any, module: nn.Module, call: tuple[Args, Kwargs], named: Mapping[str, object]
) -> Wishes:
    """Return the wishes for the inputs of a call, which `named` has by name.

    Raises:
        InputError: lists everything in `dynamic_shapes` that does not fit the inputs.
    """
    if isinstance(dynamic_shapes, (ShapesCollection, AdditionalInputs)):
        dynamic_shapes = dynamic_shapes.dynamic_shapes(module, *call)  # type: ignore[no-untyped-call]
    tensors = _tensors(named)
    if dynamic_shapes is None:
        dims = all_dims(named)
        return Wishes(
            dims, frozenset(), frozenset(), (), dict.fromkeys(tensors.keys() - dims, _BROADCAST)
        )
    reader = _Reader(tensors, dict(named))
    if dynamic_shapes == "batch":
        reader.everywhere("batch", 0)
    elif isinstance(dynamic_shapes, Mapping):
        reader.by_name(dynamic_shapes, _keyword_rest(module))
    elif isinstance(dynamic_shapes, (tuple, list)):
        reader.by_position(dynamic_shapes)
    else:
        reader.faults.append(
            f"found {dynamic_shapes!r}; needed 'batch', a dict by argument name, or a tuple"
        )
    return reader.finish()


def _tensors(named: Mapping[str, object]) -> dict[InputDim, int]:
    """Return the example size of each dimension of each input tensor."""
    return {
        InputDim(path, dim): int(size)
        for path, leaf in walk(dict(named))
        if isinstance(leaf, torch.Tensor)
        for dim, size in enumerate(leaf.shape)
    }


def _keyword_rest(module: nn.Module) -> str | None:
    return next((p.name for p in parameters_of(module) if p.kind == "VAR_KEYWORD"), None)


class _Reader:
    """Collects wishes and faults."""

    def __init__(self, sizes: Mapping[InputDim, int], named: Mapping[str, object]) -> None:
        self._sizes = sizes
        self._inputs = named
        self._dims: dict[InputDim, sympy.Expr] = {}
        self._hinted: dict[InputDim, Any] = {}
        self._required: set[InputDim] = set()
        self._bounds: dict[str, tuple[int, int | None]] = {}
        self._reasons: dict[InputDim, str] = {}
        self.faults: list[str] = []

    # -- the forms

    def everywhere(self, name: str, dim: int) -> None:
        """Name one dimension of every tensor that has it."""
        ranks: dict[tuple[Accessor, ...], int] = {}
        for place in self._sizes:
            ranks[place.path] = max(ranks.get(place.path, 0), place.dim + 1)
        places = [InputDim(path, dim % rank) for path, rank in ranks.items() if -rank <= dim < rank]
        if not places:
            self.faults.append(f"no tensor input has a dimension {dim} to be called {name!r}")
        if len({self._sizes[place] for place in places}) > 1:
            for place in places:
                if self._sizes[place] == 1:
                    self._reasons[place] = _BROADCAST
            places = [place for place in places if self._sizes[place] != 1]
        for place in places:
            self._open(place, symbol(name))

    def by_name(self, shapes: Mapping[Any, Any], rest: str | None) -> None:
        for name, shape in shapes.items():
            if isinstance(shape, int) and not isinstance(shape, bool):
                self.everywhere(str(name), shape)
            elif name in self._inputs:
                self._value((("item", name),), self._inputs[name], shape)
            elif name == rest and isinstance(shape, Mapping):
                self.by_name(shape, None)
            elif shape is not None:
                close = difflib.get_close_matches(str(name), self._inputs, n=1)
                hint = f"; closest: {close[0]!r}" if close else ""
                self.faults.append(
                    f"{name!r} is not among the inputs ({', '.join(self._inputs)}){hint}"
                )

    def by_position(self, shapes: tuple[object, ...] | list[object]) -> None:
        if len(shapes) != len(self._inputs):
            self.faults.append(
                f"it has {len(shapes)} entries for {len(self._inputs)} inputs "
                f"({', '.join(self._inputs)})"
            )
        for name, shape in zip(self._inputs, shapes, strict=False):
            self._value((("item", name),), self._inputs[name], shape)

    # -- one input

    def _value(self, path: tuple[Accessor, ...], value: Any, shape: Any) -> None:
        if shape is None:
            return
        if isinstance(value, torch.Tensor):
            for dim, wish in self._entries(path, value, shape):
                self._wish(InputDim(path, dim), wish)
            return
        found = branch(value)
        if found is None:
            self.faults.append(
                f"{path_text(path)} is the constant {value!r}, not a tensor; its entry must be None"
            )
            return
        keys = [key for _, key in found.accessors]
        if isinstance(shape, Mapping) and all(key in keys for key in shape):
            children = [shape.get(key) for key in keys]
        elif isinstance(shape, (tuple, list)) and len(shape) == len(keys):
            children = list(shape)
        else:
            self.faults.append(
                f"{path_text(path)} has the parts {', '.join(map(repr, keys))}; found {shape!r}"
            )
            return
        for accessor, child, part in zip(found.accessors, found.children, children, strict=True):
            self._value((*path, accessor), child, part)

    def _entries(
        self, path: tuple[Accessor, ...], value: torch.Tensor, shape: object
    ) -> Iterator[tuple[int, object]]:
        where, rank = path_text(path), value.dim()
        if isinstance(shape, (tuple, list)):
            if len(shape) == rank:
                yield from enumerate(shape)
            else:
                self.faults.append(f"{where} has {rank} dimensions; found {len(shape)} entries")
        elif isinstance(shape, Mapping):
            for dim, wish in shape.items():
                if isinstance(dim, int) and -rank <= dim < rank:
                    yield dim % rank, wish
                else:
                    self.faults.append(f"{where} has {rank} dimensions, no dimension {dim!r}")
        else:
            self.faults.append(
                f"{where} needs {{dimension: Dim}} or one entry per dimension; found {shape!r}"
            )

    def _wish(self, place: InputDim, wish: object) -> None:
        if isinstance(wish, str) and wish.isidentifier():
            wish = Dim(wish)
        if wish is None or (isinstance(wish, int) and not isinstance(wish, bool)):
            self._reasons[place] = _ASKED
            if wish is not None and wish != self._sizes[place]:
                self.faults.append(f"{place} is {self._sizes[place]}, not {wish}, in the example")
        elif isinstance(wish, _HINT):
            self._hint(place, wish)
        elif isinstance(wish, Dim):
            root = getattr(wish, "root", wish)
            self._bound(place, root.__name__, root)
            expr = symbol(root.__name__)
            self._open(place, wish.fn(expr) if hasattr(wish, "fn") else expr)
        else:
            self.faults.append(f"{place} needs a Dim, a name, an int or None; found {wish!r}")

    def _open(self, place: InputDim, size: sympy.Expr) -> None:
        before = self._dims.setdefault(place, size)
        if before != size:
            self.faults.append(f"{place} is called both {text(before)} and {text(size)}")
        self._required.add(place)

    def _hint(self, place: InputDim, hint: Any) -> None:
        if hint.type.name == "STATIC":
            self._reasons[place] = _ASKED
        else:
            self._hinted[place] = hint

    def _bound(self, place: InputDim, name: str, dim: Any) -> None:
        low = int(dim.min) if dim.min is not None else 0
        high = int(dim.max) if isinstance(dim.max, int) else None
        if self._bounds.setdefault(name, (low, high)) != (low, high):
            self.faults.append(f"{place}: the Dims called {name!r} have different bounds")

    # -- the end

    def finish(self) -> Wishes:
        named = frozenset(name for size in self._dims.values() for name in free_names(size))
        self._name_hinted()
        self._check_example()
        if self.faults:
            raise InputError(
                "dynamic_shapes does not fit the example inputs:\n  "
                + "\n  ".join(self.faults)
                + "\ngive 'batch', {'batch': 0}, or what torch.export takes: "
                "{argument: {dimension: Dim(...)}}"
            )
        conditions: list[sympy.Basic] = []
        for name, (low, high) in self._bounds.items():
            conditions.append(sympy.Ge(symbol(name), low))
            if high is not None:
                conditions.append(sympy.Le(symbol(name), high))
        reasons = {
            place: self._reasons.get(place, _UNNAMED)
            for place in self._sizes
            if place not in self._dims
        }
        return Wishes(self._dims, frozenset(self._required), named, tuple(conditions), reasons)

    def _name_hinted(self) -> None:
        """Name what `Dim.AUTO` and `Dim.DYNAMIC` leave unnamed, as without wishes."""
        given = {
            (place.dim, self._sizes[place]): size
            for place, size in self._dims.items()
            if isinstance(size, sympy.Symbol)
        }
        taken = {name for size in self._dims.values() for name in free_names(size)}
        usual = all_dims(dict(self._inputs))
        made: dict[sympy.Expr, sympy.Expr] = {}
        for place, hint in self._hinted.items():
            size = given.get((place.dim, self._sizes[place]))
            if size is None:
                wanted = usual.get(place) or symbol("_".join(str(k) for _, k in place.path))
                if wanted not in made:
                    name = str(wanted)
                    while name in taken:
                        name += "_"
                    taken.add(name)
                    made[wanted] = symbol(name)
                size = made[wanted]
            self._dims[place] = size
            if hint.type.name == "DYNAMIC":
                self._required.add(place)
            if hint.min is not None or hint.max is not None:
                self._bound(place, size.name, hint)

    def _check_example(self) -> None:
        """Check that one symbol has one size, within its bounds."""
        values: dict[str, tuple[int, InputDim]] = {}
        for place, size in self._dims.items():
            for name in free_names(size):
                value = solve(size, name, self._sizes[place])
                if value is None:
                    self.faults.append(
                        f"{place} is {self._sizes[place]} in the example, not {text(size)} "
                        f"for any {name}"
                    )
                    continue
                other, where = values.setdefault(name, (value, place))
                if other != value:
                    self.faults.append(
                        f"{name} is {other} at {where} and {value} at {place}; give them Dims of "
                        "different names, or leave one out"
                    )
        for name, (low, high) in self._bounds.items():
            if name in values:
                value, place = values[name]
                if value < low or (high is not None and value > high):
                    limits = f"at least {low}" + (f", at most {high}" if high is not None else "")
                    self.faults.append(f"{name} is {value} at {place}; its Dim wants {limits}")
