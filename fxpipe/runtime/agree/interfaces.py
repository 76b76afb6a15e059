"""Find out together what crosses every stage boundary, before anything is sent.

In:  this process's stages and inputs, and a `Control` to ask the other ranks.
Out: `Interfaces`, the same on all ranks, or one error on all ranks.

Stages run on made-up tensors, one after the other, wherever they live; each round is one
exchange. The last stage sends nothing, so nobody has to wait for what it returns: whether it runs
is said when all ranks say whether they are ready.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import Any

import torch

from fxpipe.errors import FxpipeError, InputError, PipeliningShapeError
from fxpipe.graph.interface import TensorSpec
from fxpipe.graph.nested import map_leaves
from fxpipe.runtime.agree.inputs import tensors_of
from fxpipe.runtime.control.control import Control
from fxpipe.runtime.stage.boundary import Boundary, PortShape, Skeleton, skeleton_of
from fxpipe.runtime.stage.dtensors import (
    as_dtensor,
    find_mesh,
    is_parallel,
    layout_of,
    local_part,
)
from fxpipe.runtime.stage.stage_kind import Stage, as_arguments, forward_context
from fxpipe.runtime.wire.failure import described, raise_problems
from fxpipe.torch_inside import pytree

__all__ = ["InterfaceProber", "Interfaces", "check_declared"]

Found = list[tuple[Skeleton, tuple[PortShape, ...]]]


@dataclass(frozen=True, slots=True)
class Interfaces:
    """The boundary of each distinct microbatch shape, and structures between stages."""

    boundaries: tuple[Boundary, ...]
    skeletons: Mapping[int, tuple[Skeleton, ...]]


class InterfaceProber:
    """Runs the stages one after the other on made-up tensors, wherever they live.

    `samples[stage][shape]` are this process's inputs of a microbatch of that shape.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        num_stages: int,
        control: Control,
        samples: Mapping[int, Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]]],
        training: bool,
    ) -> None:
        self._stages = stages
        self._num_stages = num_stages
        self._control = control
        self._samples = samples
        self._training = training
        self._num_shapes = max((len(found) for found in samples.values()), default=1)
        self.problem: BaseException | None = None

    def manual(self) -> Interfaces:
        """Hand-written stages: a chain in which a value of any structure is handed on."""
        last = self._num_stages - 1
        ports: list[dict[tuple[int, int], tuple[PortShape, ...]]] = [
            {} for _ in range(self._num_shapes)
        ]
        skeletons: dict[int, tuple[Skeleton, ...]] = {}
        before: Found | None = None
        for stage in range(last):
            if self._control.is_dry and stage not in self._stages:
                before = self._declared(stage)
            else:
                found = self._round(stage, partial(self._probe_manual, stage, before))
                before = [_read(*one) for one in found]
            for shape, (_, sent) in enumerate(before):
                ports[shape][stage, stage + 1] = sent
            skeletons[stage] = tuple(skeleton for skeleton, _ in before)
        if last in self._stages:
            try:
                self._probe_manual(last, before)
            except BaseException as error:
                self.problem = self._control.explain(error)
        return Interfaces(tuple(Boundary(last + 1, some) for some in ports), skeletons)

    def traced(self, boundaries: tuple[Boundary, ...]) -> Interfaces:
        """Traced stages whose tensors are not those of the trace: ask for them anew."""
        current = [dict(boundary.ports) for boundary in boundaries]
        for stage in range(self._num_stages - 1):
            sent = self._round(stage, partial(self._probe_traced, stage, current))
            for ports, made in zip(current, sent, strict=True):
                for (source, target), found in ports.items():
                    if source == stage:
                        ports[source, target] = tuple(
                            PortShape(port.name, shape, dtype, port.has_gradient, layout)
                            for port in found
                            for shape, dtype, layout in (made[port.name],)
                        )
        return Interfaces(tuple(Boundary(self._num_stages, p) for p in current), {})

    def _declared(self, stage: int) -> Found:
        """What a stage that does not exist sends, as the stage after it was told."""
        after = self._stages.get(stage + 1)
        args = (torch.empty(1),) if after is None else after.front.input_args
        if args is None:
            raise PipeliningShapeError(
                f"stage {stage + 1} runs over a fake process group, in which no rank says what it "
                f"sends: give PipelineStage(..., input_args=) what stage {stage + 1} receives"
            )
        value = args if len(args) != 1 else args[0]
        ports = [
            replace(port, has_gradient=self._training and port.dtype.is_floating_point)
            for port in self._ports(value, None)
        ]
        return [(skeleton_of(value), tuple(ports))] * self._num_shapes

    def _round(self, stage: int, run: Callable[[], Any]) -> Any:
        """Let the owner of a stage find something out and tell the others."""
        mine, problem = None, None
        if stage in self._stages:
            try:
                mine = run()
            except BaseException as error:
                problem = self._control.explain(error)
        told = None if problem is None else described(problem)
        found = self._control.gather((told, mine))
        with self._control.alike(problem):
            raise_problems([said for said, _ in found], problem)
        return next(value for _, value in found if value is not None)

    def _probe_manual(self, stage: int, before: Found | None) -> list[Any]:
        """What a stage returns for each shape, as plain data."""
        this = self._stages[stage]
        found = []
        for shape in range(self._num_shapes):
            args, kwargs = self._samples[stage][shape]
            if before is not None:
                skeleton, ports = before[shape]
                specs = [TensorSpec(p.shape, p.dtype, p.has_gradient) for p in ports]
                args = as_arguments(skeleton.build(specs))  # type: ignore[arg-type]
                check_declared(stage, "takes", this.front.input_args, specs)
            output = self._run(this, args, kwargs, before[shape][1] if before else None)
            _check_dense(stage, tensors_of(output))
            returned = [TensorSpec.of(x) for x in tensors_of(output)]
            check_declared(stage, "returns", this.front.output_args, returned)
            sent = self._ports(output, this.output_grads)
            found.append((skeleton_of(output).plain(), [astuple(port) for port in sent]))
        return found

    def _ports(self, value: Any, gradients: tuple[Any, ...] | None) -> list[PortShape]:
        """The tensors of a value as ports; `gradients` are examples of theirs."""
        made = skeleton_of(value)
        names = [n for n, is_tensor in zip(made.names, made.is_tensor, strict=True) if is_tensor]
        ports = []
        examples = (*(gradients or ()), *[None] * len(names))
        for name, x, gradient in zip(names, tensors_of(value), examples, strict=False):
            shape, dtype, layout = _form(x, gradient)
            wants = self._training and x.requires_grad
            ports.append(PortShape(name, shape, dtype, wants, layout))
        return ports

    def _probe_traced(
        self, stage: int, current: Sequence[Mapping[tuple[int, int], tuple[PortShape, ...]]]
    ) -> list[dict[str, tuple[Any, ...]]]:
        this = self._stages[stage]
        found = []
        for shape, ports in enumerate(current):
            sources = sorted(source for source, target in ports if target == stage)
            into = [ports[source, stage] for source in sources]
            arriving = [into[edge][i] for edge, i in this.front.received(stage, sources, into)]
            specs = tuple(TensorSpec(p.shape, p.dtype, p.has_gradient) for p in arriving)
            output = self._run(this, specs, self._samples[stage][shape][1], arriving)
            out_of = [some for (source, _), some in ports.items() if source == stage]
            sent = this.front.sent(stage, out_of)
            made = this.front.tensors(output, None, stage)
            _check_dense(stage, made)
            found.append({p.name: _form(t, None) for p, t in zip(sent, made, strict=True)})
        return found

    def _run(
        self,
        stage: Stage,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        ports: Sequence[PortShape] | None,
    ) -> Any:
        from fxpipe.graph.sandbox.fake import probe

        context = forward_context(stage, 0, is_trial=True)
        with torch.set_grad_enabled(self._training), context:
            try:
                if is_parallel(stage.submod) or any(port.layout for port in ports or ()):
                    return _run_parallel(stage, args, kwargs, ports or ())
                return probe(stage.submod, args, dict(kwargs))
            except RuntimeError as error:
                from fxpipe.graph.record.leaf_runs import DATA_DEPENDENT
                from fxpipe.graph.source_line import failing_frame

                if isinstance(error, DATA_DEPENDENT):
                    raise _values_decide(stage.stage_index, failing_frame(error)) from error
                meant = self._control.explain(error)
                if meant is not error:
                    raise meant from error
                if ports is None or isinstance(error, FxpipeError):
                    raise
                sent = ", ".join(f"{port.name} {port}" for port in ports)
                index = stage.stage_index
                raise PipeliningShapeError(
                    f"stage {index} cannot take what stage {index - 1} sends ({sent}): {error}"
                ) from error


def _values_decide(stage: int, place: object) -> InputError:
    """Only sharded stages cannot run on made-up numbers instead: replicas would have to gather."""
    where = f", at {place}," if place else ""
    return InputError(
        f"the values of tensors decide what sharded stage {stage} computes or what sizes it "
        f"returns{where} but shapes must follow from shapes, as no values are there when the ranks "
        "agree: use torch.where or a mask, or DistributedDataParallel instead of fully_shard"
    )


def _check_dense(stage: int, tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors:
        if not tensor.is_nested and any(type(size) is not int for size in tensor.shape):
            raise _values_decide(stage, None)
        if tensor.is_nested or tensor.layout is not torch.strided:
            kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
            raise InputError(
                f"stage {stage} returns a {kind} tensor, but only dense tensors travel between "
                "stages: return it dense, or return its parts and put it together in the next stage"
            )


def _form(tensor: torch.Tensor, gradient: Any) -> tuple[tuple[int, ...], torch.dtype, Any]:
    """Shape and dtype of what travels, and how it is spread."""
    layout = layout_of(tensor, gradient)
    part = tensor if layout is None else local_part(tensor, layout, "")
    return tuple(int(size) for size in part.shape), part.dtype, layout


def _run_parallel(
    stage: Stage, args: tuple[Any, ...], kwargs: Mapping[str, Any], ports: Sequence[PortShape]
) -> Any:
    """Run a module that computes on DTensors, on made-up values.

    What its collectives and its hooks make of a tensor is known only by running them; the ranks
    that share the stage do so together. State is put back.
    """
    from fxpipe.graph.sandbox.restore import preserved, preserved_values

    layouts = iter([port.layout for port in ports])

    def made_up(leaf: Any) -> Any:
        if not isinstance(leaf, TensorSpec):
            return leaf
        made = torch.zeros(leaf.shape, dtype=leaf.dtype, device=stage.device)
        made.requires_grad_(leaf.requires_grad)
        layout = next(layouts, None)
        return made if layout is None else as_dtensor(made, layout, find_mesh(stage, layout))

    module = stage.submod
    with preserved(module), preserved_values(module):
        filled = map_leaves(made_up, (args, dict(kwargs)))
        return module(*filled[0], **filled[1])


def _read(skeleton: Any, ports: Any) -> tuple[Skeleton, tuple[PortShape, ...]]:
    return Skeleton.of_plain(*skeleton), tuple(PortShape(*port) for port in ports)


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
