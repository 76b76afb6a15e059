"""Notice that the copies of a tied parameter are no longer alike.

Optimizers change all copies alike: the versions of the copies advance by the same number between
two calls. Where they do not, or where parameters were replaced, the ranks compare the values. What
changes copies without counting a version (`.data`), or counts and changes them unlike (another
learning rate or weight decay), is seen in a sample, in the first calls and now and then.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fxpipe.errors import InputError
from fxpipe.runtime.control.control import Control
from fxpipe.runtime.parameters.tied import TiedGroup, local
from fxpipe.torch_inside import version_of

__all__ = ["TiedCopies", "compare_copies"]

_NONE, _SEVERAL = -1, -2
_SAMPLE = 64  # elements of a copy that are compared
_FIRST, _EVERY = (1, 2), 64  # calls after which samples are compared


class TiedCopies:
    """The copies of tied parameters that this process holds, as the latest call left them."""

    def __init__(self) -> None:
        self._groups: Sequence[TiedGroup] = ()
        self._versions: list[int] = []
        self._epoch = 0
        self._calls = 0

    def note(self, groups: Sequence[TiedGroup], epoch: int) -> None:
        """Remember the copies; `epoch` counts how often modules and parameters were replaced."""
        self._groups, self._versions, self._epoch = groups, self._found(groups), epoch
        self._calls += 1

    def advance(self, epoch: int) -> int:
        """By how much all copies have advanced; other numbers for none, and for unequal ones."""
        if epoch != self._epoch:
            return _NONE  # they are compared, or the first plan gives all the owner's values
        pairs = zip(self._found(self._groups), self._versions, strict=True)
        found = {now - before for now, before in pairs}
        return _NONE if not found else _SEVERAL if len(found) > 1 else found.pop()

    def check(self, advances: Sequence[int], control: Control) -> None:
        """Compare the values of all copies if they have not advanced alike, or a sample is due.

        Raises:
            InputError: on all ranks: a tied parameter has different values.
        """
        known = set(advances) - {_NONE}
        if len(known) > 1 or _SEVERAL in known:
            compare_copies(self._groups, control)
        elif self._groups and (self._calls in _FIRST or self._calls % _EVERY == 0):
            _compare(self._groups, control, _sample, _is_close)

    def _found(self, groups: Sequence[TiedGroup]) -> list[int]:
        return [version_of(p) for g in groups for some in g.parameters.values() for p in some]


def compare_copies(groups: Sequence[TiedGroup], control: Control) -> None:
    """Compare the values of all copies.

    Raises:
        InputError: on all ranks: a tied parameter has different values.
    """
    _compare(groups, control, _digest, lambda a, b: bool(a == b))


def _compare(
    groups: Sequence[TiedGroup],
    control: Control,
    look: Callable[[torch.Tensor], Any],
    is_same: Callable[[Any, Any], bool],
) -> None:
    mine = [
        [(rank, look(p)) for rank, some in group.parameters.items() for p in some if not p.is_meta]
        for group in groups
    ]
    said = control.gather(mine)
    with control.alike():
        for place, group in enumerate(groups):
            copies = [copy for one in said for copy in one[place]]
            if any(not is_same(copies[0][1], other) for _, other in copies[1:]):
                ranks = sorted({rank for rank, _ in copies})
                raise InputError(
                    f"the copies of the tied parameter {group.name!r} on the ranks {ranks} "
                    "have different values: it was changed on some of them only or not alike, such "
                    "as by load_state_dict, another learning rate or weight decay; change all "
                    "copies alike"
                )


def _sample(parameter: torch.Tensor) -> list[float]:
    """Some elements, and how far they may be apart: the last bits may differ."""
    flat = local(parameter).detach().reshape(-1)
    some = flat[:: max(flat.numel() // _SAMPLE, 1)][:_SAMPLE]
    if some.is_complex():
        some = torch.view_as_real(some).reshape(-1)
    eps = torch.finfo(some.dtype).eps if some.is_floating_point() else 0.0
    return [4 * eps, *some.double().tolist()]


def _is_close(a: Sequence[float], b: Sequence[float]) -> bool:
    near = zip(a[1:], b[1:], strict=True)
    return all(math.isclose(x, y, rel_tol=a[0]) or (x != x and y != y) for x, y in near)


def _digest(parameter: torch.Tensor) -> str:
    flat = local(parameter).detach().cpu().contiguous()
    if not flat.nbytes:
        return ""
    memory = (ctypes.c_char * flat.nbytes).from_address(flat.data_ptr())
    return hashlib.sha256(memory).hexdigest()[:32]
