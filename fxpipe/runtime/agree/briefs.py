"""What each rank says of itself before a new kind of step, and what follows from all of it.

Every rank answers the questions here from what all ranks said, in the same way: so either all go
on or all raise the same error.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fxpipe.errors import InputError, ScheduleError
from fxpipe.runtime.agree.inputs import check_keywords
from fxpipe.runtime.parameters.tied import TiedGroup
from fxpipe.runtime.stage.boundary import Skeleton
from fxpipe.runtime.stage.stage_kind import Front

__all__ = [
    "Brief", "Route", "StageFacts", "agreed_routes", "agreed_rows", "check_averaged", "check_loss",
    "check_names", "check_pipelines", "check_tied",
]  # fmt: skip


class StageFacts(NamedTuple):
    """What a stage contributes to the question who wants a gradient."""

    trainable: bool
    inputs_with_grad: bool
    dtypes: frozenset[torch.dtype]
    is_parallel: bool

    @property
    def wants_gradient(self) -> bool:
        return self.trainable or self.inputs_with_grad


class Brief(NamedTuple):
    """All that the other ranks must know of one; plain data."""

    has_loss: bool
    """Whether it has the last stage and a loss function for it."""
    has_loss_fn: bool
    rows: tuple[int, ...] | None
    given: Sequence[str]
    """Names of its keyword inputs."""
    spec: Sequence[str]
    """Names in its `kwargs_chunk_spec`."""
    known: frozenset[str] | None
    """Names of keyword inputs that may be passed because of its stages; None: any."""
    inputs: Mapping[str, Any]
    """By name: structure, shapes and whether a gradient is wanted of what it can send."""
    sizes: Sequence[Any]
    stages: Mapping[int, StageFacts]
    reduces: bool
    shards: bool
    replicas: int
    """How many replicas one of its stages has, at most."""
    alone: Sequence[str]
    """Parameters that want a gradient and that nothing averages over replicas."""
    used: Sequence[str]
    """Inputs of its stages that require a gradient."""
    tied: Sequence[Sequence[tuple[Any, ...]]]
    """For each tied group its copies: rank, requires_grad, dtype, shape, is_meta."""


@dataclass(frozen=True, slots=True)
class Route:
    """A model input that rank `target` needs, was not given, and gets from `source`."""

    name: str
    source: int
    target: int
    skeleton: Skeleton
    shapes: tuple[tuple[tuple[int, ...], torch.dtype], ...]


def check_pipelines(facts: Sequence[Mapping[str, str]]) -> None:
    """Compare what the ranks say of their pipelines.

    Raises:
        ScheduleError: listing everything that differs.
    """
    lines = []
    for name in dict.fromkeys(name for found in facts for name in found):
        values = [str(found.get(name)) for found in facts]
        if len(set(values)) > 1:
            shown = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))
            lines.append(f"  {name}: {shown}")
    if lines:
        raise ScheduleError("the ranks do not run the same pipeline:\n" + "\n".join(lines))


def agreed_rows(briefs: Sequence[Brief], first: int) -> tuple[int, ...] | None:
    """Rows of every microbatch: those of rank `first`, which the others must not contradict."""
    known = {r: brief.rows for r, brief in enumerate(briefs) if brief.rows is not None}
    agreed: tuple[int, ...] | None = known.get(first, next(iter(known.values()), None))
    other = {rank: sum(rows) for rank, rows in known.items() if rows != agreed}
    if other:
        assert agreed is not None
        shown = ", ".join(f"rank {rank} passes {size}" for rank, size in other.items())
        raise InputError(f"the batch has {sum(agreed)} rows on rank {first}, but {shown}")
    return agreed


def check_names(briefs: Sequence[Brief]) -> None:
    """Refuse keyword inputs that no stage takes, and specs of such."""
    given = frozenset(name for brief in briefs for name in brief.given)
    known = given
    takes = [brief.known for brief in briefs if brief.known is not None]
    if len(takes) == len(briefs):
        known = frozenset[str]().union(*takes)
        check_keywords(given, known)
    unknown = sorted({name for brief in briefs for name in brief.spec} - known - given)
    if unknown:
        close = difflib.get_close_matches(unknown[0], known, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise InputError(
            f"kwargs_chunk_spec names {', '.join(map(repr, unknown))}, but the keyword inputs "
            f"are {', '.join(map(repr, sorted(known))) or 'none'}{hint}"
        )


def check_loss(briefs: Sequence[Brief]) -> None:
    """Refuse a loss function that is missing where it would be called."""
    having = [rank for rank, brief in enumerate(briefs) if brief.has_loss_fn]
    if having and not any(brief.has_loss for brief in briefs):
        raise InputError(
            f"the rank of the last stage has no loss_fn, but rank {having[0]} has one: step() "
            "would give no gradients; give the schedule the same loss_fn on all ranks"
        )


def check_averaged(briefs: Sequence[Brief]) -> None:
    """Refuse parameters that each replica would train on its own."""
    alone = [name for brief in briefs for name in brief.alone]
    if alone and any(brief.replicas > 1 for brief in briefs):
        raise InputError(
            f"the pipeline has {max(brief.replicas for brief in briefs)} data-parallel replicas, "
            f"but nothing averages the gradients of {len(alone)} parameters: "
            f"{', '.join(alone[:5])}{', ...' * (len(alone) > 5)}. Wrap the whole module of every "
            "stage in DistributedDataParallel or by fully_shard; what is meant to differ goes "
            "into ignored_params of fully_shard"
        )


def check_tied(briefs: Sequence[Brief], tied: Sequence[TiedGroup]) -> None:
    """Refuse copies of a tied parameter that are not alike."""
    for place, group in enumerate(tied):
        copies = [copy for brief in briefs for copy in brief.tied[place]]
        for what, at in (("requires_grad", 1), ("dtype", 2), ("shape", 3), ("is_meta", 4)):
            if len({copy[at] for copy in copies}) > 1:
                shown = ", ".join(f"{copy[at]} on rank {copy[0]}" for copy in copies)
                raise InputError(
                    f"the copies of the tied parameter {group.name!r} differ in {what}: "
                    f"{shown}; freeze, cast or replace all of them alike"
                )


def agreed_routes(
    briefs: Sequence[Brief], front: Front, rank_of: Sequence[int]
) -> tuple[Route, ...]:
    """Who sends which input to whom."""
    missing: list[tuple[str, int, int]] = []
    nowhere: dict[str, list[int]] = {}
    for stage, home in enumerate(rank_of):
        rank = 0 if len(briefs) == 1 else home
        for name in front.needs(stage):
            if name in briefs[rank].given:
                continue
            source = next((r for r, one in enumerate(briefs) if name in one.given), None)
            if source is None:
                nowhere.setdefault(name, []).append(stage)
            elif (name, source, rank) not in missing:
                missing.append((name, source, rank))
    if nowhere:
        lines = ", ".join(f"{name!r} (stages {stages})" for name, stages in nowhere.items())
        raise InputError(
            f"no rank was given the model inputs {lines}; pass them on the rank of the first "
            "stage, or make the same call on every rank"
        )
    return tuple(_route(*one, briefs) for one in missing)


def _route(name: str, source: int, target: int, briefs: Sequence[Brief]) -> Route:
    if name not in briefs[source].inputs:
        raise InputError(
            f"the input {name!r} cannot be sent from rank {source} to rank {target}, which "
            "needs it: it is not made of tensors and plain values; pass it there too"
        )
    skeleton, shapes, has_gradient = briefs[source].inputs[name]
    if has_gradient:
        raise InputError(
            f"the input {name!r} requires a gradient and is used on rank {target}, "
            "which was not given it; pass it there too"
        )
    return Route(name, source, target, Skeleton.of_plain(*skeleton), shapes)
