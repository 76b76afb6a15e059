"""Run a program on paper: when does each action start and end, who holds what.

In:  a program, costs and the edges between stages.
Out: a `Timeline`.

A lowered program is simulated exactly as it runs: each rank's thread takes its
actions in order, SEND and RECV are posted to a stream (activations and gradients have
their own), a stream carries one transfer at a time in posting order once both halves
are posted and the sender knows it, UNSHARD and REDUCE_GRAD run in order beside the
thread, OFFLOAD and RELOAD likewise on the link to the host, and a compute action waits
for all that it reads. If the costs do not overlap transfers, a transfer occupies both of
its ranks from the moment both are ready for it, and UNSHARD and REDUCE_GRAD hold their
rank.

A compute-only program is simulated with every transfer on its own: a value
takes its transfer time from the end of its producer and waits for nothing else. If
the costs do not overlap transfers the program is lowered first (early receives,
nothing fused), since then their order matters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fxpipe.errors import ScheduleError
from fxpipe.program.action import Action, Edges, Kind
from fxpipe.program.check.validate import validate
from fxpipe.program.costs import StageCosts
from fxpipe.program.lower import lower
from fxpipe.program.memory import memory_curves
from fxpipe.program.play.engine import Dispatch, Done, cost_times
from fxpipe.program.play.numbering import Numbering
from fxpipe.program.play.queues import QueueKey, Queues, Streams
from fxpipe.program.play.walk import check_edges
from fxpipe.program.program import Program
from fxpipe.program.timeline import Span, Timeline

__all__ = ["simulate"]


def simulate(
    program: Program,
    costs: StageCosts | None = None,
    edges: Edges | None = None,
    *,
    streams: Streams = "pair",
    max_outstanding_sends: int | None = None,
) -> Timeline:
    """The timeline of one step of a valid program.

        >>> simulate(one_f_one_b(4, 4, 8)).idle
        0.2727...

    Without costs, `StageCosts.uniform`: one rank's share of a microbatch takes 1 for each
    of F, I and W, and transfers take no time. `streams` says which activations of a rank
    share a queue, and likewise which gradients; see `fxpipe.program.play.queues`.
    `max_outstanding_sends` is the schedules' option: before it sends, a rank of a lowered
    program waits for the send so many before.

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
    numbering = Numbering.of(program, edges)
    play = _Simulation(program, costs, numbering, streams, max_outstanding_sends)
    play.run()
    if not play.is_done:
        raise ScheduleError(
            f"with at most {max_outstanding_sends} sends at once ranks wait for each other: "
            "allow more, or lower the program with early receives"
        )
    spans = play.spans
    order = sorted(spans, key=lambda place: (spans[place].start, spans[place].end, place[0]))
    return Timeline(
        program.num_ranks,
        tuple(spans[place] for place in order),
        memory_curves(program, costs, edges, spans, play.posted),
        _critical_path(spans, play.causes),
    )


Place = tuple[int, int]
"""A rank and a position in its list: each span has its own."""

# A time and the place of the span whose end it is.
_Moment = tuple[float, Place]
_NOWHERE = (-1, -1)
_START: _Moment = (0.0, _NOWHERE)


class _Simulation(Dispatch):
    """Ranks that follow a program, and the network between them.

    `causes[place]` is the span whose end let the one there start. `posted[place]` is when
    the receive there was posted.
    """

    def __init__(
        self,
        program: Program,
        costs: StageCosts,
        numbering: Numbering,
        streams: Streams,
        max_sends: int | None,
    ) -> None:
        super().__init__(program.num_ranks, numbering, cost_times(costs, program.num_stages))
        self.network = self
        self.spans: dict[Place, Span] = {}
        self.causes: dict[Place, Place] = {}
        self.posted: dict[Place, float] = {}
        self._program, self._costs = program, costs
        self._exclusive = not costs.overlaps_transfers
        self._queues: Queues[tuple[_Moment, Place]] = Queues(numbering, streams, lanes=True)
        self._queue_free: dict[QueueKey, _Moment] = {}
        self._collectives: list[_Moment] = [_START] * program.num_ranks
        self._unsharded: dict[int, _Moment] = {}
        # When each rank's link to the host is free.
        self._host: list[_Moment] = [_START] * program.num_ranks
        self._reloaded: dict[tuple[int, int | None], _Moment] = {}
        self._made_by: dict[int, Place] = {}
        # What each rank did until it was free.
        self._last: list[Place] = [_NOWHERE] * program.num_ranks
        self._max_sends = max_sends
        self._sends: list[list[int]] = [[] for _ in program.ranks]

    @property
    def is_done(self) -> bool:
        return all(at == len(self._program.ranks[r]) for r, at in enumerate(self.position))

    def choose(self, rank: int, now: float) -> Action | None:
        """The next action of the program; one that computes waits for parameters and residuals."""
        actions, at = self._program.ranks[rank], self.position[rank]
        if at == len(actions):
            return None
        action = actions[at]
        if self._max_sends is not None and action.kind.is_send:
            before = self._sends[rank][-self._max_sends :]
            if len(before) == self._max_sends:
                arrived = before[0] + self.numbering.num_values
                if self.ready[arrived] < 0:
                    return None  # `post` asks again
                self._occupy(rank, (self.ready[arrived], self._made_by[arrived]))
        if (self._unsharded or self._reloaded) and (action.kind.is_compute or action.parts):
            for part in action.each:
                self._occupy(rank, self._unsharded.get(part.stage, _START))
                if part.kind.is_backward:
                    self._occupy(rank, self._reloaded.get((part.stage, part.microbatch), _START))
        return action

    def _occupy(self, rank: int, until: _Moment) -> None:
        if until[0] > self.free_at[rank]:
            self.free_at[rank], self._last[rank] = until

    def _take_turns(self) -> Iterator[int]:
        noted = 0
        for rank in super()._take_turns():
            yield rank
            for done in self.done[noted:]:
                self._note(done)
            noted = len(self.done)

    def _note(self, done: Done) -> None:
        end, rank, at, start, late = done
        self._add((rank, at), start, end, self._last[rank] if late < 0 else self._made_by[late])
        self._last[rank] = (rank, at)
        for number in self.numbering.writes_of(self.ranks[rank][at]):
            self._made_by[number] = (rank, at)

    def _add(self, place: Place, start: float, end: float, cause: Place) -> None:
        rank, position = place
        self.spans[place] = Span(rank, self._program.ranks[rank][position], start, end)
        self.causes[place] = cause

    def post(self, rank: int, position: int, number: int, now: float) -> float:
        """Post half a transfer; begin those whose halves are at the heads of their queues."""
        self.free_at[rank] = now
        half = ((now, self._last[rank]), (rank, position))
        if self._max_sends is not None and self._program.ranks[rank][position].kind.is_send:
            self._sends[rank].append(number)
        for met, (sent, send), (received, recv) in self._queues.post(rank, number, half):
            keys = self._queues.keys(met)
            asked = received[0] + self._costs.ask(send[0], recv[0]), received[1]
            start = max(sent, asked, *(self._queue_free.get(key, _START) for key in keys))
            if self._exclusive:
                start = max(start, *((self.free_at[r], self._last[r]) for r, _ in (send, recv)))
            value = self.numbering.value(met)
            end = start[0] + self.times.transfer(send[0], recv[0], value)
            self._add(send, start[0], end, start[1])
            self._add(recv, start[0], end, start[1])
            self.posted[recv] = received[0]
            self._queue_free.update((key, (end, send)) for key in keys)
            if self._exclusive:
                for other in (send[0], recv[0]):
                    self._occupy(other, (end, send))
                    self.ask_again(other, end)
            self._made_by[met + self.numbering.num_values] = send
            self.deliver(met, end)
            if self._max_sends is not None:
                self.ask_again(send[0], self.free_at[send[0]])
        return self.free_at[rank]

    def handle(self, rank: int, position: int, now: float) -> float:
        """UNSHARD and REDUCE_GRAD run in order beside the rank, or hold it up.

        Copies to and from the host run in order beside both.
        """
        action, place = self._program.ranks[rank][position], (rank, position)
        if action.kind is Kind.RESHARD:
            self._add(place, now, now, self._last[rank])
            return now
        if action.kind.is_offload:
            start = max((now, self._last[rank]), self._host[rank])
            self._host[rank] = (start[0] + self._costs.offload(action.stage), place)
            self._add(place, start[0], self._host[rank][0], start[1])
            if action.kind is Kind.RELOAD:
                self._reloaded[action.stage, action.microbatch] = self._host[rank]
            return now
        took = self._costs.unshard if action.kind is Kind.UNSHARD else self._costs.reduce_grad
        start = max((now, self._last[rank]), self._collectives[rank])
        done = self._collectives[rank] = (start[0] + took(action.stage), place)
        self._add(place, start[0], done[0], start[1])
        if action.kind is Kind.UNSHARD:
            self._unsharded[action.stage] = done
        if not self._exclusive:
            return now
        self.free_at[rank] = now
        self._occupy(rank, done)
        return self.free_at[rank]


def _critical_path(spans: Mapping[Place, Span], causes: Mapping[Place, Place]) -> tuple[Span, ...]:
    if not spans:
        return ()
    at = max(spans, key=lambda place: (spans[place].end, spans[place].start))
    path = []
    while at != _NOWHERE:
        path.append(spans[at])
        at = causes[at]
    return tuple(reversed(path))
