"""Checkpoints of real processes: replicas, shards, and problems of one rank."""

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fxpipe import (
    InputError,
    LocalGroup,
    Schedule1F1B,
    SplitPoint,
    load_checkpoint,
    pipeline,
    save_checkpoint,
)
from fxpipe.schedules import Schedule
from models import gpt
from tests.distributed.ranks import run_on_ranks

GROUPS: list[dist.ProcessGroup] = []  # of the replicas
Run = tuple[Schedule, torch.optim.Optimizer]


def replicated(rank: int, wrapper: str, seed: int) -> Run:
    """Two pipelines of two stages, replicated or sharded over each other."""
    replica, place = divmod(rank, 2)
    pipelines = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    GROUPS.append(replicas[place])
    args, _ = gpt.example_inputs(2)
    cuts = {"blocks.2": SplitPoint.BEGINNING}
    pipe = pipeline(gpt.build(seed=seed).double(), args, split_spec=cuts, check=False)
    stage = pipe.build_stage(place, torch.device("cpu"), pipelines[replica])
    if wrapper == "ddp":
        stage.submod = DistributedDataParallel(stage.submod, process_group=replicas[place])
    else:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(stage.submod, mesh=DeviceMesh.from_group(replicas[place], "cpu"))
    optimizer = torch.optim.AdamW(stage.submod.parameters(), lr=0.01)
    return Schedule1F1B(stage, 2, loss_fn=gpt.loss_fn), optimizer


def train(schedule: Schedule, optimizer: torch.optim.Optimizer, seed: int) -> None:
    args, _ = gpt.example_inputs(4, seed=seed)
    schedule.step(*args, target=gpt.example_target(4, seed=seed))
    optimizer.step()
    optimizer.zero_grad()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All shards. (`full_tensor()` and the mesh remember groups of an earlier test.)"""
    if not hasattr(tensor, "to_local"):
        return tensor
    parts: list[torch.Tensor | None] = [None, None]
    dist.all_gather_object(parts, tensor.to_local(), group=GROUPS[-1])
    return torch.cat([part for part in parts if part is not None])


def one_process() -> tuple[nn.Module, Schedule, torch.optim.Optimizer]:
    args, _ = gpt.example_inputs(2)
    model = gpt.build(seed=5).double()
    cuts = {f"blocks.{i}": SplitPoint.BEGINNING for i in (1, 2, 3)}
    pipe = pipeline(model, args, split_spec=cuts, check=False)
    stages = [pipe.build_stage(i, torch.device("cpu"), LocalGroup(4)) for i in range(4)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, Schedule1F1B(stages, 2, loss_fn=gpt.loss_fn), optimizer


def save_and_load(rank: int, wrapper: str, other: str, folder: str) -> None:
    made, optimizer = replicated(rank, wrapper, seed=0)
    train(made, optimizer, seed=rank // 2)
    saving = save_checkpoint(folder, made, optimizer, step=1, wait=False)
    module = made.stages[0].submod
    state = {n.removeprefix("module."): whole(p).clone() for n, p in module.state_dict().items()}
    saving.result(timeout=100)

    # Others, wrapped in the other way, go on from there.
    resumed, resumed_optimizer = replicated(rank, other, seed=1)
    load_checkpoint(folder, resumed, resumed_optimizer)
    for name, value in resumed.stages[0].submod.state_dict().items():
        assert torch.equal(whole(value), state[name.removeprefix("module.")]), name
    train(made, optimizer, seed=9)
    train(resumed, resumed_optimizer, seed=9)
    for a, b in zip(module.parameters(), resumed.stages[0].submod.parameters(), strict=True):
        torch.testing.assert_close(whole(a), whole(b), rtol=1e-12, atol=1e-12)

    # Four stages in one process, and with them the plain model, too.
    if rank == 0:
        model, local, local_optimizer = one_process()
        assert load_checkpoint(folder, local, local_optimizer).step == 1
        found = model.state_dict()
        assert all(torch.equal(found[name], value) for name, value in state.items())
        train(local, local_optimizer, seed=9)
        for name, p in module.state_dict().items():
            plain = name.removeprefix("module.")
            if wrapper == "ddp":
                torch.testing.assert_close(p, model.state_dict()[plain], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("wrapper", "other"), [("ddp", "fsdp"), ("fsdp", "ddp")])
def test_replicas_and_shards_save_and_load(wrapper: str, other: str, tmp_path: Path) -> None:
    run_on_ranks(4, save_and_load, wrapper, other, str(tmp_path))


class Remembers(nn.Linear):
    note: object = None

    def get_extra_state(self) -> object:
        return self.note

    def set_extra_state(self, state: object) -> None:
        self.note = state


def problems_of_one_rank(rank: int, folder: str) -> None:
    from fxpipe import PipelineStage

    module = Remembers(4, 4)
    stage = PipelineStage(module, rank, 2, "cpu")
    with pytest.raises(InputError, match="all ranks must save to one folder"):
        save_checkpoint(f"{folder}/{rank}", stage)
    module.note = Path("x") if rank else "y"
    with pytest.raises(InputError, match=r"holds a PosixPath that a checkpoint cannot hold"):
        save_checkpoint(folder, stage)
    module.note = rank
    save_checkpoint(folder, stage)
    before = copy.deepcopy(module.weight)

    # One rank's module has another size: no rank is changed.
    other = PipelineStage(module if rank == 0 else Remembers(4, 5), rank, 2, "cpu")
    nn.init.zeros_(module.weight)
    with pytest.raises(InputError, match=r"weight: saved \[4, 4\], here \[5, 4\]"):
        load_checkpoint(folder, other)
    assert not module.weight.any()
    load_checkpoint(folder, stage)
    assert torch.equal(module.weight, before) and module.note == rank
    # Each rank loaded its own step, in silence.
    save_checkpoint(folder, stage, step=1)
    with pytest.raises(
        InputError, match=r"the checkpoint to load must be the same .*0001-step0 on"
    ):
        load_checkpoint(folder, stage, step=rank)
    with pytest.raises(InputError, match=r"rank 0 calls .*_checkpoint\(\), rank 1 calls"):
        (save_checkpoint if rank else load_checkpoint)(folder, stage)


def test_a_problem_of_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    run_on_ranks(2, problems_of_one_rank, str(tmp_path))
