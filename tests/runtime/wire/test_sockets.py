"""Small messages between ranks of one host: complete, in order, and never silent."""

import gc
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from fxpipe.runtime.wire.sockets import LARGEST, HostTransport, connect
from fxpipe.runtime.wire.transport import TransportError

CPU = torch.device("cpu")


class Group:
    """Stands for the process group's transport; remembers what it was asked to carry."""

    def __init__(self) -> None:
        self.carried: list[str] = []

    def send(self, peer: int, tensors: Any) -> str:
        self.carried.append(f"send to {peer}")
        return "handle"

    def recv(self, peer: int, shapes: Any, device: Any) -> str:
        self.carried.append(f"receive from {peer}")
        return "incoming"

    def release(self, handle: Any) -> None: ...

    def finish(self) -> None: ...

    def abandon(self) -> None: ...


def pair(timeout: float = 20.0, gave_up: Any = lambda: False) -> tuple[Any, Any]:
    """Two transports, rank 0's and rank 1's, joined by a socket."""
    ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
    return (
        HostTransport(Group(), {1: ends[0]}, timeout, gave_up),
        HostTransport(Group(), {0: ends[1]}, timeout, gave_up),
    )


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
    second.abandon()
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
    ends[0].setblocking(False)
    first = HostTransport(Group(), {1: ends[0]}, 20.0, lambda: False)
    incoming = first.recv(1, shapes(torch.ones(100)), CPU)
    ends[1].send(b"\x90\x01\x00\x00" + b"x" * 10)
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
    with pytest.raises(TransportError, match="12 bytes came where 20 were agreed"):
        second.recv(0, shapes(torch.zeros(5)), CPU).wait()


def test_sockets_are_closed_with_their_transport():
    ends = socket.socketpair()
    first = HostTransport(Group(), {1: ends[0]}, 1.0, lambda: False)
    del first
    gc.collect()
    assert ends[0].fileno() == -1
    assert ends[1].recv(1) == b""
    ends[1].close()


class Meeting:
    """Stands for the agreement of ranks that are threads here."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=20)
        self._said: list[Any] = [None] * size

    def control(self, rank: int) -> Any:
        meeting = self

        class Control:
            def __init__(self) -> None:
                self.rank = rank

            def gather(self, value: Any) -> list[Any]:
                meeting._said[rank] = value
                meeting._barrier.wait()
                said = list(meeting._said)
                meeting._barrier.wait()
                return said

        return Control()


def connected(size: int, wanted: Any = lambda rank: True) -> list[dict[int, socket.socket]]:
    meeting = Meeting(size)
    with ThreadPoolExecutor(size) as pool:
        return list(
            pool.map(lambda r: connect(meeting.control(r), is_wanted=wanted(r)), range(size))
        )


def test_every_two_ranks_of_a_host_get_a_socket_of_their_own():
    found = connected(4)
    for rank, made in enumerate(found):
        assert sorted(made) == [peer for peer in range(4) if peer != rank]
        for peer, one in made.items():
            one.send(f"{rank}->{peer}".encode())
    for rank, made in enumerate(found):
        for peer, one in made.items():
            deadline = time.monotonic() + 10
            said = b""
            while not said and time.monotonic() < deadline:
                try:
                    said = one.recv(100)
                except BlockingIOError:
                    time.sleep(0.01)
            assert said.decode() == f"{peer}->{rank}"
    for made in found:
        for one in made.values():
            one.close()


def test_no_rank_gets_sockets_unless_all_want_them():
    assert connected(3, lambda rank: rank != 1) == [{}, {}, {}]


def test_ranks_of_other_hosts_get_none(monkeypatch):
    names = iter(("a", "b"))
    lock = threading.Lock()

    def host() -> str:
        with lock:
            return next(names)

    monkeypatch.setattr("fxpipe.runtime.wire.sockets._host", host)
    assert connected(2) == [{}, {}]


def test_the_environment_switches_sockets_off(monkeypatch):
    monkeypatch.setenv("FXPIPE_SOCKETS", "0")
    assert connected(2) == [{}, {}]


def test_a_stranger_who_calls_is_sent_away(monkeypatch):
    import fxpipe.runtime.wire.sockets as sockets

    listen = sockets._listen
    strangers = []

    def overheard(name: str) -> Any:
        made = listen(name)
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        stranger.connect(name)
        stranger.sendall(b"?" * 16 + b"\0\0\0\0")
        strangers.append(stranger)
        return made

    monkeypatch.setattr(sockets, "_listen", overheard)
    found = connected(2)
    found[0][1].send(b"hello")
    time.sleep(0.05)
    assert found[1][0].recv(10) == b"hello"
    for one in (*strangers, found[0][1], found[1][0]):
        one.close()
