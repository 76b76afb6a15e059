"""Run one step of a session: on all ranks, or on none.

Inputs are split and handed to the stages, the program runs, all ranks confirm, and
gradients are made whole. Whatever goes wrong on any rank, every rank takes part in
the confirmation at the end and then raises; so the next step, or another schedule,
can follow.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from fxpipe.errors import InputError, RemoteStageError
from fxpipe.microbatch import split_target
from fxpipe.program import Program, Span
from fxpipe.runtime.agree.inputs import InputLeaves, stage_inputs, tensors_of
from fxpipe.runtime.agree.peers import Peers
from fxpipe.runtime.agree.request import Call, Chunks, Options, StepPlan, split_call
from fxpipe.runtime.parameters import tied as ties
from fxpipe.runtime.stage.executor import Executor, InterruptedStepError, run_local, run_rank
from fxpipe.runtime.stage.stage_kind import Stage, TracedFront
from fxpipe.runtime.stage.step_data import PAIR_AND_AUX, StepData
from fxpipe.runtime.wire.control import Control, Fault, remote_error
from fxpipe.runtime.wire.transport import TransportError

__all__ = ["Outcome", "StepRun"]


@dataclass(slots=True)
class Outcome:
    """What a step found out on this process. `loss` is known where the last stage is."""

    outputs: list[Any] | None
    rows: tuple[int, ...] | None
    losses: list[torch.Tensor]
    loss: torch.Tensor | None
    aux: torch.Tensor | None
    spans: list[Span] | None


class Context(Protocol):
    """What a step needs to know of its session."""

    program: Program
    options: Options
    records_spans: bool
    sums_weights: bool | None

    @property
    def stages(self) -> Mapping[int, Stage]: ...

    @property
    def has_last_stage(self) -> bool: ...

    def autocast(self) -> tuple[str, ...]: ...

    def parameters(self) -> list[nn.Parameter]: ...


class StepRun:
    """One step."""

    def __init__(self, session: Context, peers: Peers, plan: StepPlan, call: Call) -> None:
        self.session, self.peers, self.plan, self.call = session, peers, plan, call
        self.control: Control = peers.control
        self.trains = call.training and peers.has_loss
        self.leaves = InputLeaves()
        self.check_unchanged: Callable[[], None] = lambda: None
        self.step = StepData(
            is_training=self.trains,
            weights=plan.weights,
            loss_fn=session.options.loss_fn,
            targets=None,
            loss_kwargs=[],
            keeps_outputs=call.keeps_outputs and session.has_last_stage,
            wants_loss=plan.wants_loss,
            autocast=session.autocast(),
        )

    def run(self) -> Outcome:
        stash = self._stash()
        syncs = [runner.sync for runner in self.plan.runners.values()] if self.trains else []
        failure: Exception | None = None
        self.control.begin(self._status)
        try:
            for sync in syncs:
                sync.begin(self.session.options.timeout, None if stash is None else stash.earlier)
            with torch.set_grad_enabled(self.trains):
                failure = self._work()
            scale = self._confirm(failure)
            self._make_whole(stash, scale)
        finally:
            self.control.end()
            for sync in syncs:
                sync.end()
            for runner in self.plan.runners.values():
                # A forward leaves a root module unsharded; parameters() should not.
                runner.sync.reshard()
            for executor in self.plan.executors:
                executor.clear()
            if self.peers.channels is not None:
                self.peers.channels.clear()
        return self._outcome(scale)

    def _status(self) -> str:
        return "; ".join(executor.status() for executor in self.plan.executors)

    # Inputs

    def _prepare(self) -> None:
        """Split the inputs and hand them to the stages."""
        session, n = self.session, self.session.program.num_microbatches
        call = self._with_routed_inputs()
        chunks = split_call(call, session.stages, session.options, n)
        self.check_unchanged = chunks.check_unchanged
        self.step.targets = None
        if session.has_last_stage and call.target is not None:
            self.step.targets, _ = split_target(call.target, n, self.plan.rows)
        self.step.loss_kwargs = [call.loss_kwargs] * n
        if self.trains and any(t.requires_grad for t in tensors_of((chunks.args, chunks.kwargs))):
            self._detach(chunks)
        inputs = stage_inputs(session.stages.values(), chunks.args, chunks.kwargs)
        for index, runner in self.plan.runners.items():
            runner.begin(self.step, self.plan.wiring[index], *inputs[index])

    def _detach(self, chunks: Chunks) -> None:
        for m in range(len(chunks.args)):
            chunks.args[m] = self.leaves.detach((m, "args"), chunks.args[m])
            chunks.kwargs[m] = {
                name: self.leaves.detach((m, name), value)
                for name, value in chunks.kwargs[m].items()
            }

    def _with_routed_inputs(self) -> Call:
        """Exchange the inputs that some ranks were not given."""
        call, rank = self.call, self.control.rank
        if not self.plan.routes:
            return call
        (transport,) = self.peers.transports.values()
        info = next(iter(self.session.stages.values())).front
        assert isinstance(info, TracedFront)
        named = info.info.name_inputs(call.args, call.kwargs, partial=True)
        added = {}
        for route in self.plan.routes:
            if route.source == rank:
                transport.send(route.target, tensors_of(named[route.name]))
            elif route.target == rank:
                device = next(iter(self.session.stages.values())).device
                tensors = transport.recv(route.source, route.shapes, device).wait()
                added[route.name] = route.skeleton.build(tensors)
        return Call(
            call.training, call.args, {**call.kwargs, **added}, call.target,
            call.loss_kwargs, call.keeps_outputs,
        )  # fmt: skip

    # The program

    def _work(self) -> Exception | None:
        """Run the program; what went wrong, if anything, after all transfers are done."""
        plan = self.plan
        try:
            self._prepare()
            for executor in plan.executors:
                executor.spans = [] if self.session.records_spans else None
            if self.peers.is_local:
                run_local(plan.executors, plan.order)
            else:
                run_rank(plan.executors[0], self.control)
            self.check_unchanged()
        except InterruptedStepError as interrupted:
            return self._drained(remote_error(interrupted.fault))
        except TransportError as error:
            return self._lost(error)
        except Exception as error:
            self._describe(error)
            return self._drained(error)
        return None

    def _describe(self, error: Exception) -> None:
        """Tell the other ranks, and note on the exception where it happened."""
        executor = self._busiest()
        action = executor.where()
        fault = Fault(
            executor.rank,
            None if action is None else action.stage,
            None if action is None else action.microbatch,
            "" if action is None else str(action),
            type(error).__name__,
            str(error),
        )
        if action is not None:
            error.add_note(
                f"raised on rank {executor.rank} in stage {action.stage}, "
                f"microbatch {action.microbatch}, action {action}"
            )
        self.control.report(fault)

    def _busiest(self) -> Executor:
        return max(self.plan.executors, key=lambda executor: executor.since)

    def _drained(self, error: Exception) -> Exception:
        """Finish the transfers that are owed, so that no peer waits for this rank."""
        self._tell_replicas(error)
        if self.peers.is_local:
            return error
        try:
            self.plan.executors[0].drain()
        except TransportError as lost:
            self._abandon()
            self._report_lost(lost)
            raise error from lost
        return error

    def _tell_replicas(self, error: object) -> None:
        if self.trains:
            for runner in self.plan.runners.values():
                runner.sync.give_up(_brief(error))

    def _lost(self, error: TransportError) -> Exception:
        """A peer is gone or does not answer: there is nothing left to confirm."""
        fault = self._report_lost(error)
        self._tell_replicas(fault)
        if fault.kind == "lost":
            # Ranks that are not next to the lost one must not wait for this one.
            with contextlib.suppress(TransportError):
                self.plan.executors[0].drain(error.peer)
        self._abandon()
        message = f"another rank failed: {fault}"
        if fault.kind == "hang":
            message += f"\n{self.control.diagnose()}"
        raise RemoteStageError(
            message, rank=fault.rank, stage=fault.stage, microbatch=fault.microbatch,
            action=fault.action,
        ) from error  # fmt: skip

    def _report_lost(self, error: TransportError) -> Fault:
        executor = self._busiest()
        action = executor.where()
        what = "no answer from" if error.timed_out else "lost the connection to"
        fault = Fault(
            self.control.rank,
            None if action is None else action.stage,
            None if action is None else action.microbatch,
            "" if action is None else str(action),
            "TimeoutError" if error.timed_out else "ConnectionError",
            f"{what} rank {error.peer}: {error}",
            "hang" if error.timed_out else "lost",
        )
        return self.control.report(fault)

    def _abandon(self) -> None:
        for transport in self.peers.transports.values():
            transport.abandon()

    # After the program

    def _confirm(self, failure: Exception | None) -> float | None:
        """Every rank learns whether all succeeded, and the weight of the batch if it is needed."""
        weight = 0.0
        pairs = [term for term in self.step.losses.values() if term.weight is not None]
        if failure is None and pairs:
            weight = float(sum(term.weight for term in pairs))  # type: ignore[misc]
        vector = [
            int(failure is not None),
            int(bool(pairs)),
            int(bool(self.step.aux)),
            _bits(weight),
        ]
        vectors = self.control.exchange(vector)
        if failure is not None:
            raise failure
        if any(v[0] for v in vectors):
            self.control.look()
            fault = self.control.fault
            failed = next(rank for rank, v in enumerate(vectors) if v[0])
            raise remote_error(
                fault or Fault(failed, None, None, "", "error", "no message was left")
            )
        summed = [v for v in vectors if v[1]]
        if not summed or not self.trains:
            return None
        if any(v[2] for v in vectors):
            raise InputError(PAIR_AND_AUX)
        if not self.session.options.scale_grads:
            return None
        total = sum(_number(v[3]) for v in summed)
        return 1.0 / total if total else 0.0

    def _stash(self) -> ties.GradStash | None:
        """Old gradients go aside where the step's own must be told apart from them."""
        if not self.trains:
            return None
        if self.session.sums_weights is not False:
            return ties.GradStash(self.session.parameters())
        shared = [
            p for group in self.peers.tied for some in group.parameters.values() for p in some
        ]
        return ties.GradStash(shared)

    def _make_whole(self, stash: ties.GradStash | None, scale: float | None) -> None:
        if stash is None:
            return
        if self.peers.tied:
            for phase in ("send", "sum", "take"):
                for rank, transport in self.peers.transports.items():
                    ties.reduce(self.peers.tied, rank, transport, phase)
            for transport in self.peers.transports.values():
                transport.finish()
        stash.restore(scale)
        if self.plan.shared:
            self.leaves.add_up(self.plan.shared, self.control)
        self.leaves.give_back(scale)
        self.session.sums_weights = scale is not None

    def _outcome(self, scale: float | None) -> Outcome:
        step, n = self.step, self.session.program.num_microbatches
        terms = [step.losses[m] for m in sorted(step.losses)]
        loss = None
        if terms and terms[0].weight is not None:
            total = sum(term.total.detach() for term in terms)
            weight = sum(term.weight for term in terms)  # type: ignore[misc]
            loss = torch.as_tensor(total / weight)
        elif terms:
            loss = torch.stack(
                [t.total.detach() * step.weights[m] for m, t in enumerate(terms)]
            ).sum()
        aux = [value * step.weights[m] for m, value in step.aux]
        spans = None
        if self.session.records_spans:
            spans = [s for e in self.plan.executors for s in e.spans or ()]
            spans = [s for found in self.control.gather(spans) for s in found]
        outputs = None
        if step.keeps_outputs:
            outputs = [step.outputs[m] for m in range(n)]
        return Outcome(
            outputs,
            self.plan.rows,
            [term.reported for term in terms],
            loss,
            torch.stack(aux).sum() if aux else None,
            spans,
        )


def _brief(error: object) -> str:
    return f"{type(error).__name__}: {error}" if isinstance(error, Exception) else str(error)


def _bits(value: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def _number(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])
