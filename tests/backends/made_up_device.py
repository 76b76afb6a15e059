"""Run every schedule on a device that does not exist, on tensors without values.

    python -m tests.backends.made_up_device

All tensors are fakes on the device "made_up". A tensor on the wrong device is an error, and so is
any question about a value, which on an accelerator would stop the host until the device is there.
Prints a line for each case; ends with exit code 1 at the first that fails.

It needs a process of its own: a device cannot be taken away again.
"""

import sys

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from fxpipe import LocalGroup, PipelineStage, aux_loss, get_schedule_class
from fxpipe.program.generators import SCHEDULES

__all__: list[str] = []


class Block(nn.Module):
    """A layer with a keyword input, and an auxiliary loss where asked for."""

    def __init__(self, device: torch.device, has_aux: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, device=device)
        self.has_aux = has_aux

    def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
        made = torch.tanh(self.linear(x)) * scale
        if self.has_aux:
            aux_loss(made.pow(2).mean(), 0.01)
        return made


def mean(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).pow(2).mean()


def weighted(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return (output - target).pow(2).sum(), (target > 0).sum()


def _try(name: str, loss: str, device: torch.device) -> None:
    num_stages = 2 if SCHEDULES[name].stages_per_rank[1] == 1 else 4
    modules = [Block(device, has_aux=loss == "mean") for _ in range(num_stages)]
    group = LocalGroup(2)
    stages = [
        PipelineStage(modules[i], i, num_stages, device, group=group) for i in range(num_stages)
    ]
    made = get_schedule_class(name)(stages, 4, loss_fn=globals()[loss])
    x, y, scale = (torch.randn(10, 8, device=device) for _ in range(3))
    for _ in range(2):  # the second accumulates
        losses: list[Tensor] = []
        output = made.step(x, target=y, scale=scale, losses=losses)
        norm = made.clip_grad_norm_(1.0)
        assert output.shape == x.shape
        grads = [p.grad for module in modules for p in module.parameters()]
        for tensor in (output, made.loss, norm, *losses, *grads):
            assert tensor is not None and tensor.device == device
    assert made.eval(x, scale=scale).device == device


def _has_both_traps(device: torch.device) -> bool:
    here = torch.zeros(2, device=device)
    trapped = 0
    for mistake in (lambda: here + torch.zeros(2), lambda: here.sum().item()):
        try:
            mistake()
        except Exception:
            trapped += 1
    return trapped == 2


if __name__ == "__main__":
    _setup_privateuseone_for_python_backend("made_up")
    device = torch.device("made_up:0")
    with FakeTensorMode():
        assert _has_both_traps(device)
        for name in SCHEDULES:
            for loss in ("mean", "weighted") if name != "ForwardOnly" else ():
                _try(name, loss, device)
                sys.stdout.write(f"{name} {loss}\n")
