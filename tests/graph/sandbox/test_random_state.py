"""All generators of the process are found, whatever the accelerator is called."""

import random
import subprocess
import sys

import numpy as np
import torch

from fxpipe.graph.sandbox.restore import preserved_random, random_states, seed_all


def draws() -> tuple[float, float, float]:
    return torch.rand(()).item(), random.random(), float(np.random.random())


def test_every_generator_goes_on_where_it_was():
    with preserved_random():
        first = draws()

    assert draws() == first


def test_a_seed_is_for_every_generator():
    seed_all(3)
    first = draws()
    seed_all(3)

    assert draws() == first


# A device cannot be taken away again: in a process of its own.
ACCELERATOR = """
import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_setup_privateuseone_for_python_backend("made_up")
from fxpipe.graph.sandbox.restore import preserved_random, random_states

states = [torch.tensor([1]), torch.tensor([2])]
home = torch.get_device_module("made_up")
home.is_available = home.is_initialized = lambda: True
home.device_count = lambda: 2
home.get_rng_state = lambda device: states[device.index]
home.set_rng_state = lambda state, device: states.__setitem__(device.index, state)
with preserved_random():
    states[1] = torch.tensor([7])
    assert random_states()["made_up:1"].item() == 7
print([int(state) for state in states])
"""


def test_an_accelerator_is_found_by_what_it_can_do():
    # CUDA was asked for by name: an XPU or NPU drew other numbers after a trace.
    found = subprocess.run(
        [sys.executable, "-c", ACCELERATOR], capture_output=True, text=True, timeout=250
    )

    assert found.stdout == "[1, 2]\n", found.stderr


def test_a_process_without_accelerator_has_three():
    assert set(random_states()) >= {"torch", "Python", "numpy"}
