"""The weight half of a backward, as data: what each weight gradient needs.

In:  `WeightWork` items: an operation, its input, the gradient of its output, a parameter.
Out: gradients added to the parameters, summed first, so that each is added once.

The sums go through autograd and not straight into `.grad`: hooks on the parameters, also
those of data-parallel wrappers, see what they would see in a full backward. Each item is
let go of as soon as it is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.nn import Parameter

from fxpipe.runtime.split.engine import run_backward
from fxpipe.runtime.split.operations import Operation
from fxpipe.torch_inside import apply_of, version_of

__all__ = ["WeightWork", "accumulate", "modified", "only"]

# Weight gradients wait together until they are this many bytes; one call of autograd
# then adds them all. Small layers share the cost of the call, large ones do not pile up.
_BATCH_BYTES = 1 << 20


class WeightWork(NamedTuple):
    """What the gradients of one weight and its bias need; None: not wanted."""

    operation: Operation | None  # None: `grad` is the gradient of the weight already
    x: Tensor
    x_version: int
    grad: Tensor
    grad_version: int
    weight: Parameter | None
    bias: Parameter | None

    def add_to(self, sums: dict[Parameter, Tensor]) -> None:
        """Compute the gradients and add them to those of the same parameters."""
        operation, x, x_version, grad, grad_version, weight, bias = self
        if version_of(x) != x_version:
            raise modified(x, x_version, "an input")
        if version_of(grad) != grad_version:
            raise modified(grad, grad_version, "an output gradient")
        if weight is not None:
            _add_to(sums, weight, operation.weight_grad(grad, x, weight) if operation else grad)
        if bias is not None:
            assert operation is not None
            _add_to(sums, bias, operation.bias_grad(grad, bias))


def modified(tensor: Tensor, version: int, what: str) -> RuntimeError:
    """What to raise for a tensor that was written to since it was noted, as autograd does."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: {what} of shape {list(tensor.shape)} is at version {version_of(tensor)}, "
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
    return [work for work in kept if work.weight is not None or work.bias is not None]


def accumulate(works: list[WeightWork]) -> None:
    """Do the work and add each parameter's gradient to it, once; empties `works`."""
    last: dict[Parameter | None, int] = {}
    for left, work in enumerate(reversed(works)):
        last.setdefault(work.weight, left)
        last.setdefault(work.bias, left)
    sums: dict[Parameter, Tensor] = {}
    parameters: list[Parameter] = []
    size = 0
    works.reverse()
    with torch.no_grad():
        while works:
            work = works.pop()
            work.add_to(sums)
            for parameter in (work.weight, work.bias):
                # A sum is whole once the last work for its parameter is done.
                if parameter is not None and last[parameter] == len(works):
                    parameters.append(parameter)
                    size += parameter.nbytes
            del work
            if size > _BATCH_BYTES:
                _hand_over(parameters, sums)
                size = 0
        _hand_over(parameters, sums)


def _add_to(sums: dict[Parameter, Tensor], parameter: Parameter, grad: Tensor) -> None:
    if grad.dtype is not parameter.dtype:
        grad = grad.to(parameter.dtype)
    known = sums.get(parameter)
    if known is None:
        sums[parameter] = grad
    else:
        sums[parameter] = known + grad if torch.is_grad_enabled() else known.add_(grad)


def _hand_over(parameters: list[Parameter], sums: dict[Parameter, Tensor]) -> None:
    """Give each parameter its sum as a backward would; empties `parameters`."""
    # Autograd takes a gradient over without a copy if nobody else holds it.
    grads = [sums.pop(parameter) for parameter in parameters]
    if any(parameter.requires_grad for parameter in parameters):  # or frozen since the forward
        with torch.enable_grad():
            root: Tensor = _source(grads, *parameters)
        run_backward([root], [root.detach()])  # any gradient does: it is not looked at
    parameters.clear()


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


_source = apply_of(_Source)
