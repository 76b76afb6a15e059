"""Run one step of a session as a transaction: on all ranks, or on none.

    work     hand the inputs to the stages, run the program, merge outputs, add up tied gradients
    confirm  one exchange: all ranks succeeded, or all raise
    whole    where needed: weighted losses, gradients of inputs; confirm again

Whatever goes wrong on any rank, every rank takes part in the confirmation and then raises; so the
next step, or another schedule, can follow. Nothing after the last confirmation can fail. A step
that fails leaves gradients and buffers as they were before it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fxpipe.errors import InputError
from fxpipe.microbatch import merge_chunks, split_target
from fxpipe.program import Span
from fxpipe.runtime.agree.inputs import InputLeaves, stage_inputs, tensors_of
from fxpipe.runtime.agree.request import Call, Chunks, split_call
from fxpipe.runtime.agree.step_plan import StepPlan
from fxpipe.runtime.batch_weight import BatchWeight, have_hooks
from fxpipe.runtime.control.control import Control
from fxpipe.runtime.parameters import tied as ties
from fxpipe.runtime.parameters.partners import Partners
from fxpipe.runtime.parameters.replicas import Replicas
from fxpipe.runtime.parameters.tied import Scale
from fxpipe.runtime.rollback import Rollback
from fxpipe.runtime.stage.executor import Executor, InterruptedStepError, run_local, run_rank
from fxpipe.runtime.stage.step_data import StepData
from fxpipe.runtime.wire.failure import Failure, described, in_words, note, remote_error
from fxpipe.runtime.wire.transport import Transport, TransportError
from fxpipe.torch_inside import parameters_of, version_of

if TYPE_CHECKING:
    from fxpipe.runtime.session import Session

__all__ = ["Outcome", "StepRun"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step found out on this process. `loss` is known where the last stage is."""

    output: Any
    losses: list[torch.Tensor]
    loss: torch.Tensor | None
    aux: torch.Tensor | None
    spans: list[Span] | None


class StepRun:
    """One step."""

    def __init__(
        self,
        session: Session,
        control: Control,
        transports: Mapping[int, Transport],
        plan: StepPlan,
        call: Call,
        chunks: Chunks,
        partners: Partners,
        *,
        records_spans: bool,
        batch_weight: float,
    ) -> None:
        self.session, self.plan, self.call = session, plan, call
        self.chunks = replace(chunks, args=list(chunks.args), kwargs=list(chunks.kwargs))
        self.control, self.transports = control, transports
        self.records_spans = records_spans
        self.trains = call.training and plan.has_loss
        syncs = [runner.sync for runner in plan.runners.values()]
        self._replicas = Replicas(
            syncs, session.options.timeout, trains=self.trains, reduces=call.finalizes
        )
        self._partners = partners
        self.leaves = InputLeaves()
        self._rollback: Rollback | None = None
        self._stash: ties.GradStash | None = None
        self._versions: dict[nn.Parameter, int] = {}
        self.step = StepData(
            is_training=self.trains,
            weights=plan.weights,
            loss_fn=session.options.loss_fn,
            targets=None,
            loss_kwargs=[],
            keeps_outputs=call.keeps_outputs and session.has_last_stage,
            wants_loss=plan.wants_loss,
            autocast=session.autocast(),
            batch_weight=batch_weight if session.options.scale_grads else 1.0,
            grad_scale=session.grad_scale,
        )
        self._weight = BatchWeight(
            self.step.batch_weight,
            control,
            self._replicas,
            transports,
            next(iter(session.stages.values())).device,
            has_replicas=plan.has_replicas,
        )

    def run(self) -> Outcome:
        self._partners.restart()
        with self._replicas.limited():
            return self._run()

    def _run(self) -> Outcome:
        outcome: list[Outcome] = []
        try:
            with torch.set_grad_enabled(self.trains):
                failure = self._work(outcome)
            scale = self._confirm(failure)
            if self._needs_whole(scale):
                self._confirm(self._attempt(lambda: self._make_whole(scale)))
        except BaseException as error:
            failed = self.control.failure
            if failed is not None and failed.is_final:  # nobody must wait for collectives here
                self._replicas.break_off(str(failed))
            self._despite(error, lambda: self._replicas.end(succeeded=False))
            self._undo(error)
            self._despite(error, self._reshard)
            raise
        else:
            self._replicas.end(succeeded=True)
            self._commit(scale)
            self._reshard()
        finally:
            for executor in self.plan.executors:
                executor.clear()
            for transport in self.transports.values():
                transport.abandon()
        return outcome[0]

    def _reshard(self) -> None:
        """A forward leaves a root module unsharded; parameters() should not."""
        for runner in self.plan.runners.values():
            runner.sync.reshard()

    def _despite(self, error: BaseException, work: Callable[[], None]) -> None:
        """Clean up after an error, also where that fails: collectives of a lost replica may."""
        try:
            work()
        except Exception as other:
            note(error, f"cleaning up failed, too: {in_words(other)}")

    # Gradients and buffers as they were

    def _keep(self) -> None:
        """Keep gradients and buffers. Copies first: what cannot be copied has not been touched."""
        state = self.session.state
        parameters = state.parameters if self.trains else []
        self._versions = {p: version_of(p) for p in parameters if p.requires_grad}
        # Old gradients go aside where the step's own must be told apart from them.
        apart = parameters
        if self.session.sums_weights is False:
            groups = self.plan.tied
            apart = [p for g in groups for some in g.parameters.values() for p in some]
        ids = {id(p) for p in apart}
        kept = [p for p in parameters if id(p) not in ids] if ids else parameters
        modules = [*state.modules, *self._loss_modules()]
        self._rollback = Rollback(kept, modules, self.session.changing)
        if self.trains:
            self._stash = ties.GradStash(apart)
        self._replicas.begin({} if self._stash is None else self._stash.earlier)

    def _loss_modules(self) -> Iterator[tuple[str, nn.Module]]:
        loss_fn = self.session.options.loss_fn
        if isinstance(loss_fn, nn.Module) and self.session.has_last_stage:
            yield from loss_fn.named_modules(prefix="loss_fn")

    def _commit(self, scale: Scale) -> None:
        if self._stash is not None:
            self._stash.restore(scale)
            self.step.restore(scale)
        assert self._rollback is not None
        self._rollback.commit()

    def _undo(self, error: BaseException) -> None:
        if self._stash is not None:
            self._stash.undo()
        lost = [] if self._rollback is None else self._rollback.undo()
        changed = {p for p, version in self._versions.items() if version_of(p) != version}
        if changed:
            named = (
                f"{path}.{key}"
                for path, module in self.session.state.modules
                for key, p in parameters_of(module).items()
                if p in changed
            )
            note(
                error,
                f"the failed step has changed {next(named)} and {len(changed) - 1} more "
                "parameters, by an optimizer in a hook: they stay changed, load a checkpoint",
            )
        if lost:
            note(
                error,
                f"the failed step has changed {', '.join(lost)} for the first time; "
                "their values from before the step are not known",
            )

    # The program

    def _prepare(self) -> None:
        """Hand the inputs to the stages."""
        session, n = self.session, self.session.program.num_microbatches
        call, chunks = self._with_routed_inputs()
        self.chunks = chunks
        if session.has_last_stage and call.target is not None:
            self.step.targets, _ = split_target(call.target, n, self.plan.rows)
        self.step.loss_kwargs = [call.loss_kwargs] * n
        if self.trains and self.plan.has_input_gradients:
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

    def _with_routed_inputs(self) -> tuple[Call, Chunks]:
        """Exchange the inputs that some ranks were not given."""
        call, rank = self.call, self.control.rank
        if not self.plan.routes:
            return call, self.chunks
        post_next = self.plan.executors[0].post_next
        stage = next(iter(self.session.stages.values()))
        _, named = stage.front.name_inputs(call.args, call.kwargs)
        added = {}
        for route in self.plan.routes:
            if route.source == rank:
                post_next(tensors_of(named[route.name]))
            elif route.target == rank:
                added[route.name] = route.skeleton.build(post_next().wait())
        call = replace(call, kwargs={**call.kwargs, **added})
        n = self.session.program.num_microbatches
        return call, split_call(call, stage.front, self.session.options, n)

    def _work(self, outcome: list[Outcome]) -> BaseException | None:
        """Run the program; what went wrong, if anything, after all transfers are done."""
        plan = self.plan
        try:
            for executor in plan.executors:
                executor.since = time.monotonic()
            self._keep()
            self._prepare()
            for executor in plan.executors:
                executor.spans = [] if self.records_spans else None
            if self.session.is_local:
                run_local(plan.executors, plan.order)
            else:
                run_rank(plan.executors[0], self.control)
            self.chunks.check_unchanged()
            made = self._outcome()
            self._replicas.finish()
            if self.trains:
                self._add_up_tied()
            self._partners.finish()
            outcome.append(made)
        except InterruptedStepError as interrupted:
            failure = interrupted.failure
            if failure.is_final:
                raise self.control.final(failure) from None
            return self._drained(remote_error(failure))
        except TransportError as error:
            raise self._lost(error) from error
        except BaseException as raised:
            meant = self.control.explain(self._replicas.explained(raised))
            self._describe(meant)
            return self._drained(meant)
        return None

    def _add_up_tied(self) -> None:
        ties.add_up(self.plan.tied, {e.rank: e.post_next for e in self.plan.executors})
        for executor in self.plan.executors:
            executor.finish()

    def _attempt(self, work: Callable[[], None]) -> BaseException | None:
        """Do something that has no transfers left when it fails."""
        try:
            work()
        except TransportError as error:
            raise self._lost(error) from error
        except BaseException as error:
            self._describe(error)
            return error
        return None

    def _describe(self, error: BaseException) -> None:
        """Tell the other ranks, and note on the exception where it happened."""
        kind, text = described(error)
        failure = replace(self._where(), type=kind, message=text)
        if failure.action:
            note(error, f"raised on {str(failure).partition(': ')[0].replace(',', ' in', 1)}")
        self.control.report(failure)

    def _where(self) -> Failure:
        executor = self._busiest()
        action = executor.where()
        if action is None:
            return Failure(executor.rank)
        return Failure(
            executor.rank, stage=action.stage, microbatch=action.microbatch, action=str(action)
        )

    def _busiest(self) -> Executor:
        return max(self.plan.executors, key=lambda executor: executor.since)

    def _drained(self, error: BaseException) -> BaseException:
        """Finish the transfers that are owed, so that no peer waits for this rank."""
        try:
            self._partners.tell(in_words(error))
            self._replicas.begin_failed()
            if self.session.is_local:
                for executor in self.plan.executors:
                    executor.drain_collectives()
            else:
                self.plan.executors[0].drain()
            self._replicas.give_up(in_words(error))
        except TransportError as lost:
            self._lost(lost)
            raise error from lost
        except BaseException as inner:  # a device that is gone for good, a second interrupt
            kind, text = described(error)
            self.control.give_up(replace(self._where(), type=kind, message=text, kind="broken"))
            raise error from inner
        return error

    def _lost(self, error: TransportError) -> BaseException:
        """A peer is gone or does not answer: there is nothing left to confirm."""
        return self.control.lost(error, self._where())

    # After the program

    def _confirm(self, failure: BaseException | None) -> Scale:
        """Every rank learns whether all succeeded, and the weight of the batch if it is needed."""
        step = self.step
        sums = self.trains and self.session.sums_weights is not False
        needs = bool(step.aux) or (sums and have_hooks(self.session.state))
        weighted, bits = self._weight.said()
        flags = (failure is not None, weighted, needs, step.has_differentiated)
        vectors = self.control.exchange([*map(int, flags), bits])
        failed = next((rank for rank, v in enumerate(vectors) if v[0]), None)
        if failed is not None:
            known = self.control.settled()
            self.control.raises_everywhere = True
            if failure is not None:
                raise failure
            raise remote_error(known or Failure(failed, "error", "no message was left"))
        if self.trains and not any(v[3] for v in vectors):
            self.control.raises_everywhere = True
            raise InputError(
                "the loss does not depend on anything that requires a gradient: step() would give "
                "none. Is every parameter frozen? Call eval() for the loss alone"
            )
        summed = [v for v in vectors if v[1]]
        if not self.trains or not self.session.options.scale_grads:
            return None
        is_apart = self.session.sums_weights is not False
        self.session.sums_weights = bool(summed)
        if not summed:
            return None
        if self.plan.shards and not self.call.finalizes:
            self.control.raises_everywhere = True
            raise InputError(
                "with finalize_gradients=False sharded stages keep the sum of several steps "
                "unreduced, but loss_fn returns (sum, weight) and each step is divided by its own "
                "weight: use scale_grads=False and divide in the end, or reduce in every step"
            )
        needs = any(v[2] for v in vectors)
        try:
            must_be_known = not is_apart or self._weight.any_replica(needs)
            said = [(v[1], v[4]) for v in summed]
            return self._weight.scale(said, must_be_known=must_be_known)
        except TransportError as error:
            raise self._lost(error) from error

    def _needs_whole(self, scale: Scale) -> bool:
        """The same on all ranks: whether anything can still fail."""
        return self.trains and (scale is not None or self.plan.has_input_gradients)

    def _make_whole(self, scale: Scale) -> None:
        if self.plan.shared:
            self.leaves.add_up(self.plan.shared, self.control)
        self.leaves.give_back(scale)

    def _outcome(self) -> Outcome:
        step, n = self.step, self.session.program.num_microbatches
        terms = [step.losses[m] for m in sorted(step.losses)]
        loss = self._weight.add_up(terms)
        if loss is None and terms:
            totals = torch.stack([term.total.detach() for term in terms])
            loss = _weighted(totals, step.weights)
        aux = [value * step.weights[m] for m, value in step.aux]
        output = None
        if step.keeps_outputs:
            made, rows = [step.outputs[m] for m in range(n)], self.plan.rows
            spec, size = self.session.options.output_merge_spec, n // (self.call.batches or 1)
            merged = [
                merge_chunks(made[at : at + size], spec, rows=rows and rows[at : at + size])
                for at in range(0, n, size)
            ]
            output = merged[0] if self.call.batches is None else merged
        spans = [s for e in self.plan.executors for s in e.spans or ()]
        return Outcome(
            output,
            [term.reported for term in terms],
            loss,
            torch.stack(aux).sum() if aux else None,
            spans if self.records_spans else None,
        )


def _weighted(totals: torch.Tensor, weights: Sequence[float]) -> torch.Tensor:
    """Their weighted sum, with one product where all weights are equal."""
    if len(set(weights)) == 1:
        return totals.mul(weights[0]).sum()
    return torch.stack([one * weight for one, weight in zip(totals, weights, strict=True)]).sum()
