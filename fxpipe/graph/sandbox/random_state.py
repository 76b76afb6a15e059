"""The random generators of this process: torch's, those of the accelerator, Python's and numpy's.

Accelerators are found by what they can do (`torch.accelerator`), not by their name. One that is
there but was not used yet has no state: to ask for it would start it.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["device_kinds", "preserved_random", "put_back", "random_states", "seed_all"]


def device_kinds() -> tuple[str, ...]:
    """The CPU, and the kind of accelerator that this torch was made for."""
    found = torch.accelerator.current_accelerator()
    return ("cpu",) if found is None or found.type == "cpu" else ("cpu", found.type)


def random_states() -> dict[str, Any]:
    """The state of each generator, by what people call it."""
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "Python": random.getstate()}
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state()
    for kind, home in _accelerators():
        for place in range(home.device_count()):
            states[f"{kind}:{place}"] = home.get_rng_state(torch.device(kind, place))
    return states


def put_back(states: dict[str, Any]) -> None:
    """Set each generator to a state that `random_states` has found."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["Python"])
    if "numpy" in states:
        sys.modules["numpy"].random.set_state(states["numpy"])
    for kind, home in _accelerators():
        for place in range(home.device_count()):
            if f"{kind}:{place}" in states:
                home.set_rng_state(states[f"{kind}:{place}"], torch.device(kind, place))


@contextmanager
def preserved_random() -> Iterator[None]:
    """Restore the states of all generators on exit."""
    states = random_states()
    try:
        yield
    finally:
        put_back(states)


def seed_all(seed: int) -> None:
    """Set every generator to the same state, whatever it was."""
    torch.default_generator.manual_seed(seed)
    for _, home in _accelerators():
        # MPS has one device, and only this name.
        (getattr(home, "manual_seed_all", None) or home.manual_seed)(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


def _accelerators() -> Iterator[tuple[str, Any]]:
    for kind in device_kinds()[1:]:
        home = torch.get_device_module(kind)
        is_used = getattr(home, "is_initialized", home.is_available)
        if home.is_available() and is_used() and hasattr(home, "get_rng_state"):
            yield kind, home
