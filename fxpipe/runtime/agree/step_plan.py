"""Make the plan of a step together with the other ranks.

In:  what each rank was passed. Out: a `StepPlan` that all ranks can follow.

Every rank says all it knows in one exchange (a `_brief`); every question is then answered from
what all of them said, in the same way on each, so that either all go on or all raise the same
error, and nothing is sent before that. At the end all say that they are ready. A plan serves all
later steps with inputs of the same kind.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fxpipe.errors import InputError, ScheduleError
from fxpipe.microbatch import split_target
from fxpipe.program import Action, Edges, Kind, Program, walk
from fxpipe.program.play.queues import Streams
from fxpipe.runtime.agree.briefs import (
    Brief,
    Route,
    StageFacts,
    agreed_routes,
    agreed_rows,
    check_averaged,
    check_loss,
    check_names,
    check_tied,
)
from fxpipe.runtime.agree.inputs import known_keywords, stage_inputs, tensors_of
from fxpipe.runtime.agree.interfaces import InterfaceProber, Interfaces
from fxpipe.runtime.agree.request import Call, Chunks, Options, lower_call
from fxpipe.runtime.control.control import Control, agree
from fxpipe.runtime.parameters import tied as ties
from fxpipe.runtime.parameters.fsdp import gathered_dtypes
from fxpipe.runtime.parameters.sync import GradSync, NoSync, grad_sync, not_averaged
from fxpipe.runtime.stage.boundary import skeleton_of
from fxpipe.runtime.stage.dtensors import is_parallel
from fxpipe.runtime.stage.executor import Executor, Hooks
from fxpipe.runtime.stage.stage_kind import Stage
from fxpipe.runtime.stage.stage_runner import StageRunner, Wiring, wire
from fxpipe.runtime.wire.message import Half, Narrow, Packing, Shares
from fxpipe.runtime.wire.plain import dumps
from fxpipe.runtime.wire.stream_transport import StreamTransport
from fxpipe.runtime.wire.transport import Transport

__all__ = ["PlanMaker", "StepPlan"]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One kind of step, agreed on and bound to functions."""

    rows: tuple[int, ...] | None
    weights: tuple[float, ...]
    routes: tuple[Route, ...]
    shared: tuple[str, ...]
    wiring: Mapping[int, Sequence[Wiring]]
    runners: Mapping[int, StageRunner]
    executors: list[Executor]
    order: list[tuple[int, int]]
    wants_loss: bool
    has_loss: bool
    has_input_gradients: bool
    tied: Sequence[ties.TiedGroup]
    program: Program
    has_replicas: bool

    @property
    def shards(self) -> bool:
        """Whether replicas of any stage share its parameters out."""
        return any(a.kind is Kind.UNSHARD for actions in self.program.ranks for a in actions)


class PlanMaker:
    """Makes one plan. Call `brief`, then `make` with what all ranks said."""

    def __init__(
        self,
        stages: Mapping[int, Stage],
        program: Program,
        options: Options,
        hooks: Hooks,
        call: Call,
        *,
        autocast: bool,
        is_local: bool,
        streams: Streams | None,
    ) -> None:
        self.is_local, self.streams = is_local, streams
        self.stages, self.program, self.options, self.hooks = stages, program, options, hooks
        self.call, self.autocast = call, autocast
        self.rank_of = program.placement.stage_to_rank
        self.n = program.num_microbatches
        self.front = next(iter(stages.values())).front
        self.tied: list[ties.TiedGroup] = []

    # What this rank knows

    def brief(self, chunks: Chunks) -> Brief:
        """All that the other ranks must know of this one."""
        per_stage = stage_inputs(self.stages.values(), chunks.args, chunks.kwargs)
        modules = {index: stage.submod for index, stage in self.stages.items()}
        self.tied = ties.find_tied((*self.front.tied, *self.options.tied), modules, self.rank_of)
        syncs = [grad_sync(module) for module in modules.values()]
        given = sorted(chunks.kwargs[0])
        chosen = [one for _, kwargs in per_stage.values() for one in kwargs]
        return Brief(
            has_loss=self.program.num_stages - 1 in self.stages
            and self.options.loss_fn is not None,
            has_loss_fn=self.options.loss_fn is not None,
            rows=chunks.rows,
            given=given,
            spec=[str(name) for name in self.options.kwargs_chunk_spec or ()],
            known=known_keywords(self.stages.values(), given),
            inputs=self._describe_inputs(),
            sizes=[self.front.sizes(*one) for one in zip(chunks.args, chunks.kwargs, strict=True)],
            stages={i: _stage_facts(modules[i], found) for i, found in per_stage.items()},
            reduces=any(not isinstance(sync, NoSync) for sync in syncs),
            shards=any(sync.is_sharded for sync in syncs),
            replicas=max((g.size() for sync in syncs for g in sync.groups), default=1),
            alone=[f"{n} of stage {i}" for i, m in modules.items() for n in not_averaged(m)],
            used=sorted(
                {k for one in chosen for k, value in one.items() if _wants_gradient(value)}
            ),
            tied=[
                [(r, *_of_tied(p)) for r, copies in group.parameters.items() for p in copies]
                for group in self.tied
            ],
        )

    def pipeline_facts(self) -> dict[str, str]:
        """What makes two ranks part of the same pipeline."""
        program, options = self.program, self.options
        facts = {
            "schedule": program.name,
            "number of microbatches": program.num_microbatches,
            "number of stages": program.num_stages,
            "number of ranks": program.num_ranks,
            "kind of stages": self.front.kind,
            "scale_grads": options.scale_grads,
            "finalize_gradients": self.call.finalizes,
            "receives": options.receives,
            "boundary_dtype": options.boundary_dtype,
            "size of tp_group": options.tp_group and options.tp_group.size(),
            "streams": self.streams,
            "max_unsharded": options.max_unsharded,
            "offload": options.offload,
            "unshard_lookahead": options.unshard_lookahead,
            "tied": [[list(at) for at in shared.locations] for shared in options.tied],
            "program": hashlib.sha256(str(program).encode()).hexdigest()[:12],
            **self.front.facts(),
        }
        return {name: str(value) for name, value in facts.items()}

    def check_own_stages(self, ranks: Sequence[int]) -> None:
        if len({stage.front.kind for stage in self.stages.values()}) > 1:
            raise ScheduleError("the stages of one pipeline must all be traced or all hand-written")
        for rank in ranks:
            held = sorted(self.stages)
            mine = [s for s in held if len(ranks) == 1 or self.rank_of[s] == rank]
            wanted = list(self.program.placement.stages_of(rank))
            if mine != wanted:
                raise ScheduleError(
                    f"rank {rank} must hold the stages {wanted} for {self.program.name}, "
                    f"but was given {mine}"
                )

    def _describe_inputs(self) -> dict[str, Any]:
        """The inputs of this rank that another may need."""
        if not any(self.front.needs(stage) for stage in range(self.program.num_stages)):
            return {}
        _, whole = self.front.name_inputs(self.call.args, self.call.kwargs)
        needed = {n for s in range(self.program.num_stages) for n in self.front.needs(s)}
        found = {}
        for name, value in whole.items():
            leaves = tensors_of(value)
            if name in needed:
                shapes = tuple((tuple(x.shape), x.dtype) for x in leaves)
                described = (skeleton_of(value).plain(), shapes, _wants_gradient(value))
                with contextlib.suppress(InputError):  # missed only if another rank needs it
                    dumps(described)
                    found[name] = described
        return found

    # What all ranks conclude

    def make(
        self,
        briefs: Sequence[Brief],
        chunks: Chunks,
        control: Control,
        transports: Mapping[int, Transport],
        *,
        broadcasts_tied: bool,
    ) -> StepPlan:
        """The plan that follows from what all ranks said.

        Raises:
            InputError, PipeliningShapeError: on all ranks.
        """
        if control.is_dry:
            briefs = self._imagined(briefs)
        has_loss = any(brief.has_loss for brief in briefs)
        training = self.call.training and has_loss
        with control.alike():
            self._check_program(training)
            rows = agreed_rows(briefs, 0 if len(briefs) == 1 else self.rank_of[0])
            routes = agreed_routes(briefs, self.front, self.rank_of)
            check_names(briefs)
            if self.call.training:
                check_loss(briefs)
                check_averaged(briefs)
            check_tied(briefs, self.tied)
            keys = self.front.agree_sizes([brief.sizes for brief in briefs])
        merged = {i: found for brief in briefs for i, found in brief.stages.items()}
        facts = [merged[stage] for stage in range(self.program.num_stages)]
        distinct = list(dict.fromkeys(keys))
        shape_of = [distinct.index(key) for key in keys]
        picks = [shape_of.index(shape) for shape in range(len(distinct))]
        per_stage = stage_inputs(self.stages.values(), chunks.args, chunks.kwargs)
        samples = {
            stage: [(args[m], kwargs[m]) for m in picks]
            for stage, (args, kwargs) in per_stage.items()
        }
        prober = InterfaceProber(self.stages, self.program.num_stages, control, samples, training)
        boundaries = self.front.boundaries(distinct, [training and f.wants_gradient for f in facts])
        is_known = control.is_dry or (
            not any(one.is_parallel for one in facts)
            and self.front.was_traced_with([one.dtypes for one in facts], self.autocast)
        )
        with control.alike():
            if boundaries is None:
                interfaces = prober.manual()
            elif is_known:
                interfaces = Interfaces(boundaries, {})
            else:
                interfaces = prober.traced(boundaries)
        self._connect(routes, transports)
        if broadcasts_tied and not control.is_dry:
            for rank, transport in transports.items():
                ties.broadcast(self.tied, rank, transport)
            for transport in transports.values():
                transport.finish()
        plan: StepPlan | None = None
        problem = prober.problem
        try:
            self._check_target(rows)
            lowered = self._lower(interfaces.boundaries[0].edges(), facts, briefs, training)
            names = [name for brief in briefs for name in brief.used]
            shared = sorted({n for n in names if names.count(n) > 1}) if not self.is_local else ()
            plan = self._bind(
                rows, routes, tuple(shared), interfaces, shape_of, facts, lowered, transports,
                has_loss, any(brief.reduces for brief in briefs),
            )  # fmt: skip
        except BaseException as error:
            problem = problem or error
        agree(control, problem)
        assert plan is not None
        return plan

    def _imagined(self, briefs: Sequence[Brief]) -> list[Brief]:
        """What ranks that do not exist would say: their stages are like one of ours."""
        mine, count = briefs[0], self.program.num_stages
        like = next(iter(mine.stages.values()))._replace(trainable=True, inputs_with_grad=False)
        stages = {i: mine.stages.get(i, like) for i in range(count)}
        made = mine._replace(stages=stages, has_loss=self.options.loss_fn is not None)
        return [made] * len(briefs)

    def _connect(self, routes: Sequence[Route], transports: Mapping[int, Transport]) -> None:
        """Set up the way between all ranks that will talk, in an order that all ranks follow."""
        edges = self.front.edges(self.program.num_stages)
        pairs = [(self.rank_of[source], self.rank_of[target]) for source, target in edges]
        pairs += [(route.source, route.target) for route in routes]
        pairs += [(group.owner, peer) for group in self.tied for peer in group.ranks[1:]]
        device = next(iter(self.stages.values())).device
        for rank, transport in transports.items():
            if isinstance(transport, StreamTransport):
                transport.connect([pair for pair in pairs if len(set(pair)) > 1], rank, device)

    def _check_program(self, training: bool) -> None:
        kinds = (Kind.BACKWARD, Kind.BACKWARD_INPUT)
        has_backward = any(
            part.kind in kinds
            for actions in self.program.ranks
            for action in actions
            for part in action.each
        )
        if training and not has_backward:
            raise ScheduleError(
                f"the program {self.program.name} has forwards only and the schedule a loss_fn: "
                "step() would give no gradients; call eval(), or use a program with backwards"
            )

    def _check_target(self, rows: tuple[int, ...] | None) -> None:
        if self.program.num_stages - 1 in self.stages and self.call.target is not None:
            split_target(self.call.target, self.n, rows)

    def _bind(
        self,
        rows: tuple[int, ...] | None,
        routes: tuple[Route, ...],
        shared: tuple[str, ...],
        interfaces: Interfaces,
        shape_of: Sequence[int],
        facts: Sequence[StageFacts],
        lowered: Program,
        transports: Mapping[int, Transport],
        has_loss: bool,
        has_replicas: bool,
    ) -> StepPlan:
        boundaries = [interfaces.boundaries[shape] for shape in shape_of]
        edges = boundaries[0].edges()
        runners = {
            index: StageRunner(
                stage,
                _microbatches(lowered, index, Kind.BACKWARD_WEIGHT),
                _microbatches(lowered, index, Kind.OFFLOAD),
            )
            for index, stage in self.stages.items()
        }
        syncs: dict[int, GradSync] = {}  # the stages of several rounds have one module
        for runner in runners.values():
            runner.sync = syncs.setdefault(id(runner.module), runner.sync)
        wiring = {}
        for index, stage in self.stages.items():
            before, after = interfaces.skeletons.get(index - 1), interfaces.skeletons.get(index)
            by_shape = [
                wire(stage, boundary, before and before[i], after and after[i])  # type: ignore[arg-type]
                for i, boundary in enumerate(interfaces.boundaries)
            ]
            wiring[index] = [by_shape[shape] for shape in shape_of]
        executors = [
            Executor(
                rank,
                lowered,
                edges,
                boundaries,
                runners,
                transport,
                self._packings,
                self.hooks,
                self.options.max_outstanding_sends,
                before=self._routed(routes, rank, transport),
                after=self._summed(rank, transport) if self.call.training and has_loss else (),
            )
            for rank, transport in transports.items()
        ]
        order = [(s.rank, s.position) for s in walk(lowered, edges)] if self.is_local else []
        return StepPlan(
            rows,
            self._weights(rows),
            routes,
            shared,
            wiring,
            runners,
            executors,
            order,
            self._wants_loss(interfaces, facts),
            has_loss,
            any(one.inputs_with_grad for one in facts),
            self.tied,
            lowered,
            has_replicas,
        )

    def _routed(self, routes: Sequence[Route], rank: int, transport: Transport) -> list[Half]:
        """The messages of a rank before its program: inputs that it or others were not given."""
        device = next(iter(self.stages.values())).device
        return [
            Half(transport, peer, route.shapes, device, is_send=rank == route.source)
            for route in routes
            for here, peer in ((route.source, route.target), (route.target, route.source))
            if rank == here
        ]

    def _summed(self, rank: int, transport: Transport) -> list[Half]:
        """The messages of a rank after its program: gradients of tied parameters."""
        found = []
        for group in self.tied:
            for source, target in group.messages if group.parameters.get(rank) else ():
                if rank in (source, target):
                    like = ties.local(group.parameters[rank][0])
                    shapes = [(tuple(like.shape), like.dtype)]
                    peer = target if rank == source else source
                    is_send = rank == source
                    found.append(Half(transport, peer, shapes, like.device, is_send=is_send))
        return found

    def _packings(self) -> list[Packing]:
        dtype, group = self.options.boundary_dtype, self.options.tp_group
        made: list[Packing] = [] if dtype is None else [Narrow(dtype)]
        return made if group is None else [*made, Shares(group)]

    def _lower(
        self,
        edges: Edges,
        facts: Sequence[StageFacts],
        briefs: Sequence[Brief],
        training: bool,
    ) -> Program:
        return lower_call(
            self.program,
            self.options,
            edges,
            trains=training,
            reduces=any(brief.reduces for brief in briefs) and self.call.finalizes,
            shards=any(brief.shards for brief in briefs),
            keep_input_backward=[s for s, f in enumerate(facts) if f.inputs_with_grad],
            streams=self.streams,
        )

    def _weights(self, rows: tuple[int, ...] | None) -> tuple[float, ...]:
        if not self.options.scale_grads:
            return (1.0,) * self.n
        if rows is None:
            return (1.0 / self.n,) * self.n
        return tuple(size / sum(rows) for size in rows)

    def _wants_loss(self, interfaces: Interfaces, facts: Sequence[StageFacts]) -> bool:
        last = self.program.num_stages - 1
        arriving = (
            port.has_gradient
            for (_, target), ports in interfaces.boundaries[0].ports.items()
            if target == last
            for port in ports
        )
        return facts[last].wants_gradient or any(arriving)


def _wants_gradient(tree: Any) -> bool:
    return any(tensor.requires_grad for tensor in tensors_of(tree))


def _stage_facts(module: torch.nn.Module, inputs: Any) -> StageFacts:
    state = (*module.parameters(), *module.buffers())
    floats = [t.dtype for t in state if t.is_floating_point()] + gathered_dtypes(module)
    trainable = any(p.requires_grad for p in module.parameters())
    return StageFacts(trainable, _wants_gradient(inputs), frozenset(floats), is_parallel(module))


def _of_tied(p: torch.nn.Parameter) -> tuple[bool, torch.dtype, tuple[int, ...], bool]:
    return p.requires_grad, p.dtype, tuple(ties.local(p).shape), p.is_meta


def _microbatches(program: Program, stage: int, kind: Kind) -> frozenset[int]:
    """Microbatches for which the program has such an action on this stage."""
    actions: Sequence[Action] = program.ranks[program.placement.stage_to_rank[stage]]
    return frozenset(
        part.microbatch
        for action in actions
        for part in action.each
        if part.kind is kind and part.stage == stage and part.microbatch is not None
    )
