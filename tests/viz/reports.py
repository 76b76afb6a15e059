"""A report with all that can be in one."""

from functools import cache

from fxpipe.program import Link, Program, StageCosts, Timeline, lower, simulate
from fxpipe.program.generators import SCHEDULES
from fxpipe.viz.report import report_html
from tests.viz.pipes import pipe_of, sizes_of

__all__ = ["COSTS", "candidates", "full_report"]

NAMES = ("GPipe", "1F1B", "Interleaved1F1B", "ZBH1", "ZBVZeroBubble", "DualPipeV")
COSTS = StageCosts.uniform(
    SCHEDULES["1F1B"].placement(4, 4), residual=2**20, activation=2**18, link=Link(0.05, 2**20)
)


@cache
def candidates() -> tuple[tuple[str, Program, Timeline], ...]:
    found = []
    for name in NAMES:
        for num_microbatches in (4, 8):
            stages = 8 if SCHEDULES[name].allows(2) else 4
            program = SCHEDULES[name](4, stages, num_microbatches)
            found.append((name, program, simulate(program)))
    program = lower(SCHEDULES["1F1B"](4, 4, 8))
    return (*found, ("1F1B with transfers", program, simulate(program, COSTS)))


@cache
def full_report() -> str:
    return report_html(
        candidates(),
        pipe=pipe_of("gpt"),
        costs=COSTS,
        flops=[1e9, 2e9, 3e9, 2e9],
        sizes=sizes_of("gpt"),
        title="GPT </script> & 4 ranks",
        notes=["a <note>"],
        time_unit="ms",
        memory_unit="bytes",
        chosen=3,
    )
