"""fxpipe in the place of torch's pipelining, as a client sees it."""

import subprocess
import sys
from textwrap import dedent

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import schedules as peer

import fxpipe
from fxpipe import compat
from fxpipe.errors import ScheduleError
from fxpipe.program import Action, Kind, Program
from fxpipe.program.generators import get_schedule
from fxpipe.stage import _PipelineStageBase


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
    forward = compat._ComputationType.FORWARD
    action = compat._Action(2, forward, 3)

    stage, kind, microbatch, parts = action
    assert (stage, kind, microbatch, parts) == (2, "F", 3, None)
    assert action == compat._Action(stage_index=2, computation_type=forward, microbatch_index=3)
    assert repr(action) == "2F3"
    assert action.is_compute_op
    assert action.ours() == Action(Kind.FORWARD, 2, 3)
    assert compat._Action.from_str(" 2F3 ") == action
    assert compat._Action.from_str("") is None
    pair = compat._Action.from_str("(0F1;3B0)OVERLAP_F_B")
    assert [part.stage_index for part in pair.sub_actions] == [0, 3]
    assert compat._Action(-1, compat._ComputationType.OVERLAP_F_B, None, pair.sub_actions) == pair


@pytest.mark.parametrize(
    "text", ["1WAIT_SEND_F0", "0WAIT_SEND_B3", "2WAIT_REDUCE_GRAD", "0SEND_F1"]
)
def test_waits_and_transfers_are_read_and_printed_and_are_no_compute(text):
    action = compat._Action.from_str(text)

    assert str(action) == text
    assert not action.is_compute_op


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
    read, stages = schedule_of(fxpipe.PipelineScheduleMulti)

    read._load_csv(file, format=format)
    read.step(x, target=x)

    assert read.program.ranks == plain.program.ranks
    for ours, theirs in zip(gradients(stages), gradients(expected), strict=True):
        assert torch.equal(ours, theirs)


def test_a_file_for_another_pipeline_is_refused(tmp_path):
    file = tmp_path / "program.csv"
    file.write_text(get_schedule("1F1B")(2, 2, 4).to_csv())
    schedule, _ = schedule_of(fxpipe.PipelineScheduleMulti)

    with pytest.raises(ScheduleError, match=r"2 ranks, 2 stages and 4 .* has 2, 4 and 4"):
        schedule._load_csv(file)


def test_a_custom_function_gets_the_action_in_the_words_of_the_peer():
    schedule, stages = schedule_of(fxpipe.ScheduleInterleaved1F1B)
    plain, expected = schedule_of(fxpipe.ScheduleInterleaved1F1B)
    x = torch.randn(8, 4)
    plain.step(x, target=x)
    seen = []

    def function(action, context):
        seen.append((action.stage_index, action.microbatch_index, context.schedule_ref))
        assert len(context.arg_mbs) == len(context.kwarg_mbs) == len(context.target_mbs) == 4
        context.default()

    schedule.register_custom_function(compat._ComputationType.FORWARD, function)
    schedule.step(x, target=x)

    assert {place[:2] for place in seen} == {(s, m) for s in range(4) for m in range(4)}
    assert all(place[2] is schedule for place in seen)
    for ours, theirs in zip(gradients(stages), gradients(expected), strict=True):
        assert torch.equal(ours, theirs)


def test_a_pair_of_which_one_half_is_left_out_is_refused():
    schedule, _ = schedule_of(fxpipe.ScheduleDualPipeV)

    def forwards_only(action, context):
        part = action.sub_actions[0]
        (stage,) = (s for s in context.schedule_ref._stages if s.stage_index == part.stage_index)
        stage.forward_one_chunk(part.microbatch_index, ())

    schedule.register_custom_function(compat._ComputationType.OVERLAP_F_B, forwards_only)

    with pytest.raises(ValueError, match=r"did not call context.default\(\) for \(.*OVERLAP_F_B"):
        schedule.step(torch.randn(8, 4), target=torch.randn(8, 4))


def drive(action, context):
    """Do an action by torch's calls on the stages, as clients that overlap two of them do."""
    schedule = context.schedule_ref
    stages = {stage.stage_index: stage for stage in schedule._stages}
    for part in action.sub_actions or (action,):
        stage, microbatch = stages[part.stage_index], part.microbatch_index
        place = (part.stage_index, microbatch)
        if part.computation_type == "F":
            assert place in schedule.fwd_recv_ops and not schedule.fwd_recv_ops.pop(place)
            inputs = (context.arg_mbs[microbatch], context.kwarg_mbs[microbatch])
            schedule._assert_unsharded(stage)
            output = stage.forward_one_chunk(microbatch, *inputs)
            schedule._maybe_compute_loss(stage, output, context.target_mbs, microbatch)
        else:
            assert place in schedule.bwd_recv_ops and not schedule.bwd_recv_ops.pop(place)
            schedule.backward_counter[part.stage_index] += 1
            last = schedule.backward_counter[part.stage_index] == schedule._n_microbatches
            loss = schedule._maybe_get_loss(stage, microbatch)
            stage.backward_one_chunk(
                microbatch,
                loss=loss,
                full_backward=part.computation_type == "B",
                last_backward=last,
            )
            stage.scale_grads(schedule._n_microbatches if schedule.scale_grads else 1)


def test_a_function_that_drives_the_stages_of_the_peer_gives_the_same_gradients():
    plain, expected = schedule_of(fxpipe.ScheduleDualPipeV)
    driven, stages = schedule_of(fxpipe.ScheduleDualPipeV)
    for kind in ("FORWARD", "OVERLAP_F_B", "FULL_BACKWARD", "BACKWARD_INPUT"):
        driven.register_custom_function(compat._ComputationType[kind], drive)
    x = torch.randn(8, 4)

    plain.step(x, target=x)
    driven.step(x, target=x)

    assert any(a.kind is Kind.OVERLAP for row in driven.program.ranks for a in row)
    for ours, theirs in zip(gradients(stages), gradients(expected), strict=True):
        assert torch.equal(ours, theirs)


def test_a_stage_computes_only_when_its_turn_has_come():
    _, stages = schedule_of(fxpipe.ScheduleInterleaved1F1B)

    with pytest.raises(ScheduleError, match=r"stage 0 has no F of microbatch 1 to do now"):
        stages[0].forward_one_chunk(1, (torch.zeros(2, 4),))
    with pytest.raises(AssertionError, match="backward_one_chunk"):
        stages[0].backward_weight_one_chunk(0)


class Listed(_PipelineStageBase):
    """A stage in name only, as tools have them that print schedules."""

    def __init__(self, num_stages, group_size):
        self.num_stages = num_stages
        self.group_size = group_size


@pytest.mark.parametrize("name", ["GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble"])
def test_schedules_of_stages_that_never_run_can_be_listed(name):
    count = 1 if name in ("GPipe", "1F1B") else 2
    stages = [Listed(4 * count, 4) for _ in range(count)]

    schedule = fxpipe.get_schedule_class(name)(stages, 8)

    order = schedule.pipeline_order
    assert sorted(order) == [0, 1, 2, 3]
    ran = [action for row in order.values() for action in row if action is not None]
    forwards = {(a.stage_index, a.microbatch_index) for a in ran if a.computation_type == "F"}
    assert forwards == {(s, m) for s in range(4 * count) for m in range(8)}
    kinds = {a.computation_type for row in schedule.pipeline_order_with_comms.values() for a in row}
    assert {"SEND_F", "RECV_F", "SEND_B", "RECV_B", "REDUCE_GRAD", "UNSHARD"} <= kinds
    assert set(schedule.stage_index_to_group_rank.values()) == {0, 1, 2, 3}
    with pytest.raises(fxpipe.InputError, match="a Listed stands for a stage and cannot run"):
        schedule.step(torch.zeros(8, 4))


def actions(text):
    return [compat._Action.from_str(cell) for cell in text.split()]


def test_passes_over_the_actions_of_a_rank_give_what_the_peer_gives():
    order = actions("0F0 0F1 1F0 1F1 1B0 1B1 0B0 0B1")

    reduced = peer._add_reduce_grad(theirs(order), 2)
    reduced = [action for action in reduced if "WAIT" not in str(action)]  # torch 2.15 adds those
    assert compat._add_reduce_grad(order, 2) == reduced
    assert compat._add_unshard_reshard(order) == peer._add_unshard_reshard(theirs(order))
    halves = actions("0F0 0F1 0F2 0I0 0I1 0W0 0I2 0W2 0W1")
    assert compat._merge_bw(halves) == peer._merge_bw(theirs(halves))


def theirs(order):
    return [peer._Action.from_str(str(action)) for action in order]


@pytest.mark.parametrize(
    ("order", "placed"),
    [
        ({0: "0F0 0F1 0B0 0B1", 1: "1F0 1B0 1F1 1B1"}, (0, 1)),
        (
            {0: "0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1", 1: "1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1"},
            (0, 1, 1, 0),
        ),
        ({0: "0F0 0I0 0W0", 1: "1F0 1I0 1W0"}, (0, 1)),
    ],
)
def test_the_transfers_that_the_peer_adds_are_added(order, placed):
    given = {rank: actions(row) for rank, row in order.items()}
    count = 1 + max(a.microbatch_index for row in given.values() for a in row)

    found = compat._add_send_recv(given, placed.__getitem__, len(placed))

    wanted = peer._add_send_recv(
        {rank: theirs(row) for rank, row in given.items()}, placed.__getitem__, len(placed)
    )
    for rank, row in found.items():
        assert sorted(map(str, row)) == sorted(map(str, wanted[rank]))
        assert [a for a in row if a.is_compute_op] == given[rank]
    compat._simulate_comms_compute(found, placed.__getitem__, len(placed))
    found_places = compat._validate_schedule(given, 2, len(placed), count)
    assert found_places == dict(enumerate(placed))


def test_an_order_with_pairs_lists_the_actions_alone():
    stages = [Listed(8, 4) for _ in range(2)]

    order = fxpipe.ScheduleDualPipeV(stages, 10).pipeline_order

    # The published order ends with weight gradients that nobody waits for.
    assert None not in order[3]
    assert " ".join(map(str, order[3][-8:])) == "4I8 3I8 4I9 3I9 4W8 3W8 4W9 3W9"
    assert " ".join(map(str, order[0][7:13])) == "7F0 7I0 7W0 7F1 7I1 7W1"


def test_an_order_with_transfers_is_laid_out_in_steps():
    order = {0: actions("0F0 0SEND_F0 0RECV_B0 0B0"), 1: actions("1RECV_F0 1F0 1B0 1SEND_B0")}

    steps = compat._simulate_comms_compute(order, lambda stage: stage, 2)

    assert [[str(action or "-") for action in row] for row in steps.values()] == [
        ["0F0", "0SEND_F0", "-", "-", "0RECV_B0", "0B0"],
        ["-", "1RECV_F0", "1F0", "1B0", "1SEND_B0", "-"],
    ]


@pytest.mark.parametrize(
    "order", [{0: "0F0 0B0"}, {0: "0F0", 1: "1F0"}, {0: "0B0 0F0", 1: "1F0 1B0"}]
)
def test_an_order_that_is_not_whole_is_an_assertion_error(order):
    with pytest.raises(AssertionError):
        compat._validate_schedule({r: actions(row) for r, row in order.items()}, 2, 2, 1)


def test_stages_are_mapped_to_ranks_as_by_the_peer():
    for style, size, count in [("loop", 2, 4), ("loop", 4, 8), ("v", 2, 4), ("v", 4, 12)]:
        assert compat.generate_stage_to_rank_mapping(
            size, count, style
        ) == peer.generate_stage_to_rank_mapping(size, count, style)
        assert compat.generate_rank_to_stage_mapping(
            size, count, style
        ) == peer.generate_rank_to_stage_mapping(size, count, style)


def test_the_order_of_a_schedule_is_listed_by_name():
    plain = compat.get_schedule_ops("Interleaved1F1B", 2, 4)
    lowered = compat.get_schedule_ops("Interleaved1F1B", 2, 4, with_comms=True)

    assert [len(row) for row in plain] == [2 * 2 * 4] * 2
    assert [[a for a in row if a.is_compute_op] for row in lowered] == plain
    assert "- 1F0" in compat._format_pipeline_order(
        dict(enumerate(compat.get_schedule_ops("1F1B", 2, 2, add_spacing=True)))
    )


def test_an_order_goes_through_a_file_with_and_without_communication(tmp_path):
    made, _ = schedule_of(fxpipe.ScheduleInterleavedZeroBubble)
    for format in ("compute_only", "compute_comms"):
        read, _ = schedule_of(fxpipe.PipelineScheduleMulti)

        made._dump_csv(tmp_path / "order.csv", format)
        read._load_csv(tmp_path / "order.csv", format)

        cells = (tmp_path / "order.csv").read_text().replace("\n", ",").split(",")
        assert all(peer._Action.from_str(cell) is not None for cell in cells if cell)
        kinds = {"compute_only": made.program, "compute_comms": fused(made)}
        assert read.program.ranks == kinds[format].ranks


def fused(made):
    """What a lowered program computes: halves of backwards are joined where they gain nothing."""
    order = made.pipeline_order_with_comms
    return Program.parse(
        "\n".join(
            f"rank {rank}: " + " ".join(str(a) for a in order[rank] if a.is_compute_op)
            for rank in order
        )
    )


class Unbalanced(fxpipe.PipelineScheduleMulti):
    """An order of the user's own, with stages where no schedule of ours puts them."""

    def __init__(self, stages, n_microbatches, **options):
        super().__init__(stages, n_microbatches, **options)
        self.pipeline_order = {
            0: [*actions("0F0 1F0"), None, *actions("3F0 3B0"), None, *actions("1B0 0B0")],
            1: [None, *actions("2F0 2B0")],
        }
        self._validate_and_set_stage_mapping(self.pipeline_order)


def test_an_own_class_that_names_its_order_as_with_the_peer_trains():
    torch.manual_seed(0)
    stages = [
        fxpipe.PipelineStage(nn.Linear(4, 4), index, 4, "cpu", group=fxpipe.LocalGroup(2))
        for index in range(4)
    ]
    schedule = Unbalanced(stages, 1, loss_fn=nn.functional.mse_loss)
    x = torch.randn(2, 4)

    output = schedule.step(x, target=x)

    plain = nn.Sequential(*[stage.submod for stage in stages])
    torch.testing.assert_close(output, plain(x))
    assert schedule.stage_index_to_group_rank == {0: 0, 1: 0, 2: 1, 3: 0}
    assert all(gradient is not None for gradient in gradients(stages))


def test_an_order_with_communication_runs_its_compute():
    plain, expected = schedule_of(fxpipe.ScheduleInterleaved1F1B)
    given, stages = schedule_of(fxpipe.PipelineScheduleMulti)
    x = torch.randn(8, 4)

    given.pipeline_order_with_comms = plain.pipeline_order_with_comms
    given.step(x, target=x)
    plain.step(x, target=x)

    for ours, wanted in zip(gradients(stages), gradients(expected), strict=True):
        assert torch.equal(ours, wanted)
