"""What there is to divide among stages, as plain numbers.

`Work` is a list of items in an order in which they can run, the values that flow
between them, and what several of them share. `Limits` says where items may go and
how much memory a rank has. Nothing here knows about torch or modules: the planner
fills it from a traced graph, and a user can fill it by hand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from fxpipe.errors import PlanError
from fxpipe.program import Link, Placement, Program
from fxpipe.program.costs import FREE
from fxpipe.program.memory import kept_at_ends

__all__ = ["Flow", "InFlight", "Item", "Limits", "Shared", "Work", "in_flight"]

InFlight = tuple[tuple[tuple[int, ...], ...], ...]
"""For each rank, moments; in each, how many microbatches of its stages are in flight."""


@dataclass(frozen=True, slots=True)
class Item:
    """One thing that runs on one stage: its time per microbatch, then bytes.

    `state` is held all the time (weights, gradients, optimizer); `residual` is held for
    each microbatch between its forward and its backward.
    """

    name: str = ""
    time: float = 0.0
    state: float = 0.0
    residual: float = 0.0


@dataclass(frozen=True, slots=True)
class Flow:
    """A value that one item makes and later items read; sent once to each stage that reads.

    `gradient_bytes` travel back along each transfer.
    """

    source: int
    targets: tuple[int, ...]
    num_bytes: float = 0.0
    gradient_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class Shared:
    """What several items use and each of their stages holds once.

    A tied weight is shared `state`; an activation that several items keep for their
    backward is shared `residual`.
    """

    items: tuple[int, ...]
    state: float = 0.0
    residual: float = 0.0


@dataclass(frozen=True)
class Work:
    """All items in the order in which the model runs them, and what connects them."""

    items: tuple[Item, ...]
    flows: tuple[Flow, ...] = ()
    shared: tuple[Shared, ...] = ()

    def __post_init__(self) -> None:
        count = len(self.items)
        faults = []
        for flow in self.flows:
            inside = all(0 <= i < count for i in (flow.source, *flow.targets))
            if not inside or any(target <= flow.source for target in flow.targets):
                faults.append(f"flow {flow.source} -> {flow.targets}")
        if faults:
            raise PlanError(
                f"a flow runs from an item to later ones among the {count} items, "
                f"but got {', '.join(faults)}"
            )
        lost = [s.items for s in self.shared if not all(0 <= i < count for i in s.items)]
        if lost:
            raise PlanError(f"items go from 0 to {count - 1}, but got shared items {lost}")

    @staticmethod
    def chain(times: Sequence[float], *, boundary: float = 0.0) -> Work:
        """Items in a row, each of which hands `boundary` bytes to the next and back."""
        return Work(
            tuple(Item(str(i), time) for i, time in enumerate(times)),
            tuple(Flow(i, (i + 1,), boundary, boundary) for i in range(len(times) - 1)),
        )

    def name(self, item: int) -> str:
        return self.items[item].name or f"item {item}"


@dataclass(frozen=True)
class Limits:
    """Where items may go, and what a rank can hold.

    `pins[item] = stage`; `together` lists items that must share a stage. `memory[rank]` is
    what a rank may hold; `in_flight[rank]` lists moments of the schedule: in each, how many
    microbatches of each of the rank's stages are between forward and backward (see
    `in_flight`). Without it one microbatch of each stage is.
    """

    pins: Mapping[int, int] = field(default_factory=dict)
    together: tuple[tuple[int, ...], ...] = ()
    memory: tuple[float, ...] | None = None
    in_flight: InFlight | None = None
    link: Link = FREE
    links: Mapping[tuple[int, int], Link] = field(default_factory=lambda: MappingProxyType({}))

    def transfer(self, flow: Flow, source_rank: int, target_rank: int) -> float:
        """The time a flow takes between two ranks, there and back; none on one rank."""
        if source_rank == target_rank:
            return 0.0
        there = self.links.get((source_rank, target_rank), self.link).time(flow.num_bytes)
        if not flow.gradient_bytes:
            return there
        back = self.links.get((target_rank, source_rank), self.link)
        return there + back.time(flow.gradient_bytes)

    def check(self, work: Work, placement: Placement) -> None:
        """Refuse limits that do not fit the work or the placement.

        Raises:
            PlanError: lists every misfit.
        """
        count, stages = len(work.items), placement.num_stages
        faults = [f"item {i} is pinned, but there are {count}" for i in self.pins if i >= count]
        faults += [
            f"{work.name(i)} is pinned to stage {stage}, but there are {stages} stages"
            for i, stage in self.pins.items()
            if i < count and not 0 <= stage < stages
        ]
        for group in self.together:
            wanted = sorted({self.pins[i] for i in group if i in self.pins})
            if len(wanted) > 1:
                names = ", ".join(work.name(i) for i in group)
                faults.append(f"{names} stay together but are pinned to stages {wanted}")
        for name, table in (("memory", self.memory), ("in_flight", self.in_flight)):
            if table is not None and len(table) != placement.num_ranks:
                faults.append(f"{name} has {len(table)} entries for {placement.num_ranks} ranks")
        for rank, moments in enumerate(self.in_flight or ()):
            if rank < placement.num_ranks and any(
                len(moment) != len(placement.stages_of(rank)) for moment in moments
            ):
                faults.append(f"in_flight of rank {rank} does not list one number per stage")
        if faults:
            raise PlanError("these limits do not fit: " + "; ".join(faults))


def in_flight(program: Program) -> InFlight:
    """For each rank, the moments in which it holds most, as counts per stage of the rank.

    A stage holds a microbatch from its forward to its (weight) backward. Moments in which
    another one holds at least as much of every stage are left out.
    """
    kept = kept_at_ends(lambda kind, stage: 1.0, program.num_stages)
    result = []
    for rank, actions in enumerate(program.ranks):
        stages = program.placement.stages_of(rank)
        slot = {stage: i for i, stage in enumerate(stages)}
        held = [0] * len(stages)
        moments: set[tuple[int, ...]] = set()
        for part in (part for action in actions for part in action.each):
            at_start, at_end = kept(part)
            held[slot[part.stage]] += round(at_start)
            if at_start:
                moments.add(tuple(held))
            held[slot[part.stage]] += round(at_end)
        result.append(tuple(sorted(_greatest(moments or {tuple(held)}))))
    return tuple(result)


def _greatest(moments: set[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The moments that no other one covers."""
    kept: list[tuple[int, ...]] = []
    for moment in sorted(moments, key=sum, reverse=True):
        if not any(all(a <= b for a, b in zip(moment, other, strict=True)) for other in kept):
            kept.append(moment)
    return kept
