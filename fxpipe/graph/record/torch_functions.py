"""How a torch function runs in opened code, and how it is written as a node.

Functions that only ask for a tensor's size, dtype or the like are no nodes at all. Some
that fake tensors cannot run are replaced by others that do the same: `torch.tensor([a, b])`
of tensors reads their values one by one, as does an index that is a list of tensors;
stacking them does not, and says the same.

Some of torch's code for tensors without data makes a number of a symbol on the way: in C++, or
because it goes through the steps of a sequence. `run_following` runs others in the place of such
functions, which return what they would: tensors of the right sizes, that require a gradient
where theirs do.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.nn import functional

from fxpipe.graph.calls.attention_masks import MaskCall
from fxpipe.graph.nested import Args, Kwargs, Size, has_tensor
from fxpipe.graph.sandbox.made_up import empty
from fxpipe.torch_inside import VERSION_COUNTER, following_sizes, functorch_is_active

__all__ = [
    "as_node",
    "clamped_slices",
    "effect_of",
    "is_metadata",
    "plain_tuples",
    "run_following",
    "sizes_only",
    "stacked",
    "stacked_indices",
    "substitute",
]

_METADATA_GETTERS = {
    "shape", "dtype", "device", "ndim", "requires_grad", "is_leaf", "layout", "is_cuda", "is_cpu",
    "is_meta", "is_sparse", "is_quantized", "names", "grad_fn", VERSION_COUNTER, "itemsize",
    "nbytes", "is_mps", "is_xpu", "is_nested", "is_mkldnn", "output_nr", "retains_grad",
}  # fmt: skip
_METADATA_METHODS = {
    "size", "dim", "numel", "stride", "is_floating_point", "is_complex", "is_contiguous",
    "element_size", "storage_offset", "nelement", "ndimension", "get_device", "__len__",
    "is_signed", "is_pinned", "is_inference", "is_set_to", "__hash__", "__repr__", "__format__",
    "is_same_size",
    "has_names", "dim_order", "is_conj", "is_neg", "__deepcopy__",
}  # fmt: skip


def is_metadata(func: Any) -> bool:
    """Say whether a function only asks about a tensor, not for its values."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return getattr(func.__self__, "__name__", "") in _METADATA_GETTERS
    return name in _METADATA_METHODS


def effect_of(func: Any) -> str:
    """Name what a function does to a tensor that no node could repeat; empty for others."""
    name = getattr(func, "__name__", "")
    if name == "__set__" and getattr(func.__self__, "__name__", "") in ("data", "grad"):
        return f"an assignment to .{func.__self__.__name__}"
    if func is torch.autograd.grad:
        return "torch.autograd.grad"
    if name in ("_pack_padded_sequence", "_pad_packed_sequence"):
        return f"{name[1:]}, whose sizes are values of its arguments"
    if functorch_is_active():
        return "a transform of torch.func"
    if torch.is_inference_mode_enabled():
        return "torch.inference_mode"
    return name if name in ("backward", "set_", "share_memory_") else ""


_OPERATORS = {"__getitem__": operator.getitem, "__setitem__": operator.setitem}


def as_node(func: object, args: Args, kwargs: object) -> tuple[str, object, object, object]:
    """Return op, target, args and kwargs of the node for a call."""
    called = getattr(func, "__name__", "")
    if called in ("__get__", "__set__") and hasattr(func, "__self__"):
        attribute = func.__self__.__name__
        if called == "__get__":
            return "call_function", getattr, (args[0], attribute), {}
        return "call_function", setattr, (args[0], attribute, args[1]), {}
    if called in _OPERATORS:
        return "call_function", _OPERATORS[called], args, kwargs
    if args and isinstance(args[0], torch.Tensor):
        if _is_method(func, called):
            return "call_method", called, args, kwargs
        if _is_method(func, _dunders().get(id(func), "")):  # some go by the name of another
            return "call_method", _dunders()[id(func)], args, kwargs
    return "call_function", func, args, kwargs


def plain_tuples(value: Any) -> Any:
    """Return arguments with tuples in place of torch.Size, which torch takes as well."""
    if type(value) in (tuple, list):
        return type(value)(map(plain_tuples, value))
    if type(value) is dict:
        return {key: plain_tuples(part) for key, part in value.items()}
    return tuple(value) if isinstance(value, torch.Size) else value


@functools.cache
def _dunders() -> dict[int, str]:
    return {
        id(getattr(torch.Tensor, name)): name
        for name in dir(torch.Tensor)
        if name.startswith("__") and callable(getattr(torch.Tensor, name, None))
    }


def _is_method(func: object, name: str) -> bool:
    method = getattr(torch.Tensor, name, None)
    return method is not None and (method is func or method == func)


def substitute(func: object, args: Args) -> object:
    """Return the function to run, and to write down, in place of another."""
    if func in (torch.tensor, torch.as_tensor) and args and type(args[0]) in (tuple, list):
        return stacked if has_tensor(args[0]) else func
    return func


def stacked_indices(func: object, args: Args, stack: Callable[[object], object]) -> Args:
    """Return the arguments of a call; lists of tensors in an index are stacked by `stack`."""
    if getattr(func, "__name__", "") not in ("__getitem__", "__setitem__") or len(args) < 2:
        return args
    tensor, index, *rest = args
    parts = index if type(index) is tuple else (index,)
    if not any(_is_list_of_tensors(part) for part in parts):
        return args
    made = tuple(stack(part) if _is_list_of_tensors(part) else part for part in parts)
    return (tensor, made if type(index) is tuple else made[0], *rest)


_LIKE = {
    "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full",
}  # fmt: skip
_AS = {"expand_as", "view_as", "reshape_as", "type_as"}


def sizes_only(node: fx.Node) -> set[fx.Node]:
    """Return the nodes of which another reads size, dtype and device, and no value."""
    if isinstance(node.target, MaskCall):
        return {s for s in node.target.shown(node.args, node.kwargs) if isinstance(s, fx.Node)}
    name = getattr(node.target, "__name__", node.target)
    shown = node.args[name in _AS :][:1] if name in _LIKE | _AS else ()
    read = node.args[:1] if name in _AS else ()
    return {arg for arg in shown if isinstance(arg, fx.Node) and arg not in read}


def clamped_slices(func: object, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of a call; `x[:, :8]` ends at the smaller of 8 and the size.

    A plain slice does so by itself, but tells nobody: torch takes the answer for the example
    as the answer for all sizes.
    """
    if getattr(func, "__name__", "") != "__getitem__" or len(args) != 2:
        return args
    tensor, index = args
    parts = index if type(index) is tuple else (index,)
    if not any(_has_number(part) for part in parts if isinstance(part, slice)):
        return args
    made: list[object] = []
    dim = 0
    for place, part in enumerate(parts):
        if part is Ellipsis:
            used = sum(later is not None for later in parts[place + 1 :])
            dim = tensor.dim() - used
        elif part is not None:
            if type(part) not in (int, slice):
                return args  # a mask may take more than one dimension
            if isinstance(part, slice):
                part = _clamped(part, tensor.shape[dim])
            dim += 1
        made.append(part)
    return (tensor, tuple(made) if type(index) is tuple else made[0])


def _has_number(part: slice) -> bool:
    return part.step in (None, 1) and any(type(end) is int for end in (part.start, part.stop))


def _clamped(part: slice, size: Size) -> slice:
    if not isinstance(size, torch.SymInt) or not _has_number(part):
        return part

    smaller: Any = torch.sym_min
    larger: Any = torch.sym_max

    def end(value: Any) -> object:
        if type(value) is not int:
            return value
        return larger(size + value, 0) if value < 0 else smaller(value, size)

    return slice(end(part.start), end(part.stop))


def _is_list_of_tensors(value: object) -> bool:
    return type(value) in (tuple, list) and has_tensor(value)


def stacked(
    data: Any, dtype: Any = None, device: Any = None, requires_grad: bool = False, **_: object
) -> torch.Tensor:
    """Return what `torch.tensor` makes of nested lists of numbers and 0-d tensors."""
    made = _stacked(data).detach().to(device=device, dtype=dtype)
    return made.requires_grad_() if requires_grad else made


def _stacked(data: object) -> torch.Tensor:
    if not isinstance(data, (tuple, list)):
        return torch.as_tensor(data)
    parts = [_stacked(part) for part in data]
    kind = parts[0].dtype
    for part in parts[1:]:
        kind = torch.promote_types(kind, part.dtype)
    device = next((part.device for part in parts if part.device.type != "cpu"), parts[0].device)
    return torch.stack([part.to(device=device, dtype=kind) for part in parts])


# Functions for which torch's C++ code fixes sizes, and its Python code does not.
_FIXING = ("pad", "interpolate", "upsample", "fold", "stft", "fft")


def run_following(func: Callable[..., object], args: Args, kwargs: Kwargs) -> object:
    """Return what a function returns."""
    func = _FOLLOWING.get(func, func)
    if kwargs.get("generator", func) is None:  # with one, torch takes numbers only
        kwargs = {name: value for name, value in kwargs.items() if name != "generator"}
    if not any(word in getattr(func, "__name__", "") for word in _FIXING):
        return func(*args, **kwargs)
    with following_sizes():
        return func(*args, **kwargs)


def _batch_norm(
    x: torch.Tensor, mean: Any, var: Any, weight: Any = None, bias: Any = None,
    training: bool = False, *options: Any, **others: Any,
) -> torch.Tensor:  # fmt: skip
    """Return what a batch norm returns; torch would compute it in some twenty steps.

    That it changes its buffers is seen by no version of theirs, here as in torch.
    """
    state = [part for part in (mean, var, weight, bias) if part is not None]
    if x.dim() < 2 or any(part.shape[0] != x.shape[1] for part in state):
        return functional.batch_norm(x, mean, var, weight, bias, training, *options, **others)
    return _like(torch.empty_like(x), (x, *state))


def _recurrent(plain: Callable[..., object]) -> Callable[..., object]:
    """Return a function for a recurrent layer, without the steps of the sequence."""

    def run(x: torch.Tensor, hidden: object, weights: object, *options: object) -> object:
        if not isinstance(hidden, torch.Tensor) or not isinstance(weights, list):  # it is packed
            return plain(x, hidden, weights, *options)
        directions = 2 if options[4] else 1
        made = x.new_empty((*x.shape[:-1], directions * hidden.shape[-1]))
        found = made, torch.empty_like(hidden)
        return tuple(_like(part, (x, hidden, *weights)) for part in found)

    return run


def _masked_scatter(x: torch.Tensor, mask: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    return _like(torch.where(mask, x, x), (x, source))


def _complex(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return (one + other).to(one.dtype.to_complex())


def _like(made: torch.Tensor, sources: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a tensor that is computed from others."""
    has_gradient = torch.is_grad_enabled() and any(part.requires_grad for part in sources)
    return empty(made.shape, made.stride(), made.dtype, made.device, has_gradient)


_FOLLOWING: dict[Callable[..., object], Callable[..., object]] = {
    **dict.fromkeys(
        (torch.max_pool1d, functional.max_pool1d),
        lambda *args, **kwargs: functional.max_pool1d_with_indices(*args, **kwargs)[0],
    ),
    **{one: _recurrent(one) for one in (torch.gru, torch.rnn_tanh, torch.rnn_relu)},
    **dict.fromkeys((torch.masked_scatter, torch.Tensor.masked_scatter), _masked_scatter),
    functional.batch_norm: _batch_norm,
    **dict.fromkeys((torch.polar, torch.complex), _complex),
}
