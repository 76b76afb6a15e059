"""Plan a training run before anything is rented: `plan()` and the `Plan` it returns.

    found = plan(model, (ids,), "H100", num_ranks=64, batch_size=256)
    print(found)                       # what to do, how the model is cut, why others lost
    built = found.build(loss_fn=loss)  # the stages and the schedule of this rank

In:  a model (on the meta device if it is large) or a `Pipe`, one example call, hardware.
Out: a `Plan`: options from the best on, each priced by simulating a step. It can be saved as
     JSON, drawn as a report, and built.

Tensor, context and expert parallelism and sharded replicas are priced if they may be chosen; what
the runtime builds is a pipeline, with replicas or ZeRO 1 (`Candidate.is_buildable`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from fxpipe.errors import PlanError
from fxpipe.graph.pipe import Pipe
from fxpipe.planner.cost.hardware import Hardware, load_hardware
from fxpipe.planner.cost.observation import PHASES
from fxpipe.planner.cost.training import CHECKPOINTS, Checkpointing, Kernels, Training
from fxpipe.planner.order.orders import Objective, check_objective
from fxpipe.planner.plan_report import write_plan_report
from fxpipe.planner.plan_text import (
    plan_html,
    plan_text,
    shortage_text,
    table_rows,
)
from fxpipe.planner.search.candidates import candidates
from fxpipe.planner.search.option import Option
from fxpipe.planner.search.search import Pricing, Search
from fxpipe.planner.search.space import Space, check_amount, check_whole, space_of, wishes_of
from fxpipe.planner.search.subject import Subject, subject_of

if TYPE_CHECKING:
    from fxpipe.planner.build import Built
    from fxpipe.planner.cost.measured import Profile

__all__ = ["Plan", "Question", "plan"]

_FORMAT = 1
_KEPT = 40
_UNEVEN = 1.05
"""If the slowest rank has so much more to do than the mean, cuts inside blocks are tried, too."""


def plan(
    model: nn.Module | Pipe,
    example_args: Sequence[Any],
    hardware: str | os.PathLike[str] | Hardware,
    num_ranks: int,
    batch_size: int,
    memory_limit: float | None = None,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    schedules: str | Iterable[str] | None = None,
    microbatch_sizes: int | Iterable[int] | None = None,
    data_parallel: int | Iterable[int] | None = None,
    stages_per_rank: int | Iterable[int] | None = None,
    checkpointing: Checkpointing | Iterable[Checkpointing] = CHECKPOINTS,
    tensor_parallel: int | Iterable[int] = 1,
    context_parallel: int | Iterable[int] = 1,
    expert_parallel: int | Iterable[int] = 1,
    sharding: int | Iterable[int] = 0,
    optimizer: str = "adamw-master",
    kernels: Kernels = "eager",
    float8: bool = False,
    expert_groups: tuple[int, int] | None = None,
    loss: bool | None = None,
    pin: Mapping[str, int] | None = None,
    together: Iterable[Iterable[str]] = (),
    sizes: Mapping[str, int] | None = None,
    profile: Profile | None = None,
    improve: bool = False,
    objective: Objective = "step",
    offload: int = 2,
    effort: int = 400_000,
    progress: Callable[[int, int], None] | None = None,
) -> Plan:
    """Find out how to train a model on given ranks.

    Args:
        model: the model, or a `Pipe` whose stages are kept as they are.
        example_args, example_kwargs: one call of the model, of any batch size.
        hardware: a preset such as "H100", a description, or a file (.json, .toml).
        num_ranks: devices in all; data parallel replicas times pipeline ranks.
        batch_size: rows of one step, over all replicas.
        memory_limit: bytes a rank may hold; by default what the hardware has.
        schedules, microbatch_sizes, data_parallel, stages_per_rank, checkpointing: what may
            be chosen.
        tensor_parallel, context_parallel, expert_parallel: sizes of these groups that may be
            chosen; sharding: stages of ZeRO that may be.
        optimizer: for its state: none, sgd, momentum, adam, adamw or adamw-master.
        kernels: one of `KERNELS`; float8: products of blocks in 8 bits.
        expert_groups: a token's experts are in so many of so many groups, (4, 8) in DeepSeek-V3.
        loss: price a cross entropy of the output; by default if the output is one tensor of
            floats with at least three dimensions.
        pin, together: as in `auto_split`.
        sizes: sizes other than the batch to plan for, such as {"sequence": 8192}.
        profile: measured times, which replace the estimated ones where they exist.
        improve: search for a better order of actions than the chosen schedule's.
        objective: make one step by itself short, or the "period" from step to step if no rank
            waits for another between two steps.
        offload: what waits for its backward for more than so many compute actions of its rank may
            go to host memory, where that helps; 0 for never. Copies run beside compute.
        effort: how many actions to simulate in all.
        progress: called with (done, of all) as the search goes on.

    Raises:
        PlanError: nothing fits; the message says how much memory is missing where.
    """
    check_whole(num_ranks=num_ranks, batch_size=batch_size, effort=effort)
    check_whole(least=0, offload=offload)
    if offload == 1:
        raise PlanError("offload is at least 2 compute actions, or 0 for never, got 1")
    check_objective(objective)
    where = load_hardware(hardware)
    space = space_of(
        schedules=schedules,
        microbatch_sizes=microbatch_sizes,
        data_parallel=data_parallel,
        stages_per_rank=stages_per_rank,
        checkpointing=checkpointing,
        tensor_parallel=tensor_parallel,
        context_parallel=context_parallel,
        expert_parallel=expert_parallel,
        sharding=sharding,
    )
    pins, groups = wishes_of(pin, together)
    limit = where.memory if memory_limit is None else check_amount("memory_limit", memory_limit)
    most = num_ranks * max(space.stages_per_rank or (4,))
    if profile is not None and not hasattr(profile, "opened"):
        raise PlanError(f"profile is what fxpipe.profile() returns, got {profile!r}")
    opened = None if profile is None else profile.opened
    subject = subject_of(model, example_args, example_kwargs, most, where, sizes, opened)
    if profile is not None:
        profile.check(node.name for node in subject.costs.nodes)
    if subject.pipe is not None and (pins or groups):
        raise PlanError("a Pipe keeps its stages: pin and together are for a model that is cut")
    pricing = Pricing(
        subject.costs,
        subject.sizes,
        where,
        Training(
            optimizer,
            kernels=kernels,
            float8=float8,
            expert_groups=expert_groups,
            has_loss=subject.makes_scores if loss is None else loss,
        ),
        limit,
        subject.stage_of,
        pins,
        groups,
        profile,
        objective=objective,
        offload=offload,
        keeps=tuple(how for how in ("none", "selective") if how in space.checkpointing),
    )
    asked = Question(subject, space, pricing, num_ranks, batch_size, improve)
    return asked.answer(effort, progress)


@dataclass(frozen=True)
class Question:
    """What a plan answers: a captured model, what may be chosen, and for which machine."""

    subject: Subject
    space: Space
    pricing: Pricing
    num_ranks: int
    batch_size: int
    improve: bool = False

    def answer(self, effort: int, progress: Callable[[int, int], None] | None = None) -> Plan:
        """Search all candidates.

        Raises:
            PlanError: nothing fits.
        """
        subject, pricing = self.subject, self.pricing
        limit = pricing.memory_limit
        found = candidates(
            self.num_ranks,
            self.batch_size,
            subject.num_parts,
            subject.narrowed(self.space),
            fixed_stages=subject.num_stages,
            num_blocks=len(subject.blocks),
        )
        options = Search(pricing).run(found, budget=effort, progress=progress)
        asked = self
        if options and (options[0].missing(limit) > 0 or options[0].imbalance > _UNEVEN):
            asked, options = self._with_finer_cuts(options, max(effort // 4, 1))
            subject = asked.subject
        if not options or options[0].missing(limit) > 0:
            raise PlanError(shortage_text(options, self.num_ranks, limit, len(found)))
        if self.improve:
            better = options[0].rearranged(pricing.hardware, limit, pricing.objective)
            options = [better, *options[1:]]
        return Plan(
            tuple(options[:_KEPT]),
            pricing.hardware,
            self.num_ranks,
            self.batch_size,
            limit,
            pricing.training.optimizer,
            dict(pricing.sizes),
            subject.opened,
            subject.blocks,
            len(found),
            _step_flops(subject, pricing.sizes, options[0]),
            asked,
        )

    def _with_finer_cuts(self, options: list[Option], effort: int) -> tuple[Question, list[Option]]:
        """The best options again with cuts inside blocks, if they fit then or are quicker."""
        finer = self.subject.opened_up(self.pricing.hardware)
        if finer is None or self.pricing.profile is not None:
            return self, options
        pricing = replace(self.pricing, costs=finer.costs)
        again = [option.candidate for option in options[:8] if option.candidate.pipeline > 1]
        found = Search(pricing).run(again, budget=effort)
        if not found or found[0].missing(pricing.memory_limit) > 0:
            return self, options
        fits = options[0].missing(pricing.memory_limit) <= 0
        if fits and found[0].step_time > 0.99 * options[0].step_time:
            return self, options
        return replace(self, subject=finer, pricing=pricing), found


def _step_flops(subject: Subject, sizes: Mapping[str, int], best: Option) -> float:
    """The model's own FLOPs in a step, without what checkpointing repeats."""
    candidate = best.candidate
    sizes = {**sizes, "batch": candidate.microbatch_size}
    each = sum(subject.costs.flops(phase, sizes) for phase in PHASES)
    return each * candidate.num_microbatches * candidate.data_parallel


@dataclass(frozen=True)
class Plan:
    """Ways to train a model, the best first.

    `options[0]` is what the plan chose; see `Option` for its prediction and stages.
    `opened` are the modules that were looked into, `blocks` those that checkpointing wraps,
    `flops` what the model itself computes in a step.
    """

    options: tuple[Option, ...]
    hardware: Hardware
    num_ranks: int
    batch_size: int
    memory_limit: float
    optimizer: str
    sizes: Mapping[str, int]
    opened: tuple[str, ...]
    blocks: tuple[str, ...]
    num_candidates: int
    flops: float = 0.0
    question: Question | None = field(default=None, compare=False, repr=False)

    @property
    def best(self) -> Option:
        return self.options[0]

    @property
    def subject(self) -> Subject | None:
        """The model that was planned; None for a plan from a file."""
        return None if self.question is None else self.question.subject

    @property
    def step_time(self) -> float:
        """Predicted seconds of a step."""
        return self.best.step_time

    @property
    def throughput(self) -> float:
        """Predicted rows per second."""
        return self.batch_size / self.best.step_time if self.best.step_time else 0.0

    @property
    def tokens_per_second(self) -> float | None:
        """Predicted positions per second on one rank; None without a sequence."""
        length = self.sizes.get("sequence")
        return None if not length else self.throughput * length / self.num_ranks

    @property
    def utilization(self) -> float:
        """The model's own FLOPs over what the ranks could do in bfloat16 (MFU)."""
        peak = self.hardware.peak("bfloat16") * self.num_ranks
        return self.flops / self.step_time / peak if self.step_time else 0.0

    def rows(self) -> list[dict[str, Any]]:
        """The ranked table as plain data; `why` says why an option lost."""
        return table_rows(self)

    def build(
        self,
        model: nn.Module | None = None,
        example_args: Sequence[Any] | None = None,
        example_kwargs: Mapping[str, Any] | None = None,
        *,
        choice: int = 0,
        device: Any = "cpu",
        group: Any = None,
        loss_fn: Callable[..., Any] | None = None,
        **schedule_options: Any,
    ) -> Built:
        """The stages and the schedule of this rank, ready for `schedule.step`.

        Without a process group, or with a `LocalGroup`, all ranks of one replica run in this
        process. With one, its size must be the plan's `num_ranks`: process r * W + j is rank r
        of replica j of W, and replicas share their gradients through DistributedDataParallel, or
        their optimizer's state through `fully_shard` (ZeRO 1). Blocks are checkpointed and sharded
        as planned, in the model's own modules.

        Args:
            model, example_args, example_kwargs: for a plan that was loaded from a file; by
                default what was planned.
            choice: which of `options` to build.
            schedule_options: passed to the schedule.

        Raises:
            PlanError: the model is not the one that was planned, or the number of processes
                is another.
        """
        from fxpipe.planner.build import build

        given = None if model is None else (model, tuple(example_args or ()), example_kwargs or {})
        return build(self, given, choice, device, group, loss_fn, schedule_options)

    def report(
        self,
        path: str | os.PathLike[str],
        *,
        most: int = 8,
        tokens: float | None = None,
        price: float | None = None,
        what_if: Sequence[tuple[str, Plan | None]] = (),
    ) -> Path:
        """Write an HTML report: the options, memory, timelines of the best, the stages.

        With `tokens` it says how long they take, with `price` of a GPU and hour what they cost,
        with `what_if` (the rows of that function) what other machines would give.
        """
        return write_plan_report(self, path, most=most, tokens=tokens, price=price, what_if=what_if)

    def to_json(self) -> str:
        """All of the plan but the model; the inverse of `from_json`."""
        data = {
            "format": _FORMAT,
            "hardware": self.hardware.to_dict(),
            "num_ranks": self.num_ranks,
            "batch_size": self.batch_size,
            "memory_limit": self.memory_limit,
            "optimizer": self.optimizer,
            "sizes": dict(self.sizes),
            "opened": list(self.opened),
            "blocks": list(self.blocks),
            "num_candidates": self.num_candidates,
            "flops": self.flops,
            "options": [option.to_dict() for option in self.options],
        }
        return json.dumps(data, indent=1)

    @staticmethod
    def from_json(text: str) -> Plan:
        """Read a plan.

        Raises:
            PlanError: the text is not one.
        """
        try:
            data = json.loads(text)
            if data["format"] != _FORMAT:
                raise PlanError(f"the plan has format {data['format']}; this version reads 1")
            check_whole(num_ranks=data["num_ranks"], batch_size=data["batch_size"])
            if not data["options"]:
                raise PlanError("this is not a saved plan: it has no options")
            return Plan(
                tuple(Option.from_dict(option) for option in data["options"]),
                Hardware.from_dict(data["hardware"]),
                data["num_ranks"],
                data["batch_size"],
                data["memory_limit"],
                data["optimizer"],
                data["sizes"],
                tuple(data["opened"]),
                tuple(data["blocks"]),
                data["num_candidates"],
                data.get("flops", 0.0),
            )
        except (json.JSONDecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, PlanError):
                raise
            raise PlanError(f"this is not a saved plan: {error!r}") from error

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the plan to a JSON file."""
        target = Path(path)
        target.write_text(self.to_json() + "\n", encoding="utf-8")
        return target

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """Read a plan that `save` wrote."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise PlanError(f"cannot read the plan {os.fspath(path)!r}: {error}") from error
        return Plan.from_json(text)

    def __str__(self) -> str:
        return plan_text(self)

    def _repr_html_(self) -> str:
        return plan_html(self)
