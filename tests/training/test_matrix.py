"""Every schedule with every kind of stage: the same gradients, outputs, and runs that go on.

`python -m tests.training.test_matrix [plain] [ddp] [fsdp]` runs these columns of the whole table
and writes them into docs/schedules.md.
"""

import contextlib
import copy
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from fxpipe import (
    LocalGroup,
    PipelineStage,
    get_schedule_class,
    load_checkpoint,
    save_checkpoint,
)
from fxpipe.program.generators import SCHEDULES
from fxpipe.schedules import Schedule
from tests.distributed.bodies import layout
from tests.distributed.ranks import run_on_ranks

NAMES = tuple(info.name for info in SCHEDULES.values() if info.trains)
WRAPPERS = ("plain", "ddp", "fsdp")
FEATURES = ("frozen", "tied", "checkpointed", "compiled", "lora", "autocast", "offloaded")
MODES = ("train", "eval", "resume")


class Block(nn.Module):
    def __init__(self, feature: str) -> None:
        super().__init__()
        self.feature = feature
        self.linear = nn.Linear(8, 8)
        if feature == "lora":
            self.linear.requires_grad_(False)
            self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.feature == "checkpointed" and self.training:
            out: Tensor = checkpoint(self._compute, x, use_reentrant=False)
            return out
        return self._compute(x)

    def _compute(self, x: Tensor) -> Tensor:
        out = self.linear(x)
        if self.feature == "lora":
            out = out + self.up(self.down(x))
        return torch.tanh(out)


def blocks(feature: str, count: int, seed: int) -> list[nn.Module]:
    torch.manual_seed(seed)
    made: list[nn.Module] = [Block(feature) for _ in range(count)]
    if feature == "frozen":
        made[0].requires_grad_(False)
    if feature == "tied":
        made[-1].linear.weight = made[0].linear.weight  # type: ignore[union-attr]
    return made if feature == "autocast" else [block.double() for block in made]


def mse(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output.to(target.dtype), target)


class Groups:
    """The groups of two pipelines beside each other, or one pipeline in this process."""

    def __init__(self, wrapper: str, rank: int) -> None:
        self.wrapper, self.local = wrapper, wrapper == "plain"
        self.replica, self.place = (0, 0) if self.local else divmod(rank, 2)
        self.pipeline: Any = LocalGroup(2)
        self.folder = tempfile.mkdtemp()
        if not self.local:
            pipelines = [dist.new_group([0, 1]), dist.new_group([2, 3])]
            self.replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])][self.place]
            self.pipeline = pipelines[self.replica]
            shared = [self.folder]
            dist.broadcast_object_list(shared)
            self.folder = shared[0]

    def wrap(self, module: nn.Module, feature: str) -> nn.Module:
        if self.wrapper == "ddp" and any(p.requires_grad for p in module.parameters()):
            module = DistributedDataParallel(module, process_group=self.replicas)
        if self.wrapper == "fsdp":
            from torch.distributed.device_mesh import DeviceMesh
            from torch.distributed.fsdp import fully_shard

            fully_shard(module, mesh=DeviceMesh.from_group(self.replicas, "cpu"))
        if feature == "compiled":
            module.compile(backend="eager")
        return module

    def part(self, whole: Tensor) -> Tensor:
        """What this rank holds of a parameter."""
        return whole.chunk(2)[self.replica] if self.wrapper == "fsdp" else whole


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def build(name: str, feature: str, groups: Groups, seed: int) -> tuple[Schedule, Any, list[Any]]:
    indices, count = layout(name, groups.place, 2)
    modules = blocks(feature, count, seed)
    reference = copy.deepcopy(modules)
    mine = range(count) if groups.local else indices
    stages = [
        PipelineStage(groups.wrap(modules[i], feature), i, count, "cpu", group=groups.pipeline)
        for i in mine
    ]
    tied = [[(0, "linear.weight"), (count - 1, "linear.weight")]] if feature == "tied" else []
    more: dict[str, Any] = {"offload": 2} if feature == "offloaded" else {}
    count = 4 if feature == "offloaded" else 2
    schedule = get_schedule_class(name)(stages, count, loss_fn=mse, tied=tied, **more)
    found = {id(p): p for s in stages for p in s.submod.parameters() if p.requires_grad}
    optimizer = torch.optim.SGD([*found.values()] or [torch.zeros(1)], lr=0.1, momentum=0.9)
    return schedule, optimizer, reference


@contextlib.contextmanager
def precision(feature: str) -> Iterator[dict[str, float]]:
    if feature == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            yield {"rtol": 0.05, "atol": 0.02}
    else:
        yield {"rtol": 1e-9, "atol": 1e-9}


def data(feature: str, groups: Groups, seed: int) -> tuple[Tensor, Tensor, slice]:
    draws = torch.Generator().manual_seed(seed)
    dtype = torch.float32 if feature == "autocast" else torch.float64
    x, y = (torch.randn(8, 8, generator=draws, dtype=dtype) for _ in range(2))
    rows = slice(None) if groups.local else slice(4 * groups.replica, 4 * groups.replica + 4)
    return x, y, rows


def run_case(name: str, feature: str, groups: Groups) -> dict[str, str]:
    """What went wrong in which mode: training, evaluation, and a run that is saved and resumed."""
    schedule, optimizer, reference = build(name, feature, groups, seed=0)
    x, y, rows = data(feature, groups, seed=1)

    def train() -> None:
        with precision(feature) as close:
            schedule.step(x[rows], target=y[rows])
            _compare_gradients(schedule, reference, x, y, groups, close)

    def evaluate() -> None:
        with precision(feature) as close:
            _compare_outputs(schedule, reference, x[rows], close)

    def resume() -> None:
        optimizer.step()
        optimizer.zero_grad()
        _compare_resumed(name, feature, groups, schedule, optimizer)

    found = {}
    for mode, check in zip(MODES, (train, evaluate, resume), strict=True):
        try:
            check()
        except Exception as error:
            found[f"{name}, {feature}, {mode}"] = f"{type(error).__name__}: {error}"
    return found


def _compare_resumed(
    name: str, feature: str, groups: Groups, schedule: Schedule, optimizer: Any
) -> None:
    folder = f"{groups.folder}/{name}-{feature}"
    save_checkpoint(folder, schedule, optimizer, step=1)
    other, other_optimizer, _ = build(name, feature, groups, seed=5)
    load_checkpoint(folder, other, other_optimizer)
    x, y, rows = data(feature, groups, seed=2)
    for one, its in ((schedule, optimizer), (other, other_optimizer)):
        with precision(feature):
            one.step(x[rows], target=y[rows])
        its.step()
    for a, b in zip(schedule.stages, other.stages, strict=True):
        for p, q in zip(a.submod.parameters(), b.submod.parameters(), strict=True):
            assert torch.equal(local(p), local(q)), "a resumed run differs"


def _compare_gradients(
    schedule: Schedule,
    reference: list[Any],
    x: Tensor,
    y: Tensor,
    groups: Groups,
    close: dict[str, float],
) -> None:
    hidden = x
    for block in reference:
        hidden = block(hidden)
    mse(hidden, y).backward()
    for stage in schedule.stages:
        wanted = dict(reference[stage.stage_index].named_parameters())
        for key, p in stage.submod.named_parameters():
            grad = wanted[key.removeprefix("module.")].grad
            assert (p.grad is None) == (grad is None), f"{key} has a gradient or not"
            if p.grad is not None and grad is not None:
                torch.testing.assert_close(local(p.grad), groups.part(grad), **close)


def _compare_outputs(
    schedule: Schedule, reference: list[Any], x: Tensor, close: dict[str, float]
) -> None:
    for stage in schedule.stages:
        stage.submod.eval()
    output = schedule.eval(x)
    if output is not None:
        with torch.no_grad():
            for block in reference:
                x = block.eval()(x)
        torch.testing.assert_close(output, x, **close)
    for stage in schedule.stages:
        stage.submod.train()


def run_cases(rank: int, wrapper: str, cases: list[tuple[str, str]]) -> dict[str, str]:
    """What went wrong in each case, or nothing."""
    # The compiler looks at .grad of every tensor that it is given, also of received ones.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    groups = Groups(wrapper, rank)
    found: dict[str, str] = {}
    for name, feature in cases:
        found |= run_case(name, feature, groups)
    return found


def results(wrapper: str, cases: list[tuple[str, str]], limit: float = 150.0) -> dict[str, str]:
    if wrapper == "plain":
        return run_cases(0, wrapper, cases)
    found: dict[str, str] = {}
    for one in run_on_ranks(4, run_cases, wrapper, cases, limit=limit):
        found |= one
    return found


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_sample_of_the_table(wrapper: str) -> None:
    cases = [("1F1B", feature) for feature in FEATURES if feature != "compiled"]
    # With DDP the V of ZB-V once lost half a tied gradient: both stages are on one rank.
    cases += [("ZBVZeroBubble", "lora"), ("ZBVZeroBubble", "tied"), ("Interleaved1F1B", "tied")]

    assert results(wrapper, cases) == {}


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_the_whole_table(wrapper: str, name: str) -> None:
    assert whole_row(wrapper, name) == {}


def whole_row(wrapper: str, name: str) -> dict[str, str]:
    torch._dynamo.config.recompile_limit = 10_000
    return results(wrapper, [(name, feature) for feature in FEATURES], limit=900.0)


PAGE = Path(__file__).parents[2] / "docs" / "schedules.md"
HEAD = "| schedule | plain | DDP | FSDP2 |\n|---|---|---|---|\n"
_ROW = re.compile(r"^\| (\w+) \| ([^|]*) \| ([^|]*) \| ([^|]*) \|$", re.MULTILINE)


def write_columns(wrappers: list[str]) -> None:
    """Run these kinds of stages with everything, and put what came out into the page."""
    before, mark, table = PAGE.read_text(encoding="utf-8").partition("<!-- matrix -->\n")
    found_before = {match[1]: list(match.groups()[1:]) for match in _ROW.finditer(table)}
    cells = {name: found_before.get(name, ["not run"] * len(WRAPPERS)) for name in NAMES}
    whole = len(FEATURES) * len(MODES)
    for wrapper in wrappers:
        for name in NAMES:
            wrong = whole_row(wrapper, name)
            found = "; ".join([f"{whole - len(wrong)} of {whole}", *sorted(wrong)])
            cells[name][WRAPPERS.index(wrapper)] = found
            sys.stdout.write(f"{wrapper}, {name}: {found} {wrong or ''}\n")
            rows = "".join(f"| {key} | {' | '.join(cells[key])} |\n" for key in cells)
            PAGE.write_text(before + mark + HEAD + rows, encoding="utf-8")


if __name__ == "__main__":
    write_columns(sys.argv[1:] or list(WRAPPERS))
