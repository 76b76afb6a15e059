"""Random models, cuts and calls from a seed, compared with the plain model.

    python -m tests.graph.random_models.generate 0 200            seeds 0 to 199
    python -m tests.graph.random_models.generate 0 200 --unchecked --log seeds.jsonl

A model (`net.py`) is a list of steps (`steps.py`, `state_steps.py`), each an idiom of real code,
around leaves (`parts.py`).
`run_case` splits it, calls it a few times with other sizes, values, modes and state, and says
"equal", "refused" (an error of ours, at trace or at call), "plain fails" (nothing could be
compared), or what is wrong. A case whose first calls were equal and a later one refused counts
as refused. With `--log`, what became of each seed is a line of a file, and seeds that are in it
are not run again.
"""

import argparse
import collections
import contextlib
import copy
import dataclasses
import json
import pathlib
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe import SplitPoint, pipeline
from fxpipe.errors import FxpipeError
from tests.graph.random_models.net import RandomNet
from tests.graph.random_models.parts import WIDTH
from tests.graph.random_models.steps import CONTEXT, WORLD
from tests.parity import assert_same, run

__all__ = ["Outcome", "run_case"]

Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a case: "equal", "refused", "plain fails", "different" or "internal"."""

    kind: str
    text: str = ""

    @property
    def is_right(self) -> bool:
        return self.kind in ("equal", "refused", "plain fails")


def run_case(seed: int, **options: Any) -> Outcome:
    """Make, split and call one model; `options` are given to `pipeline`."""
    dice = random.Random(seed)
    torch.manual_seed(seed)
    with warnings.catch_warnings(), contextlib.ExitStack() as world:
        warnings.simplefilter("ignore")
        model = RandomNet(dice)
        if dice.random() < 0.3:
            _add_hook(model, dice)
        model.train(dice.random() < 0.6)
        if dice.random() < 0.2:
            dice.choice(list(model.parts)).eval()
        return _Case(model, dice, world).run(options)


class _Case:
    def __init__(self, model: RandomNet, dice: random.Random, world: contextlib.ExitStack) -> None:
        self._model, self._dice, self._world = model, dice, world
        self._has_mask, self._has_gain = dice.random() < 0.3, dice.random() < 0.3
        self._plain = copy.deepcopy(model)

    def run(self, options: Any) -> Outcome:
        call = self._call(self._dice.randint(1, 4), self._dice.randint(3, 7))
        try:
            run(copy.deepcopy(self._plain), *call)
        except Exception as error:
            return Outcome("plain fails", str(error))
        try:
            pipe = pipeline(self._model, *call, **self._cut(), **options)
        except FxpipeError as error:
            return Outcome("refused", f"trace: {error}")
        except Exception as error:
            return Outcome("internal", f"trace: {type(error).__name__}: {error}")
        for number in range(4):
            if number:
                call = self._call(self._dice.choice((1, 2, 3, 5)), self._dice.randint(2, 9))
                self._change_state(pipe)
            with self._surroundings():
                outcome = self._compared(pipe, call, number)
            if outcome is not None:
                return outcome
        return Outcome("equal")

    def _compared(self, pipe: Any, call: Call, number: int) -> Outcome | None:
        try:
            expected = run(self._plain, *call, seed=number)
        except Exception as error:
            return Outcome("equal" if number > 1 else "plain fails", str(error))
        drawn = torch.get_rng_state()
        try:
            found = run(pipe, *call, seed=number)
        except FxpipeError as error:
            return Outcome("refused", f"call {number}: {error}")
        except Exception as error:
            return Outcome("internal", f"call {number}: {type(error).__name__}: {error}")
        try:
            assert_same(expected, found)
            assert torch.equal(drawn, torch.get_rng_state()), "other random numbers were drawn"
            assert_same_attributes(self._plain, self._model)
        except AssertionError as error:
            return Outcome("different", f"call {number}: {error}")
        return None

    def _call(self, rows: int, length: int) -> Call:
        x = torch.randn(rows, length, WIDTH, requires_grad=self._dice.random() < 0.5)
        kwargs: dict[str, Any] = {"gain": 1.5} if self._has_gain else {}
        if self._has_mask:
            kwargs["mask"] = torch.rand(rows, length) > 0.3
        return (x,), kwargs

    def _cut(self) -> dict[str, Any]:
        model, dice = self._model, self._dice
        if any(name == "cut" for name, _ in model.steps):
            return {}
        if dice.random() < 0.4:
            return {"num_stages": dice.randint(2, 3)}
        inner = [name for name, _ in model.named_modules() if name.count(".") in (1, 2)]
        names = [name for name in inner if not name.endswith((".layers", ".names", "ations"))]
        where = dice.choice([*names, "last"])
        return {"split_spec": {where: SplitPoint.BEGINNING}}

    @contextlib.contextmanager
    def _surroundings(self) -> Iterator[None]:
        """Call the model as it is, or without gradients, or with lower precision."""
        pick = self._dice.random()
        with contextlib.ExitStack() as stack:
            if pick < 0.08:
                stack.enter_context(torch.no_grad())
            elif pick < 0.12:
                stack.enter_context(torch.autocast("cpu", dtype=torch.bfloat16))
            yield

    def _change_state(self, pipe: Any) -> None:
        """Do to both models what training scripts do between steps."""
        dice, both = self._dice, (self._model, self._plain)
        pick = dice.randrange(24)
        if pick < 9:
            training = dice.random() < 0.5
            for part in (*both, *(stage.module for stage in pipe.stages)):
                part.train(training)
        elif pick < 11:
            with torch.no_grad():
                for one in both:
                    one.last.weight.mul_(0.9)
        elif pick == 20:
            self._set(RandomNet, "factor", 0.5)
        elif pick == 21:
            self._world.callback(WORLD.update, dict(WORLD))
            WORLD["gain"] = 2.5
        elif pick == 22:
            self._world.callback(CONTEXT.reset, CONTEXT.set(1.25))
        elif 11 < pick < 20:
            for one in both:
                CHANGES[pick - 12](one)

    def _set(self, owner: Any, name: str, value: Any) -> None:
        self._world.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)


def _flip(model: RandomNet) -> None:
    model.flag = not model.flag


def _freeze(model: RandomNet) -> None:
    model.parts[0].requires_grad_(False)


def _freeze_scale(model: RandomNet) -> None:
    model.scale.requires_grad_(False)


def _hook(model: RandomNet) -> None:
    model.last.register_forward_hook(lambda module, args, output: output + 1)


def _append(model: RandomNet) -> None:
    model.options["shifts"].append(3)


def _load(model: RandomNet) -> None:
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)


def _replace(model: RandomNet) -> None:
    model.first.weight = nn.Parameter(model.first.weight.detach() * 0.5)


def _reset(model: RandomNet) -> None:
    model.count.zero_()
    model.running = torch.ones(WIDTH)


CHANGES: tuple[Callable[[RandomNet], None], ...] = (
    _flip, _freeze, _freeze_scale, _hook, _append, _load, _replace, _reset,
)  # fmt: skip


def _add_hook(model: RandomNet, dice: random.Random) -> None:
    part: nn.Module = dice.choice([*model.parts, model.last, model])
    seen: list[Any] = []
    kind = dice.randrange(5)
    if kind == 0:
        part.register_forward_hook(
            lambda module, args, output: output * 1.1 if isinstance(output, Tensor) else None
        )
    elif kind == 1:
        part.register_forward_hook(lambda module, args, output: seen.append(output))
    elif kind == 2:
        part.register_forward_pre_hook(lambda module, args: (args[0] * 0.9, *args[1:]))
    elif kind == 3:
        part.register_forward_hook(
            lambda module, args, kwargs, output: None if kwargs else seen.append(len(args)),
            with_kwargs=True,
        )
    elif part is not model:
        part.register_full_backward_hook(
            lambda module, inputs, outputs: tuple(g if g is None else g * 2 for g in inputs)
        )


def assert_same_attributes(plain: nn.Module, model: nn.Module) -> None:
    """Fail unless the modules of two models hold the same tensors and numbers.

    A cache may be longer in the plain model: a stage fills it anew for each call.
    """
    others = dict(model.named_modules())
    for name, part in plain.named_modules():
        for key, value in vars(part).items():
            other = vars(others[name]).get(key)
            if isinstance(value, Tensor) and isinstance(other, Tensor) and value.dim() == 1:
                value, other = value[: len(other)], other[: len(value)]
            if isinstance(value, Tensor):
                same = isinstance(other, Tensor) and torch.allclose(
                    value, other, rtol=1e-5, atol=1e-5, equal_nan=True
                )
            else:
                same = other == value if type(value) in (bool, int, float, str) else True
            assert same, f"attribute {name}.{key}: expected {value}, found {other}"


def main(argv: list[str]) -> None:
    """Print each wrong seed, then how many of each kind."""
    parser = argparse.ArgumentParser()
    parser.add_argument("first", type=int)
    parser.add_argument("count", type=int)
    parser.add_argument("--unchecked", action="store_true", help="split with check=False")
    parser.add_argument("--log", type=pathlib.Path, help="a file with a line for each seed")
    options = parser.parse_args(argv)
    found: dict[int, Outcome] = {}
    if options.log is not None and options.log.exists():
        for line in options.log.read_text().splitlines():
            seed, kind, text = json.loads(line)
            found[seed] = Outcome(kind, text)
    for seed in range(options.first, options.first + options.count):
        if seed in found:
            continue
        found[seed] = outcome = run_case(seed, **({"check": False} if options.unchecked else {}))
        if options.log is not None:
            with options.log.open("a") as file:
                file.write(json.dumps([seed, outcome.kind, outcome.text]) + "\n")
    _print_summary(found)


def _print_summary(found: dict[int, Outcome]) -> None:
    reasons: collections.Counter[str] = collections.Counter()
    for seed, outcome in sorted(found.items()):
        text = " ".join(outcome.text.split())
        if outcome.kind == "refused":
            reasons[text[:110]] += 1
        if not outcome.is_right:
            sys.stdout.write(f"{seed} {outcome.kind} {text[:300]}\n")
    sys.stdout.write(f"{dict(collections.Counter(one.kind for one in found.values()))}\n")
    for text, number in reasons.most_common(20):
        sys.stdout.write(f"  refused {number}: {text}\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1:])
