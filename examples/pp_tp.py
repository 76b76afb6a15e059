"""Tensor parallel layers inside pipeline stages: two stages, each on two ranks.

    torchrun --nproc-per-node 4 examples/pp_tp.py

Each stage is cut out of the model first; then `parallelize_module` shards its linear layers over
the "tp" dimension. What travels between stages are plain, whole tensors.
"""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional as F

from fxpipe import Pipeline, SplitPoint


class Block(nn.Module):
    """A feed-forward layer with its residual."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4)))
    plain = copy.deepcopy(model)

    def wrap(module: nn.Module) -> nn.Module:
        plan = {}
        for name, part in module.named_modules():
            if isinstance(part, Block):
                plan |= {f"{name}.up": ColwiseParallel(), f"{name}.down": RowwiseParallel()}
        return parallelize_module(module, mesh["tp"], plan)

    x, y = torch.randn(8, 16), torch.randn(8, 16)
    pipe = Pipeline.build(
        model,
        (x[:2],),
        loss_fn=F.mse_loss,
        n_microbatches=4,
        group=mesh["pp"].get_group(),
        wrap=wrap,
        split={"split_spec": {"2": SplitPoint.BEGINNING}},
    )
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(5):
        loss = pipe.step(x, target=y)
        optimizer.step()
        optimizer.zero_grad()
        wanted = F.mse_loss(plain(x), y)
        wanted.backward()
        reference.step()
        reference.zero_grad()
        torch.testing.assert_close(loss, wanted.detach())
    print(f"rank {dist.get_rank()}: loss {float(loss):.4f}, equal to the plain model's")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
