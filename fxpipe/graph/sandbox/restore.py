"""Leave a model and the process exactly as they were, also after an error.

`preserved(module)` saves and restores what a run of the module could change
without touching tensor contents: every place that its code can reach (see `places`),
`requires_grad`, and the random states of torch, Python and numpy. A run on fake
tensors changes no more than that. `preserved_values` also saves the contents of
parameters and buffers, for the rare run on real tensors.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fxpipe.graph.sandbox.places import Places
from fxpipe.torch_inside import local_tensor

__all__ = ["preserved", "preserved_values"]


@contextmanager
def preserved(
    module: nn.Module, *, far: bool = True, places: Places | None = None
) -> Iterator[None]:
    """Restore attributes, flags and random states on exit.

    `far` goes beyond what modules hold themselves. `places` are those of an earlier time.
    """
    places = places or Places(module, far=far)
    flags = [(p, p.requires_grad) for p in module.parameters()]
    rng = _random_states()
    try:
        yield
    finally:
        places.restore()
        for parameter, flag in flags:
            if parameter.requires_grad != flag:
                parameter.requires_grad_(flag)
        _restore_random_states(rng)


@contextmanager
def preserved_values(module: nn.Module) -> Iterator[None]:
    """Restore the contents of parameters and buffers on exit."""
    state = (*module.parameters(), *module.buffers())
    tensors = [local_tensor(tensor) for tensor in state if not tensor.is_meta]
    saved = [(t, t.detach().clone()) for t in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in saved:
                if not torch.equal(tensor, value):
                    tensor.copy_(value)


def _random_states() -> dict[str, Any]:
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state()
    cuda: Any = torch.cuda
    if cuda.is_available() and cuda.is_initialized():
        states["cuda"] = cuda.get_rng_state_all()
    return states


def _restore_random_states(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    if "numpy" in states:
        sys.modules["numpy"].random.set_state(states["numpy"])
    if "cuda" in states:
        torch.cuda.set_rng_state_all(states["cuda"])
