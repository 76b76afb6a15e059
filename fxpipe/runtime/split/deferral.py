"""Leave the weight gradients of one microbatch undone until somebody asks for them.

In:  a stage's forward, run inside a `Deferral`, and the gradients of its outputs.
Out: the gradients of its inputs right away; those of the weights when `run` is called.

Inside a `Deferral` a linear layer, matrix product, convolution or embedding whose weight
is a trainable parameter (see deferrable.py) runs as a custom autograd Function without
the parameter in its graph. Its backward computes the input gradient and notes what the
weight gradient needs: the input and the output gradient. `run` computes the weight
gradients, sums them per parameter and hands each sum to autograd once, so that hooks and
data-parallel wrappers see it as they do in a full backward.

Such a graph must go backward through the same `Deferral`: a checkpointed region is
computed again there and has to save the same tensors. Parameters used in any other way
get their gradient in the input half. One that is used both ways gets it in two parts,
unless it has hooks: then the first part waits for the second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from fxpipe.runtime.split.deferrable import DEFERRABLE, Call, is_leaf_parameter, recognise
from fxpipe.runtime.split.engine import run_backward
from fxpipe.runtime.split.operations import Operation
from fxpipe.runtime.split.weight_work import WeightWork, accumulate, modified, only
from fxpipe.torch_inside import (
    apply_of,
    backward_hooks,
    forward_ad_level,
    functorch_is_active,
    is_compiled,
    is_view,
    post_accumulate_hooks,
    version_of,
    without_torch_function,
)

__all__ = ["Deferral", "can_defer"]

# An input of every deferred operation. Its output requires a gradient even if nothing else
# does, and who asks autograd for the gradient of the anchor gets all of them executed.
_ANCHOR = torch.zeros((), device="cpu", requires_grad=True)


def can_defer(module: nn.Module) -> bool:
    """Whether the operations of this module can be seen one by one.

    A compiled module is one block: its backward cannot be split, and watching it would
    make the compiler build it once more.
    """
    return not any(is_compiled(child) for child in module.modules())


class Deferral(TorchFunctionMode):
    """The deferred weight work of one microbatch on one stage; use it once.

    Example:
        deferral = Deferral()
        with deferral:
            output = module(x)
        deferral.backward([output], [grad])
        deferral.run()
    """

    def __init__(self) -> None:
        super().__init__()
        self._works: list[WeightWork] = []
        # Where a backward leaves its work: a list, or None to do it at once. None is right
        # during the forward: who calls backward there expects the gradient afterwards.
        self._sink: list[WeightWork] | None = None
        self._depth = 0
        self._deferred: dict[int, Parameter] = {}
        self._aside: dict[int, _Aside] = {}

    def __enter__(self) -> Self:
        if self._depth == 0 and self._sink is not None:
            for parameter in self._deferred.values():
                self._set_aside(parameter)
        self._depth += 1
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._depth -= 1
        if self._depth == 0:
            self._sink = self._works  # the forward is over; what comes now is its backward
            while self._aside:
                self._works += self._aside.popitem()[1].put_back()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if torch.compiler.is_compiling():
            return func(*args, **(kwargs or {}))
        if func in DEFERRABLE and torch.is_grad_enabled():
            call = recognise(func, args, kwargs or {})
            if call is not None and _can_run_function():
                return self._defer(call)
        elif func in _INNER and not functorch_is_active():
            return _INNER[func](self, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def backward(
        self,
        outputs: Sequence[Tensor | GradientEdge],
        grads: Sequence[Tensor | None] | None = None,
    ) -> None:
        """Run the backward of `outputs`, leaving the weight gradients for `run`."""
        # Given tensors, the call would come to __torch_function__ and go on with no mode
        # active. Given edges it does not, and what is recomputed still passes through here.
        edges, seeds = _edges(outputs), _seeds(outputs, grads)
        with self:
            run_backward(edges, seeds)

    def run(self) -> None:
        """Compute the weight gradients and add them to the parameters, each once."""
        works, self._works = self._works, []
        accumulate(works)

    def _defer(self, call: Call) -> Tensor:
        operation, x, weight, bias = call
        for parameter in (weight, bias):
            if is_leaf_parameter(parameter) and id(parameter) not in self._deferred:
                self._deferred[id(parameter)] = parameter
                if self._sink is not None:  # first met when a checkpointed region runs again
                    self._set_aside(parameter)
        node = _Node(self, operation, weight, version_of(weight), bias)
        output: Tensor = _apply(_ANCHOR, x, node)
        return output

    def _set_aside(self, parameter: Parameter) -> None:
        """Let hooks wait for the weight half, whatever else gives this parameter a gradient."""
        hooks = [
            registered
            for registered in (backward_hooks(parameter), post_accumulate_hooks(parameter))
            if registered
        ]
        if hooks:
            entries = [(registered, dict(registered)) for registered in hooks]
            self._aside[id(parameter)] = _Aside(parameter, parameter.grad, entries)
            parameter.grad = None
            for registered in hooks:
                registered.clear()

    def _inner_backward(
        self,
        tensors: _Roots,
        grad_tensors: Tensor | Sequence[Tensor | None] | None = None,
        *,
        inputs: Sequence[Tensor | GradientEdge] | None = None,
        **options: Any,
    ) -> None:
        """`torch.autograd.backward` as a module or a recomputation calls it."""
        roots = [tensors] if isinstance(tensors, (Tensor, GradientEdge)) else list(tensors)
        grads = [grad_tensors] if isinstance(grad_tensors, Tensor) else grad_tensors
        if inputs is None:
            edges, seeds = _edges(roots), _seeds(roots, grads)
            with self:
                torch.autograd.backward(edges, seeds, **options)
            return
        works: list[WeightWork] = []
        outer, self._sink = self._sink, works
        try:
            torch.autograd.backward(roots, grads, inputs=[*inputs, _ANCHOR], **options)  # type: ignore[arg-type]
        finally:
            self._sink = outer
        kept = only(works, inputs)
        if outer is None:
            accumulate(kept)
        else:
            outer += kept

    def _inner_tensor_backward(
        self, tensor: Tensor, gradient: Tensor | None = None, **options: Any
    ) -> None:
        self._inner_backward(tensor, gradient, **options)

    def _inner_grad(
        self,
        outputs: Sequence[Tensor | GradientEdge],
        inputs: Sequence[Tensor | GradientEdge],
        *,
        grad_outputs: Tensor | Sequence[Tensor | None] | None = None,
        create_graph: bool = False,
        allow_unused: bool = False,
        materialize_grads: bool = False,
        **options: Any,
    ) -> tuple[Tensor | None, ...]:
        """`torch.autograd.grad` as a module calls it: none of its work is left for later."""
        given = [grad_outputs] if isinstance(grad_outputs, Tensor) else grad_outputs
        edges, seeds = _edges(outputs), _seeds(outputs, given)
        works: list[WeightWork] = []
        outer, self._sink = self._sink, works
        try:
            with self:
                *found, _ = torch.autograd.grad(
                    edges,
                    _edges([*inputs, _ANCHOR]),
                    seeds,
                    create_graph=create_graph,
                    allow_unused=True,
                    **options,
                )
        finally:
            self._sink = outer
        sums: dict[Parameter, Tensor] = {}
        with torch.set_grad_enabled(create_graph):
            for work in only(works, inputs):
                work.add_to(sums)
            by_id = {id(parameter): total for parameter, total in sums.items()}
            grads = [_sum_of(by_id.get(id(x)), grad) for x, grad in zip(inputs, found, strict=True)]
            if materialize_grads:
                grads = [
                    torch.zeros_like(x, requires_grad=create_graph)
                    if grad is None and isinstance(x, Tensor)
                    else grad
                    for x, grad in zip(inputs, grads, strict=True)
                ]
        unused = [i for i, grad in enumerate(grads) if grad is None]
        if unused and not allow_unused:
            raise RuntimeError(
                f"the differentiated tensor at index {unused[0]} appears not to have been used in "
                "the graph; set allow_unused=True if this is the desired behavior"
            )
        return tuple(grads)


_Roots = Tensor | GradientEdge | Sequence[Tensor | GradientEdge]

_INNER: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.autograd.backward: Deferral._inner_backward,
    Tensor.backward: Deferral._inner_tensor_backward,
    torch.autograd.grad: Deferral._inner_grad,
}


def _edges(tensors: Sequence[Tensor | GradientEdge]) -> list[GradientEdge]:
    return [t if isinstance(t, GradientEdge) else get_gradient_edge(t) for t in tensors]


def _seeds(
    tensors: Sequence[Tensor | GradientEdge], grads: Sequence[Tensor | None] | None
) -> list[Tensor | None]:
    # An edge does not know that its tensor is a subclass, so make the implicit gradient here.
    return [
        torch.ones_like(tensor)
        if grad is None and isinstance(tensor, Tensor) and tensor.numel() == 1
        else grad
        for tensor, grad in zip(tensors, grads or [None] * len(tensors), strict=True)
    ]


def _sum_of(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    if left is None or right is None:
        return right if left is None else left
    return left + right


def _can_run_function() -> bool:
    # Transforms of torch.func and forward-mode derivatives need rules that we do not have.
    return not functorch_is_active() and forward_ad_level() < 0


class _Node(NamedTuple):
    """What a deferred operation knows besides the tensors it saves."""

    deferral: Deferral
    operation: Operation
    weight: Parameter
    weight_version: int
    bias: Tensor | None


class _Deferred(torch.autograd.Function):
    """An operation whose backward gives the input gradient and notes the rest."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor, node: _Node) -> Tensor:
        ctx.node = node
        ctx.save_for_backward(x)
        ctx.set_materialize_grads(False)
        weight: Tensor = node.weight
        bias = node.bias
        if weight.dtype is not x.dtype:
            weight, bias = _cast(weight, x), None if bias is None else _cast(bias, x)
        y = node.operation.output(x, weight, bias)
        # A view that leaves a Function cannot be written to in place; an alias can.
        return y.detach() if is_view(y) else y

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[None, Tensor | None, None]:
        if grad is None:
            return None, None, None
        (x,) = ctx.saved_tensors  # may compute a checkpointed region again: with the mode on
        if torch.is_grad_enabled():  # a graph of this backward is wanted, so watch it as well
            return None, _step(ctx, x, grad), None
        with without_torch_function():
            return None, _step(ctx, x, grad), None


_apply = apply_of(_Deferred)  # neither functorch nor the compiler is active here


def _cast(weight: Tensor, x: Tensor) -> Tensor:
    return weight.to(x.dtype) if x.is_floating_point() else weight


def _step(ctx: Any, x: Tensor, grad: Tensor) -> Tensor | None:
    deferral, operation, weight, weight_version, bias = ctx.node
    input_grad = None
    if ctx.needs_input_grad[1]:
        if version_of(weight) != weight_version:
            raise modified(weight, weight_version, "a weight")
        same = weight if weight.dtype is x.dtype else _cast(weight, x)
        input_grad = operation.input_grad(grad, x, same)
        if not torch.is_grad_enabled():
            x = x.detach()  # or it would keep the graph behind it alive
    if bias is not None and not bias.requires_grad:
        bias = None
    work = WeightWork(operation, x, version_of(x), grad, version_of(grad), weight, bias)
    if deferral._sink is None:
        accumulate([work])
    else:
        deferral._sink.append(work)
    return input_grad


class _Aside(NamedTuple):
    """A parameter whose gradient and hooks were taken away while the input half runs."""

    parameter: Parameter
    grad: Tensor | None
    hooks: list[tuple[dict[int, Any], dict[int, Any]]]

    def put_back(self) -> list[WeightWork]:
        """Restore the parameter; the gradient it got meanwhile becomes work for later."""
        found, self.parameter.grad = self.parameter.grad, self.grad
        for registered, entries in self.hooks:
            registered.update(entries)
        if found is None:
            return []
        version = version_of(found)
        return [WeightWork(None, found, version, found, version, self.parameter, None)]
