"""What was sent is let go of as soon as it has been read, and no rank keeps its outputs."""

import random
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fxpipe import PipelineStage, get_schedule_class
from fxpipe.program import (
    Action,
    Edges,
    Link,
    Program,
    StageCosts,
    Value,
    lower,
    reads,
    simulate,
    writes,
)
from fxpipe.program.costs import StageCost
from fxpipe.program.generators import SCHEDULES
from fxpipe.runtime.parameters.fsdp import fsdp_roots
from fxpipe.runtime.stage.executor import _proofs
from fxpipe.torch_inside import shard_groups
from tests.backends import nccl_like
from tests.distributed.bodies import by_group_alone, layout, mse, rand, stages_of
from tests.distributed.ranks import run_on_ranks
from tests.distributed.test_data_parallel import wrap
from tests.runtime.training import SCHEDULE_NAMES

NUM_MICROBATCHES = 8
LARGE = 2**15  # numbers of a message: too many for the sockets


def _modules(num_ranks: int, width: int) -> list[nn.Module]:
    # A linear layer's backward needs its input, but not its output.
    torch.manual_seed(0)
    return [nn.Linear(width, width).double() for _ in range(num_ranks)]


def most_outputs(rank: int, num_ranks: int) -> int:
    """How many outputs of this rank are alive at most when one of its backwards begins."""
    modules = _modules(num_ranks, 8)
    made = get_schedule_class("GPipe")(stages_of(modules, [rank]), NUM_MICROBATCHES, loss_fn=mse)
    outputs: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def keep(module: nn.Module, args: Any, output: Tensor) -> None:
        outputs.append(weakref.ref(output))

    modules[rank].register_forward_hook(keep)
    made.before("B", lambda _: alive.append(sum(one() is not None for one in outputs)))
    made.step(rand(16, 8), target=rand(16, 8))
    outputs.clear()
    alive.clear()
    made.step(rand(16, 8), target=rand(16, 8))
    return max(alive)


def test_outputs_go_when_they_are_sent() -> None:
    first, middle, _ = run_on_ranks(3, most_outputs, 3)

    # All eight were kept until their backward; the gradient now starts from an edge of the graph.
    assert (first, middle) == (0, 0)


def most_sends(
    rank: int, schedule: str, num_ranks: int, rows: int, budget: int | None = None
) -> int:
    """How many sent messages this rank keeps at most, looked at when an action begins."""
    stages = stages_of(_modules(num_ranks, 8), [rank])
    made = get_schedule_class(schedule)(
        stages, NUM_MICROBATCHES, loss_fn=mse, max_outstanding_sends=budget
    )
    shape = (NUM_MICROBATCHES * rows, 8)
    made.step(rand(*shape), target=rand(*shape))
    (transport,) = made._session._transports.values()
    held: list[int] = []
    for kind in ("F", "B"):
        made.before(kind, lambda _: held.append(transport.held()))
    made.step(rand(*shape), target=rand(*shape))
    return max(held)


@pytest.mark.parametrize("backend", ["gloo", "nccl_rank"])
def test_a_sent_tensor_is_kept_only_until_it_was_read(backend: str) -> None:
    body: tuple[Any, ...] = (most_sends, "1F1B", 3, 2)
    if backend == "gloo":
        body = (by_group_alone, most_sends, "1F1B", 3, LARGE // 8)

    _, middle, last = run_on_ranks(3, *body, backend=backend)

    # Gradients used to be kept until the end of the step: eight of them.
    assert last <= 2
    assert middle <= 5


@pytest.mark.parametrize("budget", [1, 2])
def test_a_rank_keeps_no_more_sends_than_it_may(budget: int) -> None:
    body = (by_group_alone, most_sends, "GPipe", 3, LARGE // 8)

    free = run_on_ranks(3, *body)
    held = run_on_ranks(3, *body, budget)

    assert max(held) <= budget < max(free)


@pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
@pytest.mark.parametrize("budget", [1, 2])
def test_the_simulator_keeps_to_the_budget_of_sends(schedule: str, budget: int) -> None:
    info = SCHEDULES[schedule]
    num_stages = 3 if info.stages_per_rank[1] == 1 else 6
    program = lower(info(3, num_stages, NUM_MICROBATCHES), streams="rank")
    for latency in (0.3, 3.0):
        costs = StageCosts.uniform(program.placement, link=Link(latency=latency), activation=1.0)
        timeline = simulate(program, costs, streams="rank", max_outstanding_sends=budget)
        for rank, actions in enumerate(program.ranks):
            spans = {span.action: span for span in timeline.spans if span.rank == rank}
            sends = [spans[action].end for action in actions if action.kind.is_send]
            num_sends = 0
            for action in actions:
                num_sends += action.kind.is_send
                done = num_sends - budget  # before the latest send was posted
                if action.kind.is_compute and done > 0:
                    assert spans[action].start >= sends[done - 1]
        free = simulate(program, costs, streams="rank")
        assert free == simulate(program, costs, streams="rank", max_outstanding_sends=999)
        # A rank that waits for a send may receive one message more in that time.
        assert max(timeline.peak_memory) <= max(free.peak_memory) + 1.0


def envelope(program: Program, edges: Edges, rank: int) -> list[tuple[int, int]]:
    """Before each computation of a rank: received values that wait for it or a later one, and
    those sent ones of which no arrived value proves that they were read.
    """
    proved = _proofs(program, edges, rank)
    received: set[Value] = set()
    sent: set[Value] = set()
    found = []
    for action in program.ranks[rank]:
        if action.kind.is_recv:
            received.update(writes(action, edges))
        elif action.kind.is_send:
            sent.update(reads(action, edges))
        elif action.kind.is_compute or action.parts:
            found.append((len(received), len(sent)))
            for value in received.intersection(reads(action, edges)):
                received.remove(value)
                sent -= set(proved.get(value, ()))
    return found


def simulated(program: Program, edges: Edges, rank: int, seed: int) -> list[float]:
    """The same from the simulator, with random times: all values on their way from or to others."""
    chance, rank_of = random.Random(seed), program.placement.stage_to_rank
    costs = StageCosts(
        tuple(StageCost(*(chance.uniform(1, 2) for _ in range(3))) for _ in rank_of),
        activations={(s, t): float(rank_of[s] != rank_of[t]) for s, t, _ in edges.edges},
        gradients={(s, t): float(rank_of[s] != rank_of[t]) for s, t, _ in edges.edges},
        link=Link(latency=chance.choice([0.01, 0.3, 3.0])),
    )
    timeline = simulate(program, costs, edges, streams="rank")
    found = []
    for span in sorted((s for s in timeline.spans if s.rank == rank), key=lambda s: s.start):
        if span.action.kind.is_compute or span.action.parts:
            held = [held for at, held in timeline.memory[rank] if at <= span.start]
            made = sum(rank_of[v.peer] != rank for v in writes(span.action, edges))
            found.append((held or [0.0])[-1] - made)
    return found


@pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
def test_the_simulator_keeps_what_waits_and_no_sent_value_that_was_read(schedule: str) -> None:
    info = SCHEDULES[schedule]
    for seed in range(3):
        num_stages = 3 if info.stages_per_rank[1] == 1 else 6
        edges = Edges.of(num_stages, {(s, s + 1) for s in range(num_stages - 1)} | {(0, 2)})
        program = lower(info(3, num_stages, NUM_MICROBATCHES), edges, streams="rank")
        for rank in range(3):
            known = envelope(program, edges, rank)
            for held, (received, sent) in zip(
                simulated(program, edges, rank, seed), known, strict=True
            ):
                assert received <= held <= received + sent


def check_held(rank: int, schedule: str) -> None:
    """So does a rank over communicators like NCCL's: the same values, at every computation."""
    indices, num_stages = layout(schedule, rank, 3)
    compare_held(rank, schedule, stages_of(_modules(num_stages, 8), indices))


def compare_held(place: int, schedule: str, stages: list[PipelineStage]) -> None:
    most = 2 if schedule == "DualPipeV" else 1  # stages that are gathered at once
    made = get_schedule_class(schedule)(stages, NUM_MICROBATCHES, loss_fn=mse, max_unsharded=most)
    x = rand(2 * NUM_MICROBATCHES, 8)
    found: list[tuple[int, int]] = []
    gathered: list[list[int]] = []

    def look(action: Action) -> None:
        plan: Any = made._session._running
        (transport,) = made._session._transports.values()
        waiting = sum(hasattr(value, "wait") for value in plan.executors[0]._slots)
        found.append((waiting, transport.held()))
        gathered.append([stage.stage_index for stage in stages if is_gathered(stage.submod)])

    for kind in ("F", "B", "I", "W", "OVERLAP_F_B"):
        made.before(kind, look)
    made.step(x, target=x)
    plan: Any = made._session.plan
    known = envelope(plan.program, Edges.chain(plan.program.num_stages), place)
    for (received, sent), (waiting, most) in zip(found, known, strict=True):
        assert received == waiting
        assert sent <= most
    assert gathered == gathered_by(plan.program, place)


def is_gathered(module: nn.Module) -> bool:
    """Whether the whole parameters of a sharded module are held, or on their way."""
    groups: list[Any] = [group for root in fsdp_roots(module) for group in shard_groups(root)]
    return any(group.is_unsharded or group._all_gather_result is not None for group in groups)


def gathered_by(program: Program, rank: int) -> list[list[int]]:
    """The stages that the simulator holds gathered, at every computation."""
    stages = program.placement.stages_of(rank)
    costs = StageCosts(
        tuple(
            StageCost(parameters=float(2**s if s in stages else 0))
            for s in range(program.num_stages)
        ),
    )
    timeline = simulate(program, costs, streams="rank")
    found = []
    for span in sorted((s for s in timeline.spans if s.rank == rank), key=lambda s: s.start):
        if span.action.kind.is_compute or span.action.parts:
            curve = [(0.0, 0.0), *timeline.memory[rank]]
            held = int([held for at, held in curve if at <= span.start][-1])
            found.append([s for s in stages if held & 2**s])
    return found


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"])
def test_a_rank_keeps_what_the_simulator_says(schedule: str) -> None:
    run_on_ranks(3, check_held, schedule, backend="nccl_rank")


def check_held_by_replicas(rank: int, schedule: str, wrapper: str) -> None:
    """The same of two pipelines whose stages are wrapped, and the gathered stages."""
    nccl_like.register()
    pp = [dist.new_group(ranks, backend="nccl_rank") for ranks in ([0, 1], [2, 3])]
    dp = [dist.new_group(ranks, backend="gloo") for ranks in ([0, 2], [1, 3])]
    replica, place = rank // 2, rank % 2
    indices, num_stages = layout(schedule, place, 2)
    modules = _modules(num_stages, 8)
    for i in indices:
        modules[i] = wrap(modules[i], wrapper, dp[place])
    compare_held(place, schedule, stages_of(modules, indices, pp[replica]))


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"])
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_a_rank_of_replicas_keeps_what_the_simulator_says(schedule: str, wrapper: str) -> None:
    run_on_ranks(4, check_held_by_replicas, schedule, wrapper)
