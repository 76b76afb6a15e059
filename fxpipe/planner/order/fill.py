"""Place weight gradients where a rank would otherwise wait.

In:  for each rank the order of its forwards and input gradients, what each action keeps in
     memory, and how much a rank may keep. A pair of a forward and a whole backward
     (OVERLAP) counts as both.
Out: the same order with a weight gradient put in for every input gradient.

Each rank follows its own order; it takes the oldest waiting weight gradient instead when
the next action's input is not there yet, or when the next action does not fit into memory.
So weight gradients fill holes, and no rank keeps more than its limit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from fxpipe.program.action import Action, Kind
from fxpipe.program.play.engine import Dispatch, Times
from fxpipe.program.play.numbering import Numbering

__all__ = ["FillWeights"]

_TOLERANCE = 1e-9


class FillWeights(Dispatch):
    """Ranks that follow an order and fill their waiting with weight gradients.

    `kept(action)` is what an action adds to the memory of its rank when it starts and when
    it ends. A rank fills a wait that lasts at least `patience[rank]` times as long as the
    weight gradient. A rank that is over its limit and has nothing to free is stuck.
    """

    def __init__(
        self,
        orders: Sequence[Sequence[Action]],
        numbering: Numbering,
        times: Times,
        *,
        kept: Callable[[Action], tuple[float, float]],
        limits: Sequence[float],
        patience: Sequence[float],
    ) -> None:
        super().__init__(len(orders), numbering, times)
        self._patience = patience
        # What is to come on each rank, with what it takes at its start and keeps after its end.
        self._main = [
            deque((a, t, t + g) for a in order for t, g in (kept(a),)) for order in orders
        ]
        self._weights: list[deque[tuple[Action, float]]] = [deque() for _ in orders]
        self._kept = kept
        self._held = [0.0] * len(orders)
        self._limits = [limit * (1 + _TOLERANCE) for limit in limits]

    @property
    def is_complete(self) -> bool:
        return not any(self._weights) and not any(self._main)

    def choose(self, rank: int, now: float) -> Action | None:
        main, weights = self._main[rank], self._weights[rank]
        if main:
            action, takes, keeps = main[0]
            if self._held[rank] + takes <= self._limits[rank]:
                arrival, missing = self.arrival(action)
                if missing >= 0:
                    if not weights:
                        self.wait(rank, missing)
                elif arrival <= now or not weights or self._is_short(rank, arrival - now):
                    main.popleft()
                    self._held[rank] += keeps
                    if action.kind is not Kind.FORWARD:
                        self._put_off_weights(rank, action)
                    return action
        if not weights:
            return None
        action, keeps = weights.popleft()
        self._held[rank] += keeps
        return action

    def _is_short(self, rank: int, wait: float) -> bool:
        """Whether a wait is too short to fill it with the next weight gradient."""
        weight, _ = self._weights[rank][0]
        patience = self._patience[rank] * self.times.compute[weight.kind][weight.stage]
        return wait < patience - _TOLERANCE

    def _put_off_weights(self, rank: int, action: Action) -> None:
        for kind, stage, microbatch, _, _ in action.parts or (action,):
            if kind is Kind.BACKWARD_INPUT:
                weight = Action(Kind.BACKWARD_WEIGHT, stage, microbatch)
                self._weights[rank].append((weight, sum(self._kept(weight))))
