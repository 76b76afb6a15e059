"""Ask a plan what other ranks, network, memory or sequences would give.

In:  a `Plan` that holds its model.
Out: plans with one thing changed, each searched for again.
"""

from __future__ import annotations

from dataclasses import replace

from fxpipe.errors import PlanError
from fxpipe.planner.plan import Plan

__all__ = ["what_if"]


def what_if(found: Plan, *, effort: int = 150_000) -> list[tuple[str, Plan | None]]:
    """The plan again with one thing changed; None where nothing fits.

    Raises:
        PlanError: the plan was loaded and does not hold the model.
    """
    asked = found.question
    if asked is None:
        raise PlanError("a plan from a file does not hold the model: plan again to ask what if")
    pricing, ranks, rows = asked.pricing, asked.num_ranks, asked.batch_size
    machine, limit = pricing.hardware, pricing.memory_limit
    slower = replace(machine.inter, bytes_per_time=machine.inter.bytes_per_time / 4)
    changes = {
        "as planned": asked,
        "half the ranks": replace(asked, num_ranks=max(ranks // 2, 1)),
        "twice the ranks": replace(asked, num_ranks=2 * ranks),
        "a quarter of the network": replace(
            asked, pricing=replace(pricing, hardware=replace(machine, inter=slower))
        ),
        "half the memory": replace(asked, pricing=replace(pricing, memory_limit=limit / 2)),
        "twice the memory": replace(asked, pricing=replace(pricing, memory_limit=2 * limit)),
    }
    length = asked.subject.traced.hints.get("sequence") and pricing.sizes["sequence"]
    if length and rows % 2 == 0:
        longer = {**pricing.sizes, "sequence": 2 * length}
        changes["twice the sequence, as many tokens"] = replace(
            asked, pricing=replace(pricing, sizes=longer), batch_size=rows // 2
        )
    plans: list[tuple[str, Plan | None]] = []
    for label, changed in changes.items():
        try:
            plans.append((label, changed.answer(effort)))
        except PlanError:
            plans.append((label, None))
    return plans
