"""Random models, cuts and calls from a seed, compared with the plain model.

    python -m tests.graph.random_models.generate 0 200      seeds 0 to 199, what became of each

A model is a list of steps, each an idiom of real code: loops over leaves, skips, shared and
tied parts, branches on sizes, flags and modes, hooks, changes in place, views, buffers,
draws, caches, optional inputs, dtypes. `run_case` splits it, calls it a few times with
other sizes, values, modes and state, and says "equal", "refused" (an error of ours, at
trace or at call), "plain fails" (nothing could be compared), or what is wrong. A case whose
first calls were equal and a later one refused counts as refused.
"""

import collections
import copy
import dataclasses
import random
import sys
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fxpipe import SplitPoint, pipe_split, pipeline
from fxpipe.errors import FxpipeError
from tests.parity import assert_same, run

__all__ = ["Outcome", "run_case"]

WIDTH = 4


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Block(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(torch.relu(self.linear(self.norm(x))))


class Statistics(nn.Module):
    """A batch norm, which changes its buffers while training."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class Cached(Plain):
    """Keeps a table by length, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None or self.table.shape[0] < x.shape[1]:
            self.table = torch.arange(x.shape[1]).cos()
        return self.linear(x) * self.table[: x.shape[1], None]


class Pair(Plain):
    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"hidden": self.linear(x), "more": (x.mean(1), None)}


class Auxiliary(Plain):
    """Leaves a loss on itself, as mixtures of experts do."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.aux = y.square().mean()
        return y


class InPlace(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).add_(1).relu_()


class Attention(nn.Module):
    """The kernel call of the stages must be that of the plain model."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.linear(x).chunk(3, -1)
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x)[0]


class Chooses(Plain):
    """Decides by values, which a leaf may do."""

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if x.sum() > 0 else self.linear(-x)


class Crops(Plain):
    def forward(self, x: Tensor) -> Tensor:
        head = self.linear(x[:, :3])
        return torch.cat((head, x[:, 3:]), 1)


class Tree(nn.Module):
    """A module with modules inside, in which cuts may fall."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Plain(), Block())
        self.gate = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.blocks(x) * self.gate


class Helper:
    """No module: keeps a table between calls."""

    table: Tensor | None = None

    def get(self, length: int) -> Tensor:
        if self.table is None or self.table.shape[0] < length:
            self.table = torch.arange(length).sin()[:, None]
        return self.table[:length]


LEAVES = (
    Plain, Block, Statistics, Cached, Pair, Auxiliary, InPlace, nn.Identity, nn.Tanh,
    Attention, Recurrent, Chooses, Crops, Tree, Tree,
)  # fmt: skip


class Result(NamedTuple):
    hidden: Tensor
    extra: Any = None


class RandomNet(nn.Module):
    """Does its steps one after the other, in code that is split."""

    def __init__(self, dice: random.Random) -> None:
        super().__init__()
        self.parts = nn.ModuleList(dice.choice(LEAVES)() for _ in range(dice.randint(2, 5)))
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        if dice.random() < 0.3:
            self.last.weight = self.first.weight
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("count", torch.zeros(()))
        self.helper, self.options = Helper(), {"factor": 0.5, "shifts": [1, 2]}
        self.flag, self.rate, self.limit = dice.random() < 0.5, 0.25, dice.randint(3, 6)
        self.output = dice.choice(("tensor", "tuple", "dict", "named", "nested"))
        self.steps: list[tuple[str, int]] = []
        for index in range(len(self.parts)):
            self.steps.append(("leaf", index))
            for _ in range(dice.randint(0, 2)):
                self.steps.append((dice.choice(STEPS), index))

    def forward(self, x: Tensor, mask: Tensor | None = None, *, gain: float = 1.0) -> Any:
        x = self.first(x) * gain
        memory: dict[str, Any] = {"kept": x, "mask": mask}
        for name, index in self.steps:
            x = getattr(self, f"_{name}")(x, index, memory)
        x = self.last(x)
        kept = memory["kept"]
        return {
            "tensor": lambda: x,
            "tuple": lambda: (x, kept.mean()),
            "dict": lambda: {"x": x, "count": self.count.clone()},
            "named": lambda: Result(x, x.argmax(-1)),
            "nested": lambda: [x, {"mean": (kept.mean(), 3, x > 0)}],
        }[self.output]()

    def _leaf(self, x: Tensor, index: int, memory: dict[str, Any]) -> Tensor:
        y = self.parts[index](x)
        return y["hidden"] + y["more"][0][:, None] if isinstance(y, dict) else y

    def _again(self, x: Tensor, index: int, memory: dict[str, Any]) -> Tensor:
        return self._leaf(x, index // 2, memory)

    def _cut(self, x: Tensor, index: int, memory: dict[str, Any]) -> Tensor:
        pipe_split()
        return x

    def _keep(self, x: Tensor, index: int, memory: dict[str, Any]) -> Tensor:
        memory["kept"] = x
        return x

    def _skip(self, x: Tensor, index: int, memory: dict[str, Any]) -> Tensor:
        return x + memory["kept"]

    def _tied(self, x: Tensor, index: int, memory: dict[str, Any]) -> Tensor:
        return F.linear(x, self.first.weight.t())

    def _size(self, x: Tensor, index: int, memory: dict[str, Any]) -> Tensor:
        return x * 2 if x.shape[1] > self.limit else x + 1

    def _rows(self, x: Tensor, index: int, memory: dict[str, Any]) -> Tensor:
        return x - x.mean(0, keepdim=True) if x.shape[0] > 1 else x

    def _slice(self, x: Tensor, index: int, memory: dict[str, Any]) -> Tensor:
        head = x[:, : self.limit]
        return x + head.mean(1, keepdim=True) * head.shape[1]

    def _flagged(self, x: Tensor, index: int, memory: dict[str, Any]) -> Tensor:
        return torch.tanh(x) if self.flag else x * self.scale

    def _mode(self, x: Tensor, index: int, memory: dict[str, Any]) -> Tensor:
        return x * 1.5 if self.training else torch.sin(x)

    def _part_mode(self, x: Tensor, index: int, memory: dict[str, Any]) -> Tensor:
        return x * 0.5 if self.parts[index].training else x

    def _dropout(self, x: Tensor, index: int, memory: dict[str, Any]) -> Tensor:
        return F.dropout(x, self.rate, self.training)

    def _noise(self, x: Tensor, index: int, memory: dict[str, Any]) -> Tensor:
        return x + torch.rand(x.shape[-1]) + torch.randn_like(x) * 0.1

    def _change(self, x: Tensor, index: int, memory: dict[str, Any]) -> Tensor:
        x = x.clone()
        x[:, 0] += 1
        return x.mul_(0.5)

    def _change_kept(self, x: Tensor, index: int, memory: dict[str, Any]) -> Tensor:
        memory["kept"] = memory["kept"].clone()
        part = memory["kept"][:, :1]
        part.add_(1)
        return x + memory["kept"]

    def _view(self, x: Tensor, index: int, memory: dict[str, Any]) -> Tensor:
        b, s, w = x.shape
        return x.view(b, s, 2, w // 2).transpose(1, 2).reshape(b, -1, w // 2).reshape(b, s, w)

    def _counted(self, x: Tensor, index: int, memory: dict[str, Any]) -> Tensor:
        self.count += 1
        return x / self.count

    def _replaced(self, x: Tensor, index: int, memory: dict[str, Any]) -> Tensor:
        self.count = self.count * 0.9 + 1
        return x * self.count

    def _masked(self, x: Tensor, index: int, memory: dict[str, Any]) -> Tensor:
        mask = memory["mask"]
        return x if mask is None else x.masked_fill(~mask[..., None], 0.0)

    def _precise(self, x: Tensor, index: int, memory: dict[str, Any]) -> Tensor:
        return (x.double() @ torch.eye(WIDTH, dtype=torch.float64)).to(x.dtype)

    def _frozen(self, x: Tensor, index: int, memory: dict[str, Any]) -> Tensor:
        with torch.no_grad():
            target = self._leaf(x, index, memory)
        return x + target

    def _saved(self, x: Tensor, index: int, memory: dict[str, Any]) -> Tensor:
        return checkpoint(self._leaf, x, index, memory, use_reentrant=False)

    def _auxiliary(self, x: Tensor, index: int, memory: dict[str, Any]) -> Tensor:
        aux = getattr(self.parts[index], "aux", None)
        return x if aux is None else x + aux

    def _split(self, x: Tensor, index: int, memory: dict[str, Any]) -> Tensor:
        left, right = x.chunk(2, dim=-1)
        return torch.cat((right, left), -1)

    def _loop(self, x: Tensor, index: int, memory: dict[str, Any]) -> Tensor:
        for row in range(x.shape[1]):
            x = x + row
        return x

    def _helped(self, x: Tensor, index: int, memory: dict[str, Any]) -> Tensor:
        return x + self.helper.get(x.shape[1])

    def _optioned(self, x: Tensor, index: int, memory: dict[str, Any]) -> Tensor:
        return x * self.options["factor"] + len(self.options["shifts"])

    def _swapped(self, x: Tensor, index: int, memory: dict[str, Any]) -> Tensor:
        part = self.first
        return torch.func.functional_call(part, {"weight": part.weight * 2}, (x,))

    def _attended(self, x: Tensor, index: int, memory: dict[str, Any]) -> Tensor:
        return x + F.scaled_dot_product_attention(x, x, x, is_causal=True)

    def _watched(self, x: Tensor, index: int, memory: dict[str, Any]) -> Tensor:
        x = x * 1.0
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * 0.5)
        return x

    def _stopped(self, x: Tensor, index: int, memory: dict[str, Any]) -> Tensor:
        return x + memory["kept"].detach()

    def _stored(self, x: Tensor, index: int, memory: dict[str, Any]) -> Tensor:
        self.latest = x.mean()
        return x + self.latest

    def _counted_here(self, x: Tensor, index: int, memory: dict[str, Any]) -> Tensor:
        memory["steps"] = memory.get("steps", 0) + 1
        return x * memory["steps"]

    def _gathered(self, x: Tensor, index: int, memory: dict[str, Any]) -> Tensor:
        memory.setdefault("all", []).append(x)
        return x + sum(part.mean() for part in memory["all"])

    def _half(self, x: Tensor, index: int, memory: dict[str, Any]) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return x + self.first(x).to(x.dtype)

    def _short(self, x: Tensor, index: int, memory: dict[str, Any]) -> Tensor:
        size = min(self.limit, x.shape[1])
        return x + x[:, :size].sum(1, keepdim=True) / size


STEPS = tuple(
    name.removeprefix("_")
    for name, value in vars(RandomNet).items()
    if name.startswith("_") and not name.startswith("__") and callable(value)
)  # fmt: skip
STEPS = (*STEPS, "cut", "cut", "skip", "keep")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a case: "equal", "refused", "plain fails", "different" or "internal"."""

    kind: str
    text: str = ""

    @property
    def is_right(self) -> bool:
        return self.kind in ("equal", "refused", "plain fails")


def run_case(seed: int) -> Outcome:
    """Make, split and call one model."""
    dice = random.Random(seed)
    torch.manual_seed(seed)
    model = RandomNet(dice)
    if dice.random() < 0.3:
        _add_hook(model, dice)
    model.train(dice.random() < 0.6)
    if dice.random() < 0.2:
        dice.choice(list(model.parts)).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _compared(model, dice)


def _compared(model: RandomNet, dice: random.Random) -> Outcome:
    has_mask = dice.random() < 0.3
    args, kwargs = _inputs(dice, has_mask, torch.randint(2, 5, ()).item(), dice.randint(3, 7))
    plain = copy.deepcopy(model)
    try:
        run(copy.deepcopy(plain), args, kwargs)
    except Exception as error:
        return Outcome("plain fails", str(error))
    try:
        pipe = pipeline(model, args, kwargs, **_cut(model, dice))
    except FxpipeError as error:
        return Outcome("refused", str(error))
    except Exception as error:
        return Outcome("internal", f"trace: {type(error).__name__}: {error}")
    for call in range(4):
        if call:
            args, kwargs = _inputs(dice, has_mask, dice.choice((1, 2, 3, 5)), dice.randint(2, 9))
            _change_state(model, plain, pipe, dice)
        try:
            expected = run(plain, args, kwargs, seed=call)
        except Exception as error:
            return Outcome("equal" if call > 1 else "plain fails", str(error))
        try:
            found = run(pipe, args, kwargs, seed=call)
        except FxpipeError as error:
            return Outcome("refused", str(error))
        except Exception as error:
            return Outcome("internal", f"call {call}: {type(error).__name__}: {error}")
        try:
            assert_same(expected, found)
        except AssertionError as error:
            return Outcome("different", f"call {call}: {error}")
    return Outcome("equal")


def _inputs(dice: random.Random, has_mask: bool, rows: int, length: int) -> tuple[Any, Any]:
    x = torch.randn(rows, length, WIDTH, requires_grad=dice.random() < 0.5)
    if not has_mask:
        return (x,), {}
    return (x,), {"mask": torch.rand(rows, length) > 0.3}


def _cut(model: RandomNet, dice: random.Random) -> dict[str, Any]:
    if any(name == "cut" for name, _ in model.steps):
        return {}
    if dice.random() < 0.5:
        return {"num_stages": dice.randint(2, 3)}
    where = dice.choice([*(f"parts.{i}" for i in range(len(model.parts))), "last"])
    return {"split_spec": {where: SplitPoint.BEGINNING}}


def _add_hook(model: RandomNet, dice: random.Random) -> None:
    part: nn.Module = dice.choice([*model.parts, model.last, model])
    seen: list[Any] = []
    kind = dice.randrange(4)
    if kind == 0:
        part.register_forward_hook(
            lambda module, args, output: output * 1.1 if isinstance(output, Tensor) else None
        )
    elif kind == 1:
        part.register_forward_hook(lambda module, args, output: seen.append(output))
    elif kind == 2:
        part.register_forward_pre_hook(lambda module, args: (args[0] * 0.9, *args[1:]))
    elif part is not model:
        part.register_full_backward_hook(
            lambda module, inputs, outputs: tuple(g and g * 2 for g in inputs) if seen else None
        )


def _change_state(model: RandomNet, plain: RandomNet, pipe: Any, dice: random.Random) -> None:
    """Do to both models what training scripts do between steps."""
    stages = [stage.module for stage in pipe.stages]
    pick = dice.random()
    if pick < 0.5:
        training = dice.random() < 0.5
        for part in (model, plain, *stages):
            part.train(training)
    elif pick < 0.6:
        with torch.no_grad():
            for one in (model, plain):
                one.last.weight.mul_(0.9)
    elif pick < 0.7:
        for one in (model, plain):
            one.flag = not one.flag
    elif pick < 0.8:
        for one in (model, plain):
            one.parts[0].requires_grad_(False)
    elif pick < 0.85:
        for one in (model, plain):
            one.last.register_forward_hook(lambda module, args, output: output + 1)
    elif pick < 0.9:
        for one in (model, plain):
            one.options["shifts"].append(3)
    else:
        for one in (model, plain):
            one.load_state_dict(copy.deepcopy(plain.state_dict()), assign=True)


def main(first: int, count: int, one: Callable[[int], Outcome] = run_case) -> None:
    """Print each wrong seed, then how many of each kind."""
    kinds: collections.Counter[str] = collections.Counter()
    reasons: collections.Counter[str] = collections.Counter()
    for seed in range(first, first + count):
        outcome = one(seed)
        kinds[outcome.kind] += 1
        if outcome.kind == "refused":
            reasons[" ".join(outcome.text.split())[:110]] += 1
        if not outcome.is_right:
            text = " ".join(outcome.text.split())[:300]
            sys.stdout.write(f"{seed} {outcome.kind} {text}\n")
            sys.stdout.flush()
    sys.stdout.write(f"{dict(kinds)}\n")
    for text, number in reasons.most_common(12):
        sys.stdout.write(f"  refused {number}: {text}\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), int(sys.argv[2]))
