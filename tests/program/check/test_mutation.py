"""Corrupted programs and files are refused, each with a message that names the place.

Every sound program is broken in many ways. Most ways are wrong by construction; for
moves and swaps, which may leave a program sound, `oracle.is_sound` decides what
the validator has to say.
"""

import random
import re
from collections.abc import Callable

import pytest

from fxpipe.errors import ScheduleError
from fxpipe.program import Action, Edges, Kind, Program, find_faults, lower, validate
from fxpipe.program.check.faults import report
from fxpipe.program.generators import get_schedule
from tests.program.oracle import is_sound

Rows = list[list[Action]]
# A corrupted program, and a rank and texts (one of them) that the message must name.
Mutant = tuple[Rows, int, tuple[str, ...]]

NAMES = (
    ("1F1B", 3, 3, 4),
    ("GPipe", 2, 2, 3),
    ("Interleaved1F1B", 2, 4, 4),
    ("ZBVZeroBubble", 3, 6, 4),
    ("DualPipeV", 2, 4, 5),
)
SKIP = Edges.of(6, [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (0, 3), (1, 5)])


def cases() -> dict[str, tuple[Program, Edges]]:
    """Sound programs to break, compute-only and lowered."""
    found = {}
    for name, num_ranks, num_stages, num_microbatches in NAMES:
        program = get_schedule(name)(num_ranks, num_stages, num_microbatches)
        edges = Edges.chain(num_stages)
        found[name] = (program, edges)
        found[f"{name} lowered"] = (lower(program, fuse=False), edges)
        full = lower(program, receives="late", reduce_grad=True, max_unsharded=2)
        found[f"{name} lowered in full"] = (full, edges)
    program = get_schedule("ZBVZeroBubble")(3, 6, 4)
    found["skips"] = (program, SKIP)
    found["skips lowered"] = (lower(program, SKIP), SKIP)
    return found


CASES = cases()


def drop(rows: Rows, chance: random.Random) -> Mutant:
    rank, position = pick(rows, chance)
    return rows, rank, texts_of(rows[rank].pop(position))


def double(rows: Rows, chance: random.Random) -> Mutant:
    rank, position = pick(rows, chance)
    action = rows[rank][position]
    rows[rank].insert(chance.randint(0, len(rows[rank])), action)
    return rows, rank, texts_of(action)


def renumber_microbatch(rows: Rows, chance: random.Random) -> Mutant:
    rank, position = pick(rows, chance, lambda a: a.microbatch is not None and not a.parts)
    action = rows[rank][position]
    changed = action._replace(microbatch=action.microbatch + chance.choice((-1, 1, 2, 100)))
    rows[rank][position] = changed
    return rows, rank, texts_of(action, changed)


def renumber_stage(rows: Rows, chance: random.Random) -> Mutant:
    rank, position = pick(rows, chance, lambda a: not a.parts)
    action = rows[rank][position]
    changed = action._replace(stage=action.stage + chance.choice((-1, 1, 2, 50)))
    rows[rank][position] = changed
    return rows, rank, texts_of(action, changed)


def move_to_another_rank(rows: Rows, chance: random.Random) -> Mutant:
    rank, position = pick(rows, chance)
    action = rows[rank].pop(position)
    other = chance.choice([r for r in range(len(rows)) if r != rank])
    rows[other].insert(chance.randint(0, len(rows[other])), action)
    return rows, other, texts_of(action)


def change_kind(rows: Rows, chance: random.Random) -> Mutant:
    rank, position = pick(rows, chance, lambda a: not a.parts)
    action = rows[rank][position]
    kinds = [kind for kind in Kind if kind is not action.kind and kind is not Kind.OVERLAP]
    changed = action._replace(kind=chance.choice(kinds))
    rows[rank][position] = changed
    return rows, rank, texts_of(action, changed)


def put_backward_before_forward(rows: Rows, chance: random.Random) -> Mutant:
    rank, position = pick(rows, chance, lambda a: a.kind is Kind.FORWARD)
    forward = rows[rank][position]
    back = next(
        i
        for i, action in enumerate(rows[rank])
        for part in action.parts or (action,)
        if part.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT)
        and (part.stage, part.microbatch) == (forward.stage, forward.microbatch)
    )
    texts = texts_of(forward, rows[rank][back])
    rows[rank][position], rows[rank][back] = rows[rank][back], rows[rank][position]
    return rows, rank, texts


def drop_both_ends(rows: Rows, chance: random.Random) -> Mutant:
    rank, position = pick(rows, chance, lambda a: a.kind.is_send)
    send = rows[rank].pop(position)
    recv = Action(Kind(send.kind + 1), send.peer, send.microbatch, send.stage)
    next(row for row in rows if recv in row).remove(recv)
    return rows, rank, texts_of(send)


def reorder_one_end(rows: Rows, chance: random.Random) -> Mutant:
    """Swap two messages of one edge at its receiving end."""
    rank, first = pick(rows, chance, lambda a: a.kind.is_recv)
    action = rows[rank][first]
    second = chance.choice(
        [
            i
            for i, other in enumerate(rows[rank])
            if i != first and other == action._replace(microbatch=other.microbatch)
        ]
    )
    texts = (f"between ranks {rank} and", f"and {rank} here")
    rows[rank][first], rows[rank][second] = rows[rank][second], rows[rank][first]
    return rows, rank, texts


def pick(
    rows: Rows, chance: random.Random, wanted: Callable[[Action], bool] = lambda action: True
) -> tuple[int, int]:
    return chance.choice(
        [(r, i) for r, row in enumerate(rows) for i, action in enumerate(row) if wanted(action)]
    )


def texts_of(*actions: Action) -> tuple[str, ...]:
    parts = [part for action in actions for part in action.parts or (action,)]
    stages = [f"stage {part.stage} " for part in parts if part.microbatch is None]
    return (*map(str, parts), *stages)


ALWAYS_WRONG = (
    drop,
    double,
    renumber_microbatch,
    renumber_stage,
    move_to_another_rank,
    change_kind,
    put_backward_before_forward,
)
WRONG_IF_LOWERED = (drop_both_ends, reorder_one_end)
PER_WAY = 8
WAYS = [
    (name, way)
    for name in CASES
    for way in ALWAYS_WRONG + (WRONG_IF_LOWERED if "lowered" in name else ())
]


def test_there_are_enough_mutants():
    assert len(WAYS) * PER_WAY >= 1000


@pytest.mark.parametrize(("name", "way"), WAYS, ids=lambda item: getattr(item, "__name__", item))
def test_a_corrupted_program_is_refused_and_the_place_is_named(name, way):
    program, edges = CASES[name]
    chance = random.Random(f"{name} {way.__name__}")

    for _ in range(PER_WAY):
        rows, rank, texts = way([list(actions) for actions in program.ranks], chance)
        corrupted = Program.of(program.placement, program.num_microbatches, rows)

        with pytest.raises(ScheduleError, match=rf"rank {rank}\b") as error:
            validate(corrupted, edges)
        assert any(text in str(error.value) for text in texts), (texts, str(error.value))
        assert not is_sound(corrupted, edges)


@pytest.mark.parametrize("name", CASES)
def test_moves_and_swaps_are_refused_exactly_when_they_break_something(name):
    program, edges = CASES[name]
    chance = random.Random(name)
    refused = 0

    for attempt in range(60):
        rows = [list(actions) for actions in program.ranks]
        for _ in range(1 + attempt % 3):
            rank, position = pick(rows, chance)
            other = min(len(rows[rank]) - 1, max(0, position + chance.randint(-3, 3)))
            rows[rank].insert(other, rows[rank].pop(position))
        moved = Program.of(program.placement, program.num_microbatches, rows)
        for streams in ("pair", "direction"):
            faults = find_faults(moved, edges, streams=streams)
            assert (not faults) == is_sound(moved, edges, streams), report("", faults)
            refused += bool(faults)

    assert 5 <= refused <= 115


CSV_JUNK = ("x", "-", ".", ";", "F", "(", ")", "<", ">", "\u0663", "\t", "\x00", "#", "0x1", " 1")


def corrupt_cell(text: str, chance: random.Random) -> str:
    rows = [line.split(",") for line in text.splitlines()]
    row = chance.choice(rows)
    column = chance.randrange(len(row))
    cell = row[column]
    way = chance.randrange(4)
    at = chance.randrange(len(cell))
    if way == 0:
        cell = cell[:at] + chance.choice(CSV_JUNK) + cell[at:]
    elif way == 1:
        cell = cell[:at] + cell[at + 1 :]
    elif way == 2:
        cell = cell[:at] + chance.choice("0123456789FBIW_;") + cell[at + 1 :]
    else:
        cell += chance.choice(row)
    row[column] = cell
    return "\n".join(",".join(row) for row in rows) + "\n"


@pytest.mark.parametrize("name", [name for name in CASES if "skips" not in name])
def test_a_corrupted_file_is_refused_and_the_place_is_named(name):
    program, _ = CASES[name]
    text = program.to_csv()
    chance = random.Random(name)
    num_refused = 0

    while num_refused < 30:
        corrupted = corrupt_cell(text, chance)
        if corrupted == text:
            continue
        with pytest.raises(ScheduleError) as error:
            validate(Program.from_csv(corrupted))
        assert re.search(r"row \d+, column \d+|rank \d+", str(error.value)), str(error.value)
        num_refused += 1


def test_a_file_with_lost_or_extra_rows_is_refused():
    text = CASES["1F1B lowered"][0].to_csv()
    lines = text.splitlines(keepends=True)

    for broken in (
        lines[1:],
        lines[:-1],
        [*lines, lines[0]],
        [*lines, "\n"],
        [lines[0][:-1], *lines[1:]],
    ):
        with pytest.raises(ScheduleError, match=r"rank \d"):
            validate(Program.from_csv("".join(broken)))
