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
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

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
    Timeline,
    Value,
    ValueKind,
    lower,
    simulate,
)
from fxpipe.program.action import COMPUTE_KINDS
from fxpipe.program.memory import lifetimes
from fxpipe.program.play.engine import Play, cost_times
from fxpipe.program.play.numbering import Numbering

__all__ = ["Memory", "Prediction", "edges_of", "predict", "rank_memory", "stage_costs"]


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on one rank at its fullest moment, by what they are for.

    `activations` wait for a backward, or have arrived and wait for their use; `buffers` are
    what the action at work needs on top (temporaries, what sharding gathers) and what a send
    holds. `system` is held by driver and communication, `reserve` lost to fragmentation: a
    share of everything, and holes beside gradients that are made anew in each step.
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
    ranks, host = range(placement.num_ranks), hardware.host
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
                offload=0.0 if host is None else host.time(s.kept + s.kept_received),
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
    *,
    offload: int = 0,
) -> Prediction:
    """Simulate a program and follow its memory.

    With the objective "period" `step_time` is the time from step to step, in which each rank
    begins the next step when its own is done.
    """
    edges = edges_of(len(stages), edge_bytes)
    costs = stage_costs(stages, edge_bytes, program.placement, hardware, layout)
    spans: Sequence[Span]
    if offload:
        spans = simulate(lower(program, edges, offload=offload), costs, edges).spans
    else:
        spans = _spans(program, costs, edges)
    memory = rank_memory(program, spans, stages, edge_bytes, gradients_first=hardware.reserve > 0)
    memory = tuple(
        _with_system(memory[rank], program.placement.stages_of(rank), stages, edge_bytes, hardware,
                     layout, program.num_ranks)
        for rank in range(program.num_ranks)
    )  # fmt: skip
    computed = tuple(span for span in spans if span.action.kind.is_compute or span.action.parts)
    timeline = Timeline(program.num_ranks, computed, (), ())
    own = [end - (start if objective == "period" else 0.0) for start, end in timeline.extent]
    after = after_step(program.placement, stages, hardware, layout)
    step = max(span + rest for span, rest in zip(own, after, strict=True))
    step *= 1 + hardware.jitter
    return Prediction(step, timeline.makespan, timeline.idle, memory)


def _spans(program: Program, costs: StageCosts, edges: Edges) -> Sequence[Span]:
    """When everything computes, as `simulate` would say; the loop alone is six times as quick."""
    if not costs.overlaps_transfers:
        return simulate(program, costs, edges).spans
    times = cost_times(costs, program.num_stages)
    play = Play(program.ranks, Numbering.of(program, edges), times)
    play.run()
    return [
        Span(rank, program.ranks[rank][at], start, end) for end, rank, at, start, _ in play.done
    ]


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
    staging = max(stages[stage].staging for stage in own)
    held = replace(memory, buffers=memory.buffers + max(sends, default=0.0) + staging)
    remade = math.fsum(stages[stage].remade for stage in own)
    reserve = hardware.reserve * held.total + hardware.holes * remade
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
    """What each rank holds at its fullest moment: when an action starts, and its peak on top.

    Without `copies` ranks share one memory and hand tensors over by reference: what is
    received counts where it was made. With `gradients_first` gradients count from the start:
    the holes that activations leave are too small for them, and many libraries never free them.
    """
    effects = _effects(program, stages, edge_bytes, copies=copies)
    changes: list[list[tuple[float, float, float]]] = [[] for _ in program.ranks]
    starts: list[list[tuple[float, float]]] = [[] for _ in program.ranks]
    first_gradient: dict[int, float] = {}
    for rank, action, start, end in spans:
        for part in action.each:
            stage = stages[part.stage]
            if part.kind.is_offload:
                away = part.kind is Kind.OFFLOAD
                size = stage.kept + (stage.kept_received if copies else 0.0)
                changes[rank].append((end, 0.0, -size) if away else (start, 0.0, size))
            if not part.kind.is_compute:
                continue
            starts[rank].append((start, stage.peak(part.kind)))
            # Within the action its peak counts, so that all shows at its end.
            for where, size in effects[part.kind][part.stage]:
                changes[where].append((end, 0.0, size))
            if part.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
                known = first_gradient.get(part.stage, end)
                first_gradient[part.stage] = min(known, end)
    for index, end in first_gradient.items():
        where = program.placement.stage_to_rank[index]
        since = 0.0 if gradients_first else end
        changes[where].append((since, stages[index].gradients, 0.0))
    result = []
    for rank in range(program.num_ranks):
        own = [stages[stage] for stage in program.placement.stages_of(rank)]
        gradients, activations, buffers = _fullest(sorted(starts[rank]), sorted(changes[rank]))
        weights = math.fsum(stage.weights for stage in own)
        optimizer = math.fsum(stage.optimizer for stage in own)
        result.append(Memory(weights, gradients, optimizer, activations, buffers))
    return tuple(result)


def _effects(
    program: Program, stages: Sequence[StageNumbers], edge_bytes: EdgeBytes, *, copies: bool
) -> list[list[list[tuple[int, float]]]]:
    """For each kind and stage, what its end changes on which rank, by the rule of lifetimes.

    What goes to another stage waits where it is read; an activation that does not change its
    memory is among what its maker keeps.
    """
    rank_of, edges = program.placement.stage_to_rank, edges_of(len(stages), edge_bytes)

    def held(value: Value) -> tuple[int, float]:
        stage = stages[value.stage]
        where = rank_of[value.peer if copies else value.stage]
        if value.kind is ValueKind.RESIDUAL:
            received = stage.kept_received if copies else 0.0
            return where, (stage.kept + received if program.has_backward else 0.0)
        if value.kind is ValueKind.DEFERRED:
            return where, stage.deferred
        if value.kind is ValueKind.GRADIENT:
            return where, edge_bytes.get((value.peer, value.stage), (0.0, 0.0))[1]
        is_copy = where != rank_of[value.stage]
        return where, edge_bytes.get((value.stage, value.peer), (0.0, 0.0))[0] * is_copy

    def change(action: Action) -> list[tuple[int, float]]:
        born, late, freed, _ = lifetimes(action, edges)
        found = [held(value) for value in (*born, *late)]
        found += [(where, -size) for where, size in map(held, freed)]
        return [(where, size) for where, size in found if size]

    return [
        [change(Action(kind, stage, 0)) for stage in range(len(stages))] for kind in COMPUTE_KINDS
    ]


def _fullest(
    starts: Sequence[tuple[float, float]], changes: Sequence[tuple[float, float, float]]
) -> tuple[float, float, float]:
    """Gradients, what is held besides, and the peak on top, when their sum is greatest."""
    best, gradients, held, at = (0.0, 0.0, 0.0), 0.0, 0.0, 0
    for start, peak in [*starts, (math.inf, 0.0)]:
        while at < len(changes) and changes[at][0] <= start * (1 + 1e-12):
            gradients, held, at = gradients + changes[at][1], held + changes[at][2], at + 1
        if gradients + held + peak > sum(best):
            best = (gradients, held, peak)
    return best
