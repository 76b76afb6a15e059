"""What is planned for: a model or a pipe, captured and priced.

In:  a model with an example call, or a `Pipe`.
Out: a `Subject`: the graph, its costs, the sizes of the call, and stages if they are fixed.

Modules are opened as far as the stages asked for need it, but repeated blocks stay whole as long
as there are enough of them: they are what checkpointing wraps, and equal ones are
priced once. Of a `Pipe` each stage is one part, and checkpointed as a whole.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from fxpipe.errors import PlanError, TraceError
from fxpipe.graph.capture.capture import capture
from fxpipe.graph.capture.traced_graph import TracedGraph
from fxpipe.graph.cut.flow import work_nodes
from fxpipe.graph.markers import ancestors, choose_opened
from fxpipe.graph.pipe import Pipe
from fxpipe.planner.cost.graph_costs import GraphCosts
from fxpipe.planner.cost.hardware import Hardware
from fxpipe.planner.search.space import Space, check_whole

__all__ = ["Subject", "opened_for", "subject_of"]

_DEEP = 16
"""A model of so many repeated blocks has enough of them for any sensible pipeline."""


@dataclass(frozen=True)
class Subject:
    """A captured model and what its parts cost.

    `stage_of` and `pipe` are set if the stages are fixed; `call` is the example call.
    """

    traced: TracedGraph
    costs: GraphCosts
    sizes: Mapping[str, int]
    call: tuple[tuple[Any, ...], Mapping[str, Any]]
    stage_of: Mapping[str, int] | None = None
    pipe: Pipe | None = None

    @property
    def num_stages(self) -> int | None:
        return None if self.pipe is None else self.pipe.num_stages

    @property
    def num_parts(self) -> int:
        """How many stages are possible at most."""
        return sum(1 for node in self.costs.nodes if node.parameters) or len(self.costs.nodes)

    @property
    def opened(self) -> tuple[str, ...]:
        return tuple(sorted(self.traced.opened))

    @property
    def blocks(self) -> tuple[str, ...]:
        """The modules that checkpointing wraps."""
        return tuple(dict.fromkeys(n.module for n in self.costs.nodes if n.is_block and n.module))

    @property
    def makes_scores(self) -> bool:
        """Whether the output looks like scores of words that a loss is still to be made of."""
        specs = [self.costs.specs[value] for value in self.costs.result]
        return len(specs) == 1 and specs[0].dtype.is_floating_point and len(specs[0].shape) > 2

    def uncut(self) -> TracedGraph:
        """The captured graph; captured again if an earlier cut has written transfers into it."""
        known = {node.name for node in self.costs.nodes}
        facts = self.traced.facts
        if all(n.name in known for n in work_nodes(self.traced) if not facts[n].is_part):
            return self.traced
        args, kwargs = self.call
        return capture(self.traced.module, args, kwargs, opened=set(self.traced.opened))

    def opened_up(self, hardware: Hardware) -> Subject | None:
        """The same model with its blocks opened, so that cuts may fall between their parts."""
        inside = {
            name
            for name in self.blocks
            if any(True for part in self.traced.module.get_submodule(name).children())
        }
        if self.pipe is not None or not inside:
            return None
        sizes = {name: size for name, size in self.sizes.items() if name in self.traced.hints}
        opened = {*self.traced.opened, *inside}
        try:
            return subject_of(self.traced.module, *self.call, 0, hardware, sizes, opened)
        except TraceError:
            return None  # a block whose code looks at values stays whole

    def narrowed(self, space: Space) -> Space:
        """The choices that this capture leaves.

        Raises:
            PlanError: microbatch sizes were asked for that the model was not captured with, or
                expert parallelism of a model without experts.
        """
        if not any(parameter.is_expert for parameter in self.costs.parameters.values()):
            if 1 not in space.expert_parallel:
                raise PlanError(
                    f"expert_parallel is {list(space.expert_parallel)}, but no parameter is in "
                    "'experts' by its name (as in 'layers.0.experts.3.up.weight')"
                )
            space = replace(space, expert_parallel=(1,))
        if "batch" in self.traced.hints:
            return space
        rows = _rows_of(self.call)
        if rows is None:
            return space
        if space.microbatch_sizes is not None and space.microbatch_sizes != (rows,):
            raise PlanError(
                f"the model takes {rows} rows at a time only, as in the example, but "
                f"microbatch_sizes is {list(space.microbatch_sizes)}"
            )
        return replace(space, microbatch_sizes=(rows,))


def subject_of(
    model: nn.Module | Pipe,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    num_stages: int,
    hardware: Hardware,
    sizes: Mapping[str, int] | None,
    opened: Iterable[str] | None = None,
) -> Subject:
    """Capture and price a model for at most `num_stages` stages, or with given modules opened."""
    pipe: Pipe | None = None
    stage_of: dict[str, int] | None = None
    if isinstance(model, Pipe):
        traced = capture(_Series(model), args, kwargs, opened={"", "stages"})
        stage_of, pipe = _stages_of(traced), model
    elif isinstance(model, nn.Module):
        if isinstance(args, torch.Tensor):
            raise PlanError("example_args is a tuple of arguments, got a tensor: write (x,)")
        if not isinstance(args, Sequence):
            raise PlanError(f"example_args is a tuple of arguments, got {args!r}")
        traced = _captured(model, args, kwargs, num_stages, opened)
    else:
        raise PlanError(f"plan takes a torch.nn.Module or a Pipe, got {type(model).__name__}")
    _check_sizes({} if sizes is None else sizes, traced.hints)
    fused = hardware.fuses_attention
    costs = GraphCosts.of(traced, traced.hints, fused_attention=fused)
    call = (tuple(args), dict(kwargs or {}))
    return Subject(traced, costs, {**traced.hints, **(sizes or {})}, call, stage_of, pipe)


def _captured(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    num_stages: int,
    opened: Iterable[str] | None,
) -> TracedGraph:
    """A capture for so many stages; for no more than blocks where code in them looks at values."""
    if opened is not None:
        return capture(model, args, kwargs, opened=set(opened))
    try:
        return capture(model, args, kwargs, opened=opened_for(model, num_stages))
    except TraceError as error:
        fewer = opened_for(model, min(num_stages, max(len(_blocks(model)), 2)))
        if fewer == opened_for(model, num_stages):
            raise
        try:
            return capture(model, args, kwargs, opened=fewer)
        except TraceError:
            raise error from None


def _check_sizes(sizes: object, known: Mapping[str, int]) -> None:
    if not isinstance(sizes, Mapping):
        raise PlanError(f"sizes is {sizes!r}; give numbers by name, such as {{'sequence': 8192}}")
    unknown = sorted(set(map(str, sizes)) - set(known))
    if unknown:
        raise PlanError(
            f"sizes names {', '.join(unknown)}; this model has {', '.join(known) or 'none'}"
        )
    check_whole(**{f"sizes[{name!r}]": size for name, size in sizes.items()})
    if sizes.get("batch", known.get("batch")) != known.get("batch"):
        raise PlanError("sizes names batch, which follows from microbatches: use microbatch_sizes")


def opened_for(model: nn.Module, num_stages: int) -> set[str]:
    """The modules to open for at most `num_stages` stages, without opening repeated blocks.

    Of a deep model they stay whole for any number: an opened block is not checkpointed as one.
    """
    blocks = _blocks(model)
    whole = blocks if num_stages <= len(blocks) or len(blocks) >= _DEEP else ()
    return choose_opened(model, min(num_stages, max(len(blocks), 2)), whole)


class _Series(nn.Module):
    """The stages of a pipe as one model, so that each is priced as one part."""

    def __init__(self, pipe: Pipe) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stage.module for stage in pipe.stages)
        parameters = [
            inspect.Parameter(p.name, getattr(inspect.Parameter, p.kind), default=p.default)
            if p.has_default
            else inspect.Parameter(p.name, getattr(inspect.Parameter, p.kind))
            for p in pipe.info().inputs.parameters
        ]

        def forward(*args: Any, **kwargs: Any) -> Any:
            return pipe(*args, **kwargs)

        forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        self.forward = forward


def _stages_of(traced: TracedGraph) -> dict[str, int]:
    """The stage of each node of a series; what is between stages goes with the one before."""
    found: dict[str, int] = {}
    stage = 0
    for node in work_nodes(traced):
        if node.op == "call_module" and str(node.target).startswith("stages."):
            stage = int(str(node.target).split(".")[1])
        found[node.name] = stage
    return found


def _blocks(model: nn.Module) -> list[str]:
    """The modules of the most frequent kind that has parts; experts are parts of one."""
    kinds: dict[type, list[str]] = {}
    for name, part in model.named_modules():
        has_parts = any(True for _ in part.children()) and any(True for _ in part.parameters())
        has_parts = has_parts and ".experts." not in f".{name}."
        if has_parts and not isinstance(part, (nn.ModuleList, nn.ModuleDict)):
            kinds.setdefault(type(part), []).append(name)
    found = max(kinds.values(), key=len, default=[])
    around = ancestors(found)  # one that holds others of its kind is no block
    return [name for name in found if name not in around]


def _rows_of(call: tuple[tuple[Any, ...], Mapping[str, Any]]) -> int | None:
    tensors = [v for v in (*call[0], *call[1].values()) if isinstance(v, torch.Tensor) and v.dim()]
    return int(tensors[0].shape[0]) if tensors else None
