"""Notice that a tied parameter was changed on one rank only.

Optimizers change all copies alike: the versions of the copies advance by the same number between
two calls. Where they do not, the ranks compare the values.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence

import torch

from fxpipe.errors import InputError
from fxpipe.runtime.control.control import Control
from fxpipe.runtime.parameters.tied import TiedGroup, local
from fxpipe.torch_inside import version_of

__all__ = ["TiedCopies"]

_NONE, _SEVERAL = -1, -2


class TiedCopies:
    """The copies of tied parameters that this process holds, as the latest call left them."""

    def __init__(self) -> None:
        self._groups: Sequence[TiedGroup] = ()
        self._versions: list[int] = []
        self._epoch = 0

    def note(self, groups: Sequence[TiedGroup], epoch: int) -> None:
        """Remember the copies; `epoch` counts how often modules and parameters were replaced."""
        self._groups, self._versions, self._epoch = groups, self._found(groups), epoch

    def advance(self, epoch: int) -> int:
        """By how much all copies have advanced; other numbers for none, and for unequal ones."""
        if epoch != self._epoch:
            return _NONE  # a new plan gives all copies the owner's values
        pairs = zip(self._found(self._groups), self._versions, strict=True)
        found = {now - before for now, before in pairs}
        return _NONE if not found else _SEVERAL if len(found) > 1 else found.pop()

    def check(self, advances: Sequence[int], control: Control) -> None:
        """Compare the values of all copies if they have not advanced alike.

        Raises:
            InputError: on all ranks: a tied parameter has different values.
        """
        known = set(advances) - {_NONE}
        if len(known) < 2 and _SEVERAL not in known:
            return
        mine = [
            [(rank, _digest(p)) for rank, some in group.parameters.items() for p in some]
            for group in self._groups
        ]
        said = control.gather(mine)
        with control.alike():
            for place, group in enumerate(self._groups):
                copies = [copy for one in said for copy in one[place]]
                if len({digest for _, digest in copies}) > 1:
                    ranks = sorted({rank for rank, _ in copies})
                    raise InputError(
                        f"the copies of the tied parameter {group.name!r} on the ranks {ranks} "
                        "have different values: it was changed on some of them only, such as by "
                        "load_state_dict; change all copies alike"
                    )

    def _found(self, groups: Sequence[TiedGroup]) -> list[int]:
        return [version_of(p) for g in groups for some in g.parameters.values() for p in some]


def _digest(parameter: torch.Tensor) -> str:
    flat = local(parameter).detach().cpu().contiguous()
    if not flat.nbytes:
        return ""
    memory = (ctypes.c_char * flat.nbytes).from_address(flat.data_ptr())
    return hashlib.sha256(memory).hexdigest()[:32]
