"""A step over communicators is over when its messages have arrived; or it says who waits."""

import time

import pytest
import torch
import torch.distributed as dist

from fxpipe.runtime.wire.failure import Deadline
from fxpipe.runtime.wire.stream_transport import StreamTransport
from fxpipe.runtime.wire.transport import TransportError
from tests.distributed.ranks import run_on_ranks

CPU = torch.device("cpu")


def late_receiver(rank: int) -> None:
    """Rank 1 receives one message late, and never receives another."""
    transport = StreamTransport([dist.group.WORLD], "rank", lambda: False)
    transport.begin(Deadline(60.0), 1)
    if rank == 1:
        time.sleep(0.5)
        transport.recv(0, [((3,), torch.float32)], CPU)
        transport.finish()
        return
    transport.send(1, [torch.ones(3)])
    assert (transport.oldest(), transport.held()) == (1, 1)
    transport.finish()
    assert (transport.oldest(), transport.held()) == (None, 0)
    transport.begin(Deadline(0.3), 2)
    transport.send(1, [torch.ones(3)])
    with pytest.raises(TransportError, match="timed out") as caught:
        transport.finish()
    assert (caught.value.peer, caught.value.timed_out) == (1, True)


def test_the_end_of_a_step_waits_for_all_messages() -> None:
    # Nothing failed where it did not: in tests the readers of messages have waited for them.
    run_on_ranks(2, late_receiver, backend="nccl_rank")


def both_ways(rank: int, first: str) -> int | None:
    """Whom rank 0 names, who sends to rank 1 and receives from rank 2, and neither comes."""
    transport = StreamTransport([dist.group.WORLD], "pair", lambda: False)
    transport.begin(Deadline(60.0), 1)
    if rank:
        return None
    if first == "send":
        transport.send(1, [torch.ones(3)])
    transport.recv(2, [((3,), torch.float32)], CPU)
    if first == "receive":
        transport.send(1, [torch.ones(3)])
    return transport.oldest()


@pytest.mark.parametrize(("first", "peer"), [("send", 1), ("receive", 2)])
def test_who_does_not_answer_is_at_the_other_end_of_the_oldest_message(
    first: str, peer: int
) -> None:
    # It was who had not sent, though a queue may hold up a receive behind an older send.
    assert run_on_ranks(3, both_ways, first, backend="nccl_pair")[0] == peer
