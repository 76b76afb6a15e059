"""Programs survive every text form, and nothing that is not a program is read as one."""

import csv
from textwrap import dedent

import pytest

from fxpipe.errors import ScheduleError
from fxpipe.program import Action, Edges, Kind, Placement, Program, lower, parse_action, validate
from fxpipe.program.generators import get_schedule

ONE_F_ONE_B = dedent("""\
    rank 0: 0F0 0F1 0B0 0B1
    rank 1: 1F0 1B0 1F1 1B1""")

ACTIONS = {
    "2F0": Action(Kind.FORWARD, 2, 0),
    "10B31": Action(Kind.BACKWARD, 10, 31),
    "1I3": Action(Kind.BACKWARD_INPUT, 1, 3),
    "1W3": Action(Kind.BACKWARD_WEIGHT, 1, 3),
    "0SEND_F1": Action(Kind.SEND_ACTIVATION, 0, 1, 1),
    "1RECV_F1": Action(Kind.RECV_ACTIVATION, 1, 1, 0),
    "1SEND_B1": Action(Kind.SEND_GRADIENT, 1, 1, 0),
    "0RECV_B2": Action(Kind.RECV_GRADIENT, 0, 2, 1),
    "0SEND_F1>3": Action(Kind.SEND_ACTIVATION, 0, 1, 3),
    "3RECV_F1<0": Action(Kind.RECV_ACTIVATION, 3, 1, 0),
    "3SEND_B1>0": Action(Kind.SEND_GRADIENT, 3, 1, 0),
    "0RECV_B1<3": Action(Kind.RECV_GRADIENT, 0, 1, 3),
    "1UNSHARD": Action(Kind.UNSHARD, 1),
    "1RESHARD": Action(Kind.RESHARD, 1),
    "1REDUCE_GRAD": Action(Kind.REDUCE_GRAD, 1),
    "(0F5;7B1)OVERLAP_F_B": Action.overlap(Action(Kind.FORWARD, 0, 5), Action(Kind.BACKWARD, 7, 1)),
    "(0F5;7I1)OVERLAP_F_B": Action.overlap(
        Action(Kind.FORWARD, 0, 5), Action(Kind.BACKWARD_INPUT, 7, 1)
    ),
}


@pytest.mark.parametrize("text", ACTIONS)
def test_an_action_is_read_back_from_its_text(text):
    assert str(ACTIONS[text]) == text
    assert parse_action(text) == ACTIONS[text]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "expected an action such as 2F0"),
        ("F0", "expected an action such as 2F0"),
        ("0X0", "expected an action such as 2F0"),
        ("0f0", "expected an action such as 2F0"),
        ("0F0 ", "expected an action such as 2F0"),
        ("0F0x", "expected an action such as 2F0"),
        ("0F0 0F1", "expected an action such as 2F0"),
        ("-1F0", "expected an action such as 2F0"),
        ("0F-1", "expected an action such as 2F0"),
        ("00F0", "expected an action such as 2F0"),
        ("0F01", "expected an action such as 2F0"),
        ("٣F0", "expected an action such as 2F0"),
        ("0F0\n", "expected an action such as 2F0"),
        ("0F1.5", "expected an action such as 2F0"),
        ("0OVERLAP_F_B", "expected an action such as 2F0"),
        ("0F", "F needs a microbatch, expected for example 0F0"),
        ("0SEND_F", "SEND_F needs a microbatch"),
        ("0UNSHARD3", "UNSHARD is for a whole stage, expected 0UNSHARD"),
        ("0F1>2", "only transfers name a second stage"),
        ("0UNSHARD>2", "only transfers name a second stage"),
        ("0SEND_F1<2", "expected '>' before the other stage of SEND_F"),
        ("3RECV_F1>0", "expected '<' before the other stage of RECV_F"),
        ("0SEND_B1", "no stage comes before stage 0"),
        ("0RECV_F1", "no stage comes before stage 0"),
        ("(0F1)OVERLAP_F_B", "expected two actions in a pair, found 1"),
        ("(0F1;1B0;2F1)OVERLAP_F_B", "expected two actions in a pair, found 3"),
        ("(0F1;)OVERLAP_F_B", "in the pair, '': expected an action"),
        ("(0F1;1UNSHARD)OVERLAP_F_B", "expected compute actions in a pair, found 1UNSHARD"),
        ("((0F1;1B0)OVERLAP_F_B;1B0)OVERLAP_F_B", "expected an action such as 2F0"),
        ("(0F1;1B0)", "expected an action such as 2F0"),
        ("(0F1;1B0)F", "expected an action such as 2F0"),
    ],
)
def test_junk_is_refused_with_what_was_expected(text, expected):
    with pytest.raises(ScheduleError, match=r"expected|only|needs|no stage") as error:
        parse_action(text)

    assert expected in str(error.value)
    assert repr(text) in str(error.value)


def full_program() -> Program:
    edges = Edges.of(4, [(0, 1), (1, 2), (2, 3), (0, 3)])
    program = Program.parse("""
        rank 0: 0F0 0F1 (2F0;0F2)OVERLAP_F_B 2F1 2F2 2B0 2I1 2W1 0B0 0I1 0W1 2B2 0B2
        rank 1: 1F0 1F1 3F0 3B0 1F2 3F1 3F2 3B1 1B0 3B2 1B1 1B2
    """)
    return lower(program, edges, fuse=False, reduce_grad=True, max_unsharded=2)


def test_the_table_is_read_back():
    program = Program.parse(ONE_F_ONE_B)

    assert program.placement == Placement.loop(2, 2)
    assert program.num_microbatches == 2
    assert str(program) == ONE_F_ONE_B


def test_every_form_is_read_back():
    program = full_program()

    assert Program.parse(str(program)) == program
    assert Program.from_csv(program.to_csv()) == program
    assert Program.from_json(program.to_json()) == program
    assert "0SEND_F0>3" in str(program)
    assert "OVERLAP_F_B" in str(program)


def test_a_table_of_many_ranks_lines_up_and_is_read_back():
    placement = Placement.loop(11, 11)
    program = Program.of(placement, 1, [[Action(Kind.FORWARD, s, 0)] for s in range(11)])

    assert str(program).splitlines()[0] == "rank  0: 0F0"
    assert Program.parse(str(program)) == program


def test_the_csv_has_one_row_per_rank_and_one_cell_per_action():
    assert Program.parse(ONE_F_ONE_B).to_csv() == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


def test_idle_steps_are_written_as_empty_cells_and_ignored_on_reading():
    program = Program.parse(ONE_F_ONE_B)

    text = program.to_csv(idle=True)

    assert text == "0F0,0F1,,0B0,,0B1\n,1F0,1B0,1F1,1B1\n"
    assert Program.from_csv(text) == program


def test_a_lowered_program_has_no_idle_steps():
    with pytest.raises(ScheduleError, match="only a compute-only program has steps"):
        lower(Program.parse(ONE_F_ONE_B)).to_csv(idle=True)


def test_carriage_returns_spaces_and_quotes_are_part_of_csv():
    text = '0F0, 0F1 ,"0B0",0B1\r\n1F0,1B0,,1F1,1B1\r\n'

    assert str(Program.from_csv(text)) == ONE_F_ONE_B


def test_every_bad_cell_is_reported_with_row_and_column():
    with pytest.raises(ScheduleError) as error:
        Program.from_csv("0F0,0X1,0B0\n1F0,,1B\n\n")

    assert str(error.value).splitlines() == [
        "the program cannot be read:",
        "  row 1, column 2 (rank 0): '0X1': expected an action such as 2F0, 1B3, 0SEND_F1, "
        "1UNSHARD or (0F5;7B1)OVERLAP_F_B",
        "  row 2, column 3 (rank 1): '1B': B needs a microbatch, expected for example 1B0",
        "  row 3 (rank 2): expected at least one action, found none",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "row 1 .rank 0.: expected at least one action"),
        ('0F0,"0F1\n', "row 1 .rank 0.: expected comma-separated cells"),
        ('0F0\n1F0,"1B0"x\n', "row 2 .rank 1.: expected comma-separated cells"),
        ("0UNSHARD\n1UNSHARD\n", "the program computes nothing"),
        (
            "0F0,1F0\n1F1,0F1\n",
            "one rank, but stage 1 is computed on two: 1F0 on rank 0 at position 1 and "
            "1F1 on rank 1 at position 0",
        ),
        ("0F0\n2F0\n", "nothing computes stage 1, but there is stage 2, 2F0 on rank 1"),
        ("0F0,0F999999999999\n1F0\n", "nothing computes microbatch 1, .* 0F999999999999 on rank"),
    ],
)
def test_what_is_not_a_program_is_refused(text, message):
    with pytest.raises(ScheduleError, match=message):
        Program.from_csv(text)


def test_a_given_placement_and_count_are_not_inferred():
    placement = Placement(2, (0, 1, 0))

    program = Program.from_csv("0F0\n1F0\n", placement=placement, num_microbatches=3)

    assert program.placement == placement
    assert program.num_microbatches == 3
    with pytest.raises(ScheduleError, match="2F0: missing"):
        validate(program)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rank 1: 0F0", "row 1: expected 'rank 0: ' and its actions, found 'rank 1: 0F0'"),
        ("rank 0: 0F0\n1F0", "row 2: expected 'rank 1: ' and its actions, found '1F0'"),
        ("rank 0: 0F0\n\nrank 1: 1F0", "row 2: expected 'rank 1: '"),
        ("rank 0: 0F0 0F\nrank 1: 1F0", "row 1, column 2 .rank 0.: '0F': F needs a microbatch"),
    ],
)
def test_a_broken_table_is_refused(text, message):
    with pytest.raises(ScheduleError, match=message):
        Program.parse(text)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("{", "", "row 2, column 11: expected JSON"),
        ('"version": 1', '"version": 2', "'version': expected 1, found 2"),
        ('"version": 1', '"version": true', "'version': expected 1, found True"),
        ('"version": 1,', "", "'version': expected 1, found no such key"),
        ('"name"', '"nam"', "'nam': not a key of a program"),
        ('"name": ""', '"name": 3', "'name': expected a string, found 3"),
        ('"version": 1', '"version": 1, "version": 1', "expected each key once"),
        ("[0, 1]", '[0, "1"]', "'stage_to_rank': expected a list with the rank of each"),
        ("[0, 1]", "[0, 2]", "ranks go from 0 to 1, but stage 1 is on rank 2"),
        ('"num_microbatches": 2', '"num_microbatches": 2.0', "expected a whole number, found 2.0"),
        ('"1B0"', "7", "'ranks': expected a list with a list of actions"),
        ('"1B0"', '"1Q0"', "row 2, column 2 .rank 1.: '1Q0': expected an action"),
    ],
)
def test_broken_json_is_refused(old, new, message):
    text = Program.parse(ONE_F_ONE_B).to_json()
    assert old in text

    with pytest.raises(ScheduleError, match=message):
        Program.from_json(text.replace(old, new, 1))


def test_json_that_is_no_object_is_refused():
    with pytest.raises(ScheduleError, match="expected a JSON object with a program, found"):
        Program.from_json("[1, 2]")


def test_torch_reads_what_fxpipe_writes_and_the_other_way_round(tmp_path):
    from torch.distributed.pipelining.schedules import _Action

    for program in (Program.parse(ONE_F_ONE_B), chain_with_pairs()):
        for text in (program.to_csv(), lower(program, fuse=False, reduce_grad=True).to_csv()):
            rows = [
                [_Action.from_str(cell) for cell in row] for row in csv.reader([*text.splitlines()])
            ]
            written = tmp_path / "torch.csv"
            with written.open("w", newline="") as file:
                csv.writer(file).writerows(rows)

            assert Program.from_csv(written.read_text()) == Program.from_csv(text)


def chain_with_pairs() -> Program:
    return Program.parse("""
        rank 0: 0F0 0F1 3F0 (0F2;3B0)OVERLAP_F_B (3F1;0B0)OVERLAP_F_B 3B1 0B1 3F2 3B2 0B2
        rank 1: 1F0 2F0 1F1 2F1 2B0 1B0 1F2 2F2 2B1 1B1 2B2 1B2
    """)


@pytest.mark.parametrize("name", ["Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"])
def test_what_torch_lowers_is_read_and_found_sound(name):
    from torch.distributed.pipelining import schedules as torch_schedules

    program = get_schedule(name)(3, 6, 5)
    stage_to_rank = program.placement.stage_to_rank
    rows = {
        rank: torch_schedules._add_reduce_grad(
            torch_schedules._add_unshard_reshard(
                [torch_schedules._Action.from_str(str(action)) for action in actions]
            ),
            5,
        )
        for rank, actions in enumerate(program.ranks)
    }
    lowered = torch_schedules._add_send_recv(
        rows, stage_to_rank=lambda stage: stage_to_rank[stage], num_stages=6
    )
    rows = [[str(action) for action in lowered[rank]] for rank in range(3)]

    read = Program.from_csv("".join(",".join(row) + "\n" for row in rows))

    kept = [[cell for cell in row if "WAIT" not in cell] for row in rows]  # torch 2.15 adds waits
    assert read.to_csv() == "".join(",".join(row) + "\n" for row in kept)
    validate(read)


def test_waits_of_torch_are_left_out():
    text = "0F0,0SEND_F0,0WAIT_SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD,0WAIT_REDUCE_GRAD\n"
    text += "1RECV_F0,1F0,1B0,1SEND_B0,1WAIT_SEND_B0\n"

    read = Program.from_csv(text)

    assert read.to_csv() == ("0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD\n1RECV_F0,1F0,1B0,1SEND_B0\n")
    with pytest.raises(ScheduleError, match="0WAIT_RECV_F0"):
        Program.from_csv("0F0,0WAIT_RECV_F0\n")
