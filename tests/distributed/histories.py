"""Make random histories of calls and accidents from a seed, run them, and judge the promise.

    history = make(seed)                what every rank does, call after call, and what happens
    complaints = run(history)           on real processes, beside the plain model; [] if all is well

The promise, checked after every call on every rank that lives:

"In time" is the deadline and 2 s, times how much longer than its CPU time a rank needs for a
little work around the call: other work on the machine is not held against the ranks.

- nothing happened: every rank succeeds, with the plain model's loss, outputs and gradients;
- something happened: every rank raises, in time, an error of the user's or of fxpipe's that
  names the cause, and gradients and parameters are as before the call;
- the next legal call works; after a lost or silent rank it may say why not, on all ranks.

`in_process=True` runs the same history in this process over a `LocalGroup`.
"""

import random
from dataclasses import replace
from typing import Any

from fxpipe.program.generators import SCHEDULES
from tests.distributed.history_rank import EXCEPTIONS, Call, Event, History, Record, play
from tests.distributed.ranks import answers_of_ranks

__all__ = ["judge", "make", "run"]

SCHEDULE_NAMES = tuple(name for name in SCHEDULES if name != "ForwardOnly")
PATIENCE = 20.0  # seconds: the schedule's timeout where nobody is silent
SHORT = 3.0  # the timeout where somebody is
GRACE = 2.0  # seconds beyond the deadline, on a machine that is not busy
ODD = {"step": ("eval", "clip", "fewer_rows", "no_target"), "eval": ("step", "clip", "fewer_rows")}


def make(seed: int, *, in_process: bool = False, accidents: bool = True) -> History:
    """The history of a seed: always the same; without accidents only legal calls."""
    rng = random.Random(seed)
    world = rng.choice((2, 2, 3, 4))
    ranks = list(range(world))
    if rng.random() < 0.25 and world > 2:
        ranks = rng.sample(ranks, rng.randint(2, world))
    schedules = [rng.choice(SCHEDULE_NAMES)]
    if rng.random() < 0.3:
        schedules.append(rng.choice([n for n in SCHEDULE_NAMES if _like(n, schedules[0])]))
    num_stages = len(ranks) if SCHEDULES[schedules[0]].stages_per_rank[1] == 1 else 2 * len(ranks)
    made = History(
        seed=seed,
        world=world,
        ranks=tuple(ranks),
        schedules=tuple(schedules),
        num_stages=num_stages,
        microbatches=rng.choice((len(ranks), 2 * len(ranks), 2 * len(ranks) + 1)),
        model=rng.choice(("blocks", "blocks", "tied", "traced")),
        pair_loss=rng.random() < 0.2,
        timeout=PATIENCE,
        calls=(),
    )
    calls: list[Call] = []
    for _ in range(rng.randint(3, 7)):
        call = _call(rng, made, in_process)
        calls.append(call if accidents else replace(call, event=None, odd=None))
        if calls[-1].event is not None and calls[-1].event.ends:
            break
    last = calls[-1].event
    if last is not None and "kill" in last.kind:  # what a rank noted before dies with it
        calls[:-1] = [replace(call, event=None, odd=None) for call in calls[:-1]]
    # Whatever happened, a legal call follows.
    calls.append(Call("step", 0, _rows(rng, made), rng.choice((3, 5))))
    timeout = SHORT if any(c.event is not None and c.event.is_silence for c in calls) else PATIENCE
    return replace(made, calls=tuple(calls), timeout=timeout)


def _like(name: str, other: str) -> bool:
    """Whether two schedules hold the same stages on the same ranks."""
    one, two = SCHEDULES[name], SCHEDULES[other]
    most = (one.stages_per_rank[1] == 1, two.stages_per_rank[1] == 1)
    if most[0] != most[1]:
        return False
    stages = 3 if most[0] else 6
    return one.placement(3, stages) == two.placement(3, stages)


def _rows(rng: random.Random, history: History) -> int:
    return history.microbatches * rng.choice((1, 2)) + rng.choice((0, 0, 1))


def _call(rng: random.Random, history: History, in_process: bool) -> Call:
    name = rng.choices(
        ("step", "eval", "clip", "optimize", "save", "hook", "freeze", "thaw", "assign", "mode",
         "timeline", "zero_grad"),
        (8, 3, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1),
    )[0]  # fmt: skip
    call = Call(
        name,
        rng.randrange(len(history.schedules)),
        _rows(rng, history),
        rng.choice((3, 5)),
        scale=rng.choice((1.0, 1.0, -1.0, -2.0)),
        number=rng.randrange(1000),
    )
    if name not in ("step", "eval", "clip"):
        return call
    chance = rng.random()
    if chance < 0.45 and name != "clip":
        return replace(call, event=_event(rng, history, name, in_process))
    if chance < 0.6 and name in ODD and not in_process:
        odd = (rng.randrange(len(history.ranks)), rng.choice(ODD[name]))
        if odd[1] == "no_target":  # which only the rank of the last stage needs
            info = SCHEDULES[history.schedules[0]]
            placement = info.placement(len(history.ranks), history.num_stages)
            odd = (placement.stage_to_rank[-1], odd[1])
        return replace(call, odd=odd)
    return call


def _event(rng: random.Random, history: History, name: str, in_process: bool) -> Event:
    kinds = {"raise": 12, "nap": 2, "stranger": 1, "fork": 1}
    if not in_process:
        kinds |= {"stop": 1, "sleep": 1, "long_stop": 1, "kill": 1, "fork_kill": 1}
    kind = rng.choices(list(kinds), list(kinds.values()))[0]
    points = ["forward", "forward", "loss", "hook"] + ["backward"] * 2 * (name == "step")
    if kind != "raise":
        points.append("call")
    where = rng.choice(points)
    stage = rng.randrange(history.num_stages)
    if where == "loss":
        stage = history.num_stages - 1
    return Event(
        kind, where, stage, rng.randrange(history.microbatches), rng.choice(sorted(EXCEPTIONS))
    )


def run(history: History, *, limit: float = 90.0) -> list[str]:
    """What was wrong with a history, run on real processes."""
    answers = answers_of_ranks(history.world, play, history, limit=limit)
    records: dict[int, list[Record] | str] = {}
    for place, rank in enumerate(history.ranks):
        is_ok, value = answers[rank]
        records[place] = value if is_ok else str(value)
    return judge(history, records)


def judge(history: History, answers: dict[int, Any]) -> list[str]:
    """Compare what every rank noted with the promise."""
    complaints = []
    dead = {r for r, a in answers.items() if isinstance(a, str) and "did not survive" in a}
    for rank, answer in answers.items():
        if isinstance(answer, str) and rank not in dead:
            complaints.append(f"rank {rank}: {answer[-1500:]}")
    if complaints:
        return complaints
    alive = {rank: answer for rank, answer in answers.items() if rank not in dead}
    broken = False
    for i, call in enumerate(history.calls):
        found = {rank: answer[i] for rank, answer in alive.items()}
        what = _judge_call(history, call, found, dead, broken)
        complaints += [f"call {i} {call.brief}: {line}" for line in what]
        event = call.event
        gone = event is not None and event.kind in ("kill", "fork_kill") and bool(dead)
        silent = event is not None and event.is_silence and any(r.fired for r in found.values())
        broken = broken or gone or silent
        if what:
            break  # what follows is shaped by this
    return complaints


def _judge_call(
    history: History, call: Call, found: dict[int, Record], dead: set[int], broken: bool
) -> list[str]:
    event = call.event
    timeout = max((record.timeout for record in found.values()), default=history.timeout)
    grace = GRACE * max((record.slowness for record in found.values()), default=1.0)
    lines = [f"rank {r}: {text}" for r, record in found.items() for text in record.wrong]
    raised = {r: record for r, record in found.items() if record.error}
    fired = {r for r, record in found.items() if record.fired}
    for r, record in raised.items():
        if not record.is_ours and r not in fired:
            lines.append(f"rank {r} raised an internal {record.error}: {record.text}")
    if broken:
        if raised and len(raised) != len(found):
            lines.append(f"after a lost rank only ranks {sorted(raised)} raised")
        lines += _late(found, timeout + grace)
        return lines
    if dead and event is not None and event.kind in ("kill", "fork_kill"):
        (gone,) = dead
        return lines + _all_raised(found, set(), f"rank {gone}", timeout + grace)
    if fired and event is not None and event.kind == "raise":
        if event.where == "forward" and not raised:
            return lines  # it was raised in a run that only learns shapes, and that is made again
        return lines + _all_raised(found, fired, event.exception, grace)
    if fired and event is not None and event.is_silence:
        (slow,) = fired
        others = {r: record for r, record in found.items() if r != slow}
        lines += _all_raised(others, set(), f"rank {slow}", timeout + grace)
        return lines + _late({slow: found[slow]}, event.seconds(timeout) + grace)
    if call.odd is not None:
        return lines + _all_raised(found, set(), "", grace)
    lines += [f"rank {r} raised {x.error}: {x.text}" for r, x in raised.items()]
    return lines


def _all_raised(found: dict[int, Record], own: set[int], cause: str, limit: float) -> list[str]:
    lines = []
    for rank, record in found.items():
        if not record.error:
            lines.append(f"rank {rank} succeeded")
        elif rank in own and record.error != cause:
            lines.append(f"rank {rank} raised {record.error}: {record.text}, not its own {cause}")
        elif cause and rank not in own and cause not in record.text:
            lines.append(f"rank {rank} does not name {cause}: {record.error}: {record.text}")
    return lines + _late(found, limit)


def _late(found: dict[int, Record], limit: float) -> list[str]:
    return [
        f"rank {rank} took {record.seconds:.1f} s, allowed are {limit:g}: {record.text}"
        for rank, record in found.items()
        if record.seconds > limit
    ]
