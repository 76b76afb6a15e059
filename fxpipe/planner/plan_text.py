"""A plan in words: for the terminal, for notebooks, as rows of plain data."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from html import escape
from typing import TYPE_CHECKING, Any

from fxpipe.planner.cost.presets import EXPERTS_ERROR
from fxpipe.planner.search.estimate import Memory, predict
from fxpipe.planner.search.option import Option, why_slower
from fxpipe.text import aligned, bytes_text, html_table, seconds_text

if TYPE_CHECKING:
    from fxpipe.planner.plan import Plan

__all__ = [
    "cost_lines",
    "cut_line",
    "head_lines",
    "other_rows",
    "plan_html",
    "plan_text",
    "shortage_text",
    "table_rows",
    "training_time",
]


def table_rows(plan: Plan) -> list[dict[str, Any]]:
    """One plain row per option, best first."""
    return [
        {
            "rank": place,
            **asdict(option.candidate),
            "step_time": option.step_time,
            "throughput": plan.batch_size / option.step_time if option.step_time else 0.0,
            "bubble": option.prediction.bubble,
            "imbalance": option.imbalance,
            "peak_memory": option.peak,
            "memory": [
                {**asdict(memory), "total": memory.total} for memory in option.prediction.memory
            ],
            "fits": option.missing(plan.memory_limit) <= 0,
            "why": why_slower(option, plan.best, plan.memory_limit),
        }
        for place, option in enumerate(plan.options)
    ]


def plan_text(plan: Plan, *, others: int = 10) -> str:
    """What was chosen, how the model is cut, what the fullest rank holds, why others lost."""
    lines = [*head_lines(plan), "", cut_line(plan), *_indented(_cut_rows(plan.best), left=(8,))]
    lines.append(f"  {_CUT_WORDS}")
    lines += ["", *_memory_lines(plan)]
    if others:
        rows = other_rows(plan, others)
        lines += ["", f"the best {len(rows) - 1} of {len(plan.options)} simulated:"]
        lines += _indented(rows, left=(3, 4))
    return "\n".join(lines)


def head_lines(plan: Plan) -> list[str]:
    best = plan.best
    rate = f"{plan.throughput:.4g} rows/s"
    length = plan.sizes.get("sequence")
    if length:
        rate += f" ({plan.throughput * length:,.0f} positions/s)"
    improved = "" if best.program is None else ", in an improved order"
    error = _error(plan)
    margin = plan.memory_limit - best.peak
    lines = [
        f"plan for {plan.num_ranks} ranks of {plan.hardware.name}, batch {plan.batch_size}, "
        f"{bytes_text(plan.memory_limit)} per rank, optimizer {plan.optimizer}",
        f"chosen of {plan.num_candidates}: {best.candidate}{improved}",
        f"a step takes {seconds_text(best.step_time)}{error}, {rate}; ranks idle "
        f"{best.prediction.bubble:.1%}; the fullest holds {bytes_text(best.peak)}, "
        f"{bytes_text(margin)} are free{_margin_text(margin / plan.memory_limit)}",
        _error_line(plan),
    ]
    if plan.flops and plan.tokens_per_second:
        each = plan.flops / best.step_time / plan.num_ranks
        lines.append(
            f"each rank does {plan.tokens_per_second:,.0f} tokens/s and {each / 1e12:.4g} TFLOP/s, "
            f"{plan.utilization:.1%} of its bfloat16 peak (MFU)"
        )
    lines += [*_zero_bubble_line(plan), *_near_line(plan), *_host_line(plan)]
    if not best.candidate.is_buildable:
        lines.append(_build_line(plan))
    return lines


def _build_line(plan: Plan) -> str:
    """What is left to the user, and the best option that `build` makes."""
    text = (
        "build() makes pipelines with replicas or ZeRO 1; tensor, context and expert parallelism "
        "and ZeRO 2 and 3 are for you to apply to its stages"
    )
    limit = plan.memory_limit
    made = [o for o in plan.options if o.candidate.is_buildable and o.missing(limit) <= 0]
    if made:
        text += (
            f"; the best it makes, {made[0].candidate}, is {why_slower(made[0], plan.best, limit)}"
        )
    return text


_TOO_LOW = 0.03
"""How much more published runs held at most than was predicted."""


def _margin_text(share: float) -> str:
    if share >= _TOO_LOW:
        return ""
    return f", which is little: published runs held up to {_TOO_LOW:.0%} more than predicted"


def _error_line(plan: Plan) -> str:
    """What the error means, in words."""
    if not _median_error(plan):
        return f"no published run was compared with {plan.hardware.name}: the error is unknown"
    return (
        f"+-{_error(plan).removeprefix(' +-')} is the median error on published runs that nothing "
        "was fitted to; of those of all devices 95% are within 15%"
    )


def _zero_bubble_line(plan: Plan) -> list[str]:
    """Why the plan has no split backward, if it has a pipeline and none is chosen."""
    if plan.best.candidate.info.splits_backward or plan.best.candidate.pipeline == 1:
        return []
    others = [o for o in plan.options if o.candidate.info.splits_backward]
    if not others:
        return ["no zero bubble schedule was guessed to fit or to be quick enough to be simulated"]
    first = others[0]
    why = why_slower(first, plan.best, plan.memory_limit)
    return [f"why no zero bubble: the best of them, {first.candidate}, is {why}"]


def _near_line(plan: Plan) -> list[str]:
    """How many other options may be as quick, for all that the prediction knows."""
    limit = plan.best.step_time * (1 + _median_error(plan))
    others = [o for o in plan.options[1:] if o.missing(plan.memory_limit) <= 0]
    near = sum(option.step_time < limit for option in others)
    if not near or not _median_error(plan):
        return []
    return [f"{near} more of the options below are within that error: measure the first few"]


def _host_line(plan: Plan) -> list[str]:
    """What offloading puts into host memory, which nothing here checks, and what it saves."""
    best, machine = plan.best, plan.hardware
    if not best.candidate.offload:
        return []
    layout = best.candidate.layout
    plain = predict(best.make_program(), best.stages, best.edge_bytes, machine, layout)
    kept = zip(plain.memory, best.prediction.memory, strict=True)
    most = max(there.activations - here.activations for there, here in kept)
    text = (
        f"offloading puts about {bytes_text(most)} of a rank into host memory, so "
        f"{bytes_text(most * machine.ranks_per_node)} of a full node: see that it has so much; "
        "no published run that was compared did so"
    )
    limit = plan.memory_limit
    others = [o for o in plan.options if not o.candidate.offload and o.missing(limit) <= 0]
    if others:
        text += (
            f"; the best without it, {others[0].candidate}, is {why_slower(others[0], best, limit)}"
        )
    return [text]


def _error(plan: Plan) -> str:
    """How far off the time may be, going by published rows."""
    error = _median_error(plan)
    return f" +- {error:.0%}" if error else ""


def _median_error(plan: Plan) -> float:
    error = plan.hardware.error
    has_experts = plan.best.candidate.expert_parallel > 1
    return max(error, EXPERTS_ERROR) if error and has_experts else error


def cost_lines(plan: Plan, tokens: float, price: float | None) -> list[str]:
    """How long and how dear it is to train on so many tokens, at a price per GPU and hour."""
    if not plan.tokens_per_second:
        return ["tokens need a model with a sequence"]
    days, hours = training_time(plan, tokens)
    text = f"{_short(tokens)} tokens take {days} days{_error(plan)}, {hours:,.0f} GPU hours"
    if price is not None:
        text += f", ${hours * price:,.0f} at ${price:g} per GPU and hour"
    return [text]


def _short(count: float) -> str:
    """A large number as people say it: 15T, 300B, 1.5M."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if count >= size:
            return f"{count / size:.4g}{letter}"
    return f"{count:,.0f}"


def training_time(plan: Plan, tokens: float) -> tuple[str, float]:
    """Days that so many tokens take, and hours of all GPUs together."""
    assert plan.tokens_per_second
    seconds = tokens / plan.tokens_per_second  # of one rank after the other
    days = seconds / plan.num_ranks / 86400
    return f"{days:,.{0 if days >= 100 else 1}f}", seconds / 3600


def cut_line(plan: Plan) -> str:
    """The slowest rank, beside what no cut can get it below."""
    option = plan.best
    loads = option.rank_loads
    slowest = max(range(len(loads)), key=loads.__getitem__)
    why = f"the cut: rank {slowest} is the slowest with {seconds_text(loads[slowest])} of compute "
    why += f"per microbatch, {option.imbalance:.3g} times the mean"
    if option.bound:
        busiest = max(option.loads_with_transfers(plan.hardware))
        why += (
            f"; with transfers {seconds_text(busiest)} at most, and no cut gets all ranks below "
            f"{seconds_text(min(option.bound, busiest))}"
        )
    return why


_CUT_WORDS = (
    "of a microbatch: F forward, I gradients of inputs, W of weights, kept until its backward, "
    "sends; state: weights, gradients and optimizer"
)


def _cut_rows(option: Option) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        ("stage", "rank", "F", "I", "W", "state", "kept", "sends", "parts")
    ]
    for stage, numbers in enumerate(option.stages):
        sent = math.fsum(there for (a, _), (there, _) in option.edge_bytes.items() if a == stage)
        rows.append(
            (
                str(stage),
                str(option.placement.stage_to_rank[stage]),
                seconds_text(numbers.forward),
                seconds_text(numbers.backward_input),
                seconds_text(numbers.backward_weight),
                bytes_text(numbers.state),
                bytes_text(numbers.kept + numbers.kept_received),
                bytes_text(sent) if sent else "-",
                _span(option.modules[stage]),
            )
        )
    return rows


def _span(modules: Sequence[str]) -> str:
    if not modules:
        return "-"
    if len(modules) == 1:
        return modules[0]
    return f"{modules[0]} .. {modules[-1]} ({len(modules)})"


def _memory_lines(plan: Plan) -> list[str]:
    """What the fullest rank holds, and what is free on each."""
    memory = plan.best.prediction.memory
    fullest = max(range(len(memory)), key=lambda rank: memory[rank].total)
    free = [bytes_text(plan.memory_limit - held.total) for held in memory]
    most = 16
    more = f" and {len(free) - most} more" if len(free) > most else ""
    return [
        f"rank {fullest} holds {bytes_text(memory[fullest].total)}: {_parts(memory[fullest])}",
        f"free on each rank: {', '.join(free[:most])}{more}",
    ]


def _parts(memory: Memory) -> str:
    return ", ".join(f"{name} {bytes_text(size)}" for name, size in asdict(memory).items())


def other_rows(plan: Plan, most: int) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("step", "idle", "peak", "option", "")]
    rows += [
        (
            seconds_text(option.step_time),
            f"{option.prediction.bubble:.1%}",
            bytes_text(option.peak),
            str(option.candidate),
            why_slower(option, plan.best, plan.memory_limit),
        )
        for option in plan.options[: most + 1]
    ]
    return rows


def _indented(rows: Sequence[Sequence[str]], *, left: Sequence[int]) -> list[str]:
    return [f"  {line}" for line in aligned(rows, left=left)]


def shortage_text(
    options: Sequence[Option], num_ranks: int, limit: float, num_candidates: int
) -> str:
    """Why nothing fits: the closest option, and what each of its ranks lacks."""
    if not options:
        return (
            f"none of {num_candidates} candidates for {num_ranks} ranks can be cut: the model has "
            "too few parts, or pins and groups contradict the order of data"
        )
    closest = min(options, key=lambda option: (option.missing(limit), option.candidate))
    lines, memories = [], closest.prediction.memory
    short = sorted((r for r, m in enumerate(memories) if m.total > limit), key=_by_total(memories))
    for rank, memory in enumerate(memories):
        if rank in short[:4]:
            stages = closest.placement.stages_of(rank)
            names = [name for stage in stages for name in closest.modules[stage]]
            lines.append(
                f"  rank {rank} ({_span(names)}) needs {bytes_text(memory.total)}, missing "
                f"{bytes_text(memory.total - limit)}: {_parts(memory)}"
            )
    if len(short) > 4:
        lines.append(f"  and {len(short) - 4} more ranks, which lack less")
    worst = max(closest.prediction.memory, key=lambda memory: memory.total)
    state = worst.weights + worst.gradients + worst.optimizer
    advice = "smaller microbatches, or checkpointing"
    if state > limit / 2:
        advice = "more ranks in the pipeline, or a leaner optimizer"
    return (
        f"nothing fits {num_ranks} ranks with {bytes_text(limit)} each; the closest of "
        f"{num_candidates} candidates, {closest.candidate}:\n" + "\n".join(lines) + "\n"
        f"what would help: {advice}"
    )


def _by_total(memories: Sequence[Memory]) -> Callable[[int], float]:
    return lambda rank: -memories[rank].total


def plan_html(plan: Plan) -> str:
    """For notebooks."""
    head, *rest = head_lines(plan)
    lines = "".join(f"<p>{escape(line)}</p>" for line in rest)
    memory = "".join(f"<p>{escape(line)}</p>" for line in _memory_lines(plan))
    return (
        f"<div><p><b>{escape(head)}</b></p>{lines}{html_table(other_rows(plan, 14))}"
        f"<p>{escape(cut_line(plan))}</p>{html_table(_cut_rows(plan.best))}{memory}</div>"
    )
