"""How a model will be trained, as far as it costs time and memory.

`Training` says what a user chooses: optimizer, recomputation, precision, kernels, the loss.
`state_of` is what a parameter then takes on one rank, `as_run` what a node does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, get_args

from fxpipe.errors import PlanError
from fxpipe.planner.cost.graph_costs import Parameter
from fxpipe.planner.cost.observation import Observation, Op
from fxpipe.planner.cost.parallel import Layout

__all__ = [
    "CHECKPOINTINGS",
    "CHECKPOINTS",
    "KERNELS",
    "OPTIMIZERS",
    "Checkpointing",
    "Kernels",
    "State",
    "Training",
    "as_run",
    "state_of",
    "with_loss",
]

Checkpointing = Literal[
    "none", "expansions", "selective", "alternate", "1/4", "1/2", "3/4", "full"
]  # fmt: skip
CHECKPOINTS: tuple[Checkpointing, ...] = ("none", "selective", "full")
_SHARES: Mapping[str, float] = MappingProxyType(
    {
        "none": 0.0,
        "expansions": 1.0,
        "selective": 1.0,
        "alternate": 1.0,
        "1/4": 0.25,
        "1/2": 0.5,
        "3/4": 0.75,
        "full": 1.0,
    }
)

CHECKPOINTINGS: tuple[Checkpointing, ...] = get_args(Checkpointing)
"""All ways, from the plainest on."""

OPTIMIZERS: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        "none": (0.0, 0.0),
        "sgd": (0.0, 0.0),
        "momentum": (1.0, 0.0),
        "adam": (2.0, 0.0),
        "adamw": (2.0, 0.0),
        "adamw-master": (0.0, 12.0),
        "adamw-half": (0.0, 8.0),
        "adamw-lean": (0.0, 8.0),
    }
)
"""Bytes of optimizer state: per byte of a trainable parameter, and per element besides.

"adamw-master" is what bf16 training uses: for weights of 16 bits it keeps a float32 copy, two
float32 moments, and gradients in float32; for wider weights it is "adamw". "adamw-half" has
moments of 16 bits (DeepSeek-V3 technical report, 3.3.3), "adamw-lean" gradients, too
(`main_grads_dtype` of Megatron's precision-aware optimizer)."""

Kernels = Literal["eager", "compiled", "asynchronous", "fused", "overlapped"]
KERNELS: tuple[Kernels, ...] = ("eager", "compiled", "asynchronous", "fused", "overlapped")
"""Who runs operations: torch one by one; torch.compile, which joins those that only move data, or
with asynchronous tensor parallelism also hides some of a tensor group's collectives behind
products; hand-written kernels, which add to a gradient inside the product that makes it; and the
vendor's, which do that and hide collectives too."""


_BETTER_ATTENTION = 0.55
"""How long attention takes with the vendor's latest kernel, over what torch's own takes."""

# torch's asynchronous tensor parallelism shortens a step of Llama 3 70B by 8%
# (https://discuss.pytorch.org/t/209487); the vendor's kernels hide more.
_TENSOR_SHARE: Mapping[str, float] = MappingProxyType({"asynchronous": 0.7, "overlapped": 0.25})

_FLOAT8_LAUNCHES = 3
"""Kernels for one expert's product in 8 bits: its operand, the operand's scales, the product."""


@dataclass(frozen=True, slots=True)
class Training:
    """How the model will be trained.

    Checkpointing applies to blocks (modules with parts): "full" keeps a block's inputs
    and runs its forward again, "1/2" does so for every other block, "selective" also keeps
    the results of products and repeats only the rest, "alternate" keeps those of every other
    product, "expansions" all but what attention reads where few numbers were expanded to it, as
    in latent attention (`recompute_modules=["mla_up_proj"]` of Megatron). `has_loss` prices a
    cross entropy after the model's output. `expert_groups` says to how many of how many groups of
    experts one token may go, as in DeepSeek-V3 to 4 of 8.
    """

    optimizer: str = "adamw-master"
    checkpointing: Checkpointing = "none"
    kernels: Kernels = "eager"
    float8: bool = False
    has_loss: bool = False
    expert_groups: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        for name, value, known in (
            ("optimizer", self.optimizer, OPTIMIZERS),
            ("checkpointing", self.checkpointing, _SHARES),
            ("kernels", self.kernels, KERNELS),
        ):
            if value not in known:
                raise PlanError(f"unknown {name} {value!r}; known: {', '.join(known)}")
        groups = self.expert_groups
        if groups is None:
            return
        is_pair = isinstance(groups, tuple) and all(isinstance(count, int) for count in groups)
        if not is_pair or len(groups) != 2 or not 1 <= groups[0] <= groups[1]:
            raise PlanError(f"expert_groups is {groups!r}; give so many of so many, such as (4, 8)")

    @property
    def is_fused(self) -> bool:
        """Whether kernels add to gradients themselves, and gather what they read again."""
        return self.kernels in ("fused", "overlapped")

    @property
    def splits_backward(self) -> bool:
        """Whether a backward has two halves: that of what torch.compile made has not."""
        return self.kernels not in ("compiled", "asynchronous")

    @property
    def tensor_share(self) -> float:
        """The share of a tensor group's collectives that shows."""
        return _TENSOR_SHARE.get(self.kernels, 1.0)

    def recomputes(self, block: int) -> bool:
        """Whether the block with this number computes its forward again."""
        share = _SHARES[self.checkpointing]
        return int((block + 1) * share) > int(block * share)


@dataclass(frozen=True, slots=True)
class State:
    """Bytes of one parameter on one rank.

    `reduced` and `gathered` are what its gradient and weight come to in a collective over the
    replicas, before they are divided among them.
    """

    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    reduced: float = 0.0
    gathered: float = 0.0

    @property
    def held(self) -> float:
        return self.weights + self.gradients + self.optimizer


def state_of(parameter: Parameter, training: Training, layout: Layout) -> State:
    """What a parameter takes; tensors of one dimension are on every rank of a tensor group."""
    ranks = layout.context * layout.data
    part = 1.0 if parameter.dims < 2 else 1 / layout.tensor
    if parameter.is_expert and layout.expert > 1:
        part, ranks = 1 / layout.expert, layout.num_ranks // layout.expert
    weights = part * parameter.num_bytes
    if not parameter.is_trainable:
        return State(weights)
    per_byte, per_element = OPTIMIZERS[training.optimizer]
    gradients = weights
    if per_element and parameter.itemsize <= 2:
        optimizer = per_element * part * parameter.numel
        gradients = weights if training.optimizer == "adamw-lean" else 4 * part * parameter.numel
    else:
        optimizer = (2.0 if per_element else per_byte) * weights
        if ranks > 1 and not layout.sharding:
            gradients *= 2  # replicas reduce copies in buckets
    reduced = min(gradients, 4 * part * parameter.numel)
    shard = [1 / ranks if layout.sharding >= stage else 1.0 for stage in (3, 2, 1)]
    return State(weights * shard[0], gradients * shard[1], optimizer * shard[2], reduced, weights)


def as_run(seen: Observation, training: Training, *, is_block: bool) -> Observation:
    """What a node does with the kernels and the precision of the training."""
    if training.kernels == "eager" and not training.float8 and training.expert_groups is None:
        return seen

    def run(op: Op) -> Op:
        if op.op_class == "memory" and not op.is_lookup and training.kernels != "eager":
            return replace(op, num_bytes=op.num_bytes / 2)
        if op.op_class == "attention" and training.kernels == "overlapped":
            return replace(op, flops=_BETTER_ATTENTION * op.flops)
        if op.op_class == "matmul" and op.experts and training.is_fused:
            each = _FLOAT8_LAUNCHES if training.float8 else 1
            op = replace(op, launches=op.experts * each)
        if op.routed_bytes:
            op = replace(op, groups=training.expert_groups)
        if op.op_class == "matmul" and training.float8 and is_block and op.dtype != "float32":
            return replace(op, dtype="float8")
        return op

    def casts(ops: tuple[Op, ...]) -> tuple[Op, ...]:
        """Reading activations once more to write them in 8 bits."""
        if not (training.float8 and is_block):
            return ()
        moved = sum(op.num_bytes - op.fixed_bytes for op in ops if op.op_class == "matmul")
        return (Op("cast", "memory", "bfloat16", 0, 0.75 * moved, 0),) if moved else ()

    weight = tuple(
        op
        for op in seen.backward_weight
        if not (training.is_fused and op.name == "aten.add_" and op.state_bytes)
    )
    # The product at work has its operands in 8 bits as well.
    copies = max((op.num_bytes for op in seen.forward if op.op_class == "matmul"), default=0.0) / 2
    copies *= training.float8 and is_block
    inside = seen.kept_inside
    if training.kernels == "overlapped" and is_block:
        less = seen.kept_operands / 2 if training.float8 else 0.0  # operands wait in 8 bits
        inside = min(inside, seen.kept_by_products - less)
    return replace(
        seen,
        kept_inside=inside,
        forward_peak=seen.forward_peak + copies,
        backward_peak=seen.backward_peak + copies,
        forward=(*map(run, seen.forward), *casts(seen.forward)),
        backward_input=(*map(run, seen.backward_input), *casts(seen.backward_input)),
        backward_weight=tuple(map(run, weight)),
    )


def with_loss(
    seen: Observation, numel: float, itemsize: int, *, is_divided: bool = False
) -> Observation:
    """The node that makes the output, with a float32 cross entropy of it.

    Where the words are divided among ranks, one more float32 copy lives for a moment: shifted
    scores beside their exponentials, then the gradient beside what it is added to.
    """

    def op(num_bytes: float) -> Op:
        return Op("loss", "memory", "float32", 0, num_bytes, 0)

    wide = 0 if itemsize >= 4 else 4 * numel
    more = 4 * numel if is_divided else 0
    return replace(
        seen,
        forward=(*seen.forward, op(wide + itemsize * numel), op(8 * numel)),
        backward_input=(op(8 * numel), op(wide + itemsize * numel), *seen.backward_input),
        # The output itself and float32 scores wait for the backward, which makes the gradient
        # of both before it makes that of the output.
        kept_inside=seen.kept_inside + 4 * numel + (itemsize * numel if wide else 0),
        forward_peak=seen.forward_peak + wide + 4 * numel + more,
        backward_peak=max(seen.backward_peak + itemsize * numel, 8 * numel + more),
    )
