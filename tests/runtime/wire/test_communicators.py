"""Groups are split as torch's own code does it, tried on gloo, which torch can split on the CPU."""

import datetime
from typing import Any

import torch
import torch.distributed as dist

from fxpipe.runtime.wire.communicators import matchings
from fxpipe.torch_inside import split_group
from tests.distributed.ranks import run_on_ranks

CPU = torch.device("cpu")
MINUTE = datetime.timedelta(seconds=60)


def split_turned(rank: int) -> tuple[int, list[int], list[str], float]:
    """What is split from a group that turns its ranks, after ranks 1 and 2 made another one."""
    turned = dist.new_group([2, 0, 1], sort_ranks=False)
    dist.new_group([1, 2])
    made: Any = split_group(turned, CPU, "ours", MINUTE)
    after, before = (made.rank() + 1) % 3, (made.rank() - 1) % 3
    sent, received = torch.full((1,), float(rank)), torch.zeros(1)
    works = [made.send([sent], after, 0), made.recv([received], before, 0)]
    for work in works:
        work.wait()
    again: Any = split_group(turned, CPU, "ours again", MINUTE)
    assert again.rank() == made.rank()
    devices = [device.type for device in made._device_types]
    return made.rank(), dist.get_process_group_ranks(made), devices, float(received)


def test_a_split_keeps_the_order_and_only_the_device_that_was_asked_for() -> None:
    # Up to torch 2.13 dist.split_group names what it makes after the number of groups that a
    # process is in, and waited here for ever. Since 2.15 it counts what it makes, on the ranks of
    # the pipeline alone: after that, dist.new_group gave one group different names.
    found = run_on_ranks(3, split_turned)

    assert found == [
        (1, [2, 0, 1], ["cpu"], 2.0),
        (2, [2, 0, 1], ["cpu"], 0.0),
        (0, [2, 0, 1], ["cpu"], 1.0),
    ]


def test_a_chain_connects_in_two_rounds_and_a_star_in_as_many_as_it_has_rays() -> None:
    for num_ranks in (2, 3, 8, 33):
        chain = [(rank, rank + 1) for rank in range(num_ranks - 1)]
        assert len(matchings(chain)) == min(2, num_ranks - 1)
        star = [(rank, 0) for rank in range(1, num_ranks)]
        assert len(matchings(star)) == num_ranks - 1
