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
get their gradient in the input half; one that is used both ways gets it in two parts,
and its hooks fire for each.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from fxpipe.runtime.deferrable import Call, Operation, recognise

__all__ = ["Deferral", "can_defer"]

# Weight gradients wait together until they are this many bytes; one call of autograd
# then adds them all. Small layers share the cost of the call, large ones do not pile up.
_BATCH_BYTES = 1 << 24

# Makes the output of a deferred operation require a gradient when its input does not.
_ANCHOR = torch.zeros((), device="cpu", requires_grad=True)


def can_defer(module: nn.Module) -> bool:
    """Whether the operations of this module can be seen one by one.

    A compiled module is one block: its backward cannot be split, and watching it would
    make the compiler build it once more.
    """
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    compiled = (dynamo.OptimizedModule,) if dynamo is not None else ()
    return not any(
        isinstance(child, compiled) or getattr(child, "_compiled_call_impl", None) is not None
        for child in module.modules()
    )


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
        self._works: list[_Work] = []
        # Where a backward leaves its work: a list, or None to do it at once. None is right
        # during the forward: who calls backward there expects the gradient afterwards.
        self._sink: list[_Work] | None = None
        self._depth = 0

    def __enter__(self) -> Self:
        self._depth += 1
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._depth -= 1
        if self._depth == 0:  # the forward is over; what comes now is its backward
            self._sink = self._works

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        if torch.is_grad_enabled():
            call = recognise(func, args, kwargs)
            if call is not None and _can_run_function():
                return self._defer(call)
        inner = _INNER.get(func)
        if inner is not None:
            return inner(self, *args, **kwargs)
        return func(*args, **kwargs)

    def backward(
        self, outputs: Sequence[Tensor], grads: Sequence[Tensor | None] | None = None
    ) -> None:
        """Run the backward of `outputs`, leaving the weight gradients for `run`."""
        # Given tensors, the call would come to __torch_function__ and go on with no mode
        # active. Given edges it does not, and what is recomputed still passes through here.
        with self:
            torch.autograd.backward(_edges(outputs), grads)

    def run(self) -> None:
        """Compute the weight gradients and add them to the parameters, each once."""
        works, self._works = self._works, []
        _accumulate(works)

    def _defer(self, call: Call) -> Tensor:
        operation, x, weight, bias = call
        node = _Node(self, operation, weight, weight._version, bias)
        output: Tensor = _apply(None if x.requires_grad else _ANCHOR, x, node)
        return output

    def _collect(self, work: _Work) -> None:
        if self._sink is None:
            _accumulate([work])
        else:
            self._sink.append(work)

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
            with self:
                torch.autograd.backward(_edges(roots), grads, **options)
            return
        works: list[_Work] = []
        outer, self._sink = self._sink, works
        try:
            torch.autograd.backward(roots, grads, inputs=inputs, **options)  # type: ignore[arg-type]
        finally:
            self._sink = outer
        for work in _only(works, inputs):
            self._collect(work)

    def _inner_tensor_backward(
        self, tensor: Tensor, gradient: Tensor | None = None, **options: Any
    ) -> None:
        self._inner_backward(tensor, gradient, **options)

    def _inner_grad(
        self,
        outputs: Sequence[Tensor | GradientEdge],
        inputs: Sequence[Tensor | GradientEdge],
        *,
        create_graph: bool = False,
        allow_unused: bool = False,
        materialize_grads: bool = False,
        **options: Any,
    ) -> tuple[Tensor | None, ...]:
        """`torch.autograd.grad` as a module calls it: none of its work is left for later."""
        works: list[_Work] = []
        outer, self._sink = self._sink, works
        try:
            with self:
                found: Sequence[Tensor | None] = torch.autograd.grad(
                    _edges(outputs),
                    _edges(inputs),
                    create_graph=create_graph,
                    allow_unused=True,
                    **options,
                )
        finally:
            self._sink = outer
        with torch.set_grad_enabled(create_graph):
            sums = {id(parameter): total for parameter, total in _sums(_only(works, inputs))}
            grads = [_add(sums.get(id(x)), grad) for x, grad in zip(inputs, found, strict=True)]
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


def _can_run_function() -> bool:
    # Transforms of torch.func and forward-mode derivatives need rules that we do not have.
    return not torch._C._are_functorch_transforms_active() and forward_ad._current_level < 0


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
    def forward(ctx: Any, anchor: Tensor | None, x: Tensor, node: _Node) -> Tensor:
        ctx.node = node
        ctx.save_for_backward(x)
        ctx.set_materialize_grads(False)
        weight, bias = _cast(node.weight, x), node.bias
        y = node.operation.output(x, weight, None if bias is None else _cast(bias, x))
        # A view that leaves a Function cannot be written to in place; an alias can.
        return y.detach() if y._is_view() else y

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[None, Tensor | None, None]:
        if grad is None:
            return None, None, None
        if torch.is_grad_enabled():  # a graph of this backward is wanted, so watch it as well
            return None, _step(ctx, grad), None
        with torch._C.DisableTorchFunction():
            return None, _step(ctx, grad), None


# Function.apply itself only adds what functorch and dynamo need, for a third of the time of
# a small layer; neither is active here.
_apply: Any = super(torch.autograd.Function, _Deferred).apply


def _cast(weight: Tensor, x: Tensor) -> Tensor:
    return weight if weight.dtype is x.dtype or not x.is_floating_point() else weight.to(x.dtype)


def _step(ctx: Any, grad: Tensor) -> Tensor | None:
    deferral, operation, weight, weight_version, bias = ctx.node
    (x,) = ctx.saved_tensors
    input_grad = None
    if ctx.needs_input_grad[1]:
        _check_version(weight, weight_version, "a weight")
        input_grad = operation.input_grad(grad, x, _cast(weight, x))
    if x.requires_grad and not torch.is_grad_enabled():
        x = x.detach()  # or it would keep the graph behind it alive
    trains_bias = bias is not None and bias.requires_grad
    deferral._collect(
        _Work(operation, x, x._version, grad, grad._version, weight, bias if trains_bias else None)
    )
    return input_grad


def _check_version(tensor: Tensor, version: int, what: str) -> None:
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: {what} of shape {list(tensor.shape)} is at version {tensor._version}, "
            f"version {version} was expected; write to a copy instead"
        )


class _Work(NamedTuple):
    """What the gradients of one weight and its bias need; None: not wanted."""

    operation: Operation
    x: Tensor
    x_version: int
    grad: Tensor
    grad_version: int
    weight: Parameter | None
    bias: Parameter | None

    def parameters(self) -> list[Parameter]:
        return [p for p in (self.weight, self.bias) if p is not None]

    def grads(self) -> Iterator[tuple[Parameter, Tensor]]:
        _check_version(self.x, self.x_version, "an input")
        _check_version(self.grad, self.grad_version, "an output gradient")
        if self.weight is not None:
            weight = self.weight
            yield weight, self.operation.weight_grad(self.grad, self.x, weight).to(weight.dtype)
        if self.bias is not None:
            yield self.bias, self.operation.bias_grad(self.grad, self.bias).to(self.bias.dtype)


def _only(works: list[_Work], inputs: Sequence[Tensor | GradientEdge]) -> list[_Work]:
    """The part of the work that belongs to parameters among `inputs`."""
    wanted = {id(x) for x in inputs}
    kept = [
        work._replace(
            weight=work.weight if id(work.weight) in wanted else None,
            bias=work.bias if id(work.bias) in wanted else None,
        )
        for work in works
    ]
    return [work for work in kept if work.parameters()]


def _sums(works: list[_Work]) -> Iterator[tuple[Parameter, Tensor]]:
    """Each parameter with its whole gradient, as soon as that is known; empties `works`."""
    uses = Counter(parameter for work in works for parameter in work.parameters())
    sums: dict[Parameter, Tensor] = {}
    works.reverse()
    while works:
        for parameter, grad in works.pop().grads():
            sums[parameter] = grad if parameter not in sums else _plus(sums[parameter], grad)
            del grad  # autograd takes a gradient over without a copy if nobody else holds it
            uses[parameter] -= 1
            if not uses[parameter]:
                yield parameter, sums.pop(parameter)


def _add(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    if left is None or right is None:
        return right if left is None else left
    return _plus(left, right)


def _plus(left: Tensor, right: Tensor) -> Tensor:
    return left + right if torch.is_grad_enabled() else left.add_(right)


def _accumulate(works: list[_Work]) -> None:
    parameters: list[Parameter] = []
    grads: list[Tensor] = []
    size = 0
    with torch.no_grad():
        for parameter, grad in _sums(works):
            if not parameter.requires_grad:
                continue  # frozen since the forward
            parameters.append(parameter)
            grads.append(grad)
            size += grad.nbytes
            del grad
            if size > _BATCH_BYTES:
                _hand_over(parameters, grads)
                size = 0
    _hand_over(parameters, grads)


def _hand_over(parameters: list[Parameter], grads: list[Tensor]) -> None:
    """Give each parameter its gradient as a backward would; empties both lists."""
    if parameters:
        with torch.enable_grad():
            root: Tensor = _source(grads, *parameters)
        parameters.clear()
        torch.autograd.backward([root])


class _Source(torch.autograd.Function):
    """A node whose backward puts out gradients that are already known."""

    @staticmethod
    def forward(ctx: Any, grads: list[Tensor], *parameters: Parameter) -> Tensor:
        ctx.grads = grads
        return parameters[0].new_empty(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads = (None, *ctx.grads)
        ctx.grads.clear()
        return grads


_source: Any = _Source.apply
