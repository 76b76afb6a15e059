"""Agree on what a step will do, before anything is sent.

In:  this process's stages and inputs, and a `Control` to ask the other ranks.
Out: a `StepPlan`, the same on all ranks where it must be, or one error on all ranks.

Agreeing costs a few small messages, once for each new shape of inputs. Nothing is
decided by one rank alone: rows, sizes, who needs which input, what wants a
gradient, all comes out of the same gathered facts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree

from fxpipe import errors
from fxpipe.errors import FxpipeError, InputError, PipeliningShapeError, RemoteStageError
from fxpipe.graph.interface import TensorSpec
from fxpipe.graph.sandbox.fake import probe
from fxpipe.runtime.stage.boundary import Boundary, PortShape, Skeleton, bind_traced, skeleton_of
from fxpipe.runtime.stage.stage_kind import Stage, TracedFront
from fxpipe.runtime.wire.control import Control

__all__ = ["Facts", "Interfaces", "agree_interfaces", "raise_together"]


@dataclass(frozen=True, slots=True)
class Facts:
    """What a stage contributes to the question who wants a gradient."""

    trainable: bool
    inputs_with_grad: bool
    dtypes: frozenset[torch.dtype]


@dataclass(frozen=True, slots=True)
class Interfaces:
    """The boundary of each distinct microbatch shape, and structures between stages."""

    boundaries: tuple[Boundary, ...]
    skeletons: Mapping[int, tuple[Skeleton, ...]]


def raise_together(control: Control, problem: BaseException | None) -> None:
    """Raise on all ranks if any rank has a problem.

    fxpipe's own errors are raised with their type on every rank; a user's exception
    is raised as it is where it happened, and as RemoteStageError elsewhere.
    """
    described = None if problem is None else (type(problem).__name__, str(problem))
    found = control.gather(described)
    bad = [(rank, *what) for rank, what in enumerate(found) if what is not None]
    if not bad:
        return
    if problem is not None and not isinstance(problem, FxpipeError):
        raise problem
    rank, kind, message = bad[0]
    known = getattr(errors, kind, None)
    if problem is not None and len(bad) == 1:
        raise problem
    several = len({m for _, _, m in bad}) > 1
    text = "\n".join(f"rank {r}: {m}" for r, _, m in bad) if several else message
    if isinstance(known, type) and issubclass(known, FxpipeError):
        if known is RemoteStageError:
            raise RemoteStageError(text, rank=rank)
        raise known(text if several else f"{text} (found on rank {rank})")
    raise RemoteStageError(f"another rank failed: rank {rank}: {kind}: {message}", rank=rank)


def agree_interfaces(
    stages: Mapping[int, Stage],
    stage_to_rank: Sequence[int],
    control: Control,
    samples: Mapping[int, Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]]],
    symbols: Sequence[Mapping[str, int]],
    facts: Sequence[Facts],
    *,
    training: bool,
    autocast: bool,
) -> Interfaces:
    """What crosses every boundary, for each distinct shape of microbatch.

    `samples[stage][shape]` are this process's inputs of a microbatch of that shape.
    """
    any_stage = next(iter(stages.values()))
    if isinstance(any_stage.front, TracedFront):
        info = any_stage.front.info
        wants = [training and (f.trainable or f.inputs_with_grad) for f in facts]
        changed = autocast != info.trace_autocast or any(
            f.dtypes != traced for f, traced in zip(facts, info.state_dtypes, strict=True)
        )
        boundaries = tuple(bind_traced(info.interfaces, values, wants) for values in symbols)
        if changed:
            return _Prober(stages, stage_to_rank, control, samples, training).traced(boundaries)
        return Interfaces(boundaries, {})
    return _Prober(stages, stage_to_rank, control, samples, training).manual()


class _Prober:
    """Runs the stages one after the other on fake tensors, wherever they live."""

    def __init__(
        self,
        stages: Mapping[int, Stage],
        stage_to_rank: Sequence[int],
        control: Control,
        samples: Mapping[int, Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]]],
        training: bool,
    ) -> None:
        self._stages = stages
        self._stage_to_rank = stage_to_rank
        self._control = control
        self._samples = samples
        self._training = training
        self._num_shapes = max((len(found) for found in samples.values()), default=1)

    def manual(self) -> Interfaces:
        """Hand-written stages: a chain in which a value of any structure is handed on."""
        num_stages = len(self._stage_to_rank)
        ports: list[dict[tuple[int, int], tuple[PortShape, ...]]] = [
            {} for _ in range(self._num_shapes)
        ]
        skeletons: dict[int, tuple[Skeleton, ...]] = {}
        before: list[tuple[Skeleton, tuple[PortShape, ...]]] | None = None
        for stage in range(num_stages):
            before = self._round(
                stage, lambda stage=stage, before=before: self._probe_manual(stage, before)
            )
            if stage < num_stages - 1:
                for shape, (_, found) in enumerate(before):
                    ports[shape][stage, stage + 1] = found
                skeletons[stage] = tuple(skeleton for skeleton, _ in before)
        return Interfaces(tuple(Boundary(num_stages, found) for found in ports), skeletons)

    def traced(self, boundaries: tuple[Boundary, ...]) -> Interfaces:
        """Traced stages whose dtypes are not those of the trace: ask for them anew."""
        num_stages = len(self._stage_to_rank)
        current = [dict(boundary.ports) for boundary in boundaries]
        for stage in range(num_stages - 1):
            sent = self._round(stage, lambda stage=stage: self._probe_traced(stage, current))
            for ports, dtypes in zip(current, sent, strict=True):
                for (source, target), found in ports.items():
                    if source == stage:
                        ports[source, target] = tuple(
                            PortShape(p.name, p.shape, dtypes[p.name], p.has_gradient)
                            for p in found
                        )
        return Interfaces(tuple(Boundary(num_stages, ports) for ports in current), {})

    def _round(self, stage: int, run: Any) -> Any:
        """Let the owner of a stage find something out and tell the others."""
        mine, problem = None, None
        if stage in self._stages:
            try:
                mine = run()
            except Exception as error:
                problem = error
        raise_together(self._control, problem)
        found = self._control.gather(mine)
        return next(value for value in found if value is not None)

    def _probe_manual(
        self, stage: int, before: list[tuple[Skeleton, tuple[PortShape, ...]]] | None
    ) -> list[tuple[Skeleton, tuple[PortShape, ...]]]:
        this = self._stages[stage]
        declared = this.front.input_args  # type: ignore[union-attr]
        found = []
        for shape in range(self._num_shapes):
            args, kwargs = self._samples[stage][shape]
            if before is not None:
                skeleton, ports = before[shape]
                specs = [TensorSpec(p.shape, p.dtype, p.has_gradient) for p in ports]
                value = skeleton.build(specs)  # type: ignore[arg-type]
                args = value if type(value) is tuple else (value,)
                check_declared(stage, "takes", declared, specs)
            output = self._run(this, args, kwargs, before[shape][1] if before else None)
            leaves = [x for x in pytree.tree_leaves(output) if isinstance(x, torch.Tensor)]
            check_declared(
                stage, "returns", this.front.output_args, [TensorSpec.of(x) for x in leaves]  # type: ignore[union-attr]
            )  # fmt: skip
            agreed = skeleton_of(output)
            names = [
                n for n, is_tensor in zip(agreed.names, agreed.is_tensor, strict=True) if is_tensor
            ]
            found.append((agreed, tuple(map(self._port, names, leaves))))
        return found

    def _probe_traced(
        self, stage: int, current: Sequence[Mapping[tuple[int, int], tuple[PortShape, ...]]]
    ) -> list[dict[str, torch.dtype]]:
        this = self._stages[stage]
        assert isinstance(this.front, TracedFront)
        interface = this.front.info.interfaces[stage]
        found = []
        for shape, ports in enumerate(current):
            arriving = {
                p.name: p for (_, target), some in ports.items() if target == stage for p in some
            }
            specs = [
                TensorSpec(p.shape, p.dtype, p.has_gradient)
                for r in interface.received
                for p in (arriving[r.port.name],)
            ]
            output = self._run(this, tuple(specs), self._samples[stage][shape][1], None)
            sent = output if isinstance(output, tuple | list) else (output,)
            found.append({s.port.name: t.dtype for s, t in zip(interface.sent, sent, strict=True)})
        return found

    def _run(
        self,
        stage: Stage,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        ports: Sequence[PortShape] | None,
    ) -> Any:
        with torch.set_grad_enabled(self._training):
            try:
                return probe(stage.submod, args, dict(kwargs))
            except RuntimeError as error:
                if ports is None or isinstance(error, FxpipeError):
                    raise
                sent = ", ".join(f"{port.name} {port}" for port in ports)
                index = stage.stage_index
                raise PipeliningShapeError(
                    f"stage {index} cannot take what stage {index - 1} sends ({sent}): {error}"
                ) from error

    def _port(self, name: str, tensor: torch.Tensor) -> PortShape:
        shape = tuple(int(size) for size in tensor.shape)
        return PortShape(name, shape, tensor.dtype, self._training and tensor.requires_grad)


def check_declared(
    stage: int, verb: str, declared: tuple[Any, ...] | None, found: Sequence[TensorSpec]
) -> None:
    """Compare what the user declared for a hand-written stage with what is there.

    The first dimension may differ: the number of rows is that of the microbatch.

    Raises:
        PipeliningShapeError: listing every misfit.
    """
    if declared is None:
        return
    wanted = [x for x in pytree.tree_leaves(declared) if isinstance(x, torch.Tensor)]
    if len(wanted) != len(found):
        raise PipeliningShapeError(
            f"stage {stage} {verb} {len(found)} tensors, but {len(wanted)} were declared: "
            f"found {', '.join(map(str, found)) or 'none'}"
        )
    misfits = [
        f"  tensor {i}: found {spec}, declared {TensorSpec.of(tensor)}"
        for i, (spec, tensor) in enumerate(zip(found, wanted, strict=True))
        if spec.dtype != tensor.dtype or tuple(spec.shape[1:]) != tuple(tensor.shape[1:])
    ]
    if misfits:
        raise PipeliningShapeError(
            f"what stage {stage} {verb} differs from what was declared:\n" + "\n".join(misfits)
        )


def check_inputs_agree(
    symbols: Sequence[Sequence[Mapping[str, int]] | None],
) -> Sequence[Mapping[str, int]]:
    """The sizes of the inputs, from the ranks that have all of them.

    Raises:
        InputError: two ranks pass inputs of different sizes, or no rank passes any.
    """
    known = [(rank, found) for rank, found in enumerate(symbols) if found is not None]
    if not known:
        raise InputError(
            "no rank was given the model's inputs; pass them on the rank of the first stage, "
            "or make the same call on every rank"
        )
    first, values = known[0]
    for rank, found in known[1:]:
        if list(found) != list(values):
            raise InputError(
                f"rank {first} passes inputs of sizes {list(values)}, rank {rank} of {list(found)}"
            )
    return values
