"""One rank of torchtitan training its small Llama: `titan_rank.py PACKAGE SCHEDULE ...`.

PACKAGE is "torch" or "fxpipe"; with the latter `fxpipe.compat.install()` comes first and
torchtitan's own code is left as it is. Each schedule trains the same model anew. Started by
torchrun; every rank prints the square of its gradients, the one with the last stage the loss.
"""

import os
import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist

STEPS = 3


def main(package: str, schedules: list[str]) -> None:
    torch.set_num_threads(1)
    if package == "fxpipe":
        import fxpipe.compat

        fxpipe.compat.install()
    import torchtitan.distributed.dual_pipe_v as dual
    import torchtitan.distributed.parallel_dims as dims
    import torchtitan.tools.utils as tools

    tools.device_type = dims.device_type = "cpu"
    # DualPipeV runs a backward on a thread, and hands it the stream of the GPU: here is none.
    torch.accelerator.current_stream = lambda device: None
    dual.device_module = SimpleNamespace(set_stream=lambda stream: None)
    dist.init_process_group("gloo")
    for schedule in schedules:
        train(schedule)
    dist.destroy_process_group()


def train(schedule: str) -> None:
    from torchtitan.config import JobConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed.pipeline_parallel import pipeline_llm
    from torchtitan.models.llama3 import TransformerModelArgs
    from torchtitan.models.llama3.infra.parallelize import parallelize_llama
    from torchtitan.models.llama3.model.model import Transformer

    world = int(os.environ["WORLD_SIZE"])
    arguments = TransformerModelArgs(dim=32, n_layers=6, n_heads=4, vocab_size=64, max_seq_len=16)
    config = JobConfig()
    config.parallelism.pipeline_parallel_degree = world
    config.parallelism.pipeline_parallel_schedule = schedule
    config.parallelism.pipeline_parallel_microbatch_size = 1
    config.training.local_batch_size = 8
    config.training.seq_len = 16
    config.activation_checkpoint.mode = "none"
    mesh = ParallelDims(1, 1, 1, 1, world, 1, 1, world)
    mesh.build_mesh()
    torch.manual_seed(0)
    model = Transformer(arguments)
    with torch.no_grad():
        model.init_weights()

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        flat = output.flatten(0, 1).float()
        return torch.nn.functional.cross_entropy(flat, target.flatten(), reduction="sum") / 128

    pipeline, parts, is_first, is_last = pipeline_llm(
        model, mesh, config, torch.device("cpu"), arguments, parallelize_llama, loss
    )
    optimizers = [torch.optim.AdamW(part.parameters(), lr=1e-2) for part in parts]
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        tokens = torch.randint(64, (8, 17), generator=generator)
        inputs, labels = tokens[:, :-1], tokens[:, 1:]
        targets, losses = (labels, []) if is_last else (None, None)
        given = (inputs,) if is_first else ()
        pipeline.step(*given, target=targets, losses=losses, return_outputs=False)
        kind = f"{type(pipeline).__module__} {type(pipeline).__name__}"
        norm = sum(p.grad.square().sum().item() for part in parts for p in part.parameters())
        sys.stdout.write(f"GRAD {schedule} {step}/{dist.get_rank()} {norm:.8f} {kind}\n")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if losses is not None:
            value = torch.sum(torch.stack(losses)).item()
            sys.stdout.write(f"LOSS {schedule} {step} {value:.8f} {kind}\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
