"""What the gradients of a batch are divided by where its loss is a sum with a weight.

Each microbatch gives a sum and a weight. Sums are differentiated before all weights are known. So
the gradients are divided at the end of the step, once all ranks have said their weights; or the
step is made again with the weight of the batch, where something must see divided gradients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from fxpipe.runtime.agree.module_state import ModuleState
from fxpipe.runtime.control.control import Control, bits_of, number_of
from fxpipe.runtime.control.sums import sum_over_ranks
from fxpipe.runtime.parameters.replicas import Replicas
from fxpipe.runtime.parameters.tied import Scale
from fxpipe.runtime.stage.step_data import LossTerm
from fxpipe.runtime.wire.transport import Transport
from fxpipe.torch_inside import backward_hooks, backward_pre_hooks, post_accumulate_hooks

__all__ = ["BatchWeight", "BatchWeightError", "have_hooks"]


class BatchWeightError(Exception):
    """All ranks have learnt the weight of the batch, and must make the step again with it.

    Auxiliary losses must not be divided, and users' hooks must see divided gradients: so the
    weight must be known before.
    """

    def __init__(self, weight: float) -> None:
        super().__init__(f"the batch has the weight {weight:g}")
        self.weight = weight


class BatchWeight:
    """The weight of one step's batch: `assumed` at first, then what all ranks have said."""

    def __init__(
        self,
        assumed: float,
        control: Control,
        replicas: Replicas,
        transports: Mapping[int, Transport],
        device: torch.device,
        *,
        has_replicas: bool,
    ) -> None:
        self._assumed, self._control, self._replicas = assumed, control, replicas
        self._transports, self._device, self._has_replicas = transports, device, has_replicas
        self._mine: float | torch.Tensor | None = None  # a tensor on an accelerator stays there

    def add_up(self, terms: Sequence[LossTerm]) -> torch.Tensor | None:
        """The loss of the batch as this rank knows it; None if its terms have no weights."""
        weights = [term.weight for term in terms if term.weight is not None]
        if not weights:
            return None
        weight = torch.stack(weights).sum()
        self._mine = float(weight) if weight.device.type == "cpu" else weight
        return torch.as_tensor(sum(term.total.detach() for term in terms) / weight)

    def said(self) -> tuple[int, int]:
        """What the other ranks are told: 1 for a weight in words, 2 for one on a device."""
        if isinstance(self._mine, torch.Tensor):
            return 2, 0
        return (0, 0) if self._mine is None else (1, bits_of(self._mine))

    def scale(self, said: Sequence[tuple[int, int]], *, must_be_known: bool) -> Scale:
        """The factor of all gradients, from what all ranks said. All ranks call this.

        Raises:
            BatchWeightError: `must_be_known`, on any rank or replica, and was not.
        """
        if any(kind == 2 for kind, _ in said):
            on_device = self._replicas.mean(self._sum_on_device())
            if self._assumed == 1.0 and not must_be_known:
                return torch.where(on_device != 0, 1.0 / on_device, torch.zeros_like(on_device))
            total = float(on_device) or math.inf
        else:
            total = self._mean(sum(number_of(bits) for _, bits in said)) or math.inf
        if total == self._assumed or math.isnan(self._assumed):
            return None
        if must_be_known:
            self._control.raises_everywhere = True
            raise BatchWeightError(total)
        return self._assumed / total

    def any_replica(self, needs: bool) -> bool:
        """Whether a rank of any replica needs it: all run equally often."""
        if not self._has_replicas:
            return needs
        needs = self._replicas.any(needs)
        return any(v[0] for v in self._control.exchange([needs]))

    def _mean(self, total: float) -> float:
        """The weight of the batch, on average over the replicas: the same on all ranks of all."""
        if not self._has_replicas:
            return total
        mean = self._replicas.mean(torch.tensor(total, dtype=torch.float64, device=self._device))
        mine = bits_of(float(mean)) if self._replicas.has_groups else 0
        found = (v[0] for v in self._control.exchange([mine]))
        return number_of(next(filter(None, found), 0))

    def _sum_on_device(self) -> torch.Tensor:
        mine = torch.zeros((), dtype=torch.float64, device=self._device)
        if isinstance(self._mine, torch.Tensor):
            mine = mine + self._mine.to(self._device)
        return sum_over_ranks(mine, self._control, self._transports)


def have_hooks(state: ModuleState) -> bool:
    """Whether users' hooks see gradients, which must be divided by then."""
    return any(backward_hooks(p) or post_accumulate_hooks(p) for p in state.parameters) or any(
        backward_hooks(module) or backward_pre_hooks(module) for _, module in state.modules
    )
