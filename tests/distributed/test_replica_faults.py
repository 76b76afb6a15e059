"""Replicated pipelines over communicators like NCCL's: whatever befalls one rank, all raise soon.

Two pipelines of two ranks. Rank 3 is killed, stopped, or raises in its third forward or backward;
its pipeline sends over an emulated NCCL, its replicas reduce and gather over gloo.
"""

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fxpipe import PipelineStage, RemoteStageError, Schedule1F1B
from tests.backends import nccl_like
from tests.distributed import test_faults
from tests.distributed.bodies import blocks, mse, rand
from tests.distributed.ranks import answers_of_ranks
from tests.distributed.test_data_parallel import wrap

ODD = 3
SOON = 30.0  # who is told nothing waits for a minute; at once may be long on a busy machine
SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}


class Fated(test_faults.Faulty):
    """Raises, or is sent a signal, in its third forward or backward once it is armed."""

    def __init__(self) -> None:
        super().__init__()
        self.signal: signal.Signals | None = None

    def maybe_raise(self, where: str) -> None:
        if self.signal is None:
            super().maybe_raise(where)
        elif where == self.armed:
            self.calls += 1
            if self.calls == 3:
                os.kill(os.getpid(), self.signal)


def fated(rank: int, wrapper: str, streams: str, way: str, where: str) -> None:
    nccl_like.register()
    pp = [dist.new_group(ranks, backend=f"nccl_{streams}") for ranks in ([0, 1], [2, 3])]
    dp = [dist.new_group([0, 2], backend="gloo"), dist.new_group([1, 3], backend="gloo")]
    replica, place = rank // 2, rank % 2
    modules: list[nn.Module] = [blocks(1)[0], Fated()]
    module: Any = modules[place]
    stage = PipelineStage(wrap(module, wrapper, dp[place]), place, 2, "cpu", group=pp[replica])
    seconds = 6.0 if way == "stopped" else 60.0
    made = Schedule1F1B([stage], 4, loss_fn=mse, timeout=seconds)
    x = rand(8, 8)
    pid = torch.tensor(os.getpid())
    dist.broadcast(pid, ODD, group=dist.new_group(backend="gloo"))
    made.step(x, target=x)
    if rank == ODD:
        module.signal, module.armed = SIGNALS.get(way), where

    start = time.monotonic()
    words = "4711" if way == "raises" else r"rank [01]|replica of this stage"
    wanted = KeyError if rank == ODD and way == "raises" else RemoteStageError
    with pytest.raises(wanted, match=words):
        made.step(x, target=x)
    assert time.monotonic() - start < SOON
    if way == "stopped" and rank == 2:
        os.kill(int(pid), signal.SIGCONT)
    if way == "raises":
        if place:
            module.armed = ""
        made.step(x, target=x)
    else:
        start = time.monotonic()
        with pytest.raises(RemoteStageError):
            made.step(x, target=x)
        assert time.monotonic() - start < SOON


def run_fated(wrapper: str, streams: str, way: str, where: str) -> None:
    job = "nccl_eager" if streams == "eager" else "gloo"  # only a job of NCCL is bound to a device
    answers = answers_of_ranks(4, fated, wrapper, streams, way, where, backend=job)

    survivors = answers[:ODD] if way == "killed" else answers
    assert [is_ok for is_ok, _ in survivors] == [True] * len(survivors), answers


@pytest.mark.parametrize(
    ("wrapper", "streams", "way", "where"),
    [
        ("fsdp", "rank", "killed", "forward"),
        ("ddp", "eager", "killed", "backward"),
        ("fsdp", "eager", "stopped", "backward"),
        ("fsdp", "rank", "raises", "backward"),
        ("ddp", "eager", "raises", "forward"),
    ],
)
def test_a_fault_of_one_rank_reaches_all(wrapper: str, streams: str, way: str, where: str) -> None:
    run_fated(wrapper, streams, way, where)


@pytest.mark.full
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("way", ["killed", "stopped", "raises"])
@pytest.mark.parametrize("streams", ["rank", "eager"])
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_every_fault_of_one_rank_reaches_all(
    wrapper: str, streams: str, way: str, where: str
) -> None:
    run_fated(wrapper, streams, way, where)
