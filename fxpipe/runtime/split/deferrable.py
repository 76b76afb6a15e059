"""Tell which calls of torch functions can have their weight gradient deferred.

In:  one call of a torch function, as a torch-function mode sees it.
Out: a `Call` (operation, input, weight, bias), or None if it must run as it is.

Whatever is not recognised here is left to autograd, so a miss costs overlap, never a
gradient. Left alone on purpose: tensor subclasses but DTensor, sparse and nested layouts,
complex numbers, vectors, sparse embedding gradients, and weights that are computed
from parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from fxpipe.runtime.split.operations import (
    Convolution,
    Einsum,
    Embedding,
    Linear,
    Operation,
    WeightLeft,
    WeightRight,
)
from fxpipe.runtime.stage.dtensors import is_dtensor
from fxpipe.torch_inside import base_of

__all__ = ["DEFERRABLE", "Call", "is_leaf_parameter", "recognise"]


class Call(NamedTuple):
    """One recognised call; the weight is a trainable leaf."""

    operation: Operation
    x: Tensor
    weight: Parameter
    bias: Tensor | None


def recognise(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Call | None:
    """The call behind `function(*args, **kwargs)`, a key of `DEFERRABLE`, or None.

    Under autocast the input of the call is already in the lower precision.
    """
    try:
        call = DEFERRABLE[function](*args, **kwargs)
    except (TypeError, AttributeError):
        return None  # a wrong call: let the function itself say so
    if call is None or not _fits(call):
        return None
    return call if type(call.operation) is Embedding else _in_one_dtype(call)


def _is_trainable(tensor: object) -> bool:
    return is_leaf_parameter(tensor) and tensor.requires_grad and tensor.dtype.is_floating_point


def is_leaf_parameter(tensor: object) -> TypeGuard[Parameter]:
    """Whether it is a parameter, plain or a DTensor, and no other subclass."""
    return type(tensor) is Parameter or (isinstance(tensor, Parameter) and is_dtensor(tensor))


def _fits(call: Call) -> bool:
    x, weight, bias = call.x, call.weight, call.bias
    if x.is_nested or x.layout is not torch.strided:
        return False
    if is_dtensor(weight):  # then the others are, too
        return is_dtensor(x) and (bias is None or is_dtensor(bias))
    if type(x) not in (Tensor, Parameter):
        return False
    if bias is None or type(bias) is Parameter:
        return True
    return type(bias) is Tensor and not bias.requires_grad


def _in_one_dtype(call: Call) -> Call | None:
    x, weight, bias = call.x, call.weight, call.bias
    device = weight.device.type
    if torch.is_autocast_enabled(device):
        dtypes = (x.dtype, weight.dtype) if bias is None else (x.dtype, weight.dtype, bias.dtype)
        if not all(dtype in _AUTOCAST for dtype in dtypes):
            return None
        return call._replace(x=x.to(torch.get_autocast_dtype(device)))
    if x.dtype is not weight.dtype or (bias is not None and bias.dtype is not x.dtype):
        return None
    return call


_AUTOCAST = (torch.float32, torch.bfloat16, torch.float16)


_LINEAR = Linear()
_WEIGHT_RIGHT = WeightRight()
_WEIGHT_LEFT = WeightLeft()


def _linear(input: Any, weight: Any, bias: Any = None) -> Call | None:
    if not _is_trainable(weight) or weight.dim() != 2 or input.dim() < 2:
        return None
    if bias is not None and bias.dim() != 1:
        return None
    return Call(_LINEAR, input, weight, bias)


def _matmul(input: Any, other: Any) -> Call | None:
    if input.dim() < 2 or other.dim() < 2:
        return None
    if _is_trainable(other):
        return Call(_WEIGHT_RIGHT, input, other, None)
    if _is_trainable(input):
        return Call(_WEIGHT_LEFT, other, input, None)
    base = base_of(other)
    if _is_trainable(base) and other.requires_grad and other.dim() == base.dim() == 2:
        is_transposed = other.shape == base.shape[::-1] and other.stride() == base.stride()[::-1]
        if is_transposed and other.storage_offset() == base.storage_offset():
            return Call(_LINEAR, input, base, None)
    return None


def _mm(input: Any, mat2: Any) -> Call | None:
    return _matmul(input, mat2) if input.dim() == mat2.dim() == 2 else None


def _bmm(input: Any, mat2: Any) -> Call | None:
    return _matmul(input, mat2) if _are_stacks(input, mat2) else None


def _addmm(input: Any, mat1: Any, mat2: Any, *, beta: Any = 1, alpha: Any = 1) -> Call | None:
    if beta != 1 or alpha != 1 or not _is_trainable(mat2) or not mat1.dim() == mat2.dim() == 2:
        return None
    return Call(_WEIGHT_RIGHT, mat1, mat2, input)


def _baddbmm(input: Any, batch1: Any, batch2: Any, *, beta: Any = 1, alpha: Any = 1) -> Call | None:
    if beta != 1 or alpha != 1 or not _is_trainable(batch2) or not _are_stacks(batch1, batch2):
        return None
    return Call(_WEIGHT_RIGHT, batch1, batch2, input)


def _are_stacks(left: Any, right: Any) -> bool:
    return bool(left.dim() == right.dim() == 3 and left.shape[0] == right.shape[0])


def _einsum(equation: Any, *operands: Any) -> Call | None:
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    if not isinstance(equation, str) or len(operands) != 2:
        return None
    left, _, y = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if "->" not in equation or "." in equation or len(terms) != 2:
        return None
    if torch.is_autocast_enabled(operands[0].device.type):
        return None  # whether it lowers the precision depends on the path it takes
    if any(len(set(term)) != len(term) for term in (*terms, y)):
        return None
    # Each index of one term must occur in another one, or its gradient is a broadcast.
    a, b = set(terms[0]), set(terms[1])
    if not (a <= b | set(y) and b <= a | set(y)):
        return None
    if len(operands[0].shape) != len(terms[0]) or len(operands[1].shape) != len(terms[1]):
        return None
    for x, weight in ((0, 1), (1, 0)):
        if _is_trainable(operands[weight]):
            sizes = dict(zip(terms[weight], operands[weight].shape, strict=True))
            if any(sizes.get(i, n) != n for i, n in zip(terms[x], operands[x].shape, strict=True)):
                return None  # a dimension of size 1 that broadcasts
            return Call(Einsum(terms[x], terms[weight], y), operands[x], operands[weight], None)
    return None


def _spread(value: Any, dims: int) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * dims if len(values) == 1 else values


def _conv(
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Call | None:
    if not _is_trainable(weight) or input.dim() != weight.dim():
        return None
    dims = weight.dim() - 2
    dilation = _spread(dilation, dims)
    if isinstance(padding, str):
        reach = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
        if padding == "valid":
            reach = [0] * dims
        elif padding != "same" or any(r % 2 for r in reach):
            return None  # an odd reach is padded on one side only
        padding = tuple(r // 2 for r in reach)
    operation = Convolution(
        _spread(stride, dims), _spread(padding, dims), dilation, False, (0,) * dims, groups
    )
    return Call(operation, input, weight, bias)


def _conv_transpose(
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Call | None:
    if not _is_trainable(weight) or input.dim() != weight.dim():
        return None
    dims = weight.dim() - 2
    operation = Convolution(
        _spread(stride, dims),
        _spread(padding, dims),
        _spread(dilation, dims),
        True,
        _spread(output_padding, dims),
        groups,
    )
    return Call(operation, input, weight, bias)


def _embedding(
    input: Any,
    weight: Any,
    padding_idx: Any = None,
    max_norm: Any = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Call | None:
    if not _is_trainable(weight) or weight.dim() != 2 or max_norm is not None or sparse:
        return None
    rows = weight.shape[0]
    if padding_idx is None:
        padding_idx = -1
    elif not -rows <= padding_idx < rows:
        return None
    elif padding_idx < 0:
        padding_idx += rows
    return Call(Embedding(padding_idx, scale_grad_by_freq), input, weight, None)


DEFERRABLE: dict[Callable[..., Any], Callable[..., Call | None]] = {
    F.linear: _linear,
    torch.matmul: _matmul,
    Tensor.matmul: _matmul,
    Tensor.__matmul__: _matmul,
    torch.mm: _mm,
    Tensor.mm: _mm,
    torch.bmm: _bmm,
    Tensor.bmm: _bmm,
    torch.addmm: _addmm,
    Tensor.addmm: _addmm,
    torch.baddbmm: _baddbmm,
    Tensor.baddbmm: _baddbmm,
    torch.einsum: _einsum,
    F.conv1d: _conv,
    F.conv2d: _conv,
    F.conv3d: _conv,
    F.conv_transpose1d: _conv_transpose,
    F.conv_transpose2d: _conv_transpose,
    F.conv_transpose3d: _conv_transpose,
    F.embedding: _embedding,
}
