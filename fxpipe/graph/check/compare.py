"""Are two values the same? Bits first; else as close as their dtype can be.

The same operations in the same order give the same bits on a CPU, so most values are
equal outright. NaN equals NaN.
"""

from __future__ import annotations

import dataclasses
import itertools
import types
from collections.abc import Mapping
from typing import Any

import torch

from fxpipe.graph.nested import branch
from fxpipe.torch_inside import FakeTensor

__all__ = ["KERNELS", "NOTED", "Difference", "first_difference", "is_same", "noted_differences"]

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
_MISSING = object()
KERNELS = "calls of attention kernels"
# What may differ while all values are equal: it is told, but is no error. Draws of Python
# and numpy in opened code are refused where they decide or are used.
NOTED = ("random state of Python", "random state of numpy")


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """The first item in which two runs differ."""

    what: str
    text: str


def first_difference(expected: Mapping[str, Any], found: Mapping[str, Any]) -> Difference | None:
    """Return the first item that the plain model (`expected`) and the pipe do not share."""
    for what in (*expected, *(name for name in found if name not in expected)):
        if what in NOTED:
            continue
        one, other = expected.get(what, _MISSING), found.get(what, _MISSING)
        if not is_same(one, other):
            return Difference(what, _text(what, one, other))
    return None


def noted_differences(expected: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """Return, as text, what differs without any value being another."""
    return [f"{what} after a run" for what in NOTED if expected.get(what) != found.get(what)]


def _kernels_text(one: list[str], other: list[str]) -> str:
    """The first call of a kernel that is not the plain model's."""
    for mine, theirs in itertools.zip_longest(one, other):
        if mine != theirs:
            return f"{KERNELS}: ({mine}) in the plain model, ({theirs}) in the stages"
    return KERNELS


def is_same(one: Any, other: Any) -> bool:
    """Say whether two values are equal, tensors within the tolerance of their dtype."""
    if one is other:
        return True
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return _same_tensors(one, other)
    if type(one) is not type(other):
        return False
    parts, others = branch(one), branch(other)
    if parts is not None and others is not None:
        return parts.accessors == others.accessors and all(
            map(is_same, parts.children, others.children)
        )
    if isinstance(one, float):
        return one == other or (one != one and other != other)
    if isinstance(one, (types.FunctionType, types.MethodType)):
        return one.__code__ is other.__code__
    kind: Any = type(one)
    if kind.__eq__ is object.__eq__:
        return True  # two objects of one class, of which nothing more is known
    try:
        return bool(one == other)
    except Exception:
        return True


def _same_tensors(one: torch.Tensor, other: torch.Tensor) -> bool:
    if isinstance(one, FakeTensor) or isinstance(other, FakeTensor):
        return False  # left behind by a trace
    if one.shape != other.shape or one.dtype != other.dtype or one.layout != other.layout:
        return False
    if one.layout is not torch.strided:
        one, other = one.to_dense(), other.to_dense()
    if torch.equal(one, other):
        return True
    tolerance = _TOLERANCE.get(one.dtype if not one.is_complex() else torch.float32)
    if tolerance is None:
        return False
    scale = float(torch.nan_to_num(one.detach().abs().to(torch.float64), posinf=0.0).max())
    return torch.allclose(
        one, other.to(one.device), rtol=tolerance, atol=tolerance * scale, equal_nan=True
    )


def _text(what: str, one: Any, other: Any) -> str:
    if what == KERNELS:
        return _kernels_text(one, other)
    if what.startswith("random state"):
        return f"{what}: the stages do not draw the same random numbers"
    if what.startswith("kind of"):
        kinds = ["nothing" if kind is _MISSING else kind for kind in (one, other)]
        return f"{what}: {kinds[0]} in the plain model, {kinds[1]} in the stages"
    is_pair = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
    is_pair &= not (isinstance(one, FakeTensor) or isinstance(other, FakeTensor))
    if is_pair and one.shape == other.shape and one.dtype == other.dtype and one.numel() > 4:
        gap = float((one.to(torch.float64) - other.to(torch.float64)).abs().max())
        return f"{what} differs by up to {gap:.3g}"
    return f"{what}: {_shown(one)} in the plain model, {_shown(other)} in the stages"


def _shown(value: Any) -> str:
    if value is _MISSING:
        return "unchanged"
    if isinstance(value, FakeTensor):
        return "a tensor without data"
    if isinstance(value, torch.Tensor):
        kind = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        return f"{kind} {value.tolist()}" if value.numel() <= 4 else kind
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."
