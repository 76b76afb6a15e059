"""Run one rank's actions; `run_local` runs all ranks of one process in turn.

In:  a lowered program, the boundary of every microbatch, stage runners, a transport, and the
     messages before and after the program (routed inputs, tied gradients).
Out: each action done once, in the program's order.

An executor is bound once: every action becomes a function without arguments that
knows its slots, its peer and its stage. A step only calls them. A value lives in
its slot from its writer to its last reader; nothing is kept for later.

When anything fails, on this rank or elsewhere, the executor drains: it finishes
the messages that the rest of the step owes its peers, with empty tensors, and the
collectives that it owes the replicas of its stages, so that no rank waits for another
and the process groups stay usable.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from fxpipe.errors import InputError
from fxpipe.program import Action, Edges, Kind, Program, Span, Value, ValueKind, reads, writes
from fxpipe.runtime.control.control import Control
from fxpipe.runtime.parameters.sync import collective
from fxpipe.runtime.stage.boundary import Boundary
from fxpipe.runtime.stage.stage_runner import StageRunner
from fxpipe.runtime.wire.failure import Failure
from fxpipe.runtime.wire.message import Half, Packing, Shares, Unpacked
from fxpipe.runtime.wire.transport import Incoming, Transport
from fxpipe.torch_inside import profiler_is_on

__all__ = ["ActionContext", "Executor", "Hooks", "InterruptedStepError", "run_local", "run_rank"]

Run = Callable[[], None]


class InterruptedStepError(Exception):
    """Another rank failed while this one was working."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure


@dataclass(frozen=True, slots=True)
class ActionContext:
    """What a user's function for an action is given."""

    action: Action
    rank: int
    module: torch.nn.Module
    default: Run
    parts: tuple[tuple[Action, Run], ...] = ()  # of a pair, each with what does it


@dataclass(slots=True)
class Hooks:
    """Users' functions around, or instead of, the actions of a kind."""

    before: dict[Kind, list[Callable[[Action], None]]]
    after: dict[Kind, list[Callable[[Action], None]]]
    instead: dict[Kind, Callable[[ActionContext], None]]
    version: int = 0


class Executor:
    """The bound actions of one rank."""

    def __init__(
        self,
        rank: int,
        program: Program,
        edges: Edges,
        boundaries: Sequence[Boundary],
        runners: Mapping[int, StageRunner],
        transport: Transport,
        packings: Callable[[], Sequence[Packing]],
        hooks: Hooks,
        max_sends: int | None = None,
        *,
        before: Sequence[Half] = (),
        after: Sequence[Half] = (),
    ) -> None:
        self.rank = rank
        self.position = 0
        self._part: Action | None = None  # of the pair that is being done
        self.since = 0.0
        self.spans: list[Span] | None = None
        self.waited = 0.0  # for inputs, in seconds, since it was last set to zero
        self._actions = program.ranks[rank]
        self._stage_to_rank = program.placement.stage_to_rank
        self._edges = edges
        self.boundaries = boundaries
        self._runners = runners
        self._transport, self._make_packings = transport, packings
        self._packings: dict[tuple[ValueKind, int, int], Sequence[Packing]] = {}
        self._hooks = hooks
        self._max_sends = max_sends  # that are kept at once
        self._slot_of: dict[Value, int] = {}
        self._slots: list[Any] = []
        self._sent: dict[Value, Any] = {}
        self._sends: list[Value] = []  # in the program's order
        self._proved = _proofs(program, edges, rank)
        self._owed: list[Half | Run] = [*before]  # messages and collectives: somebody waits
        self._paid = 0  # of these, in this step
        self.bound: list[Run] = [self._with_hooks(action) for action in self._actions]
        self._owed += after

    def status(self) -> str:
        """What this rank is doing, for reports about others that wait."""
        if not self._actions:
            return "nothing to do"
        action = self._actions[min(self.position, len(self._actions) - 1)]
        held = time.monotonic() - self.since
        waits = ""
        for value in reads(action, self._edges):
            source = self._stage_to_rank[value.stage]
            if source != self.rank and self._slots[self._slot(value)] is not None:
                waits = f", which needs {value} from rank {source}"
        return f"in action {action} for {held:.1f} s{waits}"

    def where(self) -> Action | None:
        """What is being done, a part of a pair by itself."""
        at = self.position
        return self._part or (self._actions[at] if at < len(self._actions) else None)

    def clear(self) -> None:
        """Forget everything in flight."""
        self._slots = [None] * len(self._slots)
        self._sent.clear()
        self._paid = self.position = 0
        self._part = None
        for runner in self._runners.values():
            runner.clear()

    def finish(self) -> None:
        """Wait until all that was sent has been read."""
        self._transport.finish()
        self._sent.clear()

    def drain(self) -> None:
        """Do what others wait for, in the program's order, and compute nothing.

        Messages that are left, with empty tensors, and the collectives of replicas.
        """
        incoming = [value for value in self._slots if hasattr(value, "wait")]
        while self._paid < len(self._owed):
            owed = self._owed[self._paid]
            self._paid += 1
            if not isinstance(owed, Half):
                owed()
                continue
            posted = owed.drain()
            if posted is not None:
                incoming.append(posted)
        for pending in incoming:
            (pending.incoming if type(pending) is Unpacked else pending).wait()
        self._transport.finish()

    def drain_collectives(self) -> None:
        """The same where all ranks are of one process: only replicas wait."""
        for owed in self._owed[self._paid :]:
            if not isinstance(owed, Half):
                owed()

    def post_next(self, tensors: Sequence[torch.Tensor] = ()) -> Any:
        """Post the next message that is owed: one before or after the program."""
        half = self._owed[self._paid]
        assert isinstance(half, Half)
        posted = half.post(tensors)
        self._paid += 1
        return posted

    # Binding: one function per action.

    def _with_hooks(self, action: Action) -> Run:
        run = self._bind(action)
        hooks = self._hooks
        instead = hooks.instead.get(action.kind)
        before, after = hooks.before.get(action.kind, ()), hooks.after.get(action.kind, ())
        if instead is not None:
            run = self._bind_instead(instead, action, run)
        if not before and not after:
            return run

        def wrapped() -> None:
            for callback in before:
                callback(action)
            run()
            for callback in after:
                callback(action)

        return wrapped

    def _bind_instead(
        self, instead: Callable[[ActionContext], None], action: Action, run: Run
    ) -> Run:
        done: list[Action] = []
        lost: list[BaseException] = []  # on a thread of the user's, whom nobody asks

        def noting(part: Action, run: Run) -> Run:
            def noted() -> None:
                try:
                    run()
                except BaseException as error:
                    lost.append(error)
                    raise
                done.append(part)

            return noted

        parts = tuple((part, noting(part, self._bind(part))) for part in action.parts)
        module = self._runners[action.stage].module
        context = ActionContext(action, self.rank, module, noting(action, run), parts)
        needed = {part for part, _ in parts} or {action}
        is_needed = bool(parts) or action.kind.is_transfer or action.kind.is_compute
        computes = [part for part in action.each if part.kind.is_compute]
        values = [v for part in computes for v in reads(part, self._edges) if v.kind in _MOVED]
        taken = [self._slot(value) for value in values]

        def replaced() -> None:
            done.clear()
            lost.clear()
            for slot in taken:  # the function may use threads, of which transports know nothing
                value = self._slots[slot]
                if hasattr(value, "wait"):
                    self._slots[slot] = self._await(value)
            instead(context)
            if not is_needed or action in done or needed.issubset(done):
                return
            if lost:
                raise lost[0]
            raise InputError(
                f"the function that replaces {action.kind.text} did not call "
                f"context.default() for {action}, so its result is missing"
            )

        return replaced

    def _bind(self, action: Action) -> Run:
        kind, stage, microbatch, _, parts = action
        if kind is Kind.OVERLAP:
            ordered = _in_order(parts, self._edges)
            return partial(self._run_parts, [(part, self._bind(part)) for part in ordered])
        if kind.is_send:
            return self._bind_send(reads(action, self._edges)[0], stage)
        if kind.is_recv:
            return self._bind_recv(writes(action, self._edges)[0], stage)
        runner = self._runners[stage]
        ask = collective(runner.sync, kind)
        if ask is not None:
            return self._bind_collective(ask)
        assert microbatch is not None
        if kind.is_offload:
            return partial(runner.offload if kind is Kind.OFFLOAD else runner.reload, microbatch)
        if kind is Kind.BACKWARD_WEIGHT:
            return partial(runner.backward_weight, microbatch)
        compute = {
            Kind.FORWARD: runner.forward,
            Kind.BACKWARD: runner.backward,
            Kind.BACKWARD_INPUT: runner.backward_input,
        }[kind]
        sources = [v for v in reads(action, self._edges) if v.kind in _MOVED]
        targets = [v for v in writes(action, self._edges) if v.kind in _MOVED]
        return self._bind_compute(compute, microbatch, sources, targets)

    def _run_parts(self, parts: Sequence[tuple[Action, Run]]) -> None:
        for self._part, run in parts:
            run()
        self._part = None

    def _bind_compute(
        self,
        compute: Callable[[int, list[list[torch.Tensor]]], list[list[torch.Tensor]]],
        microbatch: int,
        sources: Sequence[Value],
        targets: Iterable[Value],
    ) -> Run:
        proofs = [sent for value in sources for sent in self._proved.get(value, ())]
        taken = [self._slot(value) for value in sources]
        given = [self._slot(value) for value in targets]
        sent, release = self._sent, self._transport.release

        def run() -> None:
            slots = self._slots
            arrived = []
            for slot in taken:
                value = slots[slot]
                arrived.append(value if type(value) is list else self._await(value))
                slots[slot] = None
            for slot, made in zip(given, compute(microbatch, arrived), strict=True):
                slots[slot] = made
            if sent:
                for value in proofs:
                    handle = sent.pop(value, None)
                    if handle is not None:
                        release(handle)

        return run

    def _await(self, incoming: Incoming) -> list[torch.Tensor]:
        if self.spans is None:
            return incoming.wait()
        begin = time.perf_counter()
        arrived = incoming.wait()
        self.waited += time.perf_counter() - begin
        return arrived

    def _bind_send(self, value: Value, stage: int) -> Run:
        slot, sent = self._slot(value), self._sent
        release, before = self._transport.release, None
        if self._max_sends is not None:
            before = self._sends[-self._max_sends] if len(self._sends) >= self._max_sends else None
            self._sends.append(value)
        half = self._half(value, stage, value.peer, is_send=True)
        post, paid = half.post, self._owe(half)

        def run() -> None:
            oldest = None if before is None else sent.pop(before, None)
            if oldest is not None:
                release(oldest)
            handle = post(self._slots[slot])
            self._paid = paid
            self._slots[slot] = None
            if handle is not None:
                sent[value] = handle

        return run

    def _bind_recv(self, value: Value, stage: int) -> Run:
        slot = self._slot(value)
        half = self._half(value, stage, value.stage, is_send=False)
        post, paid = half.post, self._owe(half)

        def run() -> None:
            self._slots[slot] = post()
            self._paid = paid

        return run

    def _bind_collective(self, ask: Run) -> Run:
        paid = self._owe(ask)

        def run() -> None:
            ask()
            self._paid = paid

        return run

    def _owe(self, owed: Half | Run) -> int:
        self._owed.append(owed)
        return len(self._owed)

    def _half(self, value: Value, stage: int, other: int, *, is_send: bool) -> Half:
        is_activation = value.kind is ValueKind.ACTIVATION
        edge = (value.stage, value.peer) if is_activation else (value.peer, value.stage)
        ports = [
            port
            for port in self.boundaries[value.microbatch].ports[edge]
            if is_activation or port.has_gradient
        ]
        key = (value.kind, value.stage, value.peer)
        if key not in self._packings:
            self._packings[key] = self._make_packings()
        is_same = all(port.layout is None or port.layout.is_replicated for port in ports)
        return Half(
            self._transport,
            self._stage_to_rank[other],
            [(port.shape, port.dtype) for port in ports],
            self._runners[stage].device,
            0 if is_activation else 1,
            [p for p in self._packings[key] if is_same or not isinstance(p, Shares)],
            is_send=is_send,
        )

    def _slot(self, value: Value) -> int:
        slot = self._slot_of.get(value)
        if slot is None:
            slot = self._slot_of[value] = len(self._slots)
            self._slots.append(None)
        return slot


def run_rank(executor: Executor, control: Control) -> None:
    """Run all actions of this process's only rank, or raise what stopped them.

    Raises:
        InterruptedStepError: another rank failed. As after any other exception, `drain` is due.
    """
    step = _stepper(executor)
    for position, run in enumerate(executor.bound):
        executor.position = position
        executor.since = time.monotonic()
        failure = control.failure
        if failure is not None:
            raise InterruptedStepError(failure)
        step(position, run)
    executor.position = len(executor.bound)
    executor.finish()


def run_local(executors: Sequence[Executor], order: Sequence[tuple[int, int]]) -> None:
    """Run the actions of all ranks in one process, in the order given: (rank, position)."""
    steppers = [_stepper(executor) for executor in executors]
    for rank, position in order:
        executor = executors[rank]
        executor.position = position
        executor.since = time.monotonic()
        steppers[rank](position, executor.bound[position])
    for executor in executors:
        executor.finish()


def _stepper(executor: Executor) -> Callable[[int, Run], None]:
    """How to run one action: plainly, or with a profiler range or a clock around it."""
    spans, actions = executor.spans, executor._actions
    profiled = profiler_is_on()
    if spans is None and not profiled:
        return lambda _, run: run()

    def step(position: int, run: Run) -> None:
        action = actions[position]
        label: Any = contextlib.nullcontext()
        if profiled:
            label = torch.profiler.record_function(f"fxpipe:{action}")
        executor.waited = 0.0
        start = time.perf_counter()
        with label:
            run()
        if spans is not None:
            # An action begins when its inputs are there: waiting is not computing.
            spans.append(Span(executor.rank, action, start + executor.waited, time.perf_counter()))

    return step


_MOVED = (ValueKind.ACTIVATION, ValueKind.GRADIENT)


def _proofs(program: Program, edges: Edges, rank: int) -> dict[Value, list[Value]]:
    """For each message to a rank, those of its own messages that were surely read before.

    Its peer had used them when it sent: so the sent tensors need not be kept any longer.
    """
    rank_of = program.placement.stage_to_rank
    peers = {rank_of[a.peer] for a in program.ranks[rank] if a.peer is not None}
    proved: dict[Value, list[Value]] = {}
    for peer in peers:
        used: list[Value] = []
        for action in program.ranks[peer]:
            for part in action.each:
                found = reads(part, edges)
                if part.kind.is_compute:
                    used += [v for v in found if v.kind in _MOVED and rank_of[v.stage] == rank]
                elif part.kind.is_send and rank_of[found[0].peer] == rank:
                    proved[found[0]], used = used, []
    return proved


def _in_order(parts: Sequence[Action], edges: Edges) -> list[Action]:
    """The parts of a pair so that none comes before what it reads."""
    first, second = parts
    made = set(writes(second, edges))
    return [second, first] if made & set(reads(first, edges)) else [first, second]
