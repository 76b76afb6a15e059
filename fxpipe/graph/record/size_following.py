"""Run torch's functions on fake tensors so that they fix no size that does not matter to them.

Some of torch's code for tensors without data makes a number of a symbol on the way: in C++, or
because it goes through the steps of a sequence. Others run in the place of such functions, and
return what they would: tensors of the right sizes, that require a gradient where theirs do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional

from fxpipe.graph.sandbox.made_up import empty
from fxpipe.torch_inside import following_sizes

__all__ = ["run_following"]

# Functions for which torch's C++ code fixes sizes, and its Python code does not.
_FIXING = ("pad", "interpolate", "upsample", "fold", "stft", "fft")


def run_following(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Return what a function returns."""
    func = _FOLLOWING.get(func, func)
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


def _recurrent(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function for a recurrent layer, without the steps of the sequence."""

    def run(x: torch.Tensor, hidden: Any, weights: Any, *options: Any) -> Any:
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


_FOLLOWING: dict[Callable[..., Any], Callable[..., Any]] = {
    **dict.fromkeys(
        (torch.max_pool1d, functional.max_pool1d),
        lambda *args, **kwargs: functional.max_pool1d_with_indices(*args, **kwargs)[0],
    ),
    **{one: _recurrent(one) for one in (torch.gru, torch.rnn_tanh, torch.rnn_relu)},
    **dict.fromkeys((torch.masked_scatter, torch.Tensor.masked_scatter), _masked_scatter),
    functional.batch_norm: _batch_norm,
    **dict.fromkeys((torch.polar, torch.complex), _complex),
}
