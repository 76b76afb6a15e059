"""A rank does its actions in an order in which each finds what it reads."""

import pytest

from fxpipe import LocalGroup, PipelineStage
from fxpipe.program import Program
from fxpipe.schedules import ScheduleFromProgram
from tests.distributed.bodies import blocks, mse, plain_gradients, rand
from tests.runtime.training import assert_close


@pytest.mark.parametrize("pair", ["1F{0};1B{0}", "1B{0};1F{0}"])
def test_a_part_of_a_pair_runs_after_what_it_reads(pair: str) -> None:
    pairs = [f"({pair.format(microbatch)})OVERLAP_F_B" for microbatch in (0, 1)]
    program = Program.parse(f"rank 0: 0F0 0F1 {pairs[0]} 0B0 {pairs[1]} 0B1")
    modules = blocks(2)
    group = LocalGroup(1)
    stages = [PipelineStage(m, i, 2, "cpu", group=group) for i, m in enumerate(modules)]
    x, y = rand(8, 8), rand(8, 8, seed=2)
    reference, _ = plain_gradients(modules, x, y)

    ScheduleFromProgram(stages, program, loss_fn=mse).step(x, target=y)

    for module, plain in zip(modules, reference, strict=True):
        for p, q in zip(module.parameters(), plain.parameters(), strict=True):
            assert_close(p.grad, q.grad, pair)
