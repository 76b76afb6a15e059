"""Predict one step: how long it takes, and what each rank holds when it holds most.

In:  a compute-only program, `StageNumbers` per stage, bytes per edge, hardware.
Out: a `Prediction`.

The program is simulated with the numbers as costs. Memory is followed along the
timeline: what autograd keeps from a forward to its backward, what the input half leaves for
the weight half, what has arrived and is not used yet, and on top of that the peak inside
each action. It assumes `step(..., return_outputs=False)`, since kept outputs grow with the
batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from fxpipe.planner.cost.collectives import collective_time
from fxpipe.planner.cost.hardware import Hardware
from fxpipe.planner.cost.parallel import Layout
from fxpipe.planner.cost.stage_numbers import EdgeBytes, StageNumbers
from fxpipe.planner.order.orders import Objective
from fxpipe.program import (
    Action,
    Edge,
    Edges,
    Kind,
    Link,
    Placement,
    Program,
    Span,
    StageCost,
    StageCosts,
    ValueKind,
    simulate,
)
from fxpipe.program.memory import kept_at_ends

__all__ = ["Memory", "Prediction", "edges_of", "predict", "rank_memory", "stage_costs"]


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on one rank at its fullest moment, by what they are for.

    `activations` wait for a backward; `buffers` are tensors in transit and temporaries,
    and what sharding gathers. `system` is held by driver and communication, `reserve` lost
    to fragmentation.
    """

    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    buffers: float = 0.0
    system: float = 0.0
    reserve: float = 0.0

    @property
    def total(self) -> float:
        return math.fsum(getattr(self, item.name) for item in fields(self))


@dataclass(frozen=True)
class Prediction:
    """One step of a program: seconds, the idle share, memory per rank.

    `step_time` is the makespan, then what is left of reducing gradients, then the optimizer.
    """

    step_time: float
    makespan: float
    bubble: float
    memory: tuple[Memory, ...]

    @property
    def peak(self) -> float:
        return max(memory.total for memory in self.memory)


def edges_of(num_stages: int, edge_bytes: EdgeBytes) -> Edges:
    """The graph of stages; stages that exchange nothing keep their order all the same."""
    edges = {pair: back > 0 for pair, (_, back) in edge_bytes.items()}
    for source, target, _ in Edges.chain(num_stages).edges:
        edges.setdefault((source, target), False)
    return Edges.of(num_stages, [Edge(*pair, back) for pair, back in edges.items()])


def stage_costs(
    stages: Sequence[StageNumbers],
    edge_bytes: EdgeBytes,
    placement: Placement,
    hardware: Hardware,
    layout: Layout,
) -> StageCosts:
    """The numbers as costs for the simulator; pipeline ranks are `layout.num_ranks` apart."""
    width = layout.num_ranks
    ranks = range(placement.num_ranks)
    links: dict[tuple[int, int], Link] = {}
    for a in ranks:
        for b in ranks:
            link = hardware.link(a * width, b * width)
            if link != hardware.intra:
                links[a, b] = link
    return StageCosts(
        tuple(
            StageCost(
                forward=s.forward,
                backward_input=s.backward_input,
                backward_weight=s.backward_weight,
                residual=s.kept + s.kept_received,
                deferred=s.deferred,
            )
            for s in stages
        ),
        activations={pair: there for pair, (there, _) in edge_bytes.items()},
        gradients={pair: back for pair, (_, back) in edge_bytes.items()},
        link=hardware.intra,
        links=links,
        overlaps_transfers=hardware.overlaps_transfers,
        pair_saving=_pair_saving(stages, layout),
    )


def _pair_saving(stages: Sequence[StageNumbers], layout: Layout) -> float:
    """The share of a forward that a backward beside it hides: tokens on their way to experts."""
    forward = math.fsum(stage.forward for stage in stages)
    if layout.expert == 1 or not forward:
        return 0.0
    return min(math.fsum(stage.exposed for stage in stages) / forward, 1.0)


def predict(
    program: Program,
    stages: Sequence[StageNumbers],
    edge_bytes: EdgeBytes,
    hardware: Hardware,
    layout: Layout,
    objective: Objective = "step",
) -> Prediction:
    """Simulate a program and follow its memory.

    With the objective "period" `step_time` is the time from step to step, in which each rank
    begins the next step when its own is done.
    """
    edges = edges_of(len(stages), edge_bytes)
    costs = stage_costs(stages, edge_bytes, program.placement, hardware, layout)
    timeline = simulate(program, costs, edges)
    memory = rank_memory(
        program, timeline.spans, stages, edge_bytes, gradients_first=hardware.reserve > 0
    )
    memory = tuple(
        _with_system(memory[rank], program.placement.stages_of(rank), stages, edge_bytes, hardware,
                     layout, program.num_ranks)
        for rank in range(program.num_ranks)
    )  # fmt: skip
    spans = [end - (start if objective == "period" else 0.0) for start, end in timeline.extent]
    after = after_step(program.placement, stages, hardware, layout)
    step = max(span + rest for span, rest in zip(spans, after, strict=True))
    step *= 1 + hardware.jitter
    return Prediction(step, timeline.makespan, timeline.idle, memory)


def after_step(
    placement: Placement, stages: Sequence[StageNumbers], hardware: Hardware, layout: Layout
) -> list[float]:
    """For each rank, the time after its last backward: gradients, then the optimizer.

    Gradients are reduced beside the last microbatch's backward, and weights gathered beside
    the first forward of the next step; a tenth of it always shows.
    """
    rest = []
    group = layout.group("replicas")
    for rank in range(placement.num_ranks):
        own = [stages[stage] for stage in placement.stages_of(rank)]
        reduced = math.fsum(stage.reduced for stage in own)
        gathered = math.fsum(stage.gathered for stage in own)
        shared = 0.0
        if layout.sharding == 0:
            shared = collective_time("all_reduce", reduced, group, hardware)
        elif layout.sharding == 1:
            shared = collective_time("reduce_scatter", reduced, group, hardware)
        if layout.sharding in (1, 2):
            shared += collective_time("all_gather", gathered, group, hardware)
        if hardware.overlaps_transfers:
            beside = math.fsum(stage.backward_input + stage.backward_weight for stage in own)
            if layout.sharding:
                beside += math.fsum(stage.forward for stage in own)
            shared = max(shared - beside, 0.1 * shared)
        # The norm reads gradients, the optimizer reads them again and writes the rest.
        touched = math.fsum(2 * (s.weights + s.optimizer + s.gradients) for s in own)
        rest.append(shared + hardware.time("memory", "float32", 0, touched))
    return rest


def _with_system(
    memory: Memory,
    own: Sequence[int],
    stages: Sequence[StageNumbers],
    edge_bytes: EdgeBytes,
    hardware: Hardware,
    layout: Layout,
    num_ranks: int,
) -> Memory:
    """What a device holds besides what the program shows."""
    # A sender keeps a tensor until it has left, beside the next one.
    sends = [there for (source, _), (there, _) in edge_bytes.items() if source in own]
    sends += [back for (_, target), (_, back) in edge_bytes.items() if target in own]
    groups = (layout.tensor, layout.context, layout.expert, layout.data, num_ranks)
    channels = hardware.channels * sum(count > 1 for count in groups)
    held = replace(memory, buffers=memory.buffers + max(sends, default=0.0))
    reserve = hardware.reserve * held.total
    return replace(held, system=hardware.context + channels, reserve=reserve)


def rank_memory(
    program: Program,
    spans: Sequence[Span],
    stages: Sequence[StageNumbers],
    edge_bytes: EdgeBytes,
    *,
    copies: bool = True,
    gradients_first: bool = False,
) -> tuple[Memory, ...]:
    """What each rank holds at its fullest moment.

    Without `copies` ranks share one memory and hand tensors over by reference: what is
    received counts where it was made. With `gradients_first` gradients count from the start:
    the holes that activations leave are too small for them, and many libraries never free them.
    """
    timed = {
        part: span
        for span in spans
        if span.is_compute
        for part in span.action.parts or (span.action,)
    }
    changes: list[list[_Change]] = [[] for _ in program.ranks]
    _add_held(changes, timed, stages, copies=copies, gradients_first=gradients_first)
    _add_in_transit(changes, timed, program.placement, edge_bytes, copies=copies)
    peaks = _peaks(timed, stages, program.num_ranks)
    result = []
    for rank in range(program.num_ranks):
        own = [stages[stage] for stage in program.placement.stages_of(rank)]
        gradients, activations, buffers = _fullest(peaks[rank], changes[rank])
        result.append(
            Memory(
                math.fsum(stage.weights for stage in own),
                gradients,
                math.fsum(stage.optimizer for stage in own),
                activations,
                buffers,
            )
        )
    return tuple(result)


class _Change(NamedTuple):
    """What a rank holds more from a time on."""

    time: float
    gradients: float = 0.0
    activations: float = 0.0
    buffers: float = 0.0


def _add_held(
    changes: list[list[_Change]],
    timed: Mapping[Action, Span],
    stages: Sequence[StageNumbers],
    *,
    copies: bool,
    gradients_first: bool,
) -> None:
    """What forwards keep for their backwards, and the buffers of weight gradients."""
    has_backward = any(part.kind is not Kind.FORWARD for part in timed)

    def num_bytes(kind: ValueKind, index: int) -> float:
        stage = stages[index]
        if kind is ValueKind.DEFERRED:
            return stage.deferred
        return stage.kept + (stage.kept_received if copies else 0.0)

    kept = kept_at_ends(num_bytes, len(stages))
    first_gradient: dict[int, Span] = {}
    for action, span in timed.items():
        # Within the action its peak counts, so that all shows at its end.
        more = sum(kept(action)) if has_backward else 0.0
        if more:
            changes[span.rank].append(_Change(span.end, activations=more))
        if action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
            known = first_gradient.setdefault(action.stage, span)
            if span.start < known.start:
                first_gradient[action.stage] = span
    for index, span in first_gradient.items():
        since = 0.0 if gradients_first else span.end
        changes[span.rank].append(_Change(since, gradients=stages[index].gradients))


def _add_in_transit(
    changes: list[list[_Change]],
    timed: Mapping[Action, Span],
    placement: Placement,
    edge_bytes: EdgeBytes,
    *,
    copies: bool,
) -> None:
    """What has been made or has arrived, and waits for the action that reads it."""
    rank_of = placement.stage_to_rank
    # By reading stage: the stage that makes the value, and bytes.
    forwards: dict[int, list[tuple[int, float]]] = {}
    backwards: dict[int, list[tuple[int, float]]] = {}
    for (source, target), (there, back) in edge_bytes.items():
        # An activation is among what its maker keeps; only a copy counts here.
        if there and copies and rank_of[source] != rank_of[target]:
            forwards.setdefault(target, []).append((source, there))
        if back:
            backwards.setdefault(source, []).append((target, back))
    made: dict[tuple[bool, int, int | None], float] = {}
    for action, span in timed.items():
        if action.kind is not Kind.BACKWARD_WEIGHT:
            made[action.kind is not Kind.FORWARD, action.stage, action.microbatch] = span.end
    for action, span in timed.items():
        if action.kind is Kind.BACKWARD_WEIGHT:
            continue
        is_gradient = action.kind is not Kind.FORWARD
        for maker, size in (backwards if is_gradient else forwards).get(action.stage, ()):
            start = made.get((is_gradient, maker, action.microbatch), span.start)
            rank = span.rank if copies else rank_of[maker]
            changes[rank].append(_Change(start, buffers=size))
            changes[rank].append(_Change(span.end, buffers=-size))


def _peaks(
    timed: Mapping[Action, Span], stages: Sequence[StageNumbers], num_ranks: int
) -> list[list[tuple[float, float]]]:
    """For each rank when its actions start, and what they need beyond what is held then."""
    moments: list[list[tuple[float, float]]] = [[] for _ in range(num_ranks)]
    for action, span in timed.items():
        stage = stages[action.stage]
        if action.kind is Kind.FORWARD:
            peak = stage.forward_peak
        elif action.kind is Kind.BACKWARD_WEIGHT:
            peak = stage.weight_peak
        else:
            peak = stage.backward_peak
        moments[span.rank].append((span.start, peak))
    for found in moments:
        found.sort()
    return moments


def _fullest(
    moments: list[tuple[float, float]], changes: list[_Change]
) -> tuple[float, float, float]:
    """Gradients, activations and buffers when their sum, peaks included, is greatest."""
    changes.sort(key=lambda change: change.time)
    best, level, at = (0.0, 0.0, 0.0), [0.0, 0.0, 0.0], 0
    for start, peak in [*moments, (math.inf, 0.0)]:
        while at < len(changes) and changes[at].time <= start * (1 + 1e-12):
            change = changes[at]
            level[0] += change.gradients
            level[1] += change.activations
            level[2] += change.buffers
            at += 1
        if math.fsum(level) + peak > math.fsum(best):
            best = (level[0], level[1], level[2] + peak)
    return best
