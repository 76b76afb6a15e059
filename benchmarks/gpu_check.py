"""Try on real GPUs what was only emulated: schedules and faults. Write one report to send back.

    make gpu-check                                  all GPUs of this host
    python -m benchmarks.gpu_check --emulated       the same over an emulated NCCL, on the CPU

Where there are not two GPUs it is emulated, and the report says so. Not tried are tied weights,
skips, replicas, tensor parallelism, evaluation and compiled stages.

Every schedule is compared with the plain model on every rank, timed beside
torch.distributed.pipelining, and its memory on the first rank is put beside the simulator's. Then
things go wrong: a stage raises, a rank hangs, a rank dies. All of that once for each way in which
communicators can be set up. What ranks find is written down at once, so a crash costs only what
comes after it. The report grows on the disk with each part, and is printed; the exit code is 1 if
anything is wrong.
"""

import argparse
import copy
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.ports import free_port
from benchmarks.step_memory import LiveBytes
from fxpipe import RemoteStageError, get_schedule_class
from fxpipe.program import lower, simulate
from fxpipe.program.costs import StageCost, StageCosts
from fxpipe.program.generators import SCHEDULES
from fxpipe.runtime.wire.communicators import streams_of
from fxpipe.stage import PipelineStage
from fxpipe.text import aligned, bytes_text

# Since torch 2.14 "nccl" is eager whatever it is told.
LAZY = "nccl" if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 14) else "nccl-lazy"
# name, backend, environment
REAL: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("lazy", LAZY, {}),
    ("eager", "nccl", {}),
    ("eager, one hardware queue", "nccl", {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
)
EMULATED: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("emulated, eager", "nccl_eager", {}),
    ("emulated, a queue per pair", "nccl_pair", {}),
    ("gloo, where torch can be timed, too", "gloo", {}),
)
MICROBATCHES = 8
COLUMNS = ("what", "result", "ms", "torch ms", "peak", "predicted")
LAST_WORDS = 20  # lines of what a failed rank wrote
LIMIT = 900.0  # seconds for one way
AFTER_FAILURE = 60.0  # seconds for the others once a rank has failed: they may wait for it
CLOSE = 1e-3  # of the largest element of a gradient


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--emulated", action="store_true", help="on the CPU, over tests/backends")
    every = [name for name in SCHEDULES if name != "ForwardOnly"]
    parser.add_argument("--schedules", nargs="+", choices=every, default=every, metavar="NAME")
    parser.add_argument("--width", type=_count, default=None, help="of a layer")
    parser.add_argument("--rows", type=_count, default=None, help="of a microbatch")
    parser.add_argument("--steps", type=_count, default=5, help="that are timed")
    parser.add_argument("--timeout", type=_count, default=120, help="seconds that a step may take")
    parser.add_argument("--ways", type=_count, default=len(REAL), help="try so many of the ways")
    parser.add_argument("--report", default="out/gpu-check.txt")
    parser.add_argument("--way", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--dies", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.emulated and torch.cuda.device_count() < 2:
        options.emulated = True
        sys.argv.append("--emulated")  # for the ranks
    options.width = options.width or (64 if options.emulated else 2048)
    options.rows = options.rows or (256 if options.emulated else 4096)
    if options.way is not None:
        _run_rank(options)
        return
    num_ranks = 2 if options.emulated else torch.cuda.device_count()
    report = Path(options.report)
    try:  # before an hour's work
        report.parent.mkdir(parents=True, exist_ok=True)
        report.open("a").close()  # what an earlier run has found stays until there is more
    except OSError as error:
        parser.error(f"cannot write the report: {error}")
    parts, is_right = [_machine(num_ranks, options.emulated)], True
    for part, is_part_right in _ways(options, num_ranks):
        parts.append(part)
        is_right &= is_part_right
        report.write_text("\n\n".join([*parts, "not finished\n"]))
    text = "\n\n".join([*parts, "everything is right\n" if is_right else "SOMETHING IS WRONG\n"])
    print(text)
    report.write_text(text)
    print(f"saved as {report}: please send it back")
    sys.exit(0 if is_right else 1)


def _count(text: str) -> int:
    if (found := int(text)) < 1:
        raise ValueError(text)
    return found


def _ways(options: argparse.Namespace, num_ranks: int) -> Iterator[tuple[str, bool]]:
    """For each way and each end what was found, and whether it is right."""
    ways = (EMULATED if options.emulated else REAL)[: options.ways]
    for place, (name, _, environment) in enumerate(ways):
        for dies in (False, True):
            rows = _launch(place, dies, environment, num_ranks)
            shown = [[str(row.get(column, "")) for column in COLUMNS] for row in rows]
            title = f"{name}{', a rank dies' if dies else ''}"
            lines = aligned([COLUMNS, *shown], left=(0, 1), rule=True)
            more = [line for row in rows for line in row.get("more", [])]
            is_right = bool(rows) and all(row["is_right"] for row in rows)
            yield "\n".join([f"== {title}", *lines, *more]), is_right


def _machine(num_ranks: int, emulated: bool) -> str:
    lines = [
        f"python {platform.python_version()}, torch {torch.__version__}, {num_ranks} ranks",
        f"{' '.join(sys.argv[1:]) or 'no options'}; on {platform.platform()}",
        "predicted: what actions keep for each other, without what a layer needs while it runs",
    ]
    if emulated:
        lines.append("no two GPUs are used: NCCL is emulated on the CPU, so times mean little")
    else:
        lines += [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        lines.append(f"nccl {torch.cuda.nccl.version()}")
    return "\n".join(lines)


def _launch(
    way: int, dies: bool, environment: dict[str, str], num_ranks: int
) -> list[dict[str, Any]]:
    """Run all ranks of one way; what they found, and which of them did not end well."""
    with tempfile.TemporaryDirectory() as folder:
        shared = {
            **os.environ, **environment, "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(num_ranks), "FOLDER": folder,
        }  # fmt: skip
        command = [sys.executable, "-X", "faulthandler", "-m", "benchmarks.gpu_check"]
        command += [*sys.argv[1:], "--way", str(way)] + (["--dies"] if dies else [])
        ranks = []
        for rank in range(num_ranks):
            # Not a pipe: one that nobody reads yet stops the rank that writes to it.
            with Path(folder, f"{rank}.words").open("wb") as words:
                place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                ranks.append(subprocess.Popen(command, env={**shared, **place}, stderr=words))
        wanted = [0] * (num_ranks - 1) + [3 if dies else 0]
        rows: list[dict[str, Any]] = []
        for rank, code in enumerate(_exit_codes(ranks, wanted)):
            if code != wanted[rank]:
                said = Path(folder, f"{rank}.words").read_text(errors="replace").strip()
                text = f"FAILED: exit code {code}"
                more = [f"-- the last words of rank {rank}", *said.splitlines()[-LAST_WORDS:]]
                rows.append(
                    {"what": f"rank {rank}", "result": text, "is_right": False, "more": more}
                )
        alive = range(num_ranks - dies)
        return [*merged([_found(folder, rank) for rank in alive]), *rows]


def _exit_codes(ranks: Sequence["subprocess.Popen[bytes]"], wanted: Sequence[int]) -> list[int]:
    """Wait for all ranks; those that do not come are killed."""
    until = time.monotonic() + LIMIT
    try:
        while None in [process.poll() for process in ranks] and time.monotonic() < until:
            codes = [process.returncode for process in ranks]
            if any(code not in (None, want) for code, want in zip(codes, wanted, strict=True)):
                until = min(until, time.monotonic() + AFTER_FAILURE)
            time.sleep(0.1)
    finally:
        for process in ranks:
            process.kill()
    return [process.wait() for process in ranks]


def _found(folder: str, rank: int) -> list[dict[str, Any]]:
    path = Path(folder, f"{rank}.jsonl")
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def merged(found: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """What all ranks found, as one row for each thing tried: wrong on one rank is wrong.

    Figures are those of the first rank.
    """
    names = dict.fromkeys(row["what"] for rows in found for row in rows)
    whole = []
    for name in names:
        made: dict[str, Any] = {"what": name, "result": "ok", "is_right": True, "more": []}
        wrong = []
        for rank, rows in enumerate(found):
            mine = [row for row in rows if row["what"] == name]
            if not mine:
                mine = [{"result": "FAILED: did not come so far", "is_right": False}]
            for row in mine:
                if rank == 0:
                    made.update({key: row[key] for key in row if key not in ("is_right", "more")})
                if not row["is_right"]:
                    wrong.append(f"rank {rank}: {row['result']}")
                if row.get("more"):
                    made["more"] += [f"-- {name}, rank {rank}", *row["more"]]
        if wrong:
            made.update(result="; ".join(wrong), is_right=False)
        whole.append(made)
    return whole


# What each rank does


def _run_rank(options: argparse.Namespace) -> None:
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    name, backend, _ = (EMULATED if options.emulated else REAL)[options.way]
    device = torch.device("cpu")
    if options.emulated:
        from tests.backends import nccl_like

        torch.set_num_threads(1)
        nccl_like.register()
        dist.init_process_group(backend)
        nccl_like.bind(backend)
    else:
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        dist.init_process_group(backend, device_id=device if name != "lazy" else None)
    checks = _death if options.dies else _checks
    with Path(os.environ["FOLDER"], f"{rank}.jsonl").open("w") as file:
        for found in checks(rank, num_ranks, device, options):
            file.write(json.dumps(found) + "\n")
            file.flush()
    sys.stderr.flush()
    os._exit(0)


def _checks(
    rank: int, num_ranks: int, device: torch.device, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    yield _guarded("queues", lambda: _queues(device))
    for schedule in options.schedules:
        yield _guarded(schedule, lambda s=schedule: _train(s, rank, num_ranks, device, options))
    yield _guarded("a stage raises", lambda: _fault(rank, num_ranks, device, options))
    yield _guarded("a rank hangs", lambda: _hang(rank, num_ranks, device, options))
    if not dist.get_backend().startswith("nccl_"):  # emulated: torch wants a group of C++
        for schedule in options.schedules:
            yield _beside_torch(schedule, rank, num_ranks, device, options)


def _queues(device: torch.device) -> dict[str, Any]:
    streams = streams_of(dist.group.WORLD, device)
    text = f"one queue per {streams}" if streams else "no queues"
    bound = getattr(dist.group.WORLD, "bound_device_id", None)
    return {"result": f"ok, {text}, {'eager' if bound is not None else 'not eager'}"}


def _guarded(what: str, check: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return {"what": what, "result": "ok", "is_right": True, **check()}
    except Exception as error:
        said = (str(error).splitlines() or [""])[0]
        text = f"FAILED: {type(error).__name__}: {said}"
        more = traceback.format_exc().splitlines()
        return {"what": what, "result": text, "is_right": False, "more": more}


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.problem = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.problem == "raise":
            raise KeyError("a stage raises")
        if self.problem == "hang":
            time.sleep(8.0)
        return torch.tanh(self.linear(x))


def _mse(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).pow(2).mean()


class _Made:
    """The stages of a rank, their schedule, and the whole plain model."""

    def __init__(
        self, schedule: str, rank: int, num_ranks: int, device: torch.device,
        shape: argparse.Namespace, package: Any = None, **options: Any,
    ) -> None:  # fmt: skip
        info = SCHEDULES[schedule]
        self.num_stages = num_ranks if info.stages_per_rank[1] == 1 else 2 * num_ranks
        placement = info.placement(num_ranks, self.num_stages)
        self.indices = list(placement.stages_of(rank))
        torch.manual_seed(0)
        self.modules = [_Block(shape.width).to(device) for _ in range(self.num_stages)]
        self.plain = copy.deepcopy(self.modules)
        make = package.PipelineStage if package else PipelineStage
        stages = [make(self.modules[i], i, self.num_stages, device) for i in self.indices]
        found = (package.schedules.get_schedule_class if package else get_schedule_class)(schedule)
        if package is None:
            options = {"timeout": shape.timeout, **options}
        alone = package is not None and schedule in ("GPipe", "1F1B")
        self.schedule = found(stages[0] if alone else stages, MICROBATCHES, loss_fn=_mse, **options)
        generator = torch.Generator().manual_seed(1)
        self.rows = shape.rows
        self.x = torch.randn(MICROBATCHES * self.rows, shape.width, generator=generator).to(device)

    def step(self, **options: Any) -> None:
        for i in self.indices:
            self.modules[i].zero_grad()
        args = (self.x,) if 0 in self.indices else ()
        target = {"target": self.x} if self.num_stages - 1 in self.indices else {}
        self.schedule.step(*args, **target, **options)

    def gradients(self) -> list[Tensor]:
        """Copies, to be compared once no rank waits for this one."""
        found = [p.grad for i in self.indices for p in self.modules[i].parameters()]
        return [torch.empty(0) if grad is None else grad.clone() for grad in found]

    def check(self, found: Sequence[Tensor]) -> None:
        h = self.x
        for module in self.plain:
            module.zero_grad()
            h = module(h)
        _mse(h, self.x).backward()
        check_close(found, [p.grad for i in self.indices for p in self.plain[i].parameters()])


def check_close(found: Sequence[Tensor], wanted: Sequence[Any]) -> None:
    """Compare gradients, each by its own size: they are small, and smaller in early stages."""
    for grad, want in zip(found, wanted, strict=True):
        close = CLOSE * float(want.abs().max())
        torch.testing.assert_close(grad, want, rtol=0.0, atol=close)


def _train(
    schedule: str, rank: int, num_ranks: int, device: torch.device, options: argparse.Namespace
) -> dict[str, Any]:
    made = _Made(schedule, rank, num_ranks, device, options)
    made.step()
    first = made.gradients()
    found = {"ms": _milliseconds(made.step, device, options.steps)}
    found["peak"] = bytes_text(_peak(lambda: made.step(return_outputs=False), device))
    found["predicted"] = bytes_text(_predicted(made, schedule, rank, num_ranks))
    made.check(first)
    made.check(made.gradients())
    return found


def _beside_torch(
    schedule: str, rank: int, num_ranks: int, device: torch.device, options: argparse.Namespace
) -> dict[str, Any]:
    """Whatever happens to torch is no fault of ours."""
    from torch.distributed import pipelining

    found: dict[str, Any] = {"what": schedule, "is_right": True, "torch ms": "has none"}
    try:
        pipelining.schedules.get_schedule_class(schedule)
    except ValueError:
        return found
    try:
        theirs = _Made(schedule, rank, num_ranks, device, options, pipelining)
        theirs.step()
        found["torch ms"] = _milliseconds(theirs.step, device, options.steps)
    except Exception as error:
        found["torch ms"] = type(error).__name__
    return found


def _milliseconds(step: Callable[[], None], device: torch.device, steps: int) -> str:
    _synchronize(device)
    start = time.perf_counter()
    for _ in range(steps):
        step()
    _synchronize(device)
    return f"{(time.perf_counter() - start) / steps * 1e3:.2f}"


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _peak(step: Callable[[], None], device: torch.device) -> float:
    """The most bytes that a step holds beyond what is there before it."""
    if device.type == "cpu":
        with LiveBytes() as live:
            step()
        return float(live.peak)
    torch.accelerator.reset_peak_memory_stats(device)
    before = torch.accelerator.memory_allocated(device)
    step()
    _synchronize(device)
    return float(torch.accelerator.max_memory_allocated(device) - before)


def _predicted(made: _Made, schedule: str, rank: int, num_ranks: int) -> float:
    """The simulator's peak, from what one microbatch leaves for its backward in each stage.

    The batch is not among it, which the first stage keeps: it is there before the step.
    """
    batch, h = made.x.untyped_storage().data_ptr(), made.x[: made.rows]
    costs = []
    for i, module in enumerate(made.plain):
        saved: dict[int, int] = {}
        there = {batch, *(p.untyped_storage().data_ptr() for p in module.parameters())}

        def pack(tensor: Tensor, saved: dict[int, int] = saved) -> Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            h = module(h.detach().requires_grad_())
            if i == made.num_stages - 1:
                _mse(h, made.x[: made.rows])
        residual = sum(size for place, size in saved.items() if place not in there)
        weights = sum(p.nbytes for p in module.parameters())
        costs.append(StageCost(residual=float(residual), weight_grad=float(weights)))
    program = SCHEDULES[schedule].generator(num_ranks, made.num_stages, MICROBATCHES)
    priced = StageCosts(tuple(costs), activation=float(h.nbytes))
    return simulate(lower(program), priced).peak_memory[rank]


def _fault(
    rank: int, num_ranks: int, device: torch.device, options: argparse.Namespace
) -> dict[str, Any]:
    made = _Made("1F1B", rank, num_ranks, device, options)
    made.step()
    made.modules[num_ranks - 1].problem = "raise"
    wanted = KeyError if rank == num_ranks - 1 else RemoteStageError
    seconds = _raises(made.step, wanted)
    made.modules[num_ranks - 1].problem = ""
    made.step()
    made.check(made.gradients())
    return {"result": f"ok, all ranks know after {seconds:.1f} s, the next step is right"}


def _hang(
    rank: int, num_ranks: int, device: torch.device, options: argparse.Namespace
) -> dict[str, Any]:
    made = _Made("1F1B", rank, num_ranks, device, options, timeout=3.0)
    made.step()
    made.modules[num_ranks - 1].problem = "hang"
    seconds = _raises(made.step, RemoteStageError)
    return {"result": f"ok, said after {seconds:.1f} s of 3.0 s"}


def _death(
    rank: int, num_ranks: int, device: torch.device, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    made = _Made("1F1B", rank, num_ranks, device, options)
    made.step()
    if rank == num_ranks - 1:
        os._exit(3)

    def check() -> dict[str, Any]:
        return {"result": f"ok, noticed after {_raises(made.step, RemoteStageError):.1f} s"}

    yield _guarded("a rank dies", check)


def _raises(step: Callable[[], None], wanted: type[Exception]) -> float:
    start = time.monotonic()
    try:
        step()
    except wanted:
        return time.monotonic() - start
    raise AssertionError(f"no {wanted.__name__} was raised")


if __name__ == "__main__":
    main()
