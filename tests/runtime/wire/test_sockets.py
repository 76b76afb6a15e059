"""Small messages between ranks of one host: complete, in order, and never silent."""

import gc
import os
import socket
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from fxpipe.runtime.wire.failure import Deadline
from fxpipe.runtime.wire.sockets import LARGEST, HostTransport, Listener
from fxpipe.runtime.wire.transport import TransportError

CPU = torch.device("cpu")


class Group:
    """Stands for the process group's transport; remembers what it was asked to carry."""

    def __init__(self) -> None:
        self.carried: list[str] = []

    def begin(self, deadline: Any, number: int) -> None: ...

    def send(self, peer: int, tensors: Any, lane: int = 0) -> str:
        self.carried.append(f"send to {peer}")
        return "handle"

    def recv(self, peer: int, shapes: Any, device: Any, lane: int = 0) -> str:
        self.carried.append(f"receive from {peer}")
        return "incoming"

    def release(self, handle: Any) -> None: ...

    def finish(self) -> None: ...

    def abandon(self) -> None: ...

    def close(self) -> None: ...


def pair(timeout: float = 20.0, gave_up: Any = lambda: False) -> tuple[Any, Any]:
    """Two transports, rank 0's and rank 1's, joined by a socket."""
    ends = socket.socketpair()
    both = (
        HostTransport(Group(), {1: ends[0]}, gave_up),
        HostTransport(Group(), {0: ends[1]}, gave_up),
    )
    for one in both:
        one.begin(Deadline(timeout), 7)
    return both


def shapes(*tensors: torch.Tensor) -> list[Any]:
    return [(tuple(t.shape), t.dtype) for t in tensors]


@pytest.mark.parametrize(
    "tensors",
    [
        [torch.randn(3, 4)],
        [torch.arange(5), torch.tensor(2.5), torch.tensor([True, False])],
        [torch.randn(4, 6).t()],
        [torch.randn(2, 3).bfloat16(), torch.randn(2, dtype=torch.complex64)],
        [torch.empty(0, 3), torch.randn(1)],
        [torch.empty(0)],
        [],
        [torch.full((3,), float(i)) for i in range(2500)],  # more than the system takes at once
    ],
)
def test_tensors_arrive_as_they_were_sent(tensors):
    first, second = pair()
    incoming = second.recv(0, shapes(*tensors), CPU)
    first.send(1, tensors)
    arrived = incoming.wait()
    assert [t.dtype for t in arrived] == [t.dtype for t in tensors]
    assert all(torch.equal(a, b) for a, b in zip(arrived, tensors, strict=True))


def test_receives_may_be_awaited_in_any_order():
    first, second = pair()
    sent = [torch.full((7,), float(i)) for i in range(5)]
    incoming = [second.recv(0, shapes(t), CPU) for t in sent]
    for tensor in sent:
        first.send(1, [tensor])
    for i in (3, 0, 4, 2, 1):
        assert torch.equal(incoming[i].wait()[0], sent[i])


def test_a_tensor_may_change_after_it_was_sent():
    first, second = pair()
    tensor = torch.ones(4)
    first.send(1, [tensor])
    first.finish()
    tensor.zero_()
    assert torch.equal(second.recv(0, shapes(tensor), CPU).wait()[0], torch.ones(4))


def test_more_than_the_socket_holds_both_ways():
    # 300 messages of 32 KiB each way before anybody reads: far more than a socket takes.
    ends = pair()
    sent = [torch.full((8192,), float(i)) for i in range(300)]

    def body(rank: int) -> bool:
        end = ends[rank]
        incoming = [end.recv(1 - rank, shapes(t), CPU) for t in sent]
        for tensor in sent:
            end.send(1 - rank, [tensor])
        found = [one.wait()[0] for one in incoming]
        end.finish()
        return all(torch.equal(a, b) for a, b in zip(found, sent, strict=True))

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(body, (0, 1))) == [True, True]


def test_large_messages_and_other_peers_use_the_group():
    first, second = pair()
    large = torch.zeros(LARGEST // 4 + 1)
    assert first.send(1, [large]) == "handle"
    assert second.recv(0, shapes(large), CPU) == "incoming"
    assert first.send(5, [torch.zeros(1)]) == "handle"
    assert first._group.carried == ["send to 1", "send to 5"]
    assert second._group.carried == ["receive from 0"]
    assert first.send(1, [torch.zeros(LARGEST // 4)]) is None


def test_a_lost_peer_is_known_at_once():
    first, second = pair()
    incoming = first.recv(1, shapes(torch.ones(2)), CPU)
    second.close()
    with pytest.raises(TransportError, match="closed") as caught:
        incoming.wait()
    assert caught.value.peer == 1
    assert not caught.value.timed_out
    with pytest.raises(TransportError):
        first.send(1, [torch.ones(2)])
    with pytest.raises(TransportError):
        second.recv(0, shapes(torch.ones(2)), CPU).wait()


def test_a_peer_that_is_lost_in_the_middle_of_a_message():
    ends = socket.socketpair()
    first = HostTransport(Group(), {1: ends[0]}, lambda: False)
    first.begin(Deadline(20.0), 0)
    incoming = first.recv(1, shapes(torch.ones(100)), CPU)
    ends[1].send(b"\x90\x01\x00\x00\0\0\0\0" + b"x" * 10)
    ends[1].close()
    with pytest.raises(TransportError, match="closed"):
        incoming.wait()


def test_silence_ends_with_the_timeout():
    first, _second = pair(timeout=0.3)
    with pytest.raises(TransportError, match=r"timed out after 0\.3 s") as caught:
        first.recv(1, shapes(torch.ones(2)), CPU).wait()
    assert caught.value.timed_out


def test_silence_ends_when_the_step_is_given_up():
    over = threading.Event()
    first, _second = pair(timeout=60.0, gave_up=over.is_set)
    incoming = first.recv(1, shapes(torch.ones(2)), CPU)
    threading.Timer(0.2, over.set).start()
    with pytest.raises(TransportError, match="given up"):
        incoming.wait()


def test_a_writer_that_nobody_reads_from_ends_with_the_timeout():
    first, _second = pair(timeout=0.3)
    for _ in range(100):
        first.send(1, [torch.zeros(LARGEST // 4)])
    with pytest.raises(TransportError, match="timed out"):
        first.finish()


def test_a_message_of_another_size_is_refused():
    first, second = pair()
    first.send(1, [torch.zeros(3)])
    with pytest.raises(TransportError, match="12 bytes of call 7 came where 20 bytes of call 7"):
        second.recv(0, shapes(torch.zeros(5)), CPU).wait()


def test_a_message_of_another_call_is_refused():
    first, second = pair()
    first.send(1, [torch.zeros(3)])
    second.begin(Deadline(20.0), 8)
    with pytest.raises(TransportError, match="of call 7 came where 12 bytes of call 8"):
        second.recv(0, shapes(torch.zeros(3)), CPU).wait()


def test_sockets_are_closed_with_their_transport():
    ends = socket.socketpair()
    first = HostTransport(Group(), {1: ends[0]}, lambda: False)
    del first
    gc.collect()
    assert ends[0].fileno() == -1
    assert ends[1].recv(1) == b""
    ends[1].close()


def connected(size: int, called: Any = lambda folder: None) -> list[dict[int, socket.socket]]:
    """What ranks that are threads here get when all of them connect."""
    listeners = [Listener() for _ in range(size)]
    folders = {rank: one.folder for rank, one in enumerate(listeners)}
    for folder in folders.values():
        called(folder)

    def body(rank: int) -> dict[int, socket.socket]:
        others = {peer: folder for peer, folder in folders.items() if peer != rank}
        return listeners[rank].connect(rank, others, Deadline(20.0), lambda: None)

    with ThreadPoolExecutor(size) as pool:
        found = list(pool.map(body, range(size)))
    for listener in listeners:
        listener.close()
    assert not any(map(os.path.exists, folders.values()))
    return found


def check_and_close(found: list[dict[int, socket.socket]]) -> None:
    for rank, made in enumerate(found):
        assert sorted(made) == [peer for peer in range(len(found)) if peer != rank]
        for peer, one in made.items():
            one.setblocking(True)
            one.send(f"{rank}->{peer}".encode())
    for rank, made in enumerate(found):
        for peer, one in made.items():
            assert one.recv(100).decode() == f"{peer}->{rank}"
            one.close()


def test_every_two_ranks_of_a_host_get_a_socket_of_their_own():
    check_and_close(connected(4))


def test_nobody_else_can_reach_the_sockets():
    listener = Listener()

    assert stat.S_IMODE(os.stat(listener.folder).st_mode) == 0o700
    listener.close()


def test_strangers_of_the_same_user_are_sent_away_and_waited_for_by_nobody():
    strangers = []

    def call(folder: str) -> None:
        for _ in range(20):  # silent ones
            stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            stranger.connect(f"{folder}/here")
            strangers.append(stranger)

    check_and_close(connected(2, call))
    for one in strangers:
        one.close()


def test_a_rank_that_does_not_call_is_waited_for_until_the_deadline():
    listener = Listener()
    looked = []

    with pytest.raises(TimeoutError):
        listener.connect(1, {0: "/nowhere"}, Deadline(0.3), lambda: looked.append(1))

    assert looked
    listener.close()
