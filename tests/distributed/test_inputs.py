"""Inputs that several ranks use, or that only one was given."""

import copy

import pytest
import torch
from torch import Tensor, nn

from fxpipe import InputError, Schedule1F1B, pipe_split, pipeline
from tests.distributed.bodies import mse, rand
from tests.distributed.ranks import run_on_ranks
from tests.runtime.training import assert_close


class Shared(nn.Module):
    """`z` is used in both stages."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 8).double(), nn.Linear(8, 8).double()

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        h = torch.tanh(self.a(x) + z)
        pipe_split()
        return self.b(h) * z


def shared_input(rank: int) -> None:
    model = Shared()
    plain = copy.deepcopy(model)
    x, z, other = rand(8, 8), rand(8, 8, seed=2).requires_grad_(), rand(8, 8, seed=2)
    other.requires_grad_()
    pipe = pipeline(model, (x[:2], z[:2].detach()))
    made = Schedule1F1B(pipe.build_stage(rank, torch.device("cpu")), 4, loss_fn=mse)

    made.step(x, z, target=x)

    mse(plain(x, other), x).backward()
    assert_close(z.grad, other.grad, f"gradient of the shared input on rank {rank}")

    # Only rank 0 has `z`: its values are sent on, but a gradient cannot be kept track of.
    given = (x, z) if rank == 0 else ()
    with pytest.raises(InputError, match="'z' requires a gradient and is used on rank 1"):
        made.step(*given, target=x)
    model.zero_grad()
    made.step(*((x, z.detach()) if rank == 0 else ()), target=x)
    wanted = dict(plain.named_parameters())
    for name, p in pipe.stages[rank].module.named_parameters():
        assert_close(p.grad, wanted[name].grad, f"{name}.grad")


def test_an_input_of_several_ranks_gets_its_whole_gradient() -> None:
    run_on_ranks(2, shared_input)
