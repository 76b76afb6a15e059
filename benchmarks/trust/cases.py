"""The cases: each runs on every rank, given a package, and raises if its results are wrong."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

__all__ = ["CASES", "Case", "WrongResultError"]


class WrongResultError(Exception):
    """The results are not the plain model's."""


@dataclass(frozen=True)
class Case:
    name: str
    run: Callable[[Any], None]
    num_ranks: int
    must_raise: bool


CASES: list[Case] = []


def case(name: str, *, ranks: int = 2, must_raise: bool = False) -> Callable[..., Any]:
    def add(run: Callable[[Any], None]) -> Callable[[Any], None]:
        CASES.append(Case(name, run, ranks, must_raise))
        return run

    return add


def same(found: Any, wanted: Any, what: str, tolerance: float = 1e-5) -> None:
    if found is None or not torch.allclose(found, wanted, rtol=tolerance, atol=tolerance):
        off = "None" if found is None else f"off by {(found - wanted).abs().max():.1e}"
        raise WrongResultError(f"{what} is {off}")


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


def blocks(count: int = 2) -> list[nn.Module]:
    torch.manual_seed(0)
    return [Block() for _ in range(count)]


def rows(count: int = 8) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(count, 8), torch.randn(count, 8)


def manual(
    api: Any, modules: list[nn.Module], name: str = "1F1B", n: int = 4, **options: Any
) -> Any:
    """A schedule of hand-written stages of this rank, and these stages' modules."""
    rank, size = dist.get_rank(), 2
    loop = range(rank, len(modules), size)
    v = [rank, len(modules) - 1 - rank]
    mine = sorted(v) if name in ("ZBVZeroBubble", "DualPipeV") else list(loop)
    stages = [api.PipelineStage(modules[i], i, len(modules), torch.device("cpu")) for i in mine]
    made = api.get_schedule_class(name)
    multi = name not in ("GPipe", "1F1B")
    options.setdefault("loss_fn", F.mse_loss)
    return made(stages if multi else stages[0], n, **options), mine


def feed(schedule: Any, x: Tensor, y: Tensor, name: str = "1F1B", **kwargs: Any) -> Any:
    """One step, with inputs and target where both packages want them."""
    rank = dist.get_rank()
    has_last = rank == (0 if name in ("ZBVZeroBubble", "DualPipeV") else 1)
    target = {"target": y} if has_last else {}
    return schedule.step(*((x,) if rank == 0 else ()), **target, **kwargs)


def compare(modules: list[nn.Module], plain: list[nn.Module], mine: list[int]) -> None:
    for index in mine:
        for (name, p), q in zip(
            modules[index].named_parameters(), plain[index].parameters(), strict=True
        ):
            if q.grad is not None:
                same(p.grad, q.grad, f"gradient of {index}.{name}")


def plain_step(modules: list[nn.Module], x: Tensor, y: Tensor) -> Tensor:
    output = nn.Sequential(*modules)(x)
    F.mse_loss(output, y).backward()
    return output.detach()


def check_schedule(api: Any, name: str) -> None:
    modules = blocks(2 if name in ("GPipe", "1F1B") else 4)
    plain = copy.deepcopy(modules)
    x, y = rows()
    schedule, mine = manual(api, modules, name)
    feed(schedule, x, y, name)
    plain_step(plain, x, y)
    compare(modules, plain, mine)


SCHEDULES = (
    "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble",
    "DualPipeV",
)  # fmt: skip
for _name in SCHEDULES:
    case(f"gradients of {_name}")(lambda api, name=_name: check_schedule(api, name))


@case("gradients accumulated over two steps")
def accumulate(api: Any) -> None:
    modules = blocks()
    plain = copy.deepcopy(modules)
    schedule, mine = manual(api, modules)
    for count in range(2):
        torch.manual_seed(count)
        x, y = torch.randn(8, 8), torch.randn(8, 8)
        feed(schedule, x, y)
        plain_step(plain, x, y)
    compare(modules, plain, mine)


@case("a batch that does not divide into equal microbatches")
def uneven(api: Any) -> None:
    modules = blocks()
    plain = copy.deepcopy(modules)
    x, y = rows(10)
    schedule, mine = manual(api, modules)
    output = feed(schedule, x, y)
    wanted = plain_step(plain, x, y)
    compare(modules, plain, mine)
    if dist.get_rank() == 1 and output.shape != wanted.shape:
        raise WrongResultError(f"{len(output)} rows for 10")


@case("a smaller batch after a larger one")
def smaller(api: Any) -> None:
    modules = blocks()
    plain = copy.deepcopy(modules)
    schedule, mine = manual(api, modules)
    for count in (8, 4):
        x, y = rows(count)
        feed(schedule, x, y)
        plain_step(plain, x, y)
    compare(modules, plain, mine)


@case("evaluation of ten rows in four microbatches")
def evaluate(api: Any) -> None:
    modules = blocks()
    x, _ = rows(10)
    schedule, _ = manual(api, modules)
    output = schedule.eval(*((x,) if dist.get_rank() == 0 else ()))
    if dist.get_rank() == 1:
        wanted = nn.Sequential(*blocks())(x)
        if output.shape != wanted.shape:
            raise WrongResultError(f"{len(output)} rows for 10")
        same(output, wanted, "output")


@case("a frozen first stage under zero bubble")
def frozen(api: Any) -> None:
    modules = blocks(4)
    modules[0].requires_grad_(False)
    plain = copy.deepcopy(modules)
    x, y = rows()
    schedule, mine = manual(api, modules, "InterleavedZeroBubble")
    feed(schedule, x, y)
    plain_step(plain, x, y)
    compare(modules, plain, mine)


class Checkpointed(Block):
    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return found


@case("checkpointed modules under zero bubble")
def checkpointed(api: Any) -> None:
    torch.manual_seed(0)
    modules: list[nn.Module] = [Checkpointed() for _ in range(4)]
    plain = copy.deepcopy(modules)
    x, y = rows()
    schedule, mine = manual(api, modules, "InterleavedZeroBubble")
    feed(schedule, x, y)
    plain_step(plain, x, y)
    compare(modules, plain, mine)


class Pair(nn.Module):
    def __init__(self, is_first: bool) -> None:
        super().__init__()
        self.linear, self.is_first = nn.Linear(8, 8), is_first

    def forward(self, given: Any) -> Any:
        if self.is_first:
            return {"hidden": torch.tanh(self.linear(given)), "mask": None, "kept": given}
        return self.linear(given["hidden"]) + given["kept"]


@case("a dict with a None between stages")
def between(api: Any) -> None:
    torch.manual_seed(0)
    modules: list[nn.Module] = [Pair(True), Pair(False)]
    plain = copy.deepcopy(modules)
    x, y = rows()
    schedule, mine = manual(api, modules)
    feed(schedule, x, y)
    plain_step(plain, x, y)
    compare(modules, plain, mine)


@case("replicas under zero bubble have equal gradients", ranks=4)
def replicas(api: Any) -> None:
    rank = dist.get_rank()
    pipes = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    modules = blocks(4)
    place, replica = rank % 2, rank // 2
    mine = [place, place + 2]
    stages = []
    for index in mine:
        wrapped = DistributedDataParallel(modules[index], process_group=pairs[place])
        stages.append(
            api.PipelineStage(wrapped, index, 4, torch.device("cpu"), group=pipes[replica])
        )
    schedule = api.get_schedule_class("InterleavedZeroBubble")(stages, 4, loss_fn=F.mse_loss)
    torch.manual_seed(10 + replica)
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    schedule.step(*((x,) if place == 0 else ()), **({"target": y} if place == 1 else {}))
    for index in mine:
        for p in modules[index].parameters():
            if p.grad is None:
                raise WrongResultError("no gradient")
            other = p.grad.clone()
            dist.all_reduce(other, dist.ReduceOp.MAX, group=pairs[place])
            same(p.grad, other, f"gradient of {index} on two replicas")


# Traced models.


def traced(
    api: Any,
    model: nn.Module,
    example: tuple[Any, ...],
    cut: str,
    n: int = 4,
    loss: Any = F.mse_loss,
) -> tuple[Any, nn.Module]:
    """The schedule of a traced model, and this rank's stage module."""
    pipe = api.pipeline(model, example, split_spec={cut: api.SplitPoint.BEGINNING})
    stage = pipe.build_stage(dist.get_rank(), torch.device("cpu"))
    return api.ScheduleGPipe(stage, n, loss_fn=loss), stage.submod


def compare_names(module: nn.Module, plain: nn.Module) -> None:
    wanted = {name: p.grad for name, p in plain.named_parameters(remove_duplicate=False)}
    unknown = [name for name, _ in module.named_parameters() if name not in wanted]
    if unknown:
        raise WrongResultError(f"parameters with other names: {unknown}")
    for name, p in module.named_parameters():
        if wanted[name] is not None:
            same(p.grad, wanted[name], f"gradient of {name}")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block = nn.Embedding(16, 8), Block()
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.block(self.embed(ids)))


def token_loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


@case("a weight tied between the first and the last stage")
def tied(api: Any) -> None:
    torch.manual_seed(0)
    model = Tied()
    plain = copy.deepcopy(model)
    ids = torch.randint(16, (8, 4))
    schedule, module = traced(api, model, (ids[:2],), "head", loss=token_loss)
    feed(schedule, ids, ids)
    token_loss(plain(ids), ids).backward()
    compare_names(module, plain)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle, self.up = Block(), Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        first = self.down(x)
        return self.up(self.middle(first) + first)


@case("a skip connection over a stage boundary")
def skip(api: Any) -> None:
    torch.manual_seed(0)
    model = UNet()
    plain = copy.deepcopy(model)
    x, y = rows()
    schedule, module = traced(api, model, (x[:2],), "up")
    feed(schedule, x, y)
    F.mse_loss(plain(x), y).backward()
    compare_names(module, plain)


@case("a skip connection past a stage", ranks=3)
def far_skip(api: Any) -> None:
    torch.manual_seed(0)
    model = UNet()
    plain = copy.deepcopy(model)
    x, y = rows()
    begin = api.SplitPoint.BEGINNING
    pipe = api.pipeline(model, (x[:2],), split_spec={"middle": begin, "up": begin})
    rank = dist.get_rank()
    stage = pipe.build_stage(rank, torch.device("cpu"))
    schedule = api.ScheduleGPipe(stage, 4, loss_fn=F.mse_loss)
    schedule.step(*((x,) if rank == 0 else ()), **({"target": y} if rank == 2 else {}))
    F.mse_loss(plain(x), y).backward()
    compare_names(stage.submod, plain)


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = Block(), nn.Dropout(0.5), Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(self.first(x)))


@case("eval() of a traced model switches dropout off")
def dropout(api: Any) -> None:
    torch.manual_seed(0)
    model = Dropping()
    plain = copy.deepcopy(model).eval()
    x, _ = rows()
    schedule, module = traced(api, model, (x[:2],), "last", loss=None)
    module.eval()
    output = schedule.eval(*((x,) if dist.get_rank() == 0 else ()))
    if dist.get_rank() == 1:
        same(output, plain(x), "output")


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = Block(), nn.BatchNorm1d(8), Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)))


@case("running statistics of BatchNorm")
def batch_norm(api: Any) -> None:
    torch.manual_seed(0)
    model = Normed()
    plain = copy.deepcopy(model)
    x, y = rows()
    schedule, module = traced(api, model, (x[:2],), "last")
    feed(schedule, x, y)
    for part in x.chunk(4):
        plain(part)
    if dist.get_rank() == 0:
        same(dict(module.named_buffers())["norm.running_mean"], plain.norm.running_mean, "mean")


class Reused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared, self.last = Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.shared(self.last(self.shared(x)))


@case("a module called in two stages")
def reused(api: Any) -> None:
    torch.manual_seed(0)
    model = Reused()
    plain = copy.deepcopy(model)
    x, y = rows()
    schedule, module = traced(api, model, (x[:2],), "last")
    feed(schedule, x, y)
    F.mse_loss(plain(x), y).backward()
    compare_names(module, plain)


class Sequences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Block(), Block()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        hidden = self.first(x)
        return self.last(hidden if mask is None else hidden * mask)


@case("another sequence length in the second step")
def lengths(api: Any) -> None:
    torch.manual_seed(0)
    model = Sequences()
    plain = copy.deepcopy(model)
    schedule, module = traced(api, model, (torch.randn(2, 6, 8),), "last")
    for length in (6, 4):
        x, y = torch.randn(8, length, 8), torch.randn(8, length, 8)
        feed(schedule, x, y)
        F.mse_loss(plain(x), y).backward()
    compare_names(module, plain)


@case("a keyword input that is split with the batch")
def keyword(api: Any) -> None:
    torch.manual_seed(0)
    model = Sequences()
    plain = copy.deepcopy(model)
    x, y, mask = torch.randn(8, 6, 8), torch.randn(8, 6, 8), torch.rand(8, 6, 8)
    begin = {"last": api.SplitPoint.BEGINNING}
    pipe = api.pipeline(model, (x[:2],), {"mask": mask[:2]}, split_spec=begin)
    stage = pipe.build_stage(dist.get_rank(), torch.device("cpu"))
    schedule = api.ScheduleGPipe(stage, 4, loss_fn=F.mse_loss)
    is_first = dist.get_rank() == 0
    feed(schedule, x, y, **({"mask": mask} if is_first else {}))
    F.mse_loss(plain(x, mask), y).backward()
    compare_names(stage.submod, plain)


class Named(Sequences):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        return {"y": super().forward(x), "h": x}


@case("a dict as the model's output reaches the loss as a dict")
def dict_output(api: Any) -> None:
    torch.manual_seed(0)
    model = Named()
    plain = copy.deepcopy(model)
    x, y = rows()

    def loss(output: Any, target: Tensor) -> Tensor:
        return F.mse_loss(output["y"], target) + output["h"].mean() * 0

    schedule, module = traced(api, model, (x[:2],), "last", loss=loss)
    feed(schedule, x, y)
    loss(plain(x), y).backward()
    compare_names(module, plain)


@case("keys of state_dict are the model's own")
def keys(api: Any) -> None:
    model = Reused()
    wanted = set(model.state_dict())
    _, module = traced(api, model, (torch.randn(2, 8),), "last")
    extra = set(module.state_dict()) - wanted
    if extra:
        raise WrongResultError(f"other keys: {sorted(extra)}")


@case("a Hugging Face Llama from its configuration")
def llama(api: Any) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    plain = copy.deepcopy(model)
    ids = torch.randint(64, (8, 6))

    def loss(output: Any, target: Tensor) -> Tensor:
        return token_loss(output[0] if isinstance(output, tuple) else output.logits, target)

    pipe = api.pipeline(model, (ids[:2],), split_spec={"model.layers.1": api.SplitPoint.BEGINNING})
    stage = pipe.build_stage(dist.get_rank(), torch.device("cpu"))
    schedule = api.ScheduleGPipe(stage, 4, loss_fn=loss)
    feed(schedule, ids, ids)
    token_loss(plain(ids).logits, ids).backward()
    compare_names(stage.submod, plain)


# Mistakes: every rank must raise.


class Failing(Block):
    def forward(self, x: Tensor) -> Tensor:
        raise ZeroDivisionError("the module's own mistake")


@case("a module raises on one rank", must_raise=True)
def raises(api: Any) -> None:
    modules = blocks()
    modules[1] = Failing()
    schedule, _ = manual(api, modules)
    feed(schedule, *rows())


class FailingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ZeroDivisionError("the backward's own mistake")


class FailsLate(Block):
    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = FailingBackward.apply(super().forward(x))  # type: ignore[no-untyped-call]
        return made


@case("a backward raises on one rank", must_raise=True)
def raises_late(api: Any) -> None:
    modules = blocks()
    modules[1] = FailsLate()
    schedule, _ = manual(api, modules)
    feed(schedule, *rows())


@case("ranks with different numbers of microbatches", must_raise=True)
def different_counts(api: Any) -> None:
    schedule, _ = manual(api, blocks(), n=4 if dist.get_rank() == 0 else 2)
    feed(schedule, *rows())


@case("ranks with different schedules", must_raise=True)
def different_schedules(api: Any) -> None:
    schedule, _ = manual(api, blocks(), "1F1B" if dist.get_rank() == 0 else "GPipe")
    feed(schedule, *rows())


@case("a target that does not fit", must_raise=True)
def wrong_target(api: Any) -> None:
    schedule, _ = manual(api, blocks(), loss_fn=nn.CrossEntropyLoss())
    feed(schedule, rows()[0], torch.zeros(8, 3, dtype=torch.long))


@case("fewer rows than microbatches", must_raise=True)
def too_few(api: Any) -> None:
    schedule, _ = manual(api, blocks())
    feed(schedule, *rows(3))


@case("no input on the first rank", must_raise=True)
def no_input(api: Any) -> None:
    schedule, _ = manual(api, blocks())
    schedule.step(**({"target": rows()[1]} if dist.get_rank() == 1 else {}))


@case("one rank trains while the other evaluates", must_raise=True)
def different_calls(api: Any) -> None:
    schedule, _ = manual(api, blocks())
    x, y = rows()
    if dist.get_rank() == 0:
        schedule.eval(x)
    else:
        schedule.step(target=y)


@case("a rank is killed in the second step", must_raise=True)
def killed(api: Any) -> None:
    modules = blocks()
    schedule, _ = manual(api, modules)
    feed(schedule, *rows())
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    feed(schedule, *rows())


def package(name: str) -> Any:
    """The names that both packages have."""
    if name == "fxpipe":
        import fxpipe as found
    else:
        import torch.distributed.pipelining as found  # type: ignore[no-redef]
    names = ("PipelineStage", "ScheduleGPipe", "SplitPoint", "pipeline")
    api = SimpleNamespace(**{key: getattr(found, key) for key in names})
    if name == "fxpipe":
        api.get_schedule_class = found.get_schedule_class
    else:
        from torch.distributed.pipelining.schedules import get_schedule_class

        api.get_schedule_class = get_schedule_class
    return api
