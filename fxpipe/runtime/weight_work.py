"""The weight half of a backward, as data: what each weight gradient needs.

In:  `WeightWork` items: an operation, its input, the gradient of its output, a parameter.
Out: gradients added to the parameters, summed first, so that each is added once.

The sums go through autograd and not straight into `.grad`: hooks on the parameters, also
those of data-parallel wrappers, see what they would see in a full backward. Each item is
let go of as soon as it is used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.nn import Parameter

from fxpipe.runtime.operations import Operation

__all__ = ["WeightWork", "accumulate", "add", "check_version", "only", "sum_up"]

# Weight gradients wait together until they are this many bytes; one call of autograd
# then adds them all. Small layers share the cost of the call, large ones do not pile up.
_BATCH_BYTES = 1 << 24


class WeightWork(NamedTuple):
    """What the gradients of one weight and its bias need; None: not wanted."""

    operation: Operation | None  # None: `grad` is the gradient of the weight already
    x: Tensor
    x_version: int
    grad: Tensor
    grad_version: int
    weight: Parameter | None
    bias: Parameter | None

    def parameters(self) -> list[Parameter]:
        return [p for p in (self.weight, self.bias) if p is not None]

    def grads(self) -> Iterator[tuple[Parameter, Tensor]]:
        check_version(self.x, self.x_version, "an input")
        check_version(self.grad, self.grad_version, "an output gradient")
        if self.weight is not None:
            weight = self.weight
            if self.operation is None:
                yield weight, self.grad
                return
            yield weight, self.operation.weight_grad(self.grad, self.x, weight).to(weight.dtype)
        if self.bias is not None:
            assert self.operation is not None
            yield self.bias, self.operation.bias_grad(self.grad, self.bias).to(self.bias.dtype)


def check_version(tensor: Tensor, version: int, what: str) -> None:
    """Refuse a tensor that was written to since it was noted, as autograd does."""
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: {what} of shape {list(tensor.shape)} is at version {tensor._version}, "
            f"version {version} was expected; write to a copy instead"
        )


def only(works: list[WeightWork], inputs: Sequence[Tensor | GradientEdge]) -> list[WeightWork]:
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


def accumulate(works: list[WeightWork]) -> None:
    """Do the work and add each parameter's gradient to it, once; empties `works`."""
    parameters: list[Parameter] = []
    grads: list[Tensor] = []
    size = 0
    with torch.no_grad():
        for parameter, grad in sum_up(works):
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


def sum_up(works: list[WeightWork]) -> Iterator[tuple[Parameter, Tensor]]:
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


def add(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    """The sum of two gradients, None for none; may write into the first."""
    if left is None or right is None:
        return right if left is None else left
    return _plus(left, right)


def _plus(left: Tensor, right: Tensor) -> Tensor:
    return left + right if torch.is_grad_enabled() else left.add_(right)


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
