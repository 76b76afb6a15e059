"""Compute one stage: forward, backward, and the two halves of a backward.

A `StageRunner` knows one stage's module and, for each microbatch, what arrives
and what leaves. It keeps what the backward needs between the two, and nothing
longer. It does not know schedules, ranks or transfers.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fxpipe.errors import InputError, PipeliningShapeError
from fxpipe.graph.aux_losses import collect_aux_losses
from fxpipe.runtime.parameters.sync import GradSync, grad_sync
from fxpipe.runtime.split.deferral import Deferral, can_defer
from fxpipe.runtime.split.engine import run_backward
from fxpipe.runtime.stage.boundary import Boundary, PortShape, Skeleton
from fxpipe.runtime.stage.dtensors import Layout, as_dtensor, find_mesh, finished, local_part
from fxpipe.runtime.stage.offload import SavedTensors
from fxpipe.runtime.stage.received import Slots, receive
from fxpipe.runtime.stage.stage_kind import Stage, forward_context
from fxpipe.runtime.stage.step_data import LossTerm, StepData, loss_term, own_leaves
from fxpipe.torch_inside import parameters_of, pytree

__all__ = ["StageRunner", "Wiring", "wire"]

_LOG = logging.getLogger(__name__)
_TOLD: weakref.WeakValueDictionary[int, Stage] = weakref.WeakValueDictionary()

Tensors = list[torch.Tensor]
Root = torch.Tensor | GradientEdge


@dataclass(frozen=True, slots=True)
class Wiring:
    """How the tensors of one microbatch connect a stage's module to its edges.

    `arrival` names, for each received tensor in the module's order, the edge and the
    place on it. `wants` says which of them get a gradient. `departure` lists, per
    edge out, the places in `sent`; `returns` those whose gradient comes back.
    """

    arrival: tuple[tuple[int, int], ...]
    wants: tuple[bool, ...]
    gradients: tuple[tuple[int, ...], ...]
    received: tuple[PortShape, ...]
    sent: tuple[PortShape, ...]
    departure: tuple[tuple[int, ...], ...]
    returns: tuple[tuple[int, ...], ...]
    incoming: Skeleton | None
    outgoing: Skeleton | None


@dataclass(slots=True)
class _Residual:
    """What a forward leaves for its backward."""

    sent: list[Root | None]  # where a gradient can come back
    objects: list[weakref.ref[torch.Tensor]]
    slots: Slots | None
    term: LossTerm | None
    aux: list[torch.Tensor]
    deferral: Deferral | None
    saved: SavedTensors | None


class StageRunner:
    """One stage's computation over the microbatches of a step."""

    def __init__(
        self, stage: Stage, split: frozenset[int], offloaded: frozenset[int] = frozenset()
    ) -> None:
        self.stage = stage
        self.module = stage.submod
        self.device = stage.device
        self.sync: GradSync = grad_sync(stage.submod)
        self._front = stage.front
        self._is_last = stage.is_last
        # A module with a dw_builder leaves its weight gradients undone by itself.
        defers = stage.dw_builder is None and can_defer(stage.submod)
        self._split = split if defers else frozenset()
        self._offloaded = offloaded
        if split and stage.dw_builder is None and not defers and id(stage) not in _TOLD:
            _TOLD[id(stage)] = stage
            _LOG.warning(
                "stage %d is compiled, so its backward cannot be split: it is computed whole where "
                "the schedule has the input half, and the holes that the weight half would fill "
                "stay empty",
                stage.stage_index,
            )
        self._wiring: Sequence[Wiring] = ()
        self._spreads = False  # whether a DTensor arrives or leaves
        self._meshes: dict[Layout, Any] = {}
        self._residuals: dict[int, _Residual] = {}
        self._deferred: dict[int, Callable[[], object]] = {}
        self._step: StepData | None = None
        self._args: Sequence[tuple[Any, ...]] = ()
        self._kwargs: Sequence[Mapping[str, Any]] = ()

    def begin(
        self,
        step: StepData,
        wiring: Sequence[Wiring],
        args: Sequence[tuple[Any, ...]],
        kwargs: Sequence[Mapping[str, Any]],
    ) -> None:
        """Take the inputs of a step; one entry per microbatch."""
        self._step, self._wiring, self._args, self._kwargs = step, wiring, args, kwargs
        self._spreads = any(p.layout for one in wiring[:1] for p in (*one.received, *one.sent))
        step.modules.append(self.module)

    def clear(self) -> None:
        self._residuals.clear()
        self._deferred.clear()
        if self._step is not None:
            self._step.undo()  # what a step that succeeded has put back already
        self._step = None
        self._args = self._kwargs = ()

    def forward(self, microbatch: int, arrived: list[Tensors]) -> list[Tensors]:
        step, wiring = self._step, self._wiring[microbatch]
        assert step is not None
        self.sync.ready()
        received: Sequence[torch.Tensor] = [arrived[edge][place] for edge, place in wiring.arrival]
        arrived.clear()
        slots: Slots | None = None
        if step.is_training and any(wiring.wants):
            received, slots = receive(received, wiring.wants)
        if self._spreads:
            ports = zip(received, wiring.received, strict=True)
            received = [as_dtensor(tensor, p.layout, self._mesh(p.layout)) for tensor, p in ports]
        deferral = Deferral() if step.is_training and microbatch in self._split else None
        args, kwargs = self._args[microbatch], self._kwargs[microbatch]
        context = forward_context(self.stage, microbatch)
        saved = SavedTensors(self.device) if microbatch in self._offloaded else None
        with (
            collect_aux_losses() as aux,
            context,
            deferral or nullcontext(),
            saved or nullcontext(),
        ):
            output = self._front.call(self.module, received, wiring.incoming, args, kwargs)
        del received
        term = None
        sent: Tensors = []
        if self._is_last:
            term = self._finish(microbatch, output)
        else:
            sent = self._outgoing(wiring, output, step.is_training)
        if aux.terms:
            step.aux.append((microbatch, sum(aux.terms).detach()))  # type: ignore[union-attr]
        if step.is_training:
            self._check_fresh(microbatch, sent)
            roots = [_root(tensor) if tensor.requires_grad else None for tensor in sent]
            refs = [weakref.ref(tensor) for tensor in sent if tensor.requires_grad]
            self._residuals[microbatch] = _Residual(
                roots, refs, slots, term, aux.terms, deferral, saved
            )
        own = [_own(tensor) for tensor in sent]
        return [[own[i] for i in places] for places in wiring.departure]

    def offload(self, microbatch: int) -> None:
        """Move what the forward of a microbatch keeps to the host."""
        saved = self._residuals[microbatch].saved
        assert saved is not None
        saved.offload()

    def reload(self, microbatch: int) -> None:
        """Move it back."""
        saved = self._residuals[microbatch].saved
        assert saved is not None
        saved.reload()

    def _mesh(self, layout: Layout | None) -> Any:
        if layout is None:
            return None
        if layout not in self._meshes:
            self._meshes[layout] = find_mesh(self.stage, layout)
        return self._meshes[layout]

    def backward(self, microbatch: int, arrived: list[Tensors]) -> list[Tensors]:
        made, rest = self._backward(microbatch, arrived)
        self._weights(rest)
        return made

    def backward_input(self, microbatch: int, arrived: list[Tensors]) -> list[Tensors]:
        made, self._deferred[microbatch] = self._backward(microbatch, arrived)
        return made

    def backward_weight(self, microbatch: int) -> None:
        self._weights(self._deferred.pop(microbatch))

    def _weights(self, work: Callable[[], object]) -> None:
        assert self._step is not None
        if work is _nothing:
            return
        with self._step.no_autocast():
            work()

    def _finish(self, microbatch: int, output: Any) -> LossTerm | None:
        """The last stage: keep the output, compute the loss."""
        step = self._step
        assert step is not None
        if step.keeps_outputs:
            is_one = isinstance(output, torch.Tensor)
            kept = _own(output) if is_one else pytree.tree_map_only(torch.Tensor, _own, output)
            step.outputs[microbatch] = kept
        if step.loss_fn is None or step.targets is None:
            return None
        term = loss_term(
            step.loss_fn, output, step.targets[microbatch], step.loss_kwargs[microbatch]
        )
        for other in step.losses.values():
            if (other.weight is None) != (term.weight is None):
                raise InputError(
                    "loss_fn returned a scalar for some microbatches and a pair (sum, weight) for "
                    "others: a mean of means and a masked mean cannot be added up; return one kind"
                )
            break
        step.losses[microbatch] = term
        if step.is_training:
            # A step that fails must leave their gradients as they were; one that succeeds divides
            # them by the weight of the batch once it is known, as those of parameters.
            for leaf in step.put_aside(own_leaves(term.total, output)):
                self._check_is_here(leaf)
        return term

    def _check_is_here(self, leaf: torch.Tensor) -> None:
        """The loss reaches a tensor beside the output: not a parameter of another rank's stage."""
        for known, path, index in self._front.model_parts:
            part = known()
            found = {} if part is None else parameters_of(part)
            name = next((f"{path}.{key}" for key, p in found.items() if p is leaf), None)
            if name is not None:
                raise InputError(
                    f"loss_fn uses {name!r} of stage {index}, which another rank trains: this "
                    "gradient would be lost. Call aux_loss() in the model for such a term, or use "
                    "the optimizer's weight decay"
                )

    def _outgoing(self, wiring: Wiring, output: Any, is_training: bool) -> Tensors:
        index = self.stage.stage_index
        sent = self._front.tensors(output, wiring.outgoing, index)
        if self._spreads or any(type(tensor) is not torch.Tensor for tensor in sent):
            sent = [
                local_part(tensor, port.layout, f"{port.name!r} of stage {index}")
                for tensor, port in zip(sent, wiring.sent, strict=True)
            ]
        for tensor, port in zip(sent, wiring.sent, strict=True):
            if tensor.shape != port.shape or tensor.dtype != port.dtype:
                self._misfits(sent, wiring.sent)
            if tensor.requires_grad and not port.has_gradient and is_training:
                raise InputError(
                    f"{port.name!r} of stage {index} requires a gradient in this microbatch, but "
                    "did not when the stages agreed on what they send: none would come back for "
                    "it. Detach it in every microbatch or in none"
                )
        return sent

    def _check_fresh(self, microbatch: int, sent: Tensors) -> None:
        """Two microbatches whose backward is still to come cannot share a tensor."""
        made = {id(tensor) for tensor in sent if tensor.requires_grad}
        for other, residual in self._residuals.items():
            for known in residual.objects:
                tensor = known()
                if tensor is not None and id(tensor) in made:
                    raise InputError(
                        f"stage {self.stage.stage_index} returned the same tensor object for the "
                        f"microbatches {other} and {microbatch}; in training every microbatch "
                        "needs a tensor of its own, since its backward comes later"
                    )

    def _misfits(self, sent: Tensors, ports: Sequence[PortShape]) -> None:
        lines = [
            f"  {port.name!r}: returned {str(t.dtype).removeprefix('torch.')}{list(t.shape)}, "
            f"agreed {port}"
            for t, port in zip(sent, ports, strict=True)
            if t.shape != port.shape or t.dtype != port.dtype
        ]
        raise PipeliningShapeError(
            f"stage {self.stage.stage_index} returned other tensors than its interface says:\n"
            + "\n".join(lines)
        )

    def _backward(
        self, microbatch: int, arrived: list[Tensors]
    ) -> tuple[list[Tensors], Callable[[], object]]:
        self.sync.ready()
        residual = self._residuals.pop(microbatch)
        step, wiring = self._step, self._wiring[microbatch]
        assert step is not None
        aux = [term for term in residual.aux if term.requires_grad]
        roots: list[Root] = list(aux)
        seeds = [step.seed(microbatch, term, is_aux=True) for term in aux]
        if residual.term is not None and (residual.term.total.requires_grad or step.wants_loss):
            if not residual.term.total.requires_grad:
                raise InputError(
                    "the loss does not depend on anything that requires a gradient; "
                    "does loss_fn detach it, or is every parameter frozen?"
                )
            roots.append(residual.term.total)
            seeds.append(step.seed(microbatch, residual.term.total, is_aux=False))
        by_place: dict[int, torch.Tensor] = {}
        for places, grads in zip(wiring.returns, arrived, strict=True):
            for place, grad in zip(places, grads, strict=True):
                known = by_place.get(place)
                by_place[place] = grad if known is None else known + grad
        arrived.clear()
        for place, grad in by_place.items():
            root = residual.sent[place]
            if root is not None:  # else it is detached in this microbatch
                roots.append(root)
                seeds.append(grad)
        del aux
        residual.sent, residual.aux, residual.term = [], [], None
        deferral, dw_builder = residual.deferral, self.stage.dw_builder
        rest: Callable[[], object] = _nothing
        with step.no_autocast():
            if deferral is not None:
                rest = deferral.run
            if roots:
                step.has_differentiated = True
                (run_backward if deferral is None else deferral.backward)(roots, seeds)
            if dw_builder is not None:
                rest = dw_builder()
        return self._input_gradients(wiring, residual.slots), rest

    def _input_gradients(self, wiring: Wiring, slots: Slots | None) -> list[Tensors]:
        if slots is None:
            return [[] for _ in wiring.gradients]
        made = []
        for places in wiring.gradients:
            grads = []
            for place in places:
                grad = slots.take(place)
                if grad is None:
                    port = wiring.received[place]
                    grad = torch.zeros(port.shape, dtype=port.dtype, device=self.device)
                grads.append(finished(grad))
            made.append(grads)
        return made


def _nothing() -> None: ...


def _root(tensor: torch.Tensor) -> Root:
    """Where the backward of an output starts; the output itself is the next stage's to keep.

    Subclasses are kept: their gradients have to fit what an edge does not know.
    """
    return get_gradient_edge(tensor) if type(tensor) is torch.Tensor else tensor


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers for somebody else, who may read them late.

    Without autograd a module may return the same buffer for every microbatch.
    """
    is_fresh = torch.is_grad_enabled() and tensor.grad_fn is not None
    return finished(tensor.detach()) if is_fresh else tensor.clone()


def wire(
    stage: Stage,
    boundary: Boundary,
    incoming: Skeleton | None,
    outgoing: Skeleton | None,
) -> Wiring:
    """Connect a stage's module to the edges of a boundary."""
    index = stage.stage_index
    edges = boundary.edges()
    into = [boundary.ports[e.source, index] for e in edges.into(index)]
    out_of = [boundary.ports[index, e.target] for e in edges.out_of(index)]
    arrival = stage.front.received(index, [e.source for e in edges.into(index)], into)
    sent = stage.front.sent(index, out_of)
    place = {port.name: i for i, port in enumerate(sent)}
    received = tuple(into[edge][i] for edge, i in arrival)
    position = {at: i for i, at in enumerate(arrival)}
    return Wiring(
        arrival=tuple(arrival),
        wants=tuple(port.has_gradient for port in received),
        gradients=tuple(
            tuple(position[edge, i] for i, port in enumerate(ports) if port.has_gradient)
            for edge, ports in enumerate(into)
            if any(port.has_gradient for port in ports)
        ),
        received=received,
        sent=sent,
        departure=tuple(tuple(place[port.name] for port in ports) for ports in out_of),
        returns=tuple(
            tuple(place[port.name] for port in ports if port.has_gradient)
            for ports in out_of
            if any(port.has_gradient for port in ports)
        ),
        incoming=incoming,
        outgoing=outgoing,
    )
