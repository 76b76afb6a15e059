"""One schedule on this process: step after step, on all ranks or on none.

A `Session` owns the stages of this process and does what a schedule's `step` and
`eval` promise: agree with the other ranks on a plan, then run it (see `stepping`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fxpipe.errors import InputError
from fxpipe.program import Program, lower
from fxpipe.runtime.agree.inputs import signature
from fxpipe.runtime.agree.interfaces import raise_together
from fxpipe.runtime.agree.peers import Peers, meet
from fxpipe.runtime.agree.request import Call, Options, StepPlan
from fxpipe.runtime.agree.step_plan import make_plan
from fxpipe.runtime.parameters.sync import GradSync, NoSync, expect_collectives, grad_sync
from fxpipe.runtime.stage.executor import Hooks
from fxpipe.runtime.stage.stage_kind import Stage
from fxpipe.runtime.step_run import Outcome, StepRun
from fxpipe.runtime.wire.local_group import resolve_group

__all__ = ["Session"]

MAX_PLANS = 64


class Session:
    """The stages of this process and everything they need to run together."""

    def __init__(
        self, stages: Sequence[Stage], group: Any, program: Program, options: Options, hooks: Hooks
    ) -> None:
        self.stages = {stage.stage_index: stage for stage in stages}
        self.group = resolve_group(group)
        self.program = program
        self.options = options
        self.hooks = hooks
        self.records_spans = False
        self._peers: Peers | None = None
        self._plans: OrderedDict[Any, StepPlan] = OrderedDict()
        self.sums_weights: bool | None = None
        self._gave_up: list[GradSync] = []

    @property
    def has_last_stage(self) -> bool:
        return self.program.num_stages - 1 in self.stages

    @property
    def peers(self) -> Peers:
        if self._peers is None:
            self._peers = meet(
                self.group,
                self.stages,
                self.program,
                {
                    "scale_grads": self.options.scale_grads,
                    "receives": self.options.receives,
                },
                self.options.tied,
                has_loss=self.has_last_stage and self.options.loss_fn is not None,
                timeout=self.options.timeout,
            )
        return self._peers

    @property
    def plan(self) -> StepPlan | None:
        """The plan of the latest step."""
        return next(reversed(self._plans.values()), None)

    def forget_plans(self) -> None:
        """Agree anew at the next step, for example after a hook was added."""
        self._plans.clear()

    def step(self, call: Call) -> Outcome:
        """Run one step on all ranks.

        Raises:
            the user's exception where it happened, RemoteStageError on the other ranks;
            InputError or PipeliningShapeError on all ranks, before anything is sent.
        """
        peers = self.peers
        try:
            plan = self._agree(call, peers)
        except Exception as error:
            self._tell_replicas(call, f"{type(error).__name__}: {error}")
            raise
        return StepRun(self, peers, plan, call).run()

    def _tell_replicas(self, call: Call, message: str) -> None:
        """The step does not even begin: replicas that begin it would wait for this rank."""
        syncs = {i: grad_sync(stage.submod) for i, stage in self.stages.items()}
        trains = call.training and self._peers is not None and self._peers.has_loss
        if not trains or all(isinstance(sync, NoSync) for sync in syncs.values()):
            return
        sharded = any(sync.is_sharded for sync in syncs.values())
        lowered = lower(
            self.program,
            reduce_grad=True,
            max_unsharded=self.options.max_unsharded if sharded else None,
        )
        for index, sync in syncs.items():
            expect_collectives(sync, lowered, index)
            sync.begin(self.options.timeout)
            sync.give_up(message)
            sync.end()
        self._gave_up = list(syncs.values())  # until the others have heard it

    def _agree(self, call: Call, peers: Peers) -> StepPlan:
        control, problem, key = peers.control, None, 0
        autocast = self.autocast()
        try:
            self._check(call, peers)
            key = hash(
                (signature(call.args, call.kwargs, call.target), self._state_key(), autocast)
            )
        except Exception as error:
            problem = error
        vectors = control.exchange([int(problem is not None), key, int(call.training)])
        if any(v[0] for v in vectors):
            raise_together(control, problem)
        if len({v[2] for v in vectors}) > 1:
            calls = [
                f"rank {r} calls {'step' if v[2] else 'eval'}()" for r, v in enumerate(vectors)
            ]
            raise InputError(f"all ranks must make the same call, but {', '.join(calls)}")
        plan = self._plans.get(vectors)
        if plan is None:
            plan = make_plan(
                call, self.stages, self.program, self.options, peers, self.hooks, autocast
            )
            self._plans[vectors] = plan
            if len(self._plans) > MAX_PLANS:
                self._plans.popitem(last=False)
        self._plans.move_to_end(vectors)
        return plan

    def _check(self, call: Call, peers: Peers) -> None:
        if call.training and not torch.is_grad_enabled():
            raise InputError(
                "step() computes gradients: call it outside torch.no_grad(), or call eval()"
            )
        if self.has_last_stage and peers.has_loss and call.training and call.target is None:
            raise InputError(
                "step() needs the target for loss_fn on the rank of the last stage, "
                "but target is None there"
            )

    def _state_key(self) -> int:
        """Changes when parameters are frozen, thawed or cast."""
        return hash(
            tuple(
                (p.requires_grad, p.dtype)
                for stage in self.stages.values()
                for p in stage.submod.parameters()
            )
        )

    def autocast(self) -> tuple[str, ...]:
        types = {stage.device.type for stage in self.stages.values()}
        return tuple(t for t in sorted(types) if torch.is_autocast_enabled(t))

    def parameters(self) -> list[nn.Parameter]:
        found = (p for stage in self.stages.values() for p in stage.submod.parameters())
        return list({id(p): p for p in found}.values())
