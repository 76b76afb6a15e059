"""Make the plan of a step together with the other ranks.

In:  what each rank was passed. Out: a `StepPlan` that all ranks can follow.

Every question is answered from facts gathered from all ranks, in the same order
on each of them, so that either all go on or all raise the same error, and nothing
is sent before that. A plan serves all later steps with inputs of the same kind.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fxpipe.errors import InputError
from fxpipe.microbatch import split_target
from fxpipe.program import Action, Edges, Kind, Program, lower, walk
from fxpipe.program.generators import forward_only_on
from fxpipe.runtime.agree.inputs import check_keywords, manual_keywords, stage_inputs, tensors_of
from fxpipe.runtime.agree.interfaces import (
    Facts,
    Interfaces,
    agree_interfaces,
    check_inputs_agree,
    raise_together,
)
from fxpipe.runtime.agree.peers import Peers
from fxpipe.runtime.agree.request import Call, Chunks, Options, Route, StepPlan, split_call
from fxpipe.runtime.parameters.fsdp import gathered_dtypes
from fxpipe.runtime.parameters.sync import NoSync, expect_collectives, grad_sync
from fxpipe.runtime.stage.boundary import skeleton_of
from fxpipe.runtime.stage.executor import Executor, Hooks
from fxpipe.runtime.stage.stage_kind import Stage, TracedFront
from fxpipe.runtime.stage.stage_runner import StageRunner, wire

__all__ = ["make_plan"]


def make_plan(
    call: Call,
    stages: Mapping[int, Stage],
    program: Program,
    options: Options,
    peers: Peers,
    hooks: Hooks,
    autocast: tuple[str, ...],
) -> StepPlan:
    """Agree with all ranks on how to run steps with inputs like these.

    Raises:
        InputError, PipeliningShapeError: on all ranks.
    """
    return _Maker(call, stages, program, options, peers, hooks, autocast).make()


class _Maker:
    def __init__(
        self,
        call: Call,
        stages: Mapping[int, Stage],
        program: Program,
        options: Options,
        peers: Peers,
        hooks: Hooks,
        autocast: tuple[str, ...],
    ) -> None:
        self.call, self.stages, self.program, self.options = call, stages, program, options
        self.peers, self.hooks, self.autocast = peers, hooks, autocast
        self.control = peers.control
        self.rank_of = program.placement.stage_to_rank
        self.n = program.num_microbatches
        front = next(iter(stages.values())).front
        self.info = front.info if isinstance(front, TracedFront) else None

    def make(self) -> StepPlan:
        chunks = self._together(lambda: split_call(self.call, self.stages, self.options, self.n))
        routes = self._routes(chunks)
        rows = self._rows(chunks)
        self._together(lambda: self._check_target(rows))
        shape_of, samples, symbols = self._shapes(chunks, routes)
        facts = self._facts(chunks)
        training = self.call.training and self.peers.has_loss
        interfaces = agree_interfaces(
            self.stages,
            self.rank_of,
            self.control,
            samples,
            symbols,
            facts,
            training=training,
            autocast=bool(self.autocast),
        )
        return self._bind(rows, routes, interfaces, shape_of, facts, chunks)

    def _together(self, work: Callable[[], Any]) -> Any:
        """Do local work that may fail; all ranks raise, or none."""
        found, problem = None, None
        try:
            found = work()
        except Exception as error:
            problem = error
        raise_together(self.control, problem)
        return found

    def _check_target(self, rows: tuple[int, ...] | None) -> None:
        if self.program.num_stages - 1 in self.stages and self.call.target is not None:
            split_target(self.call.target, self.n, rows)

    def _rows(self, chunks: Chunks) -> tuple[int, ...] | None:
        """Rows of every microbatch: the first stage's, which the others must not contradict."""
        found = self.control.gather((chunks.rows, sorted(chunks.kwargs[0])))
        first = 0 if self.peers.is_local else self.rank_of[0]
        known = {rank: rows for rank, (rows, _) in enumerate(found) if rows is not None}
        agreed = known.get(first, next(iter(known.values()), None))
        other = {rank: sum(rows) for rank, rows in known.items() if rows != agreed}
        if other:
            assert agreed is not None
            shown = ", ".join(f"rank {rank} passes {size}" for rank, size in other.items())
            raise InputError(f"the batch has {sum(agreed)} rows on rank {first}, but {shown}")
        given = frozenset(name for _, names in found for name in names)
        names = frozenset(self.info.input_names) if self.info is not None else self._keywords(given)
        self._together(lambda: self._check_specs(names | given))
        return agreed

    def _keywords(self, given: frozenset[str]) -> frozenset[str]:
        """Keywords that hand-written stages take; what was given must be among them."""
        accepted = self.control.gather(manual_keywords(self.stages.values()))
        if None in accepted:
            return given
        known = frozenset[str]().union(*accepted)
        check_keywords(given, known)
        return known

    def _check_specs(self, known: frozenset[str]) -> None:
        spec = self.options.kwargs_chunk_spec
        unknown = sorted(set(spec) - known) if isinstance(spec, Mapping) else []
        if unknown:
            close = difflib.get_close_matches(unknown[0], known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise InputError(
                f"kwargs_chunk_spec names {', '.join(map(repr, unknown))}, but the keyword inputs "
                f"are {', '.join(map(repr, sorted(known))) or 'none'}{hint}"
            )

    def _routes(self, chunks: Chunks) -> tuple[Route, ...]:
        """Who sends which input to whom, for traced stages."""
        if self.info is None:
            return ()
        given = self.control.gather(sorted(chunks.kwargs[0]))
        if self.peers.is_local:
            given = given * self.program.num_ranks
        missing: list[tuple[str, int, int]] = []
        nowhere: dict[str, list[int]] = {}
        for stage, interface in enumerate(self.info.interfaces):
            rank = self.rank_of[stage]
            for name in interface.model_inputs:
                if name in given[rank]:
                    continue
                source = next((r for r, names in enumerate(given) if name in names), None)
                if source is None:
                    nowhere.setdefault(name, []).append(stage)
                elif (name, source, rank) not in missing:
                    missing.append((name, source, rank))
        if nowhere:
            lines = ", ".join(f"{name!r} (stages {stages})" for name, stages in nowhere.items())
            raise InputError(
                f"no rank was given the model inputs {lines}; pass them on the rank of the first "
                "stage, or make the same call on every rank"
            )
        return self._describe_routes(missing)

    def _describe_routes(self, missing: Sequence[tuple[str, int, int]]) -> tuple[Route, ...]:
        if not missing:
            return ()
        mine: dict[str, Any] = {}

        def describe() -> None:
            whole = self.info.name_inputs(self.call.args, self.call.kwargs, partial=True)  # type: ignore[union-attr]
            for name, source, target in missing:
                if source == self.control.rank:
                    leaves = tensors_of(whole[name])
                    if any(x.requires_grad for x in leaves):
                        raise InputError(
                            f"the input {name!r} requires a gradient and is used on rank {target}, "
                            "which was not given it; pass it there too"
                        )
                    shapes = tuple((tuple(x.shape), x.dtype) for x in leaves)
                    mine[name] = (skeleton_of(whole[name]), shapes)

        self._together(describe)
        found = self.control.gather(mine)
        return tuple(
            Route(name, source, target, *found[source][name]) for name, source, target in missing
        )

    def _shapes(
        self, chunks: Chunks, routes: Sequence[Route]
    ) -> tuple[list[int], dict[int, list[Any]], list[dict[str, int]]]:
        """Which microbatches are of one shape, and samples of each shape.

        A rank that has all inputs knows; the others are told.
        """
        if self.info is not None:
            symbols = self._together(lambda: self._symbols(chunks))
            values = check_inputs_agree(self.control.gather(symbols))
            keys: list[Any] = [tuple(sorted(v.items())) for v in values]
        else:
            keys = [_shape_key(a, k) for a, k in zip(chunks.args, chunks.kwargs, strict=True)]
            keys = list(zip(*self.control.gather(keys), strict=True))
        distinct = list(dict.fromkeys(keys))
        shape_of = [distinct.index(key) for key in keys]
        picks = [shape_of.index(shape) for shape in range(len(distinct))]
        per_stage = stage_inputs(self.stages.values(), chunks.args, chunks.kwargs)
        samples = {
            stage: [(args[m], kwargs[m]) for m in picks]
            for stage, (args, kwargs) in per_stage.items()
        }
        if self.info is None:
            return shape_of, samples, []
        return shape_of, samples, [dict(key) for key in distinct]

    def _symbols(self, chunks: Chunks) -> list[dict[str, int]] | None:
        assert self.info is not None
        needed = {name for i in self.info.interfaces for name in i.model_inputs}
        if not needed <= set(chunks.kwargs[0]):
            return None
        return [self.info.bind_inputs((), kwargs) for kwargs in chunks.kwargs]

    def _facts(self, chunks: Chunks) -> list[Facts]:
        per_stage = stage_inputs(self.stages.values(), chunks.args, chunks.kwargs)
        mine: dict[int, Facts] = {}
        for index, stage in self.stages.items():
            args, kwargs = per_stage[index]
            leaves = tensors_of((args[0], kwargs[0]))
            floats = [
                t.dtype
                for t in (*stage.submod.parameters(), *stage.submod.buffers())
                if t.is_floating_point()
            ]
            floats += gathered_dtypes(stage.submod)
            mine[index] = Facts(
                any(p.requires_grad for p in stage.submod.parameters()),
                any(x.requires_grad for x in leaves),
                frozenset(floats),
            )
        merged: dict[int, Facts] = {}
        for found in self.control.gather(mine):
            merged.update(found)
        return [merged[stage] for stage in range(self.program.num_stages)]

    def _bind(
        self,
        rows: tuple[int, ...] | None,
        routes: tuple[Route, ...],
        interfaces: Interfaces,
        shape_of: Sequence[int],
        facts: Sequence[Facts],
        chunks: Chunks,
    ) -> StepPlan:
        boundaries = [interfaces.boundaries[shape] for shape in shape_of]
        edges = boundaries[0].edges()
        lowered = self._lower(edges, facts)
        runners = {
            index: StageRunner(stage, _split_microbatches(lowered, index))
            for index, stage in self.stages.items()
        }
        for index, runner in runners.items():
            expect_collectives(runner.sync, lowered, index)
        wiring = {}
        for index, stage in self.stages.items():
            before, after = interfaces.skeletons.get(index - 1), interfaces.skeletons.get(index)
            by_shape = [
                wire(stage, boundary, before and before[i], after and after[i])  # type: ignore[arg-type]
                for i, boundary in enumerate(interfaces.boundaries)
            ]
            wiring[index] = [by_shape[shape] for shape in shape_of]
        executors = [
            Executor(rank, lowered, edges, boundaries, runners, transport, self.hooks)
            for rank, transport in self.peers.transports.items()
        ]
        order = [(s.rank, s.position) for s in walk(lowered, edges)] if self.peers.is_local else []
        return StepPlan(
            rows,
            self._weights(rows),
            routes,
            self._shared(chunks, facts),
            wiring,
            runners,
            executors,
            order,
            self._wants_loss(interfaces, facts),
            edges,
            lowered,
            boundaries,
        )

    def _lower(self, edges: Edges, facts: Sequence[Facts]) -> Program:
        training = self.call.training and self.peers.has_loss
        syncs = [grad_sync(stage.submod) for stage in self.stages.values()]
        mine = (
            any(not isinstance(sync, NoSync) for sync in syncs),
            any(sync.is_sharded for sync in syncs),
        )
        reduce, shard = (any(flags) for flags in zip(*self.control.gather(mine), strict=True))
        program = self.program
        if not training:
            program = forward_only_on(program.placement, self.n)
        return lower(
            program,
            edges,
            receives=self.options.receives,
            keep_input_backward=[s for s, f in enumerate(facts) if f.inputs_with_grad],
            reduce_grad=reduce and training,
            max_unsharded=self.options.max_unsharded if shard and training else None,
        )

    def _weights(self, rows: tuple[int, ...] | None) -> tuple[float, ...]:
        if not self.options.scale_grads:
            return (1.0,) * self.n
        if rows is None:
            return (1.0 / self.n,) * self.n
        return tuple(size / sum(rows) for size in rows)

    def _shared(self, chunks: Chunks, facts: Sequence[Facts]) -> tuple[str, ...]:
        """Names of inputs that need a gradient and are used on several ranks."""
        if self.peers.is_local or not any(f.inputs_with_grad for f in facts):
            return ()
        per_stage = stage_inputs(self.stages.values(), chunks.args, chunks.kwargs)
        used = {
            name
            for _, kwargs in per_stage.values()
            for name, value in kwargs[0].items()
            if any(x.requires_grad for x in tensors_of(value))
        }
        found = self.control.gather(sorted(used))
        names = [name for names in found for name in names]
        return tuple(sorted({name for name in names if names.count(name) > 1}))

    def _wants_loss(self, interfaces: Interfaces, facts: Sequence[Facts]) -> bool:
        last = self.program.num_stages - 1
        arriving = (
            port.has_gradient
            for (_, target), ports in interfaces.boundaries[0].ports.items()
            if target == last
            for port in ports
        )
        return facts[last].trainable or facts[last].inputs_with_grad or any(arriving)


def _split_microbatches(program: Program, stage: int) -> frozenset[int]:
    """Microbatches whose backward comes in two halves on this stage."""
    actions: Sequence[Action] = program.ranks[program.placement.stage_to_rank[stage]]
    return frozenset(
        part.microbatch
        for action in actions
        for part in action.parts or (action,)
        if part.kind is Kind.BACKWARD_WEIGHT and part.stage == stage and part.microbatch is not None
    )


def _shape_key(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return tuple((tuple(x.shape), x.dtype) for x in tensors_of((args, kwargs)))
