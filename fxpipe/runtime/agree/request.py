"""What a schedule was asked for, and what one call was passed on this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from fxpipe.errors import InputError, InputTypeError
from fxpipe.microbatch import Microbatches, split_batch
from fxpipe.program import Edges, Program, lower
from fxpipe.program.generators import forward_only_on
from fxpipe.program.play.queues import Streams
from fxpipe.runtime.stage.stage_kind import Front

__all__ = ["Call", "Chunks", "Options", "lower_call", "split_call"]


@dataclass(frozen=True, slots=True)
class Options:
    """What a schedule was asked for."""

    loss_fn: Callable[..., Any] | None = None
    args_chunk_spec: tuple[Any, ...] | None = None
    kwargs_chunk_spec: Mapping[str, Any] | None = None
    output_merge_spec: Any = None
    scale_grads: bool = True
    timeout: float = 1800.0
    receives: Any = "early"
    boundary_dtype: torch.dtype | None = None
    tp_group: dist.ProcessGroup | None = None
    max_unsharded: int = 3
    offload: int | None = None
    unshard_lookahead: str | tuple[int, ...] = "full"
    max_outstanding_sends: int | None = None
    tied: tuple[Any, ...] = ()

    def lookahead(self, num_ranks: int) -> tuple[int, ...] | None:
        """Of how many stages a rank begins to gather parameters; None: of all it may hold."""
        if self.unshard_lookahead == "full":
            return None
        if self.unshard_lookahead == "auto":
            return tuple(min(rank + 2, self.max_unsharded) for rank in range(num_ranks))
        given = self.unshard_lookahead
        if (
            not isinstance(given, list | tuple)
            or len(given) != num_ranks
            or not all(isinstance(n, int) and n > 0 for n in given)
        ):
            raise InputError(
                'unshard_lookahead is "full", "auto" or a list with a number above 0 for each of '
                f"the {num_ranks} ranks, got {given!r}"
            )
        return tuple(given)


@dataclass(frozen=True, slots=True)
class Call:
    """What the user passed to one step on this process."""

    training: bool
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any
    loss_kwargs: Mapping[str, Any]
    keeps_outputs: bool
    losses: list[torch.Tensor] | None = None
    presplit: tuple[Any, Any, Any] = (None, None, None)  # arg_mbs, kwarg_mbs, target_mbs
    finalizes: bool = True  # average gradients over replicas, or leave that to a later step
    batches: int | None = None  # so many, one behind the other, whose outputs are a list

    def taken(self, n: int) -> Call:
        """The same call with microbatches taken from lists and iterators, once per step."""
        whole = self._with_presplit()

        def taken(value: Any) -> Any:
            if isinstance(value, Microbatches):
                return Microbatches(value.take(n), rows=value.rows)
            return value

        return replace(whole, args=tuple(map(taken, whole.args)), target=taken(whole.target))

    def _with_presplit(self) -> Call:
        """The call with what was given by microbatch as its inputs and its target.

        Raises:
            InputError: whole and split inputs are both given, a list is none, or lists differ.
        """
        arg_mbs, kwarg_mbs, target_mbs = self.presplit
        if arg_mbs is kwarg_mbs is target_mbs is None:
            return self
        _check_presplit(arg_mbs, kwarg_mbs, target_mbs)
        if self.args or self.kwargs:
            shown = [f"{len(self.args)} positional"] * bool(self.args) + list(
                map(repr, self.kwargs)
            )
            raise InputError(
                f"pass inputs whole or as arg_mbs and kwarg_mbs, not both: got {', '.join(shown)}"
            )
        if self.target is not None and target_mbs is not None:
            raise InputError("pass the target whole or as target_mbs, not both")
        count = len(arg_mbs if arg_mbs is not None else kwarg_mbs or ())
        calls = list(zip(arg_mbs or [()] * count, kwarg_mbs or [{}] * count, strict=True))
        has_inputs = any(args or kwargs for args, kwargs in calls)  # not on a later rank
        return replace(
            self,
            args=(Microbatches(calls),) if has_inputs else (),
            target=self.target if target_mbs is None else Microbatches(target_mbs),
        )


@dataclass(slots=True)
class Chunks:
    """The inputs of this process, microbatch by microbatch, as the stages take them."""

    args: list[tuple[Any, ...]]
    kwargs: list[dict[str, Any]]
    rows: tuple[int, ...] | None
    check_unchanged: Callable[[], None] = lambda: None


def _check_presplit(arg_mbs: Any, kwarg_mbs: Any, target_mbs: Any) -> None:
    for name, value in (("arg_mbs", arg_mbs), ("kwarg_mbs", kwarg_mbs), ("target_mbs", target_mbs)):
        if value is not None and not isinstance(value, list):
            raise InputTypeError(f"{name} must be a list, got a {type(value).__name__}")
    for name, value, kind in (("arg_mbs", arg_mbs, tuple), ("kwarg_mbs", kwarg_mbs, dict)):
        odd = [type(item).__name__ for item in value or () if not isinstance(item, kind)]
        if odd:
            raise InputTypeError(f"{name} must be a list of {kind.__name__}s, has a {odd[0]}")
    if None not in (arg_mbs, kwarg_mbs) and len(arg_mbs) != len(kwarg_mbs):
        raise InputError(f"{len(arg_mbs)} arg_mbs do not go with {len(kwarg_mbs)} kwarg_mbs")


def split_call(call: Call, front: Front, options: Options, n: int) -> Chunks:
    """Split what this process was passed."""
    if not call.args and not call.kwargs:
        return Chunks([()] * n, [{} for _ in range(n)], None)
    kwargs_spec = options.kwargs_chunk_spec
    if isinstance(kwargs_spec, Mapping):  # names that no rank knows are refused in agreeing
        kwargs_spec = {k: v for k, v in kwargs_spec.items() if k in call.kwargs}
    split = split_batch(call.args, call.kwargs, n, options.args_chunk_spec, kwargs_spec or None)
    named = [front.name_inputs(a, k) for a, k in zip(split.args, split.kwargs, strict=True)]
    args, kwargs = [a for a, _ in named], [k for _, k in named]
    return Chunks(args, kwargs, split.rows, split.check_unchanged)


def lower_call(
    program: Program,
    options: Options,
    edges: Edges | None = None,
    *,
    trains: bool,
    reduces: bool,
    shards: bool,
    keep_input_backward: Sequence[int] = (),
    streams: Streams | None = None,
) -> Program:
    """What the ranks run for a step or an evaluation."""
    if not trains:
        program = forward_only_on(program.placement, program.num_microbatches)
    return lower(
        program,
        edges,
        receives=options.receives,
        keep_input_backward=keep_input_backward,
        reduce_grad=reduces and trains,
        max_unsharded=options.max_unsharded if shards else None,
        offload=options.offload if trains else None,
        unshard_lookahead=options.lookahead(program.num_ranks),
        streams=streams,
    )
