"""A cable between two network namespaces that takes time: a process carries each packet over.

    python -m tests.distributed.cable NAME_A NAME_B SECONDS BITS_PER_SECOND

Both ends are TUN devices called `cable`, one in each namespace. A packet waits until those before
it have left, leaves at the cable's rate, and arrives so many seconds later. (`tc` would need netem
for that, which kernels of small virtual machines do not have.) Prints "ready"; ends with its input.
"""

import contextlib
import ctypes
import fcntl
import heapq
import os
import select
import struct
import sys
import time

_MAKE, _TUN, _NO_HEADER = 0x400454CA, 0x0001, 0x1000  # of linux/if_tun.h
_NETWORK = 0x40000000  # CLONE_NEWNET


def _end_in(namespace: str) -> int:
    """A new device in a namespace; the caller stays there."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as place:
        if libc.setns(place.fileno(), _NETWORK):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _MAKE, struct.pack("16sH22s", b"cable", _TUN | _NO_HEADER, b""))
    return device


def _carry(ends: tuple[int, int], seconds: float, rate: float) -> None:
    on_the_way: list[tuple[float, int, int, bytes]] = []
    busy_until, number = dict.fromkeys(ends, 0.0), 0
    while True:
        wait = max(on_the_way[0][0] - time.monotonic(), 0.0) if on_the_way else None
        ready, _, _ = select.select([*ends, sys.stdin], [], [], wait)
        if sys.stdin in ready:
            return
        for end in ready:
            packet = os.read(end, 1 << 16)
            now = time.monotonic()
            left = max(busy_until[end], now) + 8 * len(packet) / rate
            busy_until[end], number = left, number + 1
            other = ends[1 - ends.index(end)]
            heapq.heappush(on_the_way, (left + seconds, number, other, packet))
        while on_the_way and on_the_way[0][0] <= time.monotonic():
            _, _, end, packet = heapq.heappop(on_the_way)
            with contextlib.suppress(OSError):  # that end is not up: a packet is lost
                os.write(end, packet)


if __name__ == "__main__":
    made = (_end_in(sys.argv[1]), _end_in(sys.argv[2]))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    _carry(made, float(sys.argv[3]), float(sys.argv[4]))
