"""The model's inputs by name: what the trace saw, and whether a new call fits.

An input is a parameter of the model's own forward (or an extra keyword). The
signature remembers the example call: tensors as `TensorSpec`s with symbolic
sizes, everything else as it was. A later call must give the same constants and
tensors that fit the specs; from those the values of the size symbols follow.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import sympy
import torch
from torch import nn

from fxpipe.errors import InputError, PipeliningShapeError
from fxpipe.graph.dims import Dim, evaluate, free_names, holds, solve, symbol, text
from fxpipe.graph.interface import TensorSpec
from fxpipe.graph.nested import Accessor, Args, branch, has_tensor, map_leaves, snapshot, walk

__all__ = [
    "InputSignature",
    "InputSize",
    "Parameter",
    "name_call",
    "parameters_of",
    "path_text",
]

_POSITIONAL = ("POSITIONAL_ONLY", "POSITIONAL_OR_KEYWORD")


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of the model's forward; `kind` as `inspect` names it."""

    name: str
    kind: str
    has_default: bool
    default: object = None


def parameters_of(module: nn.Module) -> tuple[Parameter, ...]:
    """Return the parameters of a module's forward."""
    found = inspect.signature(module.forward).parameters.values()
    empty = inspect.Parameter.empty
    return tuple(
        Parameter(
            p.name, p.kind.name, p.default is not empty, None if p.default is empty else p.default
        )
        for p in found
    )


def name_call(
    parameters: Iterable[Parameter],
    args: Args,
    kwargs: Mapping[str, object],
    *,
    partial: bool = False,
) -> dict[str, object]:
    """Return the arguments of a call by parameter name; defaults are not filled in.

    Extra positional arguments are one tuple under the name of the `*` parameter;
    extra keywords keep their own names. `partial` accepts missing arguments.

    Raises:
        InputError: lists every unknown, doubled and missing argument.
    """
    named: dict[str, object] = {}
    faults: list[str] = []
    parameters = tuple(parameters)
    positional = [p for p in parameters if p.kind in _POSITIONAL]
    rest = next((p.name for p in parameters if p.kind == "VAR_POSITIONAL"), None)
    for parameter, value in zip(positional, args, strict=False):
        named[parameter.name] = value
    extra = args[len(positional) :]
    if extra and rest is not None:
        named[rest] = tuple(extra)
    elif extra:
        faults.append(f"{len(args)} positional inputs given, at most {len(positional)} taken")
    takes_any = any(p.kind == "VAR_KEYWORD" for p in parameters)
    known = {p.name for p in parameters if p.kind in (*_POSITIONAL[1:], "KEYWORD_ONLY")}
    for name, value in kwargs.items():
        if name in named:
            faults.append(f"{name!r} is given twice")
        elif name in known or takes_any:
            named[name] = value
        else:
            faults.append(f"{name!r} is not an input of the model")
    required = [p.name for p in (*positional, *_keyword_only(parameters)) if not p.has_default]
    missing = [name for name in required if name not in named]
    if missing and not partial:
        faults.append(f"missing: {', '.join(map(repr, missing))}")
    if faults:
        names = ", ".join(p.name for p in parameters)
        raise InputError(
            "the inputs do not fit the model's forward:\n  "
            + "\n  ".join(faults)
            + f"\nforward takes ({names})"
        )
    return named


def _keyword_only(parameters: tuple[Parameter, ...]) -> list[Parameter]:
    return [p for p in parameters if p.kind == "KEYWORD_ONLY"]


@dataclass(frozen=True, slots=True)
class InputSize:
    """One dimension of one input tensor: an expression, or a number and why it is fixed."""

    input: str
    dim: int
    size: Dim
    reason: str = ""

    @property
    def is_dynamic(self) -> bool:
        return not isinstance(self.size, int)

    def __str__(self) -> str:
        kind = "dynamic" if self.is_dynamic else f"static: {self.reason}"
        return f"{self.input} dimension {self.dim}: {text(self.size)} ({kind})"


@dataclass(frozen=True, slots=True)
class InputSignature:
    """The inputs of the traced call.

    `example` maps each given input to its value, with a `TensorSpec` in place of each
    tensor; `conditions` are what the sizes must satisfy beyond fitting the specs;
    `sizes` says of every input dimension whether it may change, and if not why.
    """

    parameters: tuple[Parameter, ...]
    example: Mapping[str, object]
    conditions: tuple[sympy.Basic, ...]
    sizes: tuple[InputSize, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the inputs that carry tensors."""
        return tuple(name for name, value in self.example.items() if _has_spec(value))

    @property
    def symbols(self) -> dict[str, tuple[str, ...]]:
        """For each size symbol the input dimensions that give its value, as text."""
        found: dict[str, list[str]] = {}
        for path, leaf in walk(dict(self.example)):
            if isinstance(leaf, TensorSpec):
                for dim, size in enumerate(leaf.shape):
                    if isinstance(size, sympy.Symbol):
                        found.setdefault(size.name, []).append(f"{path_text(path)} dim {dim}")
        return {name: tuple(places) for name, places in found.items()}

    def name_inputs(
        self, args: Iterable[object], kwargs: Mapping[str, object] | None, *, partial: bool = False
    ) -> dict[str, object]:
        """Return the inputs of a call by name; see `name_call`."""
        return name_call(self.parameters, tuple(args), dict(kwargs or {}), partial=partial)

    def bind(self, named: Mapping[str, object], *, partial: bool = False) -> dict[str, int]:
        """Return the value of each size symbol for the given inputs.

        Raises:
            PipeliningShapeError: lists every input that differs from the traced call
                in a fixed size, dtype, rank, structure or constant, and every
                condition on sizes that does not hold.
        """
        faults: list[str] = []
        values: dict[str, int] = {}
        unsolved: list[tuple[str, Dim, int]] = []
        for name, expected in self.example.items():
            if name in named:
                _compare((("item", name),), expected, named[name], values, unsolved, faults)
            elif not partial and not self._is_default(name, expected):
                faults.append(f"{name}: not given, but the traced call had it")
        for name, value in named.items():
            if name not in self.example and not self._is_default(name, value):
                faults.append(f"{name}: given, but the traced call left it out")
        _solve(unsolved, values)
        faults += _unsolved_faults(unsolved, values, partial)
        faults += _condition_faults(self.conditions, values)
        if faults:
            raise PipeliningShapeError(
                "the inputs do not fit what was traced:\n  "
                + "\n  ".join(faults)
                + "\ntrace with inputs like these, or with dynamic shapes where the model allows"
            )
        return values

    def unmet(self, named: Mapping[str, object]) -> list[sympy.Basic]:
        """Return the conditions on sizes that do not hold for inputs."""
        values: dict[str, int] = {}
        unsolved: list[tuple[str, Dim, int]] = []
        for name, expected in self.example.items():
            _compare((("item", name),), expected, named[name], values, unsolved, [])
        _solve(unsolved, values)
        return [c for c in self.conditions if _condition_faults([c], values)]

    def _is_default(self, name: str, value: object) -> bool:
        default = next((p for p in self.parameters if p.name == name), None)
        if has_tensor(value) or _has_spec(value):
            return False
        if default is None or not default.has_default:
            return value is None
        return _same(default.default, value)


def path_text(path: tuple[Accessor, ...]) -> str:
    """Write a path into the inputs as a user would: `batch['mask'][0]`."""
    if not path:
        return "input"
    (_, first), *rest = path
    return str(first) + "".join(f".{key}" if kind == "attr" else f"[{key!r}]" for kind, key in rest)


def _has_spec(value: object) -> bool:
    return any(isinstance(leaf, TensorSpec) for _, leaf in walk(value))


def _same(left: object, right: object) -> bool:
    if left is right:
        return True
    try:
        return type(left) is type(right) and bool(left == right)
    except Exception:
        return False


def _compare(
    path: tuple[Accessor, ...],
    expected: object,
    given: object,
    values: dict[str, int],
    unsolved: list[tuple[str, Dim, int]],
    faults: list[str],
) -> None:
    where = path_text(path)
    if isinstance(expected, TensorSpec):
        if not isinstance(given, torch.Tensor):
            faults.append(f"{where}: expected {expected}, got {given!r}")
        else:
            _compare_tensor(where, expected, given, values, unsolved, faults)
        return
    if isinstance(given, torch.Tensor):
        faults.append(f"{where}: expected the constant {expected!r}, got {TensorSpec.of(given)}")
        return
    left, right = branch(expected), branch(given)
    if left is None or right is None:
        if left is not right or not _same(expected, given):
            faults.append(f"{where}: traced with {expected!r}, got {given!r}")
    elif left.accessors != right.accessors:
        faults.append(f"{where}: its structure differs from the traced call's")
    else:
        for accessor, a, b in zip(left.accessors, left.children, right.children, strict=True):
            _compare((*path, accessor), a, b, values, unsolved, faults)


def _compare_tensor(
    where: str,
    expected: TensorSpec,
    given: torch.Tensor,
    values: dict[str, int],
    unsolved: list[tuple[str, Dim, int]],
    faults: list[str],
) -> None:
    shape = tuple(int(size) for size in given.shape)
    found = TensorSpec(shape, given.dtype)
    if len(shape) != len(expected.shape) or _kind(given.dtype) != _kind(expected.dtype):
        faults.append(f"{where}: expected {expected}, got {found}")
        return
    for dim, (size, wanted) in enumerate(zip(shape, expected.shape, strict=True)):
        if isinstance(wanted, int):
            if wanted != size:
                faults.append(f"{where}: expected {expected}, got {found} (dimension {dim})")
        elif isinstance(wanted, sympy.Symbol):
            if values.setdefault(wanted.name, size) != size:
                faults.append(
                    f"{where}: expected {expected}, got {found}, "
                    f"but {wanted.name} is {values[wanted.name]} elsewhere"
                )
        else:
            unsolved.append((f"{where} dimension {dim}", wanted, size))


def _kind(dtype: torch.dtype) -> str:
    # The precision may change after the trace, with the parameters'; the kind may not.
    if dtype.is_floating_point:
        return "float"
    return "complex" if dtype.is_complex else str(dtype)


def _solve(unsolved: list[tuple[str, Dim, int]], values: dict[str, int]) -> None:
    """Learn symbols that no input dimension gives directly, such as from `2*half`."""
    for _, wanted, size in unsolved:
        missing = free_names(wanted) - values.keys()
        if len(missing) == 1 and isinstance(wanted, sympy.Expr):
            (name,) = missing
            known = {symbol(other): value for other, value in values.items()}
            value = solve(wanted.xreplace(known), name, size)
            if value is not None:
                values[name] = value


def _unsolved_faults(
    unsolved: list[tuple[str, Dim, int]], values: dict[str, int], partial: bool
) -> list[str]:
    faults = []
    for where, wanted, size in unsolved:
        if not free_names(wanted) <= values.keys():
            faults += [] if partial else [f"{where}: expected {text(wanted)}, got {size}"]
        else:
            due = int(evaluate(wanted, values))
            if due != size:
                faults.append(f"{where}: expected {text(wanted)} = {due}, got {size}")
    return faults


def _condition_faults(conditions: Iterable[sympy.Basic], values: dict[str, int]) -> list[str]:
    faults = []
    for condition in conditions:
        names = sorted(free_names(condition))
        if set(names) <= values.keys() and not holds(condition, values):
            given = ", ".join(f"{name} = {values[name]}" for name in names)
            faults.append(f"the model was traced for sizes with {text(condition)}; got {given}")
    return faults


def spec_inputs(
    named: Mapping[str, object], spec: Callable[[torch.Tensor], object]
) -> dict[str, object]:
    """Return inputs with each tensor replaced by its `TensorSpec`, as `spec` gives it.

    Constants are copied: the user may change a dict of options between two calls.
    """
    result: dict[str, object] = snapshot(
        map_leaves(lambda leaf: spec(leaf) if isinstance(leaf, torch.Tensor) else leaf, dict(named))
    )
    return result
