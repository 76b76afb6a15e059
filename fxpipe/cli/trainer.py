"""Train a named model on the ranks of this process: what `train` and `demo` run.

In:  `TrainOptions`, equal on all ranks.
Out: a `StepReport` for each step, handed to a function on every rank.

With `compare` every rank also trains its own copy of the plain model, on the same batches
and with the same optimizer, and compares the gradients of its stages.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fxpipe.cli.named.models import Inputs, NamedModel, as_inputs, call_with, resolve
from fxpipe.cli.named.pipes import split_model
from fxpipe.cli.named.programs import find_program
from fxpipe.cli.named.references import load_object, parse_reference
from fxpipe.cli.options import split_names
from fxpipe.cli.train import TrainOptions
from fxpipe.errors import InputError
from fxpipe.graph.aux_losses import collect_aux_losses
from fxpipe.microbatch import split_batch
from fxpipe.program import Program
from fxpipe.runtime.wire.local_group import LocalGroup
from fxpipe.schedules import ScheduleFromProgram
from fxpipe.torch_inside import pytree
from fxpipe.training.pipeline import Pipeline

__all__ = ["StepReport", "Trainer", "join_ranks"]

_DISTINCT_BATCHES = 8


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step, on every rank; what was not compared is None."""

    step: int
    loss: float
    plain_loss: float | None
    gradient_difference: float | None
    seconds: float


def join_ranks(device: str) -> torch.device:
    """Meet the other processes; returns the device of this one."""
    found = _device(device, int(os.environ.get("LOCAL_RANK", "0")))
    try:
        backend = dist.get_default_backend_for_device(found)
    except ValueError:
        raise InputError(f"--device {device!r}: torch.distributed has no backend for it") from None
    dist.init_process_group(backend)
    return found


def _device(name: str, local_rank: int) -> torch.device:
    here = torch.accelerator.current_accelerator(check_available=True)
    if name == "auto":
        name = "cpu" if here is None else here.type
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InputError(f"--device {name!r} is no device: {error}") from None
    if device.type != "cpu":
        if here is None or here.type != device.type:
            found = "no accelerator" if here is None else f"an accelerator of type {here.type}"
            raise InputError(f"--device {name}: torch sees {found} here; try --device cpu")
        device = torch.device(device.type, local_rank % torch.accelerator.device_count())
        torch.accelerator.set_device_index(device.index)
    return device


class Trainer:
    """The pipeline of this process, its optimizer, and the plain model beside it."""

    def __init__(self, settings: TrainOptions, *, plain_in_parts: bool = True) -> None:
        self.settings = settings
        self.program = _program(settings)
        make = _optimizer_class(settings.optimizer)
        self._plain_in_parts = plain_in_parts
        self.model = resolve(settings.request())
        self._batches = _batches(settings, self.model)
        self._next = next(self._batches)
        loss_fn = self.model.loss_fn
        module = self.model.build()
        self.device = torch.device("cpu") if settings.local else join_ranks(settings.device)
        self.plain = copy.deepcopy(module).to(self.device) if settings.compare else None
        self.traced = split_model(
            self.model, module, self._example(),
            num_stages=self.program.num_stages, split=split_names(settings.split),
        )  # fmt: skip
        group = LocalGroup(self.program.num_ranks) if settings.local else None
        rank = None if settings.local else dist.get_rank()
        self.is_reporter = not rank
        mine = (
            range(self.program.num_stages)
            if rank is None
            else self.program.placement.stages_of(rank)
        )
        stages = [self.traced.pipe.build_stage(index, self.device, group) for index in mine]
        self.pipe = Pipeline(ScheduleFromProgram(stages, self.program, loss_fn=loss_fn))
        owned = [self.pipe.parameters(), list(self.plain.parameters()) if self.plain else []]
        # A stage may have no parameters, and an optimizer refuses an empty list.
        self._optimizers = [make(some, lr=settings.learning_rate) for some in owned if some]

    def _example(self) -> Inputs:
        """One microbatch: made up, or of the user's first batch."""
        if self.settings.data is None:
            return self.model.inputs(max(2, self.settings.batch // self.program.num_microbatches))
        (args, kwargs), _ = self._next
        parts = split_batch(args, kwargs, self.program.num_microbatches)
        return tuple(parts.args[0]), dict(parts.kwargs[0])

    def run(self, observe: Callable[[StepReport], None]) -> list[StepReport]:
        """Train; `observe` is called after each step. The last step is recorded."""
        reports = []
        for step in range(self.settings.steps):
            if step:
                self._next = next(self._batches)
            self.pipe.schedule.record_timeline(step == self.settings.steps - 1)
            reports.append(self._step(step))
            observe(reports[-1])
        return reports

    def close(self) -> None:
        """Leave the other ranks, after all have come here."""
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()

    def _step(self, step: int) -> StepReport:
        (args, kwargs), target = pytree.tree_map_only(
            Tensor, lambda tensor: tensor.to(self.device), self._next
        )
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        start = time.perf_counter()
        loss = self.pipe.step(*args, target=target, **kwargs).item()
        seconds = time.perf_counter() - start
        plain_loss = difference = None
        if self.plain is not None:
            plain_loss = self._plain_step((args, kwargs), target)
            difference = self._gradient_difference()
        start = time.perf_counter()
        for optimizer in self._optimizers:
            optimizer.step()
        seconds += time.perf_counter() - start
        return StepReport(step, loss, plain_loss, difference, seconds)

    def _plain_step(self, inputs: Inputs, target: Any) -> float:
        """Loss and gradients of the plain model, on the whole batch or microbatch by microbatch.

        In parts, batch statistics and auxiliary losses are those that the pipeline sees.
        """
        assert self.plain is not None
        count = self.program.num_microbatches if self._plain_in_parts else 1
        parts = split_batch(*inputs, count, target=target)
        rows = parts.rows or (1,) * count
        assert parts.target is not None
        total = 0.0
        for args, kwargs, part, weight in zip(
            parts.args, parts.kwargs, parts.target, rows, strict=True
        ):
            with collect_aux_losses() as aux:
                output = self.plain(*args, **kwargs)
            loss = self.model.loss_fn(output, part)
            if isinstance(loss, tuple):
                raise InputError("--compare needs a loss that is one number, not (sum, weight)")
            share = weight / sum(rows)
            ((loss + aux.total()) * share).backward()
            total += loss.item() * share
        return total

    def _gradient_difference(self) -> float:
        """The largest difference between a gradient here and the plain model's, on all ranks."""
        assert self.plain is not None
        wanted = dict(self.plain.named_parameters(remove_duplicate=False))
        worst = torch.zeros((), dtype=torch.float64)
        for name, parameter in self.pipe.named_parameters():
            worst = torch.maximum(worst, _distance(parameter.grad, wanted[name].grad))
        if dist.is_initialized():
            worst = worst.to(self.device)
            dist.all_reduce(worst, dist.ReduceOp.MAX)
        return float(worst)


def _distance(found: Tensor | None, wanted: Tensor | None) -> Tensor:
    if found is None or wanted is None:
        return torch.tensor(0.0 if found is wanted else float("inf"), dtype=torch.float64)
    return (found.double() - wanted.double()).abs().max().cpu()


def _optimizer_class(name: str) -> Callable[..., torch.optim.Optimizer]:
    known = {
        key.lower(): value
        for key, value in vars(torch.optim).items()
        if isinstance(value, type)
        and issubclass(value, torch.optim.Optimizer)
        and value is not torch.optim.Optimizer
    }
    if name.lower() not in known:
        names = sorted(value.__name__ for value in known.values())
        raise InputError(f"torch.optim has no optimizer {name!r}; it has {', '.join(names)}")
    return known[name.lower()]


def _program(settings: TrainOptions) -> Program:
    """The program that the ranks will run.

    Raises:
        ScheduleError, InputError: there is none for these sizes.
    """
    if settings.schedule == "-":
        raise InputError("--schedule -: every rank reads the program, so it must be a file")
    program = find_program(
        settings.schedule,
        ranks=settings.nproc if settings.local else int(os.environ["WORLD_SIZE"]),
        stages=settings.stages,
        microbatches=settings.microbatches,
    )
    if program.name == "ForwardOnly":
        raise InputError("ForwardOnly trains nothing; see fxpipe schedule list for the others")
    if settings.batch < program.num_microbatches:
        raise InputError(
            f"a batch of {settings.batch} rows cannot be split into {program.num_microbatches} "
            "microbatches; raise --batch or lower --microbatches"
        )
    return program


def _batches(settings: TrainOptions, model: NamedModel) -> Iterator[tuple[Inputs, Any]]:
    """Batches without end: a few made-up ones over and over, or the user's epoch after epoch."""
    if settings.data is None:
        while True:
            for seed in range(_DISTINCT_BATCHES):
                yield model.inputs(settings.batch, seed), model.target(settings.batch, seed)
    found, options = (
        load_object(settings.data, what="--data"),
        parse_reference(settings.data).options,
    )
    name = f"--data {settings.data!r}"
    while True:
        is_empty, epoch = True, found
        if callable(found):
            request = model.request
            epoch = call_with(found, settings.data, request, settings.batch, request.seed, options)
        if not isinstance(epoch, Iterable):
            raise InputError(
                f"{name} gave a {type(epoch).__name__}; it must be an iterable of "
                "(inputs, target), such as a DataLoader, or a function that returns one"
            )
        for item in epoch:
            is_empty = False
            if not isinstance(item, tuple | list) or len(item) != 2:
                raise InputError(
                    f"{name} gave a {type(item).__name__} as a batch; each must "
                    "be a pair (inputs, target), inputs being a tensor, a tuple, a dict or "
                    "(args, kwargs)"
                )
            yield as_inputs(item[0]), item[1]
        if is_empty:
            raise InputError(f"{name} gave no batch")
