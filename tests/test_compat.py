"""fxpipe in the place of torch's pipelining, as a client sees it."""

import subprocess
import sys
from textwrap import dedent

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe import compat
from fxpipe.errors import ScheduleError
from fxpipe.program import Action, Kind
from fxpipe.program.generators import get_schedule


def run(code: str) -> str:
    """What a process prints that runs `code`; imports of a whole process are at stake."""
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", dedent(code)], capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr
    return found.stdout.strip()


def test_imports_of_the_peer_give_our_objects_until_it_is_taken_back():
    printed = run("""
        import fxpipe.compat
        fxpipe.compat.install()
        fxpipe.compat.install()
        import torch.distributed.pipelining as peer
        from torch.distributed.pipelining import PipelineStage
        from torch.distributed.pipelining.microbatch import TensorChunkSpec, _split_block_mask
        from torch.distributed.pipelining.schedules import (
            OVERLAP_F_B, PipelineScheduleMulti, _Action, _PipelineSchedule,
            _PipelineScheduleRuntime, get_schedule_class,
        )
        from torch.distributed.pipelining.stage import _PipelineStageBase
        print(PipelineStage.__module__, peer.schedules.ScheduleGPipe.__module__)
        print(issubclass(_PipelineScheduleRuntime, PipelineScheduleMulti))
        print(issubclass(get_schedule_class("1f1b"), _PipelineSchedule))
        fxpipe.compat.uninstall()
        import torch.distributed.pipelining
        print(torch.distributed.pipelining.PipelineStage.__module__)
    """)

    assert printed.splitlines() == [
        "fxpipe.stage fxpipe.schedules",
        "True",
        "True",
        "torch.distributed.pipelining.stage",
    ]


def test_actions_have_the_arguments_and_attributes_of_the_peer():
    action = compat._Action(2, compat._ComputationType.FORWARD, 3)

    assert action == Action(Kind.FORWARD, 2, 3)
    assert (action.stage_index, action.computation_type, action.microbatch_index) == (2, "F", 3)
    assert repr(action) == "2F3"
    assert action.is_compute_op
    assert compat._Action.from_str(" 2F3 ") == action
    assert compat._Action.from_str("") is None
    pair = compat._Action.from_str("(0F1;3B0)OVERLAP_F_B")
    assert pair.sub_actions == (Action(Kind.FORWARD, 0, 1), Action(Kind.BACKWARD, 3, 0))
    assert compat._Action(-1, compat._ComputationType.OVERLAP_F_B, None, pair.sub_actions) == pair


@pytest.mark.parametrize("text", ["0X1", "F", "0F", "0SEND_F"])
def test_text_that_is_no_action_is_refused(text):
    with pytest.raises(ScheduleError, match=text):
        compat._Action.from_str(text)


def schedule_of(cls, **options):
    torch.manual_seed(0)
    stages = [
        fxpipe.PipelineStage(nn.Linear(4, 4), index, 4, "cpu", group=fxpipe.LocalGroup(2))
        for index in range(4)
    ]
    return cls(stages, 4, loss_fn=nn.functional.mse_loss, **options), stages


def gradients(stages):
    return [parameter.grad for stage in stages for parameter in stage.submod.parameters()]


@pytest.mark.parametrize("format", ["compute_only", "compute_comms"])
def test_a_program_is_read_from_the_files_of_the_peer(format, tmp_path):
    plain, expected = schedule_of(fxpipe.ScheduleInterleaved1F1B)
    x = torch.randn(8, 4)
    plain.step(x, target=x)
    written = plain.lowered() if format == "compute_comms" else plain.program
    text = written.to_csv().replace("\n", ",0UNSHARD,1WAIT_SEND_F0\n", 1)
    file = tmp_path / "program.csv"
    file.write_text(text if format == "compute_comms" else written.to_csv())
    read, stages = schedule_of(compat._PipelineScheduleRuntime)

    read._load_csv(file, format=format)
    read.step(x, target=x)

    assert read.program.ranks == plain.program.ranks
    for ours, theirs in zip(gradients(stages), gradients(expected), strict=True):
        assert torch.equal(ours, theirs)


def test_a_file_for_another_pipeline_is_refused(tmp_path):
    file = tmp_path / "program.csv"
    file.write_text(get_schedule("1F1B")(2, 2, 4).to_csv())
    schedule, _ = schedule_of(compat._PipelineScheduleRuntime)

    schedule._load_csv(file)

    with pytest.raises(ScheduleError, match=r"2 ranks, 2 stages and 4 .* has 2, 4 and 4"):
        schedule.step(torch.zeros(8, 4), target=torch.zeros(8, 4))


def test_a_custom_function_gets_the_action_in_the_words_of_the_peer():
    compat.install()
    try:
        schedule, stages = schedule_of(fxpipe.ScheduleInterleaved1F1B)
        seen = []

        def function(action, context):
            seen.append((action.stage_index, action.microbatch_index, context.schedule_ref))
            context.default()

        schedule.register_custom_function(compat._ComputationType.FORWARD, function)
        x = torch.randn(8, 4)
        schedule.step(x, target=x)
    finally:
        compat.uninstall()

    assert {place[:2] for place in seen} == {(s, m) for s in range(4) for m in range(4)}
    assert all(place[2] is schedule for place in seen)
    assert all(gradient is not None for gradient in gradients(stages))
