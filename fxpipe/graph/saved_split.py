"""Plans as JSON: write a `PipeInfo`, and read it back.

Sizes and conditions are in their text form (`dims.text`), tensors are specs, constants
among the inputs are themselves. Nothing that is read is ever executed.
"""

from __future__ import annotations

import json
import keyword
from collections.abc import Callable, Mapping
from typing import Any

import sympy
import torch

from fxpipe.errors import InputError
from fxpipe.graph.dims import Dim, parse, symbol, text
from fxpipe.graph.info import PipeInfo
from fxpipe.graph.inputs import InputSignature, InputSize, Parameter
from fxpipe.graph.interface import Port, Received, Sent, StageInterface, TensorSpec, Tied, edges_of

__all__ = ["read", "written"]

FORMAT = "fxpipe plan"
VERSION = 1
_WORDS = {"max", "min", "ceil_div", "and", "or", "not"}


def written(info: PipeInfo, *, strict: bool = True) -> str:
    """Write a plan as JSON.

    Unless `strict`, an input without a JSON form is written as the name of its type, and
    reasons, which name places in files, are left out: what ranks compare.

    Raises:
        InputError: an input has no JSON form.
    """
    return json.dumps(_Writer(info.symbols, strict).plan(info), indent=1)


def read(source: str) -> PipeInfo:
    """Read what `written` wrote.

    Raises:
        InputError: the text is not such a plan.
    """
    try:
        data = json.loads(source)
    except json.JSONDecodeError as error:
        raise InputError(f"this is not JSON: {error}") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise InputError(f'this is not a plan of a pipe: it lacks "format": "{FORMAT}"')
    if data.get("version") != VERSION:
        raise InputError(
            f"the plan has version {data.get('version')!r}, this fxpipe reads {VERSION}; "
            "split the model anew"
        )
    try:
        return _Reader(data["symbols"]).plan(data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"the plan is damaged: {type(error).__name__}: {error}") from error


class _Writer:
    def __init__(self, symbols: tuple[str, ...], strict: bool) -> None:
        self._strict = strict
        # A symbol carries an input's name, which may not be a name in an expression.
        self._alias = {
            name: name if name.isidentifier() and name not in _WORDS | set(keyword.kwlist)
            else f"size_{place}"
            for place, name in enumerate(symbols)
        }  # fmt: skip

    def plan(self, info: PipeInfo) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": VERSION,
            "symbols": {alias: name for name, alias in self._alias.items()},
            "example_sizes": dict(sorted(info.example_sizes.items())),
            "opened": sorted(info.opened),
            "stage_of": dict(sorted(info.stage_of.items())),
            "autocast": info.trace_autocast,
            "stages": [self._stage(info, i) for i in range(info.num_stages)],
            "tied": [[list(place) for place in tie.locations] for tie in info.tied],
            "inputs": self._inputs(info.inputs),
        }

    def _stage(self, info: PipeInfo, index: int) -> dict[str, Any]:
        found = info.interfaces[index]
        return {
            "receives": [[*self._port(r.port), r.source_stage] for r in found.received],
            "reads": list(found.model_inputs),
            "sends": [[*self._port(s.port), list(s.target_stages)] for s in found.sent],
            "state": list(found.state),
            "dtypes": sorted(map(_dtype_name, info.state_dtypes[index])),
            "repeated": list(info.repeated[index]) if info.repeated else [],
        }

    def _port(self, port: Port) -> tuple[str, dict[str, Any]]:
        return port.name, self._spec(port.spec)

    def _spec(self, spec: TensorSpec) -> dict[str, Any]:
        return {
            "shape": [self._size(dim) for dim in spec.shape],
            "dtype": _dtype_name(spec.dtype),
            "requires_grad": spec.requires_grad,
        }

    def _size(self, dim: Dim | sympy.Basic) -> str:
        if isinstance(dim, int):
            return str(dim)
        return text(dim.xreplace({symbol(a): symbol(b) for a, b in self._alias.items()}))

    def _inputs(self, inputs: InputSignature) -> dict[str, Any]:
        return {
            "parameters": [
                [p.name, p.kind, p.has_default, self._value(p.default, None)]
                for p in inputs.parameters
            ],
            "example": {name: self._value(value, name) for name, value in inputs.example.items()},
            "conditions": [self._size(condition) for condition in inputs.conditions],
            "sizes": [
                [s.input, s.dim, self._size(s.size), s.reason if self._strict else ""]
                for s in inputs.sizes
            ],
        }

    def _value(self, value: Any, name: str | None) -> Any:
        """A constant or a nest of them; `name` is the input, None for a default."""
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, TensorSpec):
            return {"tensor": self._spec(value)}
        if type(value) in (list, tuple):
            return {type(value).__name__: [self._value(part, name) for part in value]}
        if type(value) is dict and all(isinstance(key, str | int) for key in value):
            return {"dict": [[key, self._value(part, name)] for key, part in value.items()]}
        if isinstance(value, torch.dtype):
            return {"dtype": _dtype_name(value)}
        if isinstance(value, torch.device):
            return {"device": str(value)}
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        if self._strict and name is not None:
            raise InputError(
                f"the plan cannot be saved: the input {name!r} holds a {kind}, which has no JSON "
                "form\ntrace with tensors, numbers, strings, lists, tuples and dicts, or let "
                "every rank trace for itself"
            )
        return {"opaque": kind}


class _Opaque:
    """A default that could not be written; equal to nothing."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __repr__(self) -> str:
        return f"<{self._kind}>"


class _Reader:
    def __init__(self, symbols: Mapping[str, str]) -> None:
        self._names = dict(symbols)

    def plan(self, data: Mapping[str, Any]) -> PipeInfo:
        stages = data["stages"]
        interfaces = tuple(self._stage(index, stage) for index, stage in enumerate(stages))
        return PipeInfo(
            interfaces,
            edges_of(interfaces),
            tuple(Tied(tuple((s, n) for s, n in places)) for places in data["tied"]),
            self._inputs(data["inputs"]),
            tuple(self._names.values()),
            bool(data["autocast"]),
            tuple(frozenset(map(_dtype, stage["dtypes"])) for stage in stages),
            frozenset(data["opened"]),
            dict(data["stage_of"]),
            tuple(tuple(stage["repeated"]) for stage in stages),
            dict(data["example_sizes"]),
        )

    def _stage(self, index: int, stage: Mapping[str, Any]) -> StageInterface:
        return StageInterface(
            index,
            tuple(
                Received(Port(name, self._spec(spec)), source)
                for name, spec, source in stage["receives"]
            ),
            tuple(stage["reads"]),
            tuple(
                Sent(Port(name, self._spec(spec)), tuple(targets))
                for name, spec, targets in stage["sends"]
            ),
            tuple(stage["state"]),
        )

    def _spec(self, spec: Mapping[str, Any]) -> TensorSpec:
        shape = tuple(self._size(size) for size in spec["shape"])
        return TensorSpec(shape, _dtype(spec["dtype"]), spec["requires_grad"])

    def _size(self, source: str) -> Any:
        found = parse(source)
        if isinstance(found, int):
            return found
        return found.xreplace({symbol(alias): symbol(name) for alias, name in self._names.items()})

    def _inputs(self, inputs: Mapping[str, Any]) -> InputSignature:
        return InputSignature(
            tuple(
                Parameter(name, kind, has_default, self._value(default))
                for name, kind, has_default, default in inputs["parameters"]
            ),
            {name: self._value(value) for name, value in inputs["example"].items()},
            tuple(self._size(condition) for condition in inputs["conditions"]),
            tuple(
                InputSize(name, dim, self._size(size), reason)
                for name, dim, size, reason in inputs["sizes"]
            ),
        )

    def _value(self, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        ((kind, inside),) = value.items()
        readers: dict[str, Callable[[Any], Any]] = {
            "tensor": self._spec,
            "list": lambda parts: [self._value(part) for part in parts],
            "tuple": lambda parts: tuple(self._value(part) for part in parts),
            "dict": lambda parts: {key: self._value(part) for key, part in parts},
            "dtype": _dtype,
            "device": torch.device,
            "opaque": _Opaque,
        }
        return readers[kind](inside)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"{name!r} is not a dtype")
    return found
