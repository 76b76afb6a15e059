"""One schedule on this process: call after call, on all ranks or on none.

A `Session` owns the stages of this process and does what a schedule's `step` and `eval` promise:
prepare what it was passed, agree with the other ranks on a plan, then run it (see `step_run`). A
call has one deadline, and ranks that make different calls are told so.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fxpipe.errors import InputError, InputTypeError
from fxpipe.graph.sandbox.restore import put_back, random_states
from fxpipe.program import Program, Span
from fxpipe.program.formats.text import parse_action
from fxpipe.runtime.agree.briefs import Brief, check_pipelines
from fxpipe.runtime.agree.inputs import signature
from fxpipe.runtime.agree.module_state import ModuleState, surroundings
from fxpipe.runtime.agree.request import Call, Chunks, Options, lower_call, split_call
from fxpipe.runtime.agree.step_plan import PlanMaker, StepPlan
from fxpipe.runtime.agree.tied_copies import TiedCopies, compare_copies
from fxpipe.runtime.batch_weight import BatchWeightError
from fxpipe.runtime.control.control import Control, agree, bits_of, check_same, number_of
from fxpipe.runtime.control.dry_run import DryControl, DryTransport, is_fake
from fxpipe.runtime.control.group_control import GroupControl, control_of
from fxpipe.runtime.newcomer import Newcomer
from fxpipe.runtime.parameters import tied as ties
from fxpipe.runtime.parameters.partners import Partners, partner_groups
from fxpipe.runtime.parameters.replicas import Replicas
from fxpipe.runtime.parameters.sync import GradSync, check_wrapper, do_collectives, grad_sync
from fxpipe.runtime.rollback import ChangingBuffers
from fxpipe.runtime.stage.executor import Hooks
from fxpipe.runtime.stage.stage_kind import Stage
from fxpipe.runtime.step_run import Outcome, StepRun
from fxpipe.runtime.wire.failure import Deadline, described, in_words, note, raise_problems
from fxpipe.runtime.wire.local_group import LocalGroup, resolve_group
from fxpipe.runtime.wire.transport import (
    LocalChannels,
    LocalTransport,
    Transport,
    TransportError,
)

__all__ = ["Session"]

MAX_PLANS = 64


class Session:
    """The stages of this process and everything they need to run together."""

    def __init__(
        self,
        stages: Sequence[Stage],
        group: Any,
        program: Program,
        options: Options,
        hooks: Hooks,
        newcomer: Newcomer,
    ) -> None:
        self.stages = {stage.stage_index: stage for stage in stages}
        self.group = resolve_group(group)
        if is_fake(self.group) and program.num_ranks == 1:
            self.group = LocalGroup(1)  # nobody is missing
        self.program = program
        self.options = options
        self.hooks = hooks
        self.records_spans = False
        self.sums_weights: bool | None = None
        self.grad_scale = 1.0
        self.changing = ChangingBuffers()
        self.plan: StepPlan | None = None
        self.run: StepRun | None = None  # while it runs
        self._running: StepPlan | None = None
        self._number = 0  # of a schedule that all ranks have made a plan for
        self._newcomer = newcomer
        self._busy = threading.Lock()
        self._control: Control | None = None
        self._transports: Mapping[int, Transport] = {}
        self.state = ModuleState(stages)
        self._device_types = sorted({stage.device.type for stage in stages})
        self._keys: OrderedDict[Any, int] = OrderedDict()
        self._num_keys = 0
        self._plans: OrderedDict[Any, StepPlan] = OrderedDict()
        self._tied_epoch = 0
        self._copies = TiedCopies()
        self._spread: tuple[int, Sequence[dist.ProcessGroup]] | None = None
        self._batch_weight = 1.0  # of the latest batch with auxiliary losses beside a weighted sum

    @property
    def has_last_stage(self) -> bool:
        return self.program.num_stages - 1 in self.stages

    @property
    def is_local(self) -> bool:
        return isinstance(self.group, LocalGroup)

    @contextlib.contextmanager
    def call(self, name: str) -> Iterator[Control]:
        """Make a call that all ranks make together: one of `control.CALLS`.

        Raises:
            InputError: another call of this schedule is not over yet.
            RemoteStageError: an earlier call has broken the connection to the other ranks.
        """
        if not self._busy.acquire(blocking=False):
            raise InputError(
                f"{name}() was called while another call of the same schedule is not over: "
                "from a hook, a loss function, or another thread"
            )
        try:
            deadline = Deadline(self.options.timeout)
            control = self._control
            if control is None:
                if isinstance(self.group, LocalGroup):
                    control = Control()
                elif is_fake(self.group):
                    control = DryControl(self.group)
                else:
                    control = control_of(self.group, deadline)
                self._control = control
            number = self._number or (0 if self.is_local else -self._newcomer.place())
            with control.call(name, number, deadline, self._status):
                yield control
        except BaseException:
            failed = None if self._control is None else self._control.failure
            if failed is not None and failed.is_final:
                syncs = list(self._syncs().values())
                Replicas(syncs, 0.0, trains=True, reduces=False).break_off(str(failed))
            raise
        finally:
            self._running = self.run = None
            self._busy.release()

    def _status(self) -> str:
        running = self._running
        if running is None:
            return "agreeing with the other ranks"
        return "; ".join(executor.status() for executor in running.executors)

    def step(self, call: Call) -> Outcome:
        """Run one step on all ranks.

        Raises:
            the user's exception where it happened, RemoteStageError on the other ranks;
            InputError or PipeliningShapeError on all ranks, before anything is sent.
        """
        with self.call("step" if call.training else "eval") as control:
            partners = Partners(self._spread_over(), self.options.timeout)
            control.explain = partners.explained
            try:
                with partners.limited():
                    return self._step(call, control, partners)
            except BaseException as error:
                partners.tell(in_words(error))
                raise

    def _spread_over(self) -> Sequence[dist.ProcessGroup]:
        """Groups of ranks with which this one shares stages, as the latest call found them."""
        if self._spread is None or self._spread[0] != self.state.epoch:
            modules = [m.submod for m in self.stages.values() if isinstance(m.submod, nn.Module)]
            self._spread = self.state.epoch, partner_groups(modules, self.options.tp_group)
        return self._spread[1]

    def _step(self, call: Call, control: Control, partners: Partners) -> Outcome:
        try:
            plan, call, chunks, records = self._agree(call, control, partners)
        except TransportError as error:
            failure = control.lost(error)
            self._tell_replicas(call, control, failure)
            raise failure from error
        except BaseException as error:
            self._tell_replicas(call, control, error)
            raise
        self.plan = self._running = plan
        outcome = self._run(control, plan, call, chunks, partners, records)
        if records:
            outcome = self._with_all_spans(outcome, control)
        return outcome

    def _run(
        self,
        control: Control,
        plan: StepPlan,
        call: Call,
        chunks: Chunks,
        partners: Partners,
        records: bool,
    ) -> Outcome:
        """Run the step; once more if the weight of the batch had to be known before."""
        draws = None
        if self.sums_weights is not False and call.training:
            draws = random_states()
        # Replicas have weights of their own, and must all run as often.
        assumed = 1.0 if plan.has_replicas else self._batch_weight
        for _ in range(3):
            self.run = StepRun(
                self, control, self._transports, plan, call, chunks, partners,
                records_spans=records, batch_weight=assumed,
            )  # fmt: skip
            try:
                return self.run.run()
            except BatchWeightError as found:
                assumed = self._batch_weight = found.weight
                if draws is not None:
                    put_back(draws)
                control.raises_everywhere = False
        control.raises_everywhere = True
        raise InputError(
            "loss_fn returns other weights each time the step is made; beside auxiliary losses "
            "they must depend on the batch, the model and torch's random numbers alone"
        )

    def _tell_replicas(self, call: Call, control: Control, error: BaseException) -> None:
        """The step does not even begin: replicas that begin it would wait for this rank."""
        if control.failure is not None and control.failure.is_final:
            return  # `call` breaks off
        has_loss = self.options.loss_fn is not None if self.plan is None else self.plan.has_loss
        trains, message = call.training and has_loss, in_words(error)
        syncs = self._syncs()
        replicas = Replicas(
            list(syncs.values()), self.options.timeout, trains=trains, reduces=call.finalizes
        )
        if not replicas.has_groups:
            return
        try:
            with replicas.limited():
                try:
                    replicas.begin_failed()
                    lowered = lower_call(
                        self.program,
                        self.options,
                        trains=trains,
                        reduces=call.finalizes,
                        shards=any(sync.is_sharded for sync in syncs.values()),
                    )
                    for actions in lowered.ranks:
                        do_collectives(actions, syncs)
                    replicas.give_up(message)
                finally:
                    replicas.end(succeeded=False)
        except BaseException as other:
            replicas.break_off(message)
            note(error, f"replicas were told, but not waited for: {in_words(other)}")

    def _syncs(self) -> dict[int, GradSync]:
        """How each stage is kept in step with its replicas; the same for stages of one module."""
        if self.plan is not None:
            return {index: runner.sync for index, runner in self.plan.runners.items()}
        modules = {i: s.submod for i, s in self.stages.items() if isinstance(s.submod, nn.Module)}
        made = {id(module): grad_sync(module) for module in modules.values()}
        return {index: made[id(module)] for index, module in modules.items()}

    def _agree(
        self, call: Call, control: Control, partners: Partners
    ) -> tuple[StepPlan, Call, Chunks, bool]:
        """The plan for this call, the same on all ranks, and the inputs split for it."""
        chunks, problem, key = Chunks([], [], None), None, -1
        try:
            self._check(call)
            call = call.taken(self.program.num_microbatches)
            front = next(iter(self.stages.values())).front
            chunks = split_call(call, front, self.options, self.program.num_microbatches)
            key = self._key_of(call)
            for _, module in self.state.modules:
                check_wrapper(module)
            partners.begin()
        except BaseException as error:
            problem = error
        advance = self._copies.advance(self.state.epoch)
        mine = [problem is not None, key, self.records_spans, advance, bits_of(self.grad_scale)]
        vectors = control.exchange(mine)
        if any(v[0] for v in vectors):
            agree(control, problem)
        if len({v[4] for v in vectors}) > 1:
            with control.alike():
                check_same("grad_scale", [number_of(v[4]) for v in vectors])
        self._copies.check([v[3] for v in vectors], control)
        keys, records = tuple(v[1] for v in vectors), any(v[2] for v in vectors)
        found = self._plans.get(keys)
        unlike = partners.compare(call.training, call.finalizes, found is None)
        if unlike:
            with control.alike():
                raise InputError(unlike)
        if found is None:
            found = self._make_plan(call, chunks, key, control)
        self._plans.move_to_end(keys)
        self._copies.note(found.tied, self.state.epoch)
        return found, call, chunks, records

    def _make_plan(self, call: Call, chunks: Chunks, key: int, control: Control) -> StepPlan:
        """Make a plan together, and remember it under every rank's key."""
        maker = PlanMaker(
            self.stages,
            self.program,
            self.options,
            self.hooks,
            call,
            autocast=bool(self.autocast()),
            is_local=self.is_local,
            streams=control.streams(next(iter(self.stages.values())).device),
        )
        brief: Brief | None = None
        problem: BaseException | None = None
        ranks = list(range(self.program.num_ranks)) if self.is_local else [control.rank]
        try:
            maker.check_own_stages(ranks)
            brief = maker.brief(chunks)
        except BaseException as error:
            problem = error
        said = control.gather(
            {
                "problem": None if problem is None else described(problem),
                "key": key,
                "pipeline": maker.pipeline_facts(),
                "ties": self.state.epoch != self._tied_epoch,
                "brief": brief,
            }
        )
        with control.alike(problem):
            check_pipelines([one["pipeline"] for one in said])
            raise_problems([one["problem"] for one in said], problem)
        self._connect(control)
        is_replaced = any(one["ties"] for one in said)
        if is_replaced and self._number:
            compare_copies(maker.tied, control)
        plan = maker.make(
            [one["brief"] for one in said],
            chunks,
            control,
            self._transports,
            broadcasts_tied=is_replaced and not self._number,
        )
        self._tied_epoch = self.state.epoch
        self._plans[tuple(one["key"] for one in said)] = plan
        if len(self._plans) > MAX_PLANS:
            self._plans.popitem(last=False)
        if not self._number:
            self._number = 1
            self._newcomer.leave()
            if isinstance(control, GroupControl):
                control.schedules += 1
                self._number = control.schedules
        return plan

    def transports(self, control: Control) -> Mapping[int, Transport]:
        """The ways to other ranks, by the rank here; all ranks ask for them together."""
        self._connect(control)
        return self._transports

    def _connect(self, control: Control) -> None:
        if self._transports:
            return
        if control.is_dry:
            self._transports = {control.rank: DryTransport()}
            return
        if not isinstance(control, GroupControl):
            channels = LocalChannels()
            ranks = range(self.program.num_ranks)
            self._transports = {rank: LocalTransport(rank, channels) for rank in ranks}
            return
        device = next(iter(self.stages.values())).device
        self._transports = {control.rank: control.transport(device)}

    def _check(self, call: Call) -> None:
        if call.training and self.options.loss_fn and not torch.is_grad_enabled():
            raise InputError(
                "step() computes gradients: call it outside torch.no_grad(), or call eval()"
            )
        if call.losses is not None and not isinstance(call.losses, list):
            raise InputTypeError(f"losses must be a list to fill, got {type(call.losses).__name__}")
        has_loss = self.has_last_stage and self.options.loss_fn is not None
        if has_loss and call.training and call.target is None and call.presplit[2] is None:
            raise InputError(
                "step() needs the target for loss_fn on the rank of the last stage, "
                "but target is None there"
            )

    def _key_of(self, call: Call) -> int:
        """A number that stands for all that a plan depends on; found by comparing all of it."""
        key = (
            (call.training, call.finalizes),
            signature(call.args, call.kwargs, call.target),
            self.state.key(),
            surroundings(self._device_types),
            self.hooks.version,
        )
        number = self._keys.get(key)
        if number is None:
            self._num_keys += 1
            number = self._keys[key] = self._num_keys
            if len(self._keys) > MAX_PLANS:
                self._keys.popitem(last=False)
        return number

    def _with_all_spans(self, outcome: Outcome, control: Control) -> Outcome:
        """Everybody's measured times."""
        mine = [(s.rank, str(s.action), s.start, s.end) for s in outcome.spans or ()]
        spans = [
            Span(rank, parse_action(action), start, end)
            for found in control.gather(mine)
            for rank, action, start, end in found
        ]
        return replace(outcome, spans=spans if self.records_spans else None)

    def autocast(self) -> tuple[str, ...]:
        return tuple(t for t in self._device_types if torch.is_autocast_enabled(t))

    def tied(self) -> Sequence[ties.TiedGroup]:
        """The parameters that several stages share, with the copies of this process."""
        if self.plan is not None:
            return self.plan.tied
        front = next(iter(self.stages.values())).front
        modules = {index: stage.submod for index, stage in self.stages.items()}
        rank_of = self.program.placement.stage_to_rank
        return ties.find_tied((*front.tied, *self.options.tied), modules, rank_of)

    def parameters(self) -> list[nn.Parameter]:
        found = (p for stage in self.stages.values() for p in stage.submod.parameters())
        return list({id(p): p for p in found}.values())
