"""Random histories of replicated pipelines: the plain model's gradients, or an error on all ranks.

Two pipelines of two ranks are replicas of each other, by DDP or FSDP2. A seed gives their schedule,
options, ties, and a list of calls: steps in which some replicas leave layers out, steps that reduce
nothing, evaluations, and accidents of one rank. An accident is an error on every rank that takes
part, soon, and leaves all gradients as they were.
"""

import contextlib
import copy
import random
import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fxpipe import InputError, PipelineStage, RemoteStageError, get_schedule_class
from fxpipe.program.generators import SCHEDULES
from tests.backends import nccl_like
from tests.distributed.bodies import layout, mse, rand
from tests.distributed.ranks import run_on_ranks
from tests.distributed.test_data_parallel import part, plain, wrap
from tests.runtime.training import SCHEDULE_NAMES, assert_close

ROWS = 10  # of one replica
SOON = 30.0  # the time-out is longer
HALVES = (slice(0, ROWS), slice(ROWS, 2 * ROWS))


class Accident(Exception):  # noqa: N818
    """What happens to one rank."""


class Reach(torch.autograd.Function):
    """Tells a layer that its backward goes on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: "Layer") -> Tensor:
        ctx.layer = layer
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.layer.reach("backward")
        return grads[0], None


class Layer(nn.Module):
    """Leaves its second part out where told so; has an accident in the nth forward or backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.extra = nn.Linear(8, 8).double(), nn.Linear(8, 8).double()
        self.uses_extra = True
        self.armed, self.left = "", 0

    def reach(self, where: str) -> None:
        if where == self.armed:
            self.left -= 1
            if self.left < 0:
                raise Accident("4711")

    def forward(self, x: Tensor) -> Tensor:
        self.reach("forward")
        h = torch.tanh(self.linear(x))
        if torch.is_grad_enabled():
            h = Reach.apply(h, self)  # type: ignore[no-untyped-call]
        return h + self.extra(h) if self.uses_extra else h


@dataclass(frozen=True)
class Call:
    """`name` is step, eval or no_sync; `where` an accident of rank `odd`, or nothing."""

    name: str
    finalizes: bool
    users: tuple[int, ...]
    where: str
    odd: int
    nth: int


@dataclass(frozen=True)
class History:
    schedule: str
    wrapper: str
    streams: str
    is_tied: bool
    microbatches: int
    options: dict[str, Any]
    calls: tuple[Call, ...]


def make(seed: int) -> History:
    rng = random.Random(seed)
    schedule, wrapper = rng.choice(SCHEDULE_NAMES), rng.choice(["ddp", "ddp", "fsdp", "fsdp parts"])
    options: dict[str, Any] = {}
    if not SCHEDULES[schedule].name.startswith("DualPipe") and rng.random() < 0.4:
        options["max_unsharded"] = rng.choice([1, 2])
    if rng.random() < 0.3:
        options["unshard_lookahead"] = rng.choice(["full", "auto"])
    turns_back = SCHEDULES[schedule].placement(2, 4).stage_to_rank[-1] == 0
    is_tied = rng.random() < 0.4 and (wrapper == "ddp" or not turns_back)
    microbatches = rng.choice([4, 5])
    names = ["step", "step", "step", "eval"] + ["no_sync"] * (wrapper == "ddp")
    calls = []
    for _ in range(rng.randint(4, 8)):
        name = rng.choice(names)
        where = rng.choice(["", "", "", "forward", "backward", "gradient", "rows"])
        finalizes = rng.random() < 0.7
        if name == "no_sync" or (name == "eval" and where != "forward"):
            where = ""
        if where == "gradient" and wrapper != "ddp" and not finalizes:
            where = ""  # there is none yet
        users = rng.choice([(0, 1), (0, 1), (0,), (1,), ()])
        calls.append(
            Call(name, finalizes, users, where, rng.randrange(4), rng.randrange(microbatches))
        )
    calls.append(Call("step", True, (0, 1), "", 0, 0))
    return History(
        schedule,
        wrapper,
        rng.choice(nccl_like.MODELS),
        is_tied,
        microbatches,
        options,
        tuple(calls),
    )


class Player:
    """One rank, and the plain model on the rows of all replicas."""

    def __init__(self, rank: int, history: History) -> None:
        backend = f"nccl_{history.streams}"
        pp = [dist.new_group(ranks, backend=backend) for ranks in ([0, 1], [2, 3])]
        dp = [dist.new_group(ranks, backend="gloo") for ranks in ([0, 2], [1, 3])]
        self.rank, self.history = rank, history
        self.replica, place = rank // 2, rank % 2
        self.indices, self.num_stages = layout(history.schedule, place, 2)
        self.modules: list[Any] = [Layer() for _ in range(self.num_stages)]
        ties = []
        if history.is_tied:
            self.modules[-1].linear.weight = self.modules[0].linear.weight
            ties = [[(0, "linear.weight"), (self.num_stages - 1, "linear.weight")]]
        self.reference: Any = copy.deepcopy(nn.ModuleList(self.modules))
        self.wrapped = {i: wrap(self.modules[i], history.wrapper, dp[place]) for i in self.indices}
        group = pp[self.replica]
        stages = [
            PipelineStage(module, i, self.num_stages, "cpu", group=group)
            for i, module in self.wrapped.items()
        ]
        self.made = get_schedule_class(history.schedule)(
            stages,
            history.microbatches,
            loss_fn=mse,
            tied=ties,
            timeout=60.0,
            **history.options,
        )

    def call(self, call: Call, x: Tensor, y: Tensor, rows: int) -> Any:
        mine = x[HALVES[self.replica]][:rows], y[HALVES[self.replica]][:rows]
        with contextlib.ExitStack() as stack:
            if call.name == "eval":
                return self.made.eval(mine[0])
            if call.name == "no_sync":
                for module in self.wrapped.values():
                    stack.enter_context(module.no_sync())  # type: ignore[operator]
            finalizes = call.finalizes
            return self.made.step(mine[0], target=mine[1], finalize_gradients=finalizes)

    def play(self, call: Call, x: Tensor, y: Tensor) -> None:
        for module in self.modules:
            module.uses_extra = self.replica in call.users
        if call.where:
            self.fail(call, x, y)
            return
        found = self.call(call, x, y, ROWS)
        for replica, rows in enumerate(HALVES):
            h = x[rows]
            for module in self.reference:
                module.uses_extra = replica in call.users
                h = module(h)
            if replica == self.replica and self.num_stages - 1 in self.indices:
                assert_close(found, h, f"the output of {call}")
            if call.name != "eval":
                (mse(h, y[rows]) / 2).backward()  # type: ignore[no-untyped-call]
        if call.name == "step" and call.finalizes:
            self.compare(str(call))

    def fail(self, call: Call, x: Tensor, y: Tensor) -> None:
        before = self.gradients()
        layer, rows = self.modules[self.indices[call.nth % len(self.indices)]], ROWS
        handle: Any = None
        if call.where == "rows":
            rows = 3 if self.replica == call.odd // 2 else ROWS
        elif self.rank == call.odd and call.where == "gradient":
            handle = layer.linear.bias.register_post_accumulate_grad_hook(self.have_accident)
        elif self.rank == call.odd:
            layer.armed, layer.left = call.where, call.nth
        start = time.monotonic()
        takes_part = call.name != "eval" or "fsdp" in self.history.wrapper
        if not takes_part and self.replica != call.odd // 2:
            self.call(call, x, y, rows)
        else:
            with pytest.raises(
                (Accident, InputError, RemoteStageError), match=r"4711|microbatches"
            ):
                self.call(call, x, y, rows)
        assert time.monotonic() - start < SOON, call
        layer.armed = ""
        if handle is not None:
            handle.remove()
        for now, then in zip(self.gradients(), before, strict=True):
            assert (now is None) == (then is None), call
            assert now is None or then is None or torch.equal(now, then), call

    def have_accident(self, _: Tensor) -> None:
        raise Accident("4711")

    def gradients(self) -> list[Tensor | None]:
        every = [p for module in self.wrapped.values() for p in module.parameters()]
        return [None if p.grad is None else part(p.grad).clone() for p in every]

    def compare(self, what: str) -> None:
        for i, module in self.wrapped.items():
            wanted = dict(self.reference[i].named_parameters(remove_duplicate=False))
            for name, p in module.named_parameters(remove_duplicate=False):
                want = wanted[plain(name)].grad
                grad: Any = p.grad
                if hasattr(grad, "full_tensor"):
                    grad = grad.full_tensor()
                assert (grad is None) == (want is None), f"{what}: stage {i} {name}"
                if want is not None:
                    assert_close(grad, want, f"{what}: stage {i} {name}")


def play(rank: int, seed: int) -> None:
    nccl_like.register()
    history = make(seed)
    player = Player(rank, history)
    for number, call in enumerate(history.calls):
        x, y = rand(2 * ROWS, 8, seed=2 * number), rand(2 * ROWS, 8, seed=2 * number + 1)
        player.play(call, x, y)


def run(seed: int) -> None:
    run_on_ranks(4, play, seed, backend="nccl_eager" if make(seed).streams == "eager" else "gloo")


@pytest.mark.parametrize("seed", range(6))
def test_a_history_of_replicas(seed: int) -> None:
    run(seed)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(6, 200))
def test_two_hundred_histories_of_replicas(seed: int) -> None:
    run(seed)
