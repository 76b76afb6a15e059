"""One rank of small programs for torch's pipelining: `program_rank.py PACKAGE`; torchrun starts it.

They differ by their imports alone: PACKAGE is "torch" or "fxpipe". Each prints what it found.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

if sys.argv[1] == "torch":
    import torch.distributed.pipelining as pipelining
    from torch.distributed.pipelining import microbatch, schedules
    from torch.distributed.pipelining.schedules import (
        _Action,
        _ComputationType,
        _PipelineScheduleRuntime,
    )
else:
    import fxpipe as pipelining
    from fxpipe import microbatch, schedules
    from fxpipe.compat import _Action, _ComputationType
    from fxpipe.schedules import PipelineScheduleMulti as _PipelineScheduleRuntime

WIDTH, ROWS, CPU = 8, 16, torch.device("cpu")
PROGRAMS: list[Callable[[int], list[Any]]] = []


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        y = self.down(torch.relu(self.up(x)))
        return y if scale is None else y * scale


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x if bias is None else x + bias


class Marked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layer(), Layer()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.first(x) + y
        pipelining.pipe_split()
        return self.second(x)


class Masking(nn.Module):
    """Hands on a tuple, one part of which has no gradient."""

    def __init__(self, is_first: bool) -> None:
        super().__init__()
        self.linear, self.is_first = nn.Linear(WIDTH, WIDTH), is_first

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        return (self.linear(x), x > 0) if self.is_first else self.linear(x).masked_fill(mask, 0.0)


def program(function: Callable[[int], list[Any]]) -> Callable[[int], list[Any]]:
    PROGRAMS.append(function)
    return function


def squares(output: Tensor, target: Tensor, factor: float = 1.0) -> Tensor:
    return factor * F.mse_loss(output, target, reduction="sum")


def batch(seed: int = 1) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, WIDTH, generator=draws), torch.randn(ROWS, WIDTH, generator=draws)


def gradients(modules: list[nn.Module]) -> list[Tensor | None]:
    return [p.grad for module in modules for p in module.parameters()]


def stepped(schedule: Any, modules: list[nn.Module], is_first: bool, **given: Any) -> list[Any]:
    x, y = batch()
    losses: list[Tensor] = []
    ends = {} if is_first and len(modules) == 1 else {"target": y, "losses": losses}
    output = schedule.step(*((x,) if is_first else ()), **ends, **given)
    return [output, losses, gradients(modules)]


def single(kind: str, rank: int, module: nn.Module, **options: Any) -> Any:
    stage = pipelining.PipelineStage(module, rank, 2, CPU)
    return schedules.get_schedule_class(kind)(stage, 4, loss_fn=squares, **options)


def several(kind: str, places: list[int], microbatches: int = 4, **options: Any) -> list[Any]:
    layers = Layers().layers
    stages = [pipelining.PipelineStage(layers[i], i, 4, CPU) for i in places]
    cls = schedules.get_schedule_class(kind)
    made = cls(stages, microbatches, loss_fn=squares, **options)
    return stepped(made, [layers[i] for i in places], 0 in places)


@program
def stages_by_hand(rank: int) -> list[Any]:
    layer = Layers().layers[rank]
    return stepped(single("GPipe", rank, layer), [layer], rank == 0)


@program
def training_of_three_steps(rank: int) -> list[Any]:
    layer = Layers().layers[rank]
    made, found = single("1F1B", rank, layer), []
    optimizer = torch.optim.AdamW(layer.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        found += stepped(made, [layer], rank == 0)
        optimizer.step()
    return [*found, list(layer.parameters())]


@program
def markers_and_keywords(rank: int) -> list[Any]:
    x, y = batch()
    pipe = pipelining.pipeline(Marked(), mb_args=(x[:4],), mb_kwargs={"y": y[:4]})
    stage = pipe.build_stage(rank, CPU)
    made = pipelining.ScheduleGPipe(stage, 4, loss_fn=squares)
    names = sorted(name for name, _ in stage.submod.named_parameters())
    given = {"y": y} if rank == 0 else {}
    return [names, pipe.num_stages, *stepped(made, [stage.submod], rank == 0, **given)]


@program
def a_split_spec(rank: int) -> list[Any]:
    at = {"layers.2": pipelining.SplitPoint.BEGINNING}
    pipe = pipelining.pipeline(Layers(), (batch()[0][:4],), split_spec=at)
    module = pipe.get_stage_module(rank)
    stage = pipelining.build_stage(module, rank, pipe.info(), CPU)
    made = pipelining.Schedule1F1B(stage, 4, loss_fn=squares)
    return [sorted(module.state_dict()), *stepped(made, [module], rank == 0)]


@program
def schedules_of_several_stages(rank: int) -> list[Any]:
    loop, v = [rank, rank + 2], [rank, 3 - rank]
    return [
        *several("Interleaved1F1B", loop),
        *several("interleavedzerobubble", loop, scale_grads=False),
        *several("LoopedBFS", loop),
        *several("ZBVZeroBubble", v, 8),
        *several("DualPipeV", v, 8),
    ]


@program
def evaluation(rank: int) -> list[Any]:
    layer = Layers().layers[rank]
    made, (x, y) = single("GPipe", rank, layer), batch()
    losses: list[Tensor] = []
    output = made.eval(x) if rank == 0 else made.eval(target=y, losses=losses)
    return [output, losses, gradients([layer])]


@program
def merged_and_split_by_specs(rank: int) -> list[Any]:
    rows = microbatch.TensorChunkSpec(1)
    given = {"args_chunk_spec": (rows,), "output_merge_spec": rows}
    stage = pipelining.PipelineStage(Layers().layers[rank], rank, 2, CPU)
    made = pipelining.ScheduleGPipe(stage, 4, **given)
    x = torch.randn(3, ROWS, WIDTH, generator=torch.Generator().manual_seed(2))
    return [made.step(x) if rank == 0 else made.step()]


@program
def keywords_on_every_rank(rank: int) -> list[Any]:
    layer = Layers().layers[rank]
    scale = torch.arange(1.0, ROWS + 1)[:, None]
    return stepped(single("GPipe", rank, layer), [layer], rank == 0, scale=scale)


@program
def arguments_of_the_loss(rank: int) -> list[Any]:
    layer = Layers().layers[rank]
    given = {"loss_kwargs": {"factor": 3.0}, "return_outputs": False}
    return stepped(single("1F1B", rank, layer), [layer], rank == 0, **given)


@program
def masks_between_stages(rank: int) -> list[Any]:
    module = [Masking(is_first=True), Masking(is_first=False)][rank]
    return stepped(single("1F1B", rank, module), [module], rank == 0)


@program
def a_frozen_first_stage(rank: int) -> list[Any]:
    layer = Layers().layers[rank].requires_grad_(rank == 1)
    return stepped(single("GPipe", rank, layer), [layer], rank == 0)


@program
def an_own_schedule(rank: int) -> list[Any]:
    layers, places = Layers().layers, [rank, rank + 2]
    stages = [pipelining.PipelineStage(layers[i], i, 4, CPU) for i in places]
    made = _PipelineScheduleRuntime(stages, 4, loss_fn=squares)
    order = {}
    for r in range(2):
        forwards = [(stage, _ComputationType.FORWARD) for stage in (r, r + 2)]
        backwards = [(stage, _ComputationType.FULL_BACKWARD) for stage in (r + 2, r)]
        order[r] = [_Action(*what, i) for what in forwards + backwards for i in range(4)]
    made._prepare_schedule_with_comms(order)
    return stepped(made, [layers[i] for i in places], rank == 0)


@program
def microbatches_by_hand(rank: int) -> list[Any]:
    x, y = batch()
    args, kwargs = microbatch.split_args_kwargs_into_chunks((x, 3), {"y": y, "flag": True}, 4)
    merged = microbatch.merge_chunks([part[0] for part in args], microbatch.TensorChunkSpec(0))
    return [[part[0] for part in args], args[0][1], [part["y"] for part in kwargs], merged]


def text(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{list(value.shape)} {value.detach().double().sum():.7f}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(text(part) for part in value)}]"
    return str(value)


def main() -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)  # LoopedBFS adds up in another order
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for each in PROGRAMS:
        torch.manual_seed(0)
        sys.stdout.write(f"FOUND {each.__name__} {rank}: {text(each(rank))}\n")
        sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
