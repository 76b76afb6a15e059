"""Time generating, validating and lowering programs as they grow, beside torch's lowering.

    python -m benchmarks.program_scaling             # up to 512 microbatches
    python -m benchmarks.program_scaling --quick     # up to 128

Both packages lower the same program to the same kinds of actions: transfers, UNSHARD
and RESHARD for at most 3 stages at once, REDUCE_GRAD. fxpipe's time also holds two
validations, before and after. All times are of the CPU, since a machine that does other
things as well makes the clock on the wall say little; the best of several rounds counts.
"""

import argparse
import time
from collections.abc import Callable

from torch.distributed.pipelining import schedules as torch_schedules

from fxpipe.program import Program, lower, validate
from fxpipe.program.generators import get_schedule

LARGE = ("InterleavedZeroBubble", 64, 4)
BESIDE_TORCH = ("ZBVZeroBubble", 32, 2)
MAX_UNSHARDED = 3


def best_of(rounds: int, work: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(rounds):
        start = time.process_time()
        work()
        best = min(best, time.process_time() - start)
    return best


def make(case: tuple[str, int, int], num_microbatches: int) -> Program:
    name, num_ranks, stages_per_rank = case
    return get_schedule(name)(num_ranks, num_ranks * stages_per_rank, num_microbatches)


def full(program: Program) -> Program:
    return lower(program, reduce_grad=True, max_unsharded=MAX_UNSHARDED)


def torch_lowering(program: Program) -> Callable[[], object]:
    """What torch does to the same program when a schedule is built."""
    actions = {
        rank: [torch_schedules._Action.from_str(str(action)) for action in row]
        for rank, row in enumerate(program.ranks)
    }
    stage_to_rank = program.placement.stage_to_rank

    def work() -> object:
        sharded = {
            rank: torch_schedules._add_reduce_grad(
                torch_schedules._add_unshard_reshard(row, MAX_UNSHARDED), program.num_microbatches
            )
            for rank, row in actions.items()
        }
        return torch_schedules._add_send_recv(
            sharded, stage_to_rank=lambda stage: stage_to_rank[stage], num_stages=program.num_stages
        )

    return work


def show_growth(sizes: list[int], rounds: int) -> None:
    name, num_ranks, stages_per_rank = LARGE
    print(f"{name}, {num_ranks} ranks, {stages_per_rank} stages a rank; seconds")
    head = ("microbatches", "actions", "generate", "validate", "lower", "validate", "all", "growth")
    print("".join(f"{cell:>14}" for cell in head))
    before = 0.0
    for size in sizes:
        # Nothing else of that size may be alive: Python's collector would walk it as well.
        generating = best_of(rounds, lambda size=size: make(LARGE, size))
        program = make(LARGE, size)
        validating = best_of(rounds, lambda program=program: validate(program))
        lowering = best_of(rounds, lambda program=program: lower(program))
        lowered = lower(program)
        again = best_of(rounds, lambda lowered=lowered: validate(lowered))
        times = (generating, validating, lowering, again)
        growth = f"{sum(times) / before:.2f}x" if before else ""
        before = sum(times)
        cells = [f"{t:.2f}" for t in (*times, before)]
        count = sum(map(len, lowered.ranks))
        print("".join(f"{cell:>14}" for cell in (size, count, *cells, growth)), flush=True)
        del program, lowered


def show_beside_torch(sizes: list[int], rounds: int) -> None:
    name, num_ranks, stages_per_rank = BESIDE_TORCH
    print(f"\n{name}, {num_ranks} ranks, {stages_per_rank} stages a rank; seconds to lower")
    head = ("microbatches", "fxpipe", "growth", "torch", "growth", "fxpipe/torch")
    print("".join(f"{cell:>14}" for cell in head))
    before: tuple[float, float] | None = None
    for size in sizes:
        program = make(BESIDE_TORCH, size)
        mine = best_of(rounds, lambda program=program: full(program))
        theirs = best_of(1, torch_lowering(program))
        growths = (f"{mine / before[0]:.2f}x", f"{theirs / before[1]:.2f}x") if before else ("", "")
        before = (mine, theirs)
        cells = (size, f"{mine:.3f}", growths[0], f"{theirs:.3f}", growths[1])
        print("".join(f"{cell:>14}" for cell in (*cells, f"{mine / theirs:.3f}")), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="stop at 128 microbatches")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    sizes = [32, 64, 128] if options.quick else [64, 128, 256, 512]
    show_growth(sizes, options.rounds)
    show_beside_torch(sizes, options.rounds)


if __name__ == "__main__":
    main()
