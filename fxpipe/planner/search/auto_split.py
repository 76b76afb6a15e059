"""A split policy that balances stages by what they cost.

    pipe = pipeline(model, args, split_policy=auto_split(4))
    pipe = pipeline(model, args, split_policy=auto_split(4, pin={"head": 3}, hardware="A100"))

In:  a number of stages and wishes, then a `TracedGraph`.
Out: an `Assignment` whose slowest stage is as quick as possible (see `partition`).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from fxpipe.errors import PlanError, SplitError
from fxpipe.graph.capture.traced_graph import TracedGraph
from fxpipe.graph.cut.cut import Assignment
from fxpipe.graph.cut.flow import symbols_in
from fxpipe.planner.cost.graph_costs import GraphCosts
from fxpipe.planner.cost.hardware import Hardware, load_hardware
from fxpipe.planner.cost.presets import HARDWARE
from fxpipe.planner.cost.training import Training
from fxpipe.planner.cost.workload import Workload, workload_of
from fxpipe.planner.partition.partition import Partition, partition
from fxpipe.planner.partition.work import Limits
from fxpipe.planner.search.space import check_whole, wishes_of
from fxpipe.program import Placement

__all__ = ["DEFAULT_HARDWARE", "REORDER_GAIN", "AutoSplit", "assign", "auto_split", "named_items"]

DEFAULT_HARDWARE = replace(
    HARDWARE["H100"],
    name="H100 without overhead",
    overhead=0.0,
    intra=replace(HARDWARE["H100"].intra, latency=0.0),
)
"""What stages are balanced for if nothing is said: a roofline, the same for models of any size.

With a latency, the transfers of a small model would outweigh its work, and the work would
end up on one stage."""

REORDER_GAIN = 0.02
"""Stages follow the model's own order unless another one is better by this share."""


def auto_split(
    num_stages: int,
    *,
    pin: Mapping[str, int] | None = None,
    together: Iterable[Iterable[str]] = (),
    memory_limit: float | Sequence[float] | None = None,
    hardware: str | Hardware | None = None,
    sizes: Mapping[str, int] | None = None,
    placement: Placement | None = None,
    training: Training | None = None,
) -> AutoSplit:
    """Make a policy for `pipeline(..., split_policy=...)`.

    Args:
        num_stages: how many stages to make.
        pin: module name -> stage it must be in.
        together: groups of module names that must share a stage (tied weights, say).
        memory_limit: bytes a rank may hold for weights, gradients, optimizer and the
            activations of one microbatch; one number, or one per rank.
        hardware: a preset, a description, or a file; by default a plain roofline.
        sizes: sizes to price at, by default those of the traced call.
        placement: which rank holds which stage, if ranks hold several.
        training: optimizer and checkpointing, which count for memory and time.

    The policy raises:
        SplitError: a name is unknown, wishes contradict each other, or there are too few
            places to cut.
    """
    check_whole(num_stages=num_stages)
    where = placement or Placement.loop(num_stages, num_stages)
    if where.num_stages != num_stages:
        raise SplitError(
            f"the placement has {where.num_stages} stages, but {num_stages} were asked for"
        )
    return AutoSplit(
        num_stages,
        *wishes_of(pin, together),
        None if memory_limit is None else _per_rank(memory_limit, where.num_ranks),
        DEFAULT_HARDWARE if hardware is None else load_hardware(hardware),
        None if sizes is None else dict(sizes),
        where,
        training or Training(),
    )


@dataclass(frozen=True)
class AutoSplit:
    """The policy that `auto_split` makes; `num_stages` tells `pipeline` what to open."""

    num_stages: int
    pin: Mapping[str, int]
    together: tuple[tuple[str, ...], ...]
    memory_limit: tuple[float, ...] | None
    hardware: Hardware
    sizes: Mapping[str, int] | None
    placement: Placement
    training: Training

    def __call__(self, traced: TracedGraph) -> Assignment:
        """Assign the nodes of a graph to stages."""
        sizes = _all_sizes(traced, {**traced.hints, **(self.sizes or {})})
        costs = GraphCosts.of(traced, sizes, fused_attention=self.hardware.fuses_attention)
        load = workload_of(costs, sizes, self.hardware, self.training)
        if len(load.work.items) < self.num_stages:
            raise SplitError(
                f"cannot make {self.num_stages} stages: the captured graph has "
                f"{len(load.work.items)} parts to spread\n"
                "ask for fewer stages, or open every module with granularity='op'"
            )
        pins = {i: s for name, s in self.pin.items() for i in named_items(costs, load, name)}
        together = tuple(
            tuple(sorted({i for name in group for i in named_items(costs, load, name)}))
            for group in self.together
        )
        limits = Limits(pins, together, self.memory_limit, link=self.hardware.intra)
        try:
            found = partition(load.work, self.placement, limits, reorder_gain=REORDER_GAIN)
        except PlanError as error:
            raise SplitError(str(error)) from error
        return assign(load, found)


def _all_sizes(traced: TracedGraph, known: dict[str, int]) -> dict[str, int]:
    """Return sizes with a guess for those that depend on data: the largest of the others."""
    used = {name for n in traced.graph.nodes for name in symbols_in((n.args, n.kwargs))}
    for node in traced.graph.nodes:
        used |= {name for spec in traced.facts.tensors(node) for name in spec.symbols}
    return dict.fromkeys(used, max(known.values(), default=1)) | known


def assign(load: Workload, found: Partition) -> Assignment:
    """The stage of each node from the stage of each item."""
    return Assignment(
        {name: found.stage_of[item] for item, names in enumerate(load.nodes) for name in names}
    )


def named_items(costs: GraphCosts, load: Workload, name: str) -> list[int]:
    """The items that a module's work is in.

    Raises:
        SplitError: nothing runs under that name, or only as part of a closed module.
    """
    item_of = load.item_of()
    found = {
        item_of[node.name]
        for node in costs.nodes
        if node.module == name or node.module.startswith(f"{name}.")
    }
    if found:
        return sorted(found)
    modules = list(dict.fromkeys(node.module for node in costs.nodes if node.module))
    around = [module for module in modules if name.startswith(f"{module}.")]
    if around:
        raise SplitError(
            f"{name!r} is inside {around[0]!r}, which stays in one piece here; "
            f"name {around[0]!r} instead, or capture with granularity='op'"
        )
    close = difflib.get_close_matches(name, modules, cutoff=0.4)
    hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
    raise SplitError(f"no module {name!r} runs in this model{hint}")


def _per_rank(limit: float | Sequence[float], num_ranks: int) -> tuple[float, ...]:
    if isinstance(limit, int | float):
        return (float(limit),) * num_ranks
    return tuple(map(float, limit))
