"""A pipeline as a training loop wants it: the loss on every rank, modes, accumulation, loggers.

    pipe = Pipeline.build(model, (ids,), loss_fn=loss, n_microbatches=8)    # on every rank
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3)
    for ids, target in data:
        loss = pipe.step(ids, target=target)
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

It holds a schedule, `pipe.schedule`, and adds nothing that the schedule hides. The loop, the
optimizer and the data stay yours.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

import torch
from torch import nn
from torch.nn import functional as F

from fxpipe.errors import InputError
from fxpipe.graph.pipe import pipeline
from fxpipe.program.generators import get_schedule
from fxpipe.runtime.rollback import ChangingBuffers, Rollback
from fxpipe.runtime.share import first_known
from fxpipe.runtime.wire.local_group import LocalGroup, resolve_group
from fxpipe.schedules import Schedule, get_schedule_class
from fxpipe.schedules.rounds import arguments
from fxpipe.stage import PipelineStage
from fxpipe.training.state import parts_of

__all__ = ["Pipeline", "ProgressBar", "StepInfo", "causal_lm_loss", "evaluation"]


@dataclass(frozen=True, slots=True)
class StepInfo:
    """What a callback is told after a step, on every rank."""

    step: int
    loss: float
    seconds: float
    is_first_rank: bool


class Pipeline:
    """The stages of this process with their schedule.

    Args:
        schedule: any schedule.
        callbacks: called with a `StepInfo` after each step, on every rank. If one raises, all
            ranks raise; the gradients of the step are there.
        step: the number of steps made already, by a run that goes on.
    """

    def __init__(
        self,
        schedule: Schedule,
        *,
        callbacks: Sequence[Callable[[StepInfo], Any]] = (),
        step: int = 0,
    ) -> None:
        self.schedule = schedule
        self.callbacks = list(callbacks)
        self.num_steps = step
        self.context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
        """Made around each call of the schedule, such as an autocast."""

    @classmethod
    def build(
        cls,
        model: nn.Module,
        example_args: tuple[Any, ...],
        example_kwargs: Mapping[str, Any] | None = None,
        *,
        loss_fn: Callable[..., Any] | None,
        n_microbatches: int,
        schedule: str = "1F1B",
        stages_per_rank: int | None = None,
        device: torch.device | str = "cpu",
        group: Any = None,
        wrap: Callable[[nn.Module], nn.Module] = lambda module: module,
        callbacks: Sequence[Callable[[StepInfo], Any]] = (),
        split: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Pipeline:
        """Split a model over the ranks of a group and take this rank's stages.

        Args:
            example_args, example_kwargs: one microbatch; see `pipeline`.
            stages_per_rank: default two for schedules that take several, else one.
            wrap: makes a DDP, `fully_shard`ed or compiled module of a stage's module.
            split: more arguments for `pipeline`, such as `{"split_spec": ...}`.
            options: more arguments for the schedule.
        """
        info = get_schedule(schedule)
        found = resolve_group(group)
        is_local = isinstance(found, LocalGroup)
        num_ranks = found.num_ranks if isinstance(found, LocalGroup) else found.size()
        per_rank = stages_per_rank or (1 if info.stages_per_rank[1] == 1 else 2)
        num_stages = num_ranks * per_rank
        how = {"num_stages": num_stages} if split is None else dict(split)
        pipe = pipeline(model, example_args, dict(example_kwargs or {}), **how)
        if pipe.num_stages != num_stages:
            raise InputError(
                f"the split makes {pipe.num_stages} stages, but {num_ranks} ranks with {per_rank} "
                f"stages each need {num_stages}"
            )
        placement = info.placement(num_ranks, num_stages)
        mine = range(num_stages) if is_local else placement.stages_of(found.rank())  # type: ignore[union-attr]
        stages: list[PipelineStage] = []
        for index in mine:
            stage = pipe.build_stage(index, torch.device(device), found)
            stage.submod = wrap(stage.submod)
            if not isinstance(stage.submod, nn.Module):
                raise InputError(
                    f"wrap= must return the wrapped module, got {type(stage.submod).__name__} "
                    f"for stage {index}"
                )
            stages.append(stage)
        made = get_schedule_class(schedule)(stages, n_microbatches, loss_fn=loss_fn, **options)
        return cls(made, callbacks=callbacks)

    @property
    def stages(self) -> tuple[PipelineStage, ...]:
        return self.schedule.stages

    def parameters(self) -> list[nn.Parameter]:
        """The parameters of this process's stages, each once."""
        return list({id(p): p for _, p in self.named_parameters()}.values())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The same parameters by their names in the plain model, tied ones under each name."""
        for part in parts_of(self.stages):
            yield from part.parameters().items()

    def train(self, mode: bool = True) -> Pipeline:
        """Put all stages of this process into training mode."""
        for stage in self.stages:
            stage.submod.train(mode)
        return self

    def eval(self) -> Pipeline:
        """Put all stages of this process into evaluation mode."""
        return self.train(False)

    def step(self, *args: Any, target: Any = None, **kwargs: Any) -> torch.Tensor:
        """Train on one batch: gradients are added to `.grad`. The loss, on every rank."""
        begin = time.perf_counter()
        with self.context():
            self.schedule.step(*args, target=target, return_outputs=False, **kwargs)
        return self._told(self.schedule.loss, begin)

    def accumulate(self, batches: Iterable[tuple[Any, Any]]) -> torch.Tensor:
        """Train on several batches as on one: the mean of their losses and gradients.

        Each batch is `(inputs, target)`; inputs are a tensor, a tuple, or a dict of keywords.
        Replicas average once, at the last batch. If one batch fails, gradients are as before.
        """
        begin = time.perf_counter()
        every, problem = [], None
        try:
            every = [(inputs, target) for inputs, target in batches]
            if not every:
                raise InputError("accumulate() was given no batch")
        except BaseException as error:
            problem = error
        self.schedule.check_alike("accumulate", "the number of batches", len(every), problem)
        losses: list[torch.Tensor | None] = []
        scale = self.schedule.grad_scale
        self.schedule.grad_scale = scale / len(every)
        before = Rollback(self.parameters(), (), ChangingBuffers())
        try:
            for number, (inputs, target) in enumerate(every):
                args, kwargs = arguments(inputs)
                with self._no_sync(number < len(every) - 1), self.context():
                    self.schedule.step(*args, target=target, return_outputs=False, **kwargs)
                losses.append(self.schedule.loss)
        except BaseException:
            before.undo()
            raise
        finally:
            self.schedule.grad_scale = scale
        known = [loss for loss in losses if loss is not None]
        return self._told(torch.stack(known).mean() if known else None, begin)

    @contextlib.contextmanager
    def _no_sync(self, is_on: bool) -> Iterator[None]:
        wrapped = [stage.submod for stage in self.stages if is_on]
        with contextlib.ExitStack() as stack:
            for module in wrapped:
                if isinstance(module, nn.parallel.DistributedDataParallel):
                    stack.enter_context(module.no_sync())
            yield

    def evaluate(self, *args: Any, target: Any, **kwargs: Any) -> torch.Tensor:
        """The loss of a batch on every rank, in evaluation mode; modes are put back."""
        with evaluation(self.stages), self.context():
            self.schedule.eval(*args, target=target, return_outputs=False, **kwargs)
        return self.schedule.shared_loss()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output without gradients, on the rank of the last stage; None elsewhere."""
        with self.context():
            return self.schedule.eval(*args, **kwargs)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """See `Schedule.clip_grad_norm_`."""
        return self.schedule.clip_grad_norm_(max_norm, norm_type)

    def _told(self, own: torch.Tensor | None, begin: float) -> torch.Tensor:
        """The loss on every rank, after callbacks have seen it: what one raises reaches all."""
        mine = None if own is None else float(own)
        said = self.schedule.gather("shared_loss", (mine, bool(self.callbacks)))
        value = first_known([loss for loss, _ in said])
        self.num_steps += 1
        if any(has_callbacks for _, has_callbacks in said):
            is_first = any(stage.stage_index == 0 for stage in self.stages)
            info = StepInfo(self.num_steps, value, time.perf_counter() - begin, is_first)
            problem: BaseException | None = None
            try:
                for callback in self.callbacks:
                    callback(info)
            except BaseException as error:
                problem = error
            self.schedule.check_alike("callbacks", "the step", self.num_steps, problem)
        return torch.tensor(value) if own is None else own


class ProgressBar:
    """A callback: one line on the first rank's standard error.

    step 120/400 [#########---------------------]  loss 2.3071  8.2 steps/s
    """

    def __init__(self, total: int, *, file: TextIO | None = None) -> None:
        self._total, self._file = total, file or sys.stderr

    def __call__(self, info: StepInfo) -> None:
        if not info.is_first_rank:
            return
        done = min(30, 30 * info.step // max(self._total, 1))
        bar = "#" * done + "-" * (30 - done)
        rate = 1 / max(info.seconds, 1e-9)
        text = f"step {info.step}/{self._total} [{bar}]  loss {info.loss:.4f}  {rate:.1f} steps/s"
        end = "\n" if info.step >= self._total else ""
        self._file.write(f"\r{text}{end}")
        self._file.flush()


def causal_lm_loss(output: Any, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of a language model over a whole batch, as Hugging Face models compute it.

    `output` is the logits or has them as `.logits`; labels are the input ids, -100 where a
    token does not count. A pair `(sum, weight)`, so microbatches with few tokens count little.
    """
    logits = getattr(output, "logits", output)
    shifted = F.pad(labels, (0, 1), value=-100)[..., 1:].reshape(-1)
    flat = logits.reshape(-1, logits.shape[-1]).float()
    total = F.cross_entropy(flat, shifted, ignore_index=-100, reduction="sum")
    return total, (shifted != -100).sum()


@contextlib.contextmanager
def evaluation(stages: Sequence[PipelineStage]) -> Iterator[None]:
    """All modules in evaluation mode inside the block, each in its own mode after it."""
    modes = [(m, m.training) for stage in stages for m in stage.submod.modules()]
    try:
        for stage in stages:
            stage.submod.eval()
        yield
    finally:
        for module, mode in modes:
            module.training = mode
