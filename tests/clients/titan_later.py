"""Let torchtitan 0.3.0 make its schedules: `titan_later.py FOLDER PACKAGE SCHEDULE ...`.

It has no attention for a CPU, so its own `pipeline_llm` splits its small Llama without values, as
rank 0 of two over the "fake" process group. Prints the class and the order of each schedule.
"""

import sys
from pathlib import Path


def main(folder: str, package: str, schedules: list[str]) -> None:
    sys.path.insert(0, folder)
    if package == "fxpipe":
        import fxpipe.compat

        fxpipe.compat.install()
    import torch.distributed as dist
    import torchtitan
    import torchtitan.distributed.parallel_dims as dims
    import torchtitan.tools.utils as tools
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torchtitan.experiments.graph_trainer.graph_pp import (  # noqa: F401
        graph_builder,
        pipeline,
        runner,
        stage,
        utils,
    )

    assert Path(torchtitan.__file__).is_relative_to(folder)
    tools.device_type = dims.device_type = "cpu"
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    for schedule in schedules:
        show(schedule)
    dist.destroy_process_group()


def show(schedule: str) -> None:
    import torch
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed.pipeline_parallel import pipeline_llm
    from torchtitan.models.llama3 import llama3_configs, parallelize_llama

    config = llama3_configs["debugmodel"]("flex")
    mesh = ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=2, ep=1, world_size=2)
    mesh.build_mesh()
    with torch.device("meta"):
        model = config.build()
    made, parts, is_first, _ = pipeline_llm(
        model,
        parallel_dims=mesh,
        training=TrainingConfig(local_batch_size=8),
        parallelism=ParallelismConfig(
            pipeline_parallel_degree=2,
            pipeline_parallel_schedule=schedule,
            pipeline_parallel_microbatch_size=1,
        ),
        compile_config=CompileConfig(),
        ac_config=None,
        dump_folder="",
        device=torch.device("cpu"),
        model_config=config,
        parallelize_fn=parallelize_llama,
        loss_fn=torch.nn.functional.mse_loss,
    )
    assert is_first
    order = {
        rank: [str(a) for a in row if a is not None] for rank, row in made.pipeline_order.items()
    }
    sys.stdout.write(f"MADE {schedule} {type(made).__module__} {len(parts)} {order}\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
