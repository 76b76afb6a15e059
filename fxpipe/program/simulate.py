"""Run a program on paper: when does each action start and end, who holds what.

In:  a program, costs and the edges between stages.
Out: a `Timeline`.

A lowered program is simulated exactly as it runs: each rank's thread takes its
actions in order, SEND and RECV are posted to a stream, a stream carries one
transfer at a time in posting order once both halves are posted, UNSHARD and
REDUCE_GRAD run in order beside the thread, and a compute action waits for all
that it reads. If the costs do not overlap transfers, a transfer reserves both of its
ranks, and UNSHARD and REDUCE_GRAD hold their thread.

A compute-only program is simulated with every transfer on its own: a value
takes its transfer time from the end of its producer and waits for nothing else. If
the costs do not overlap transfers the program is lowered first (early receives,
nothing fused), since then their order matters.
"""

from __future__ import annotations

import heapq

from fxpipe.program.action import Action, Edges, Kind, recv_of, send_of
from fxpipe.program.costs import Costs, StageCosts
from fxpipe.program.lower import lower
from fxpipe.program.memory import memory_curves
from fxpipe.program.numbering import COMPUTE_KINDS, Numbering
from fxpipe.program.program import Program
from fxpipe.program.timeline import Span, Timeline
from fxpipe.program.validate import Streams, validate
from fxpipe.program.walk import check_edges

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


class _Run:
    """The state of one simulation: who is where, what is there, and since when.

    `causes[i]` is the span whose end let span i start, or -1. `posted[i]` is when the
    receive with span i was posted. A *token* is something to wait for: a value by its
    number, or an unsharded stage.
    """

    def __init__(self, program: Program, costs: Costs, edges: Edges, streams: Streams) -> None:
        self.program = program
        self.costs = costs
        self.streams = streams
        self.is_lowered = program.is_lowered
        self.exclusive = not costs.overlaps_transfers
        self.numbering = Numbering(program.placement, edges, program.num_microbatches, lowered=True)
        self.spans: list[Span] = []
        self.causes: list[int] = []
        self.posted: dict[int, float] = {}
        num_ranks, num_values = program.num_ranks, self.numbering.num_values
        self._first_stage_token = 2 * num_values
        self._there = bytearray(2 * num_values + program.num_stages)
        self._halves: dict[int, float] = {}
        self._waiting: dict[int, list[int]] = {}
        self._position = [0] * num_ranks
        self._thread_span = [-1] * num_ranks
        self._events: list[tuple[float, int, int, int, int]] = []
        self._num_events = 0
        # Since when a rank, its collectives or a stream is free, and after which span.
        self._rank_free = [(0.0, -1)] * num_ranks
        self._collectives_free = [(0.0, -1)] * num_ranks
        self._stream_free: dict[tuple[int, int], tuple[float, int]] = {}
        kinds = {action.kind for actions in program.ranks for action in actions}
        if Kind.UNSHARD not in kinds:
            self._there[self._first_stage_token :] = b"\x01" * program.num_stages
        stages = range(program.num_stages)
        self._durations = [[costs.compute(kind, s) for s in stages] for kind in COMPUTE_KINDS]
        rank_of = program.placement.stage_to_rank
        self._routes = {
            base // program.num_microbatches: (
                rank_of[value.stage],
                rank_of[value.peer],
                costs.transfer(
                    rank_of[value.stage],
                    rank_of[value.peer],
                    costs.value_bytes(value.kind, value.stage, value.peer),
                ),
            )
            for base, value in self.numbering.crossing
        }

    def play(self) -> None:
        """Run all ranks to the end of their actions."""
        for rank in range(self.program.num_ranks):
            self._advance(rank, 0.0, -1)
        while self._events:
            now, _, rank, token, span = heapq.heappop(self._events)
            if token >= 0:
                self._arrive(token, now, span)
            if rank >= 0:
                self._finish(rank, now, span)

    def _advance(self, rank: int, now: float, cause: int) -> None:
        """Let a rank's thread go on from `now` until it starts or waits for something."""
        actions = self.program.ranks[rank]
        while self._position[rank] < len(actions):
            action = actions[self._position[rank]]
            kind = action.kind
            if kind.is_transfer:
                self._post(rank, action, now)
            elif kind.is_compute or kind is Kind.OVERLAP:
                missing = self._missing(action)
                if missing is None:
                    self._start(rank, action, self._duration(action), now, cause)
                else:
                    self._waiting.setdefault(missing, []).append(rank)
                return
            elif kind is Kind.RESHARD:
                self._there[self._first_stage_token + action.stage] = 0
                self._add_span(Span(rank, action, now, now), cause)
            elif self.exclusive:
                self._start(rank, action, self._duration(action), now, cause)
                return
            else:
                self._start_collective(rank, action, now, cause)
            self._position[rank] += 1

    def _missing(self, action: Action) -> int | None:
        tokens = self.numbering.reads_of(action)
        tokens += [self._first_stage_token + part.stage for part in action.parts or (action,)]
        return next((token for token in tokens if not self._there[token]), None)

    def _duration(self, action: Action) -> float:
        if action.kind is Kind.UNSHARD:
            return self.costs.unshard(action.stage)
        if action.kind is Kind.REDUCE_GRAD:
            return self.costs.reduce_grad(action.stage)
        if action.parts:
            return self.costs.pair([(part.kind, part.stage) for part in action.parts])
        return self._durations[action.kind][action.stage]

    def _start(self, rank: int, action: Action, took: float, now: float, cause: int) -> None:
        if self.exclusive:
            now, cause = max((now, cause), self._rank_free[rank])
        span = self._add_span(Span(rank, action, now, now + took), cause)
        if self.exclusive:
            self._rank_free[rank] = (now + took, span)
        self._push(now + took, rank, -1, span)

    def _start_collective(self, rank: int, action: Action, now: float, cause: int) -> None:
        now, cause = max((now, cause), self._collectives_free[rank])
        end = now + self._duration(action)
        span = self._add_span(Span(rank, action, now, end), cause)
        self._collectives_free[rank] = (end, span)
        if action.kind is Kind.UNSHARD:
            self._push(end, -1, self._first_stage_token + action.stage, span)

    def _finish(self, rank: int, now: float, span: int) -> None:
        action = self.program.ranks[rank][self._position[rank]]
        self._position[rank] += 1
        self._thread_span[rank] = span
        if action.kind is Kind.UNSHARD:
            self._arrive(self._first_stage_token + action.stage, now, span)
        for number in self.numbering.writes_of(action):
            self._arrive(number, now, span)
            route = self._routes.get(number // self.program.num_microbatches)
            if route is not None and not self.is_lowered:
                self._push(now + route[2], -1, number + self.numbering.num_values, span)
        self._advance(rank, now, span)

    def _arrive(self, token: int, now: float, span: int) -> None:
        self._there[token] = 1
        for rank in self._waiting.pop(token, ()):
            self._advance(rank, now, span)

    def _post(self, rank: int, action: Action, now: float) -> None:
        """Post half a transfer; the second half starts it.

        Both ends of a stream post in the same order (validate checks that), so
        transfers get their second half in the order of the stream.
        """
        assert action.peer is not None and action.microbatch is not None
        number = self.numbering.carried[action.kind][action.stage][action.peer]
        number += action.microbatch
        if number not in self._halves:
            self._halves[number] = now
            return
        source, target, took = self._routes[number // self.program.num_microbatches]
        ends = (source, target)
        stream = (min(ends), max(ends)) if self.streams == "pair" else ends
        start = max(
            (now, self._thread_span[rank]),
            self._stream_free.get(stream, (0.0, -1)),
            *(self._rank_free[end] for end in ends if self.exclusive),
        )
        value = self.numbering.value(number)
        send = self._add_span(Span(source, send_of(value), start[0], start[0] + took), start[1])
        recv = self._add_span(Span(target, recv_of(value), start[0], start[0] + took), start[1])
        self.posted[recv] = now if action.kind.is_recv else self._halves[number]
        self._stream_free[stream] = (start[0] + took, send)
        if self.exclusive:
            for end in ends:
                self._rank_free[end] = (start[0] + took, send)
        self._push(start[0] + took, -1, number + self.numbering.num_values, send)

    def _push(self, time: float, rank: int, token: int, span: int) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (time, self._num_events, rank, token, span))

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
