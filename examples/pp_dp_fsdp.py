"""Pipelines beside each other: two stages, and replicas or shards of each stage.

    torchrun --nproc-per-node 4 examples/pp_dp_fsdp.py --data-parallel fsdp

A mesh of two dimensions: "pp" numbers the stages of a pipeline, "dp" the pipelines.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from fxpipe import Pipeline
from fxpipe.example_models import gpt


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--steps", type=int, default=10)
    options.add_argument("--data-parallel", choices=("ddp", "fsdp"), default="fsdp")
    given = options.parse_args()

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "pp"))

    def wrap(module: nn.Module) -> nn.Module:
        if given.data_parallel == "ddp":
            return DistributedDataParallel(module, process_group=mesh["dp"].get_group())
        return fully_shard(module, mesh=mesh["dp"])

    (ids,), _ = gpt.example_inputs(2)
    pipe = Pipeline.build(
        gpt.build(seed=0),
        (ids,),
        loss_fn=gpt.loss_fn,
        n_microbatches=2,
        group=mesh["pp"].get_group(),
        wrap=wrap,
    )
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    replica = mesh["dp"].get_local_rank()
    losses = []
    for step in range(given.steps):
        (ids,), _ = gpt.example_inputs(4, seed=2 * (step % 2) + replica)  # its own part of the data
        losses.append(float(pipe.step(ids, target=ids.roll(-1, 1))))
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    print(f"rank {dist.get_rank()}: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
