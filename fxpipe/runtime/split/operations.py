"""The arithmetic of operations that are linear in their input and in their weight.

In:  an input, a weight, perhaps a bias, or the gradient of the output.
Out: the output, or the gradient of one of the three, by itself.

Because y = op(x, weight) + bias is linear in both, the input gradient needs the weight
but not the input, and the weight gradient the input but not the weight (beyond its
shape): the two halves of a backward are independent. Weight and bias gradients are
always new tensors, so that the caller may add to them in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "Convolution",
    "Einsum",
    "Embedding",
    "Linear",
    "Operation",
    "WeightLeft",
    "WeightRight",
]


class Operation(Protocol):
    """The parts of an operation `y = op(x, weight) + bias`."""

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor: ...

    def input_grad(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor: ...

    def weight_grad(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor: ...

    def bias_grad(self, grad: Tensor, bias: Tensor) -> Tensor: ...


class Linear:
    """y[..., o] = sum_i x[..., i] weight[o, i] + bias[o]."""

    __slots__ = ()

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    def input_grad(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return torch.matmul(grad, weight)

    def weight_grad(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return torch.mm(_rows(grad).t(), _rows(x))

    def bias_grad(self, grad: Tensor, bias: Tensor) -> Tensor:
        return _rows(grad).sum(0)


class WeightRight:
    """y = x @ weight + bias; stacks of matrices broadcast."""

    __slots__ = ()

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if bias is None:
            return torch.matmul(x, weight)
        if x.dim() == 2:
            return torch.addmm(bias, x, weight)
        return torch.baddbmm(bias, x, weight)

    def input_grad(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return torch.matmul(grad, weight.mT).sum_to_size(x.shape)

    def weight_grad(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        if weight.dim() == 2:
            return torch.mm(_rows(x).t(), _rows(grad))
        return torch.matmul(x.mT, grad).sum_to_size(weight.shape)

    def bias_grad(self, grad: Tensor, bias: Tensor) -> Tensor:
        return grad.clone() if grad.shape == bias.shape else grad.sum_to_size(bias.shape)


class WeightLeft:
    """y = weight @ x; stacks of matrices broadcast."""

    __slots__ = ()

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.matmul(weight, x)

    def input_grad(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return torch.matmul(weight.mT, grad).sum_to_size(x.shape)

    def weight_grad(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        if weight.dim() == 2:
            return torch.mm(_rows(grad.mT).t(), _rows(x.mT))
        return torch.matmul(grad, x.mT).sum_to_size(weight.shape)

    def bias_grad(self, grad: Tensor, bias: Tensor) -> Tensor:
        raise AssertionError("no bias is ever given to a product with the weight on the left")


@dataclass(frozen=True, slots=True)
class Einsum:
    """y = einsum("x,weight->y", x, weight), by the indices of each."""

    x: str
    weight: str
    y: str

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.einsum(f"{self.x},{self.weight}->{self.y}", x, weight)

    def input_grad(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return torch.einsum(f"{self.y},{self.weight}->{self.x}", grad, weight)

    def weight_grad(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return torch.einsum(f"{self.y},{self.x}->{self.weight}", grad, x)

    def bias_grad(self, grad: Tensor, bias: Tensor) -> Tensor:
        raise AssertionError("no bias is ever given to einsum")


@dataclass(frozen=True, slots=True)
class Convolution:
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int

    def _rest(self) -> tuple[Any, ...]:
        return (
            self.stride,
            self.padding,
            self.dilation,
            self.transposed,
            self.output_padding,
            self.groups,
        )

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.convolution(x, weight, bias, *self._rest())

    def input_grad(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return self._backward(grad, x, weight, (True, False, False))[0]

    def weight_grad(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return self._backward(grad, x, weight, (False, True, False))[1]

    def bias_grad(self, grad: Tensor, bias: Tensor) -> Tensor:
        return grad.sum((0, *range(2, grad.dim())))

    def _backward(
        self, grad: Tensor, x: Tensor, weight: Tensor, mask: tuple[bool, bool, bool]
    ) -> Sequence[Tensor]:
        results: Sequence[Tensor] = torch.ops.aten.convolution_backward.default(
            grad, x, weight, None, *self._rest(), mask
        )
        return results


@dataclass(frozen=True, slots=True)
class Embedding:
    """y[...] = weight[x[...]]; the input is whole numbers and has no gradient."""

    padding: int
    scale_by_frequency: bool

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.embedding(weight, x, self.padding, self.scale_by_frequency, False)

    def input_grad(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        raise AssertionError("indices have no gradient")

    def weight_grad(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        result: Tensor = torch.ops.aten.embedding_dense_backward.default(
            grad, x, weight.shape[0], self.padding, self.scale_by_frequency
        )
        return result

    def bias_grad(self, grad: Tensor, bias: Tensor) -> Tensor:
        raise AssertionError("no bias is ever given to an embedding")


def _rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() == 2 else tensor.flatten(0, -2)
