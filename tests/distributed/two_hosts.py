"""Two hosts on one machine: network namespaces, joined by a cable that can be slow or cut.

    with two_hosts() as hosts:                  # two_hosts(delay=0.02, rate=80e6): a long cable
        hosts.limit("8mbit")                    # the cable's bandwidth
        answers = hosts.run("train", "1F1B")    # a function of this module, one rank per host
        hosts.cut()

Each host has a network, a host name and an address of its own; nothing of it is seen outside.
Needs root, `ip` and `unshare`; `why_not()` says what is missing.
"""

import contextlib
import datetime
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["Hosts", "two_hosts", "why_not"]

PORT = 29511
_ADDRESS = "10.213.7.{}"  # exists inside the namespaces only
_LIMIT = 240.0
_ROOT = Path(__file__).parents[2]


def why_not() -> str:
    """What two hosts need and this machine lacks; empty if nothing."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    if not all(map(shutil.which, ("ip", "unshare"))):
        return "the commands ip (iproute2) and unshare are missing"
    if not os.path.exists("/dev/net/tun"):
        return "there is no /dev/net/tun"
    tried = subprocess.run(["unshare", "--net", "--uts", "true"], capture_output=True, check=False)
    return "" if tried.returncode == 0 else "namespaces are not permitted here"


class Hosts:
    def __init__(self, name: str) -> None:
        self._names = [f"{name}-{i}" for i in (0, 1)]
        self._cables = [f"fx{os.getpid() % 10**7}{end}" for end in "ab"]
        self._carrier: subprocess.Popen[str] | None = None

    def _do(self, host: int, *command: str) -> None:
        whole = ["ip", "netns", "exec", self._names[host], *command]
        subprocess.run(whole, check=True, capture_output=True)

    def build(self, delay: float, rate: float) -> None:
        for name in self._names:
            subprocess.run(["ip", "netns", "add", name], check=True)
        if delay:
            self._cables = ["cable", "cable"]
            command = [sys.executable, "-m", "tests.distributed.cable", *self._names]
            pipe = subprocess.PIPE
            self._carrier = subprocess.Popen(
                [*command, str(delay), str(rate)], stdin=pipe, stdout=pipe, text=True, cwd=_ROOT
            )
            assert self._carrier.stdout is not None
            assert self._carrier.stdout.readline() == "ready\n"
        else:
            ends = [
                part
                for cable, name in zip(self._cables, self._names, strict=True)
                for part in (cable, "netns", name)
            ]
            command = ["ip", "link", "add", *ends[:3], "type", "veth", "peer", "name", *ends[3:]]
            subprocess.run(command, check=True)
        for host, cable in enumerate(self._cables):
            self._do(host, "ip", "addr", "add", _ADDRESS.format(host + 1) + "/24", "dev", cable)
            self._do(host, "ip", "link", "set", "lo", "up")
            self._do(host, "ip", "link", "set", cable, "up")

    def remove(self) -> None:
        if self._carrier is not None:
            self._carrier.kill()
            self._carrier.communicate()
        for name in self._names:
            subprocess.run(["ip", "netns", "del", name], check=False)

    def limit(self, rate: str) -> None:
        """Let so many bits pass per second, each way."""
        for host, cable in enumerate(self._cables):
            shape = ["root", "tbf", "rate", rate, "burst", "16kb", "latency", "10s"]
            self._do(host, "tc", "qdisc", "replace", "dev", cable, *shape)

    def cut(self) -> None:
        self._do(0, "ip", "link", "set", self._cables[0], "down")

    def start(self, function: str, *args: Any) -> list["subprocess.Popen[str]"]:
        ranks = []
        for host, name in enumerate(self._names):
            environment = {
                **os.environ, "RANK": str(host), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1",
                "MASTER_ADDR": _ADDRESS.format(1), "MASTER_PORT": str(PORT),
                "GLOO_SOCKET_IFNAME": self._cables[host],
                "PYTHONPATH": str(_ROOT),
            }  # fmt: skip
            inside = f'hostname host-{host}; exec "$@"'
            command = ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", inside, "sh"]
            command += [sys.executable, "-m", "tests.distributed.two_hosts", function]
            ranks.append(
                subprocess.Popen(
                    [*command, json.dumps(args)],
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
        return ranks

    def run(self, function: str, *args: Any) -> list[Any]:
        return answers(self.start(function, *args))


def answers(ranks: list["subprocess.Popen[str]"]) -> list[Any]:
    """What the ranks return; those that do not are ended."""
    found = []
    until = time.monotonic() + _LIMIT
    try:
        for rank in ranks:
            said, _ = rank.communicate(timeout=max(until - time.monotonic(), 1.0))
            assert rank.returncode == 0, f"exit code {rank.returncode}: {said}"
            found.append(json.loads(said.splitlines()[-1]))
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return found


@contextlib.contextmanager
def two_hosts(delay: float = 0.0, rate: float = 1e9) -> Iterator[Hosts]:
    """Two hosts; with a `delay` in seconds the cable is one that also has a rate in bits."""
    hosts = Hosts(f"fxpipe-{os.getpid()}")
    try:
        hosts.build(delay, rate)
        yield hosts
    finally:
        hosts.remove()


# What the ranks run


def train(rank: int, schedule: str) -> dict[str, Any]:
    from tests.distributed.bodies import train_blocks

    train_blocks(rank, schedule, 2, 4)
    return {"host": os.uname().nodename}


def lose(rank: int) -> dict[str, Any]:
    """A step; then the cable is cut, and the next one must say so on both hosts."""
    from fxpipe import RemoteStageError, Schedule1F1B
    from tests.distributed.bodies import blocks, mse, rand, stages_of

    made = Schedule1F1B(stages_of(blocks(2), [rank]), 4, loss_fn=mse, timeout=6.0)
    made.step(rand(8, 8), target=rand(8, 8))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    start = time.monotonic()
    try:
        made.step(rand(8, 8), target=rand(8, 8))
    except RemoteStageError as error:
        return {"error": str(error), "seconds": time.monotonic() - start}
    return {"error": "none"}


def fall_silent(rank: int) -> dict[str, Any]:
    """A forward that takes longer than a rank may be silent; then one host stands still."""
    from unittest import mock

    from fxpipe import RemoteStageError, Schedule1F1B
    from fxpipe.runtime.control import watch
    from tests.distributed.bodies import blocks, mse, rand, stages_of

    modules = blocks(2)
    with mock.patch.multiple(watch, SIGN=0.5, SILENCE=4.0):
        made = Schedule1F1B(stages_of(modules, [rank]), 4, loss_fn=mse, timeout=120.0)
        made.step(rand(8, 8), target=rand(8, 8))
        if rank == 1:
            modules[1].register_forward_hook(lambda *_: time.sleep(1.5))
        made.step(rand(8, 8), target=rand(8, 8))
        if rank == 1:
            with subprocess.Popen(["sh", "-c", f"sleep 15; kill -CONT {os.getpid()}"]):
                os.kill(os.getpid(), signal.SIGSTOP)
        start = time.monotonic()
        try:
            made.step(rand(8, 8), target=rand(8, 8))
        except RemoteStageError as error:
            return {"error": str(error), "seconds": time.monotonic() - start}
    return {"error": "none"}


def measure(rank: int, megabytes: int) -> dict[str, Any]:
    """The link, and a step whose messages are large, beside what the simulator says."""
    from fxpipe import Schedule1F1B
    from fxpipe.program import Link, lower, simulate
    from fxpipe.program.costs import StageCost, StageCosts
    from fxpipe.runtime.wire.measure_link import measure_link
    from tests.distributed.bodies import mse, stages_of

    link = measure_link(sizes=(1 << 10, 1 << 16, 1 << 19), repeats=3)
    modules: list[Any] = [torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)]
    made = Schedule1F1B(stages_of(modules, [rank]), 4, loss_fn=mse)
    x = torch.randn(4 * (megabytes << 20) // 32 // 4, 8)
    made.step(x, target=x)
    made.record_timeline()
    start = time.perf_counter()
    made.step(x, target=x)
    seconds = time.perf_counter() - start
    spans = [s for s in made.timeline.spans if s.action.kind.is_compute]
    by_kind: dict[str, list[float]] = {}
    for span in spans:
        by_kind.setdefault(span.action.kind.text, []).append(span.end - span.start)
    whole = max(s.end for s in spans) - min(s.start for s in spans)
    mean = {kind: sum(found) / len(found) for kind, found in by_kind.items()}
    cost = StageCost(forward=mean["F"], backward=mean["B"])
    size = float(x.nbytes) / 4
    costs = StageCosts((cost, cost), activation=size, link=Link(link.latency, link.bytes_per_time))
    predicted = simulate(lower(made.program), costs).makespan
    return {
        "link": [link.latency, link.bytes_per_time],
        "bytes": size, "seconds": seconds, "computing": whole, "predicted": predicted,
    }  # fmt: skip


def _main() -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
    found = globals()[sys.argv[1]](rank, *json.loads(sys.argv[2]))
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    os._exit(0)  # a group whose peer is out of reach would wait for it


if __name__ == "__main__":
    _main()
