"""One rank of a random history: make its calls beside a plain model, and note what came of each.

A rank holds its stages and a plain copy of all modules. After each call it compares
loss, outputs, gradients and parameters with the plain copy, which takes part in a call
only if the call succeeded.
"""

import contextlib
import copy
import ctypes
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fxpipe import (
    FxpipeError,
    InputError,
    LocalGroup,
    PipelineStage,
    SplitPoint,
    get_schedule_class,
    load_checkpoint,
    pipeline,
    save_checkpoint,
)
from fxpipe.program.generators import SCHEDULES
from tests.distributed import ranks as pool
from tests.runtime.training import assert_close

__all__ = ["EXCEPTIONS", "Call", "Event", "History", "Record", "play", "play_in_process"]

WIDTH = 6


class SilentError(Exception):
    """Cannot be printed."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


class StubbornError(Exception):
    """Takes no notes, and cannot be made from its message."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__("stubborn")

    def add_note(self, note: str) -> None:
        raise TypeError("no notes")


EXCEPTIONS: dict[str, Callable[[], BaseException]] = {
    "ValueError": lambda: ValueError("bad batch 4711"),
    "KeyError": lambda: KeyError("4711"),
    "RuntimeError": lambda: RuntimeError("Connection timed out"),
    "StopIteration": lambda: StopIteration(),
    "SilentError": lambda: SilentError(),
    "StubbornError": lambda: StubbornError(1, 2),
    "KeyboardInterrupt": lambda: KeyboardInterrupt(),
    "SystemExit": lambda: SystemExit(3),
    "GeneratorExit": lambda: GeneratorExit(),
    "MemoryError": lambda: MemoryError(),
    "UnicodeError": lambda: UnicodeError("\udc80" * 3000),
}


@dataclass(frozen=True)
class Event:
    """What happens at the `nth` time that a point of a stage is reached within one call."""

    kind: str
    where: str
    stage: int
    nth: int
    exception: str

    @property
    def is_silence(self) -> bool:
        """Whether the rank does not answer for longer than the timeout."""
        return self.kind in ("sleep", "long_stop")

    @property
    def ends(self) -> bool:
        """Whether nothing but one last call can follow."""
        return self.is_silence or self.kind in ("kill", "fork_kill")

    def seconds(self, timeout: float) -> float:
        return timeout + 2.0 if self.is_silence else 0.3


@dataclass(frozen=True)
class Call:
    """One call on every rank; `odd` is a rank that makes another one, and which."""

    name: str
    schedule: int
    rows: int
    length: int
    scale: float = 1.0
    number: int = 0
    event: Event | None = None
    odd: tuple[int, str] | None = None

    @property
    def brief(self) -> str:
        extra = "" if self.odd is None else f" (rank {self.odd[0]}: {self.odd[1]})"
        if self.event is not None:
            e = self.event
            what = e.exception if e.kind == "raise" else e.kind
            extra += f" ({what} in {e.where} {e.nth} of stage {e.stage})"
        return self.name + extra


@dataclass(frozen=True)
class History:
    """What a group of ranks does; `ranks` are those of the world that take part, in order."""

    seed: int
    world: int
    ranks: tuple[int, ...]
    schedules: tuple[str, ...]
    num_stages: int
    microbatches: int
    model: str
    pair_loss: bool
    timeout: float
    calls: tuple[Call, ...]


@dataclass
class Record:
    """What one call came to on one rank."""

    seconds: float = 0.0
    slowness: float = 1.0
    timeout: float = 0.0
    error: str = ""
    text: str = ""
    is_ours: bool = True
    fired: bool = False
    wrong: list[str] = field(default_factory=list)


class Points:
    """Where something may happen; one event is armed at a time.

    A stage may run on made-up tensors first, and whatever Python knows is put back after that: so
    what has happened is noted where Python does not look.
    """

    def __init__(self) -> None:
        self.event: Event | None = None
        self.timeout = 0.0
        self._fired = ctypes.c_bool(False)
        self._left = ctypes.c_int(0)

    @property
    def fired(self) -> bool:
        return self._fired.value

    def arm(self, event: Event | None, timeout: float) -> None:
        self.event, self.timeout, self._fired.value = event, timeout, False
        self._left.value = 0 if event is None else event.nth

    def reach(self, where: str, stage: int) -> None:
        event = self.event
        if event is None or event.where != where or event.stage != stage or self.fired:
            return
        if self._left.value:
            self._left.value -= 1
            return
        self._fired.value = True
        happen(event, self.timeout)


POINTS = Points()


def slowness() -> float:
    """How much longer than its CPU time this process needs for a little work; about 1 if alone."""
    wall, cpu = time.monotonic(), time.process_time()
    while time.process_time() - cpu < 0.01:
        pass
    return max(1.0, (time.monotonic() - wall) / (time.process_time() - cpu))


def happen(event: Event, timeout: float) -> None:
    """Let the event take place in this process, now."""
    kind, seconds = event.kind, event.seconds(timeout)
    if kind == "raise":
        raise EXCEPTIONS[event.exception]()
    if kind in ("nap", "sleep"):
        time.sleep(seconds)
    elif kind in ("stop", "long_stop"):
        waker = ["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"]
        with subprocess.Popen(waker, start_new_session=True):
            os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "stranger":
        _connect_to_everything()
    if kind in ("fork", "fork_kill") and os.fork() == 0:
        pool.close_pipe()
        time.sleep(timeout + 4.0 if kind == "fork_kill" else 2.0)
        os._exit(0)
    if kind in ("kill", "fork_kill"):
        os.kill(os.getpid(), signal.SIGKILL)


def _connect_to_everything() -> None:
    """Somebody connects to every port this process listens on, and says nothing."""
    mine = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            mine.add(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue
    held = []
    with open("/proc/net/tcp") as table:
        rows = [line.split() for line in table][1:]
    for row in rows:
        if row[3] == "0A" and f"socket:[{row[9]}]" in mine:
            address, port = row[1].split(":")
            host = socket.inet_ntoa(bytes.fromhex(address)[::-1])
            one = socket.socket()
            one.settimeout(1.0)
            held.append(one)
            with contextlib.suppress(ConnectionRefusedError):  # it may have stopped listening since
                one.connect(("127.0.0.1" if host == "0.0.0.0" else host, int(port, 16)))
    time.sleep(0.2)
    for one in held:
        one.close()


class _Watched(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, stage: int) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.stage = stage
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
        POINTS.reach("backward", ctx.stage)
        return grad, None


class Block(nn.Module):
    """A stage with points in its forward and its backward, and a buffer that counts."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.stage = stage
        self.linear = nn.Linear(WIDTH, WIDTH).double()
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        POINTS.reach("forward", self.stage)
        if self.training:
            self.calls += 1
        return _Watched.apply(torch.tanh(self.linear(x) * scale), self.stage)


class Chain(nn.Module):
    """The plain model: blocks one after the other, the first also added at the end."""

    def __init__(self, history: History) -> None:
        super().__init__()
        torch.manual_seed(history.seed)
        self.blocks = nn.ModuleList(Block(i) for i in range(history.num_stages))
        self.skips = history.model == "traced"
        if history.model != "blocks":
            self.blocks[-1].linear.weight = self.blocks[0].linear.weight

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        first = x = self.blocks[0](x, scale)
        for block in self.blocks[1:-1]:
            x = block(x, scale)
        return self.blocks[-1](x + first if self.skips else x, scale)


def sum_and_weight(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    mask = target > 0
    return ((output - target).pow(2) * mask).sum(), mask.sum()


def mean(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).pow(2).mean()


class Rank:
    """This process in one history; all ranks of it if `group` is a LocalGroup."""

    def __init__(self, history: History, rank: int | None, group: Any) -> None:
        self.history, self.rank = history, rank
        self.plain = Chain(history)
        model = copy.deepcopy(self.plain)
        indices = list(range(history.num_stages))
        if rank is not None:
            info = SCHEDULES[history.schedules[0]]
            placement = info.placement(len(history.ranks), history.num_stages)
            indices = list(placement.stages_of(rank))
        self.indices = indices
        self.is_last = history.num_stages - 1 in indices
        options: dict[str, Any] = {"timeout": history.timeout}
        if history.model == "traced":
            spec = {f"blocks.{i}": SplitPoint.BEGINNING for i in range(1, history.num_stages)}
            pipe = pipeline(model, (torch.zeros(2, 3, WIDTH).double(),), split_spec=spec)
            self.stages = [pipe.build_stage(i, "cpu", group) for i in indices]
        else:
            self.stages = [
                PipelineStage(model.blocks[i], i, history.num_stages, "cpu", group=group)
                for i in indices
            ]
            if history.model == "tied":
                last = history.num_stages - 1
                options["tied"] = [[(0, "linear.weight"), (last, "linear.weight")]]
        self.schedules = [
            get_schedule_class(name)(
                self.stages, history.microbatches, loss_fn=self.loss, **options
            )
            for name in history.schedules
        ]
        for made in self.schedules:
            made.before("F", lambda action: POINTS.reach("hook", action.stage))

    def loss(self, output: Tensor, target: Tensor) -> Any:
        POINTS.reach("loss", self.history.num_stages - 1)
        return (sum_and_weight if self.history.pair_loss else mean)(output, target)

    def plain_loss(self, output: Tensor, target: Tensor) -> Tensor:
        if self.history.pair_loss:
            total, weight = sum_and_weight(output, target)
            return total / weight
        return mean(output, target)

    def blocks(self, index: int) -> tuple[nn.Module, nn.Module]:
        """The block of a stage of this rank, and the plain model's."""
        stage = self.stages[self.indices.index(index)].submod
        found = next(m for m in stage.modules() if isinstance(m, Block))
        return found, self.plain.blocks[index]

    def make(self, call: Call) -> Record:
        record = Record(timeout=self.history.timeout)
        name = call.name
        if call.odd is not None and call.odd[0] == self.rank:
            name = call.odd[1]
        POINTS.arm(call.event if self._is_mine(call.event) else None, self.history.timeout)
        before = slowness()
        begin = time.monotonic()
        try:
            POINTS.reach("call", 0 if call.event is None else call.event.stage)
            getattr(self, f"do_{name}")(call, record)
        except BaseException as error:
            record.error = type(error).__name__
            record.is_ours = isinstance(error, FxpipeError)
            try:
                record.text = str(error)[:1500]
            except Exception:
                record.text = "(no text)"
        record.seconds = time.monotonic() - begin
        record.slowness = max(before, slowness())
        record.fired = POINTS.fired
        POINTS.arm(None, 0.0)
        self.compare(record)
        return record

    def _is_mine(self, event: Event | None) -> bool:
        return event is not None and event.stage in self.indices

    def compare(self, record: Record) -> None:
        """Parameters, buffers and gradients beside the plain model's."""
        for index in self.indices:
            mine, plain = self.blocks(index)
            for (name, p), q in zip(mine.named_parameters(), plain.parameters(), strict=True):
                self._compare(record, p.grad, q.grad, f"stage {index} {name}.grad")
                self._compare(record, p.detach(), q.detach(), f"stage {index} {name}")
            self._compare(record, mine.calls, plain.calls, f"stage {index} buffer")

    def _compare(self, record: Record, found: Any, wanted: Any, what: str) -> None:
        try:
            assert_close(found, wanted, what)
        except AssertionError as error:
            record.wrong.append(str(error))

    # Calls

    def inputs(self, call: Call) -> tuple[Tensor, Tensor]:
        torch.manual_seed(call.number)
        shape = (call.rows, call.length, WIDTH)
        return torch.randn(shape).double(), torch.randn(shape).double()

    def scale(self, call: Call) -> dict[str, float]:
        # In a traced model a number is a constant of the trace.
        return {} if self.history.model == "traced" else {"scale": call.scale}

    def do_step(self, call: Call, record: Record) -> None:
        x, y = self.inputs(call)
        made = self.schedules[call.schedule]
        if not any(p.requires_grad for p in self.plain.parameters()):
            self._step_without_gradients(record, made, call)
            return
        found = made.step(x, target=y, **self.scale(call))
        with quiet():
            output = self.plain(x, **self.scale(call))
            loss = self.plain_loss(output, y)
            if loss.requires_grad:
                loss.backward()
        self._count_calls()
        self._compare_outcome(record, made, found, output, loss)

    def _step_without_gradients(self, record: Record, made: Any, call: Call) -> None:
        """Everything is frozen: backward() of the plain model raises, and so does a step."""
        x, y = self.inputs(call)
        try:
            made.step(x, target=y, **self.scale(call))
        except InputError as error:
            if "does not depend on anything that requires a gradient" not in str(error):
                raise
        else:
            record.wrong.append("nothing wants a gradient, and step() does not say so")

    def _compare_outcome(
        self, record: Record, made: Any, found: Any, output: Tensor, loss: Tensor
    ) -> None:
        if self.is_last:
            self._compare(record, found, output.detach(), "output")
            self._compare(record, made.loss, loss.detach(), "loss")

    def _count_calls(self) -> None:
        for block in self.plain.blocks:
            if block.training:  # once per microbatch, not once
                block.calls += self.history.microbatches - 1

    def do_eval(self, call: Call, record: Record) -> None:
        x, y = self.inputs(call)
        made = self.schedules[call.schedule]
        found = made.eval(x, target=y, **self.scale(call))
        with quiet(), torch.no_grad():
            output = self.plain(x, **self.scale(call))
        self._count_calls()
        self._compare_outcome(record, made, found, output, self.plain_loss(output, y))

    def do_fewer_rows(self, call: Call, record: Record) -> None:
        x, y = self.inputs(call)
        made = self.schedules[call.schedule]
        run = made.eval if call.name == "eval" else made.step
        run(x[:-1], target=y[:-1], **self.scale(call))

    def do_no_target(self, call: Call, record: Record) -> None:
        x, _ = self.inputs(call)
        self.schedules[call.schedule].step(x, **self.scale(call))

    def do_clip(self, call: Call, record: Record) -> None:
        kind = (2.0, 1.0, 3.0, 0.5, float("inf"), float("-inf"), 0.0)[call.number % 7]
        most = (1e9, 0.1)[call.number % 2]
        found = self.schedules[call.schedule].clip_grad_norm_(most, kind)
        wanted = nn.utils.clip_grad_norm_(self.plain.parameters(), most, kind)
        self._compare(record, found.double(), wanted.double(), f"norm {kind}")

    def do_optimize(self, call: Call, record: Record) -> None:
        for module in (*(stage.submod for stage in self.stages), self.plain):
            parameters = list(module.parameters())
            torch.optim.SGD(parameters, lr=0.05).step()
            module.zero_grad()

    def do_zero_grad(self, call: Call, record: Record) -> None:
        for module in (*(stage.submod for stage in self.stages), self.plain):
            module.zero_grad()

    def do_save(self, call: Call, record: Record) -> None:
        _save(self.stages, is_alone=self.rank is None)

    def do_hook(self, call: Call, record: Record) -> None:
        index = call.number % self.history.num_stages
        if index in self.indices:
            self.blocks(index)[0].register_forward_hook(_double)
        self.plain.blocks[index].register_forward_hook(_double)

    def _each(self, call: Call, what: Callable[[nn.Module], object]) -> None:
        index = call.number % self.history.num_stages
        shared = {0, self.history.num_stages - 1}
        # A shared parameter is frozen wherever it is.
        several = shared if self.history.model != "blocks" and index in shared else {index}
        for one in several:
            if one in self.indices:
                what(self.blocks(one)[0])
            what(self.plain.blocks[one])

    def do_freeze(self, call: Call, record: Record) -> None:
        self._each(call, lambda block: block.requires_grad_(False))

    def do_thaw(self, call: Call, record: Record) -> None:
        self._each(call, lambda block: block.requires_grad_(True))

    def do_assign(self, call: Call, record: Record) -> None:
        for stage in self.stages:
            state = {k: v.clone() for k, v in stage.submod.state_dict().items()}
            stage.submod.load_state_dict(state, assign=True)
            stage.submod.zero_grad()
        self.plain.zero_grad()

    def do_mode(self, call: Call, record: Record) -> None:
        for module in (*(stage.submod for stage in self.stages), self.plain):
            module.train(call.number % 2 == 0)

    def do_timeline(self, call: Call, record: Record) -> None:
        self.schedules[call.schedule].record_timeline(call.number % 3 > 0)


def _save(stages: list[PipelineStage], *, is_alone: bool = False) -> None:
    """Save to one folder and load: all processes together, or this one that holds all stages."""
    with tempfile.TemporaryDirectory() as folder:
        shared = [folder]
        if not is_alone:
            dist.broadcast_object_list(shared)
        save_checkpoint(shared[0], stages)
        load_checkpoint(shared[0], stages)


def _double(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 2


class quiet:  # noqa: N801
    """No event in the plain model."""

    def __enter__(self) -> None:
        self._event, POINTS.event = POINTS.event, None

    def __exit__(self, *error: object) -> None:
        POINTS.event = self._event


def play(world_rank: int, history: History) -> list[Record] | None:
    """Make the history's calls on this process, if it takes part."""
    group = None
    if history.ranks != tuple(range(history.world)):
        group = dist.new_group(list(history.ranks), sort_ranks=False)
    store = dist.distributed_c10d._get_default_store()
    if world_rank not in history.ranks:
        for call in history.calls:
            if call.name == "save":  # which all processes do together
                _save([])
        deaths = sum(c.event is not None and "kill" in c.event.kind for c in history.calls)
        with contextlib.suppress(RuntimeError):
            while store.add("done", 0) < len(history.ranks) - deaths:  # it may be this rank's store
                time.sleep(0.05)
        return None
    # A busy machine gets more time, and the clock runs from when all ranks are there.
    slow = torch.tensor(slowness())
    dist.all_reduce(slow, dist.ReduceOp.MAX, group)
    history = replace(history, timeout=history.timeout * float(slow))
    rank = Rank(history, history.ranks.index(world_rank), group)
    dist.barrier(group)
    records = [rank.make(call) for call in history.calls]
    with contextlib.suppress(RuntimeError):  # the rank that holds the store may be gone
        store.add("done", 1)
    return records


def play_in_process(history: History) -> list[Record]:
    """Make the history's calls with all ranks in this process."""
    rank = Rank(history, None, LocalGroup(len(history.ranks)))
    return [rank.make(call) for call in history.calls]
