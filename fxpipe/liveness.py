"""Give activations slots of memory that are used again once their backward is over.

In:  a schedule and one of its ranks.
Out: for each stage and microbatch a slot and the actions between which it is taken.

An activation lives from its forward to the action that ends it in the table of values: the whole
backward, or its weight half. These are the lives of residuals that the simulator's memory curves
add up, so the number of slots is the greatest number of them at once.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from fxpipe.errors import ScheduleError
from fxpipe.program.action import Action, Edges, ValueKind
from fxpipe.program.formats.torch_actions import computes_of
from fxpipe.program.memory import lifetimes

__all__ = ["PipelineActivationLiveness", "analyze_pipeline_activation_liveness"]

Granularity = Literal["microbatch", "stage_microbatch"]
Key = tuple[int, int]
T = TypeVar("T")


@dataclass(frozen=True)
class PipelineActivationLiveness:
    """Slots for the activations of a rank, by `(stage, microbatch)`.

    Positions are those of the rank's order and both ends belong to a life, so that two lives
    that meet in one pair of actions have two slots.
    """

    pp_rank: int
    granularity: Granularity
    stage_indices: tuple[int, ...]
    num_microbatches: int
    slot_by_stage_and_microbatch: Mapping[Key, int]
    num_slots: int
    _lives: Mapping[Key, tuple[int, int]] = field(repr=False)

    __hash__ = None  # type: ignore[assignment]

    def slot_for(self, stage_index: int, microbatch_index: int) -> int:
        """The slot of an activation.

        Raises:
            ScheduleError: a ValueError; the stage or the microbatch is not among them.
        """
        return _found(self.slot_by_stage_and_microbatch, stage_index, microbatch_index, "slot")

    def get_activation_lifetime(self, stage_index: int, microbatch_index: int) -> tuple[int, int]:
        """The positions of the action that makes an activation and of the one that ends it.

        Raises:
            ScheduleError: a ValueError; the stage or the microbatch is not among them.
        """
        return _found(self._lives, stage_index, microbatch_index, "lifetime")


def analyze_pipeline_activation_liveness(
    schedule: Any, *, pp_rank: int, stage_indices: Sequence[int], granularity: Granularity
) -> PipelineActivationLiveness:
    """Find slots for the activations of some stages of a rank.

    With the granularity "microbatch" all stages of a microbatch share a slot, from the first
    forward to the last backward.

    Raises:
        ScheduleError: a ValueError; an activation has not one forward and one end, in this order.
    """
    stages, count = tuple(stage_indices), schedule._n_microbatches
    if granularity not in ("microbatch", "stage_microbatch"):
        raise ScheduleError(
            f"Unsupported granularity {granularity!r}: microbatch, stage_microbatch"
        )
    if not stages or len(set(stages)) != len(stages):
        raise ScheduleError(f"stage_indices must be unique and must not be empty, got {stages}")
    is_own = getattr(schedule, "_order", None) is not None
    order = schedule.pipeline_order if is_own else schedule.pipeline_order_with_comms
    if pp_rank not in order:
        raise ScheduleError(f"rank {pp_rank} is not present, the ranks are {sorted(order)}")
    lives = _lives(order[pp_rank], stages, count)
    if granularity == "microbatch":
        lives = {
            (stage, m): (min(lives[s, m][0] for s in stages), max(lives[s, m][1] for s in stages))
            for stage in stages
            for m in range(count)
        }
    slots, num_slots = _slots(lives, shared=granularity == "microbatch")
    given = (MappingProxyType(slots), num_slots, MappingProxyType(lives))
    return PipelineActivationLiveness(pp_rank, granularity, stages, count, *given)


def _lives(row: Sequence[Any], stages: Sequence[int], count: int) -> dict[Key, Any]:
    """When each activation is made and when it ends."""
    made: dict[Key, int] = {}
    halves: dict[Key, int] = {}
    ended: dict[Key, int] = {}
    deferred: set[Key] = set()
    alone = Edges(max(stages) + 1, ())
    for position, part in _parts(row):
        if part.stage not in stages:
            continue
        key = _key(part, count)
        born, late, freed, _ = lifetimes(part, alone)
        if any(value.kind is ValueKind.RESIDUAL for value in born):
            _once(made, key, position, "forwards")
        elif late:
            _once(halves, key, position, "input backwards")
        else:
            _once(ended, key, position, "release actions")
            deferred.update(key for value in freed if value.kind is ValueKind.DEFERRED)
    wanted = {(stage, m) for stage in stages for m in range(count)}
    for name, found in (("Forward actions", made), ("Backward release actions", ended)):
        if found.keys() != wanted:
            raise ScheduleError(f"{name} are missing for {sorted(wanted - found.keys())}")
    if deferred - halves.keys():
        raise ScheduleError(
            f"weight halves without input backward: {sorted(deferred - set(halves))}"
        )
    early = [key for key in sorted(wanted) if ended[key] < made[key]]
    if early:
        raise ScheduleError(f"the activation of {early[0]} ends before its forward")
    return {key: (made[key], ended[key]) for key in sorted(wanted)}


def _parts(row: Sequence[Any]) -> Iterator[tuple[int, Action]]:
    for position, given in enumerate(row):
        for action in computes_of([given]):
            yield from ((position, part) for part in action.each)


def _key(part: Action, count: int) -> Key:
    assert part.microbatch is not None, "an action that computes has a microbatch"
    if part.microbatch >= count:
        raise ScheduleError(f"{part} has a microbatch outside 0 to {count - 1}")
    return part.stage, part.microbatch


def _once(places: dict[Key, int], key: Key, position: int, what: str) -> None:
    if key in places:
        raise ScheduleError(f"stage {key[0]}, microbatch {key[1]} has multiple {what}")
    places[key] = position


def _slots(lives: Mapping[Key, tuple[int, int]], *, shared: bool) -> tuple[dict[Key, int], int]:
    """The lowest free slot for each life, in the order in which lives begin."""
    busy: list[tuple[int, int]] = []
    free: list[int] = []
    found: dict[Any, int] = {}
    count = 0
    names = {key: key[1] if shared else key for key in lives}
    for key, (start, end) in sorted(lives.items(), key=lambda item: (item[1], item[0])):
        if names[key] in found:
            continue
        while busy and busy[0][0] < start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if not free:
            free, count = [count], count + 1
        found[names[key]] = slot = heapq.heappop(free)
        heapq.heappush(busy, (end, slot))
    return {key: found[name] for key, name in names.items()}, count


def _found(places: Mapping[Key, T], stage: int, microbatch: int, what: str) -> T:
    if (stage, microbatch) not in places:
        raise ScheduleError(
            f"No activation {what} exists for stage {stage}, microbatch {microbatch}"
        )
    return places[stage, microbatch]
