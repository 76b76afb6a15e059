"""Run a program on paper: when does each action start and end, who holds what.

In:  a program, costs and the edges between stages.
Out: a `Timeline`.

A lowered program is simulated exactly as it runs: each rank's thread takes its
actions in order, SEND and RECV are posted to a stream, a stream carries one
transfer at a time in posting order once both halves are posted, UNSHARD and
REDUCE_GRAD run in order beside the thread, and a compute action waits for all
that it reads. If the costs do not overlap transfers, a transfer occupies both of its
ranks from the moment both are ready for it, and UNSHARD and REDUCE_GRAD hold their rank.

A compute-only program is simulated with every transfer on its own: a value
takes its transfer time from the end of its producer and waits for nothing else. If
the costs do not overlap transfers the program is lowered first (early receives,
nothing fused), since then their order matters.
"""

from __future__ import annotations

import heapq

from fxpipe.program.action import Action, Edges, Kind
from fxpipe.program.check.validate import Streams, validate
from fxpipe.program.costs import Costs, StageCosts
from fxpipe.program.lower import lower
from fxpipe.program.memory import memory_curves
from fxpipe.program.play.numbering import COMPUTE_KINDS, Numbering
from fxpipe.program.play.walk import check_edges
from fxpipe.program.program import Program
from fxpipe.program.timeline import Span, Timeline

__all__ = ["simulate"]


def simulate(
    program: Program,
    costs: Costs | None = None,
    edges: Edges | None = None,
    *,
    streams: Streams = "pair",
) -> Timeline:
    """The timeline of one step of a valid program.

        >>> simulate(one_f_one_b(4, 4, 8)).idle
        0.2727...

    Without costs, `StageCosts.uniform`: one rank's share of a microbatch takes 1 for each
    of F, I and W, and transfers take no time. `streams` says whether both directions
    between two ranks share one stream.

    Raises:
        ScheduleError: the program is not valid.
    """
    edges = check_edges(program, edges)
    if costs is None:
        costs = StageCosts.uniform(program.placement)
    if not program.is_lowered and not costs.overlaps_transfers:
        program = lower(program, edges, fuse=False, costs=costs)
    else:
        validate(program, edges, streams=streams)
    run = _Run(program, costs, edges, streams)
    run.play()
    spans = run.spans
    order = sorted(range(len(spans)), key=lambda i: (spans[i].start, spans[i].end, spans[i].rank))
    return Timeline(
        program.num_ranks,
        tuple(spans[i] for i in order),
        memory_curves(program, costs, edges, spans, run.posted),
        _critical_path(spans, run.causes),
    )


# A time and the span whose end it is, or -1.
_Moment = tuple[float, int]


class _Run:
    """The state of one simulation: who is where, what is there, and since when.

    `causes[i]` is the span whose end let span i start, or -1. `posted[i]` is when the
    receive with span i was posted. Things to wait for are numbers: values by their
    numbering, then unsharded stages from `_first_stage` on.
    """

    def __init__(self, program: Program, costs: Costs, edges: Edges, streams: Streams) -> None:
        self.program = program
        self.costs = costs
        self.streams = streams
        self.exclusive = not costs.overlaps_transfers
        self.spans: list[Span] = []
        self.causes: list[int] = []
        self.posted: dict[int, float] = {}
        self.numbering = numbering = Numbering(
            program.placement, edges, program.num_microbatches, lowered=program.is_lowered
        )
        self._first_stage = 2 * numbering.num_values
        # When something is there and after which span; a negative time while it is not.
        self._ready: list[_Moment] = [(-1.0, -1)] * (self._first_stage + program.num_stages)
        self._waiting: dict[int, int] = {}
        self._halves: dict[int, tuple[_Moment, Action]] = {}
        self._running: list[tuple[float, int, int]] = []
        self._position = [0] * program.num_ranks
        self._thread: list[_Moment] = [(0.0, -1)] * program.num_ranks
        self._rank_free: list[_Moment] = [(0.0, -1)] * program.num_ranks
        self._collectives_free: list[_Moment] = [(0.0, -1)] * program.num_ranks
        self._stream_free: dict[tuple[int, int], _Moment] = {}
        stages = range(program.num_stages)
        self._took = [[costs.compute(kind, stage) for stage in stages] for kind in COMPUTE_KINDS]
        rank_of = program.placement.stage_to_rank
        self._routes: dict[int, tuple[tuple[int, int], float]] = {}
        for base, value in numbering.crossing:
            ends = (rank_of[value.stage], rank_of[value.peer])
            num_bytes = costs.value_bytes(value.kind, value.stage, value.peer)
            self._routes[base] = (ends, costs.transfer(*ends, num_bytes))
        flies = {} if program.is_lowered else self._routes
        self._writes = [
            [
                [
                    # A lowered program has a transfer for what changes rank.
                    (base, self._routes[base][1] if base in flies else 0.0)
                    for base in bases
                ]
                for bases in of_kind
            ]
            for of_kind in numbering.writes
        ]
        self._shards = any(a.kind is Kind.UNSHARD for actions in program.ranks for a in actions)

    def play(self) -> None:
        """Run all ranks to the end of their actions."""
        for rank in range(self.program.num_ranks):
            self._advance(rank)
        while self._running:
            now, rank, span = heapq.heappop(self._running)
            self._finish(rank, (now, span))

    def _advance(self, rank: int) -> None:
        """Let a rank's thread go on until it starts something or has to wait."""
        actions = self.program.ranks[rank]
        now = self._thread[rank]
        while self._position[rank] < len(actions):
            action = actions[self._position[rank]]
            kind = action.kind
            if kind <= 3 or action.parts:
                start = self._start_of(rank, action, now)
                self._thread[rank] = now
                if start is not None:
                    self._begin(rank, action, start)
                return
            if kind <= 7:
                now = self._post(action, now)
            elif kind is Kind.RESHARD:
                self._ready[self._first_stage + action.stage] = (-1.0, -1)
                self._add_span(Span(rank, action, now[0], now[0]), now[1])
            elif self.exclusive:
                self._begin(rank, action, max(now, self._rank_free[rank]))
                return
            else:
                self._begin_collective(rank, action, now)
            self._position[rank] += 1

    def _start_of(self, rank: int, action: Action, now: _Moment) -> _Moment | None:
        """When a compute action can start; if that is not known yet, let the rank wait."""
        needed = self.numbering.reads_of(action)
        if self._shards:
            needed += [self._first_stage + part.stage for part in action.parts or (action,)]
        start = max(now, self._rank_free[rank]) if self.exclusive else now
        for number in needed:
            ready = self._ready[number]
            if ready[0] < 0:
                self._waiting[number] = rank
                return None
            if ready[0] > start[0]:
                start = ready
        return start

    def _begin(self, rank: int, action: Action, start: _Moment) -> None:
        end = start[0] + self._duration(action)
        span = self._add_span(Span(rank, action, start[0], end), start[1])
        if self.exclusive:
            self._rank_free[rank] = (end, span)
        heapq.heappush(self._running, (end, rank, span))

    def _begin_collective(self, rank: int, action: Action, now: _Moment) -> None:
        start = max(now, self._collectives_free[rank])
        end = start[0] + self._duration(action)
        span = self._add_span(Span(rank, action, start[0], end), start[1])
        self._collectives_free[rank] = (end, span)
        if action.kind is Kind.UNSHARD:
            self._ready[self._first_stage + action.stage] = (end, span)

    def _duration(self, action: Action) -> float:
        if action.parts:
            return self.costs.pair([(part.kind, part.stage) for part in action.parts])
        if action.kind <= 3:
            return self._took[action.kind][action.stage]
        if action.kind is Kind.UNSHARD:
            return self.costs.unshard(action.stage)
        return self.costs.reduce_grad(action.stage)

    def _finish(self, rank: int, now: _Moment) -> None:
        action = self.program.ranks[rank][self._position[rank]]
        self._position[rank] += 1
        self._thread[rank] = now
        woken = [rank]
        if action.kind is Kind.UNSHARD:
            self._ready[self._first_stage + action.stage] = now
        elif action.kind is not Kind.REDUCE_GRAD:
            for part in action.parts or (action,):
                assert part.microbatch is not None
                for base, delay in self._writes[part.kind][part.stage]:
                    number = base + part.microbatch
                    self._ready[number] = (now[0] + delay, now[1])
                    if number in self._waiting:
                        woken.append(self._waiting.pop(number))
        for other in woken:
            self._advance(other)

    def _post(self, action: Action, now: _Moment) -> _Moment:
        """Post half a transfer; return when the thread goes on.

        The second half starts the transfer. Both ends of a stream post in the same order
        (validate checks that), so transfers get their second half in that order too.
        """
        kind, stage, microbatch, peer, _ = action
        assert microbatch is not None and peer is not None
        base = self.numbering.carried[kind][stage][peer]
        number = base + microbatch
        if number not in self._halves:
            self._halves[number] = (now, action)
            return now
        first, other = self._halves.pop(number)
        ends, took = self._routes[base]
        stream = (min(ends), max(ends)) if self.streams == "pair" else ends
        start = max(first, now, self._stream_free.get(stream, (0.0, -1)))
        if self.exclusive:
            start = max(start, *(self._rank_free[end] for end in ends))
        end = start[0] + took
        is_recv = kind.is_recv
        halves = (other, action) if is_recv else (action, other)
        send = self._add_span(Span(ends[0], halves[0], start[0], end), start[1])
        recv = self._add_span(Span(ends[1], halves[1], start[0], end), start[1])
        self.posted[recv] = now[0] if is_recv else first[0]
        self._stream_free[stream] = done = (end, send)
        if self.exclusive:
            self._rank_free[ends[0]] = self._rank_free[ends[1]] = now = done
        arrived = number + self.numbering.num_values
        self._ready[arrived] = done
        if arrived in self._waiting:
            self._advance(self._waiting.pop(arrived))
        return now

    def _add_span(self, span: Span, cause: int) -> int:
        self.spans.append(span)
        self.causes.append(cause)
        return len(self.spans) - 1


def _critical_path(spans: list[Span], causes: list[int]) -> tuple[Span, ...]:
    if not spans:
        return ()
    at = max(range(len(spans)), key=lambda i: (spans[i].end, spans[i].start))
    path = []
    while at >= 0:
        path.append(spans[at])
        at = causes[at]
    return tuple(reversed(path))
