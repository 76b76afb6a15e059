"""Parallelism inside a stage, as pure transforms of what a node does.

In:  the `Observation` of a node as one device would run it, and a `Layout`.
Out: the `Observation` of one rank's share of it, with its collectives among the operations.

    tensor     products, attention and what they keep are divided; 2 reductions per block and
               direction, as an all-gather and a reduce-scatter if norms are divided too
    context    everything that follows the sequence is divided; keys and values go round
    expert     experts' weights are divided; tokens travel to their experts and back
    sharding   0 replicas, 1 optimizer state, 2 and gradients, 3 and weights are divided among
               replicas: that is a matter of state, see `state`

Ranks are laid out tensor first, then context and expert, then data, then the pipeline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fxpipe.errors import PlanError
from fxpipe.planner.cost.collectives import Collective, Group, collective_time
from fxpipe.planner.cost.hardware import Hardware
from fxpipe.planner.cost.observation import Observation, Op

__all__ = ["Layout", "communication", "op_time", "share_of"]


@dataclass(frozen=True, slots=True, order=True)
class Layout:
    """How the ranks of one stage share its work.

    `sharding` is the stage of ZeRO; `sequence` divides norms and residuals among the ranks of
    a tensor group, too. The experts' group is taken from tensor, context and data ranks: each
    of its ranks has whole experts.
    """

    tensor: int = 1
    context: int = 1
    expert: int = 1
    data: int = 1
    sharding: int = 0
    sequence: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.sharding <= 3:
            raise PlanError(f"sharding is a stage of ZeRO from 0 to 3, got {self.sharding}")
        if self.num_ranks % self.expert:
            raise PlanError(
                f"{self.expert} expert ranks do not divide {self.tensor} tensor times "
                f"{self.context} context times {self.data} data ranks"
            )

    @property
    def num_ranks(self) -> int:
        """Ranks of one stage, over all replicas."""
        return self.tensor * self.context * self.data

    @property
    def held_share(self) -> float:
        """The share of an activation that a rank holds."""
        return 1 / (self.context * (self.tensor if self.sequence else 1))

    @property
    def sent_share(self) -> float:
        """The share of an activation that a rank sends to the next stage."""
        return 1 / (self.context * self.tensor)

    def group(self, name: str) -> Group:
        """The ranks that one collective joins: tensor, context, expert, replicas, experts."""
        if name == "tensor":
            return Group(self.tensor, 1)
        if name == "context":
            return Group(self.context, self.tensor)
        if name == "expert":
            return Group(self.expert)
        if name == "experts":  # replicas of the same experts
            if self.expert == 1:
                return Group(self.context * self.data, self.tensor)
            return Group(self.num_ranks // self.expert, self.expert)
        return Group(self.context * self.data, self.tensor)


def op_time(op: Op, hardware: Hardware, layout: Layout) -> float:
    """Seconds of an operation or a collective."""
    if op.group:
        kind: Collective = op.name  # type: ignore[assignment]
        copies = op.num_bytes / op.made_bytes if op.made_bytes else 1.0
        group = layout.group(op.group)
        return collective_time(kind, op.num_bytes, group, hardware, copies, op.groups)
    work = hardware.time(op.op_class, op.dtype, op.flops, op.num_bytes)
    return max(work, op.launches * hardware.launch)


def share_of(
    seen: Observation, layout: Layout, stream: float, source: float, *, regathers: bool = False
) -> Observation:
    """One rank's share of a node whose first output has `stream` bytes and input `source`.

    `regathers` says that a product's gathered input is gathered again for the backward rather
    than kept whole.
    """
    if layout.context > 1:
        seen = _context_parallel(seen, layout.context)
        stream, source = stream / layout.context, source / layout.context
    if layout.expert > 1:
        seen = _expert_parallel(seen, layout.expert, stream)
    if layout.tensor > 1:
        sizes = (stream, source)
        seen = _tensor_parallel(seen, layout, *sizes, regathers)
    return seen


_RING = 0.4
"""How much longer attention takes in pieces that go round and are merged than in one, at most.

Fitted to Llama 3 8B with 2, 4 and 8 context ranks (see `benchmarks.published`)."""


def _context_parallel(seen: Observation, ranks: int) -> Observation:
    slower = 1 + _RING * (1 - 1 / ranks)

    def part(op: Op) -> Op:
        fixed = op.fixed_bytes
        return replace(
            op,
            flops=op.flops / ranks * (slower if op.op_class == "attention" else 1.0),
            num_bytes=fixed + (op.num_bytes - fixed) / ranks,
            made_bytes=op.made_bytes if op.makes_gradient else op.made_bytes / ranks,
            routed_bytes=op.routed_bytes / ranks,
        )

    keys = sum(op.key_bytes for op in seen.forward)
    # Keys and values go round once in the forward; in the backward their gradients do, too.
    more = [_collective("ring", "context", keys)] if keys else []
    back = [_collective("ring", "context", 2 * keys)] if keys and seen.backward_input else []
    made = _scaled(
        replace(
            seen,
            forward=(*map(part, seen.forward), *more),
            backward_input=(*map(part, seen.backward_input), *back),
            backward_weight=tuple(map(part, seen.backward_weight)),
        ),
        1 / ranks,
    )
    # Keys and values of all ranks pass through, in the backward with their gradients.
    return replace(
        made,
        forward_peak=made.forward_peak + keys,
        backward_peak=made.backward_peak + 2 * keys,
    )


def _expert_parallel(seen: Observation, ranks: int, stream: float) -> Observation:
    routed = max((op.routed_bytes for op in seen.forward), default=0.0)
    if not routed:
        return seen

    def part(op: Op) -> Op:
        if not op.experts:
            return op
        # Each rank has fewer experts and as many tokens for them.
        less = op.fixed_bytes if op.op_class != "memory" else op.num_bytes
        return replace(
            op,
            num_bytes=op.num_bytes - less * (1 - 1 / ranks),
            made_bytes=op.made_bytes / (ranks if op.makes_gradient else 1),
            state_bytes=op.state_bytes / ranks,
            launches=op.launches / ranks,
        )

    # Each token goes to several experts; a node has `stream` bytes of different ones.
    sent = replace(
        _collective("all_to_all", "expert", routed),
        made_bytes=min(stream, routed),
        groups=next(op.groups for op in seen.forward if op.routed_bytes),
    )
    travel = [sent] * 2
    back = travel if seen.backward_input or seen.backward_weight else []
    return replace(
        seen,
        forward=(*map(part, seen.forward), *travel),
        backward_input=(*map(part, seen.backward_input), *back),
        backward_weight=tuple(map(part, seen.backward_weight)),
    )


def _tensor_parallel(
    seen: Observation, layout: Layout, stream: float, source: float, regathers: bool
) -> Observation:
    ranks, sequence, is_whole = layout.tensor, layout.sequence, layout.expert > 1

    def part(op: Op) -> Op:
        if op.group:  # heads are divided, and tokens on their way to experts
            less = op.made_bytes / ranks
            return replace(op, num_bytes=op.num_bytes / ranks, made_bytes=less)
        if op.experts and is_whole:
            loose = op.num_bytes - op.fixed_bytes
            return replace(op, flops=op.flops / ranks, num_bytes=op.fixed_bytes + loose / ranks)
        if op.op_class == "memory" and not sequence and stream and op.made_bytes == stream:
            return op
        moved = op.num_bytes / ranks
        if op.op_class == "matmul":
            # Of the activations that a product reads and writes one side stays whole.
            loose = op.num_bytes - op.fixed_bytes
            moved = op.fixed_bytes / ranks + loose * (1 + 1 / ranks) / 2
        return replace(
            op,
            flops=op.flops / ranks,
            num_bytes=moved,
            made_bytes=op.made_bytes / ranks,
            state_bytes=op.state_bytes / ranks,
        )

    ahead, back, size = _reductions(seen, stream, source)
    whole = 0.0
    if not sequence:
        kept = [op.made_bytes for op in seen.forward if op.op_class == "memory"]
        whole = min(sum(made for made in kept if made == stream), seen.kept_inside / 2)
    inside = whole + (seen.kept_inside - whole) / ranks
    reduce = _collective("all_reduce", "tensor", size)
    made = replace(
        seen,
        forward=(*map(part, seen.forward), *[reduce] * ahead),
        backward_input=(*map(part, seen.backward_input), *[reduce] * back),
        backward_weight=tuple(map(part, seen.backward_weight)),
    )
    made = _scaled(made, 1 / ranks)
    # Each reduction has its gather: the input of the products before it is whole, one after
    # the other or, if it is kept for the weights' gradients, all of them. In the backward the
    # input's gradient is whole, beside the part of another product or the input once more.
    count = max(ahead, back) if sequence else 0
    gathered = size if count else 0.0
    saved = 0.0 if regathers or not back else count * gathered
    return replace(
        made,
        kept_inside=inside + saved,
        forward_peak=made.forward_peak + max(gathered, saved),
        backward_peak=made.backward_peak + 2 * gathered,
        deferred=made.deferred + saved,
    )


def _reductions(seen: Observation, stream: float, source: float) -> tuple[int, int, float]:
    """Reductions over a tensor group in the forward and the backward, and their bytes.

    After an attention's output product and after the last product of a feed-forward part;
    one for an embedding, and one in the backward of a product alone (the head).
    """
    kinds = [op.op_class for op in seen.forward if op.op_class in ("matmul", "attention")]
    has_backward = bool(seen.backward_input)
    if not kinds:
        return (1 if any(op.state_bytes and op.is_lookup for op in seen.forward) else 0), 0, stream
    if kinds == ["matmul"]:
        return 0, int(has_backward), source
    count = kinds.count("attention")
    after = (
        len(kinds) - 1 - max((i for i, kind in enumerate(kinds) if kind == "attention"), default=-1)
    )
    count += 1 if not count or after > 1 else 0
    return count, count * has_backward, stream


def _scaled(seen: Observation, share: float) -> Observation:
    return replace(
        seen,
        kept_inside=seen.kept_inside * share,
        forward_peak=seen.forward_peak * share,
        backward_peak=seen.backward_peak * share,
        deferred=seen.deferred * share,
    )


def _collective(kind: Collective, group: str, num_bytes: float) -> Op:
    return Op(kind, "memory", "bfloat16", 0, num_bytes, 0, group=group)


def communication(
    ops: Sequence[Op], hardware: Hardware, layout: Layout, *, tensor_share: float = 1.0
) -> float:
    """Seconds of a node's collectives that nothing in the node hides.

    Of a tensor group's collectives `tensor_share` shows.
    """
    ring = sum(op_time(op, hardware, layout) for op in ops if op.name == "ring")
    attention = sum(op_time(op, hardware, layout) for op in ops if op.op_class == "attention")
    rest = sum(
        op_time(op, hardware, layout) * (tensor_share if op.group == "tensor" else 1.0)
        for op in ops
        if op.group and op.name != "ring"
    )
    return rest + max(ring - attention, 0.0)
