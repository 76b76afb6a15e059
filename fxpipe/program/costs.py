"""Say how long actions take and how much memory values hold.

`StageCosts` is what the simulator asks and what profiles and plans produce;
`StageCosts.uniform` makes one in which one rank's share of a microbatch is the unit
of time and of memory.

Times and bytes are in whatever unit the caller uses, seconds or milliseconds or
"one forward"; nothing here mixes two of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

from fxpipe.errors import ScheduleError
from fxpipe.program.action import Kind, ValueKind
from fxpipe.program.program import Placement

__all__ = ["FREE", "Link", "StageCost", "StageCosts"]


@dataclass(frozen=True, slots=True)
class Link:
    """What it takes to move bytes from one rank to another."""

    latency: float = 0.0
    bytes_per_time: float = math.inf

    def __post_init__(self) -> None:
        if not self.latency >= 0 or not self.bytes_per_time > 0:
            raise ScheduleError(
                "a link needs a latency of at least 0 and a bandwidth above 0, "
                f"got latency {self.latency} and {self.bytes_per_time} bytes per unit of time"
            )

    def time(self, num_bytes: float) -> float:
        return self.latency + num_bytes / self.bytes_per_time


FREE = Link()


@dataclass(frozen=True, slots=True)
class StageCost:
    """What one microbatch costs on one stage: times first, then memory.

    `backward` None means the two halves together; `deferred` None means that the
    input half keeps the whole residual for the weight half.
    """

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0
    backward: float | None = None
    unshard: float = 0.0
    reduce_grad: float = 0.0
    offload: float = 0.0
    residual: float = 0.0
    deferred: float | None = None
    weight_grad: float = 0.0
    parameters: float = 0.0

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if value is not None and not value >= 0:
                raise ScheduleError(f"the cost {item.name} must be at least 0, got {value}")

    @property
    def whole_backward(self) -> float:
        if self.backward is None:
            return self.backward_input + self.backward_weight
        return self.backward

    @property
    def kept_for_weights(self) -> float:
        return self.residual if self.deferred is None else self.deferred


@dataclass(frozen=True)
class StageCosts:
    """Costs from tables: one `StageCost` per stage, one `Link` per pair of ranks.

    `activations` and `gradients` hold bytes by edge `(source, target)`; both follow
    the edge, so `gradients[0, 1]` is what stage 1 returns to stage 0. An edge that is
    not listed moves `activation` bytes each way. A pair of ranks that is not in
    `links` uses `link`. `overlaps_transfers` says whether ranks compute while they transfer,
    unshard and reduce; if not, a transfer occupies the ranks at both of its ends.
    `pair_saving` is the share of the shorter part of an OVERLAP
    that hides behind the longer one: 0 runs them in turn, 1 hides it all.
    """

    stages: tuple[StageCost, ...]
    activation: float = 0.0
    activations: Mapping[tuple[int, int], float] = field(default_factory=dict)
    gradients: Mapping[tuple[int, int], float] = field(default_factory=dict)
    link: Link = FREE
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict)
    overlaps_transfers: bool = True
    pair_saving: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.pair_saving <= 1:
            raise ScheduleError(f"pair_saving is a share from 0 to 1, got {self.pair_saving}")

    @staticmethod
    def uniform(
        placement: Placement,
        *,
        forward: float = 1.0,
        backward_input: float = 1.0,
        backward_weight: float = 1.0,
        residual: float = 1.0,
        activation: float = 0.0,
        link: Link = FREE,
        overlaps_transfers: bool = True,
        pair_saving: float = 0.0,
    ) -> StageCosts:
        """Costs for one rank's share of the model, split evenly over its stages.

        The defaults are the units of the literature: one microbatch through one
        rank's layers takes 1 for F, I and W each and holds 1 of memory from its
        forward to its (weight) backward; transfers are free.
        """
        share = placement.num_ranks / placement.num_stages
        stage = StageCost(
            forward=forward * share,
            backward_input=backward_input * share,
            backward_weight=backward_weight * share,
            residual=residual * share,
        )
        return StageCosts(
            (stage,) * placement.num_stages,
            activation=activation,
            link=link,
            overlaps_transfers=overlaps_transfers,
            pair_saving=pair_saving,
        )

    def compute(self, kind: Kind, stage: int) -> float:
        """The time of a compute action."""
        cost = self._of(stage)
        if kind is Kind.FORWARD:
            return cost.forward
        if kind is Kind.BACKWARD:
            return cost.whole_backward
        if kind is Kind.BACKWARD_INPUT:
            return cost.backward_input
        assert kind is Kind.BACKWARD_WEIGHT, kind
        return cost.backward_weight

    def pair(self, parts: Sequence[tuple[Kind, int]]) -> float:
        """The time of an OVERLAP of the given `(kind, stage)` parts."""
        times = [self.compute(kind, stage) for kind, stage in parts]
        return sum(times) - self.pair_saving * (sum(times) - max(times))

    def transfer(self, source_rank: int, target_rank: int, num_bytes: float) -> float:
        """The time from both ranks being ready to the value having arrived."""
        return self.links.get((source_rank, target_rank), self.link).time(num_bytes)

    def ask(self, source_rank: int, target_rank: int) -> float:
        """The time from the target being ready to the source knowing it."""
        return self.links.get((target_rank, source_rank), self.link).latency

    def unshard(self, stage: int) -> float:
        return self._of(stage).unshard

    def reduce_grad(self, stage: int) -> float:
        return self._of(stage).reduce_grad

    def offload(self, stage: int) -> float:
        """The time to move the residual of a microbatch to host memory, or back."""
        return self._of(stage).offload

    def value_bytes(self, kind: ValueKind, stage: int, peer: int) -> float:
        """The memory of a value; a weight gradient is one buffer per stage."""
        if kind is ValueKind.ACTIVATION:
            return self.activations.get((stage, peer), self.activation)
        if kind is ValueKind.GRADIENT:
            return self.gradients.get((peer, stage), self.activation)
        cost = self._of(stage)
        if kind is ValueKind.RESIDUAL:
            return cost.residual
        if kind is ValueKind.DEFERRED:
            return cost.kept_for_weights
        return 0.0 if kind is ValueKind.OFFLOADED else cost.weight_grad

    def unsharded_bytes(self, stage: int) -> float:
        """The memory that UNSHARD takes and RESHARD gives back."""
        return self._of(stage).parameters

    def _of(self, stage: int) -> StageCost:
        if stage >= len(self.stages):
            raise ScheduleError(
                f"the costs are for {len(self.stages)} stages, the program has stage {stage}"
            )
        return self.stages[stage]
