"""What was observed of one call and its backward, as data: operations, and bytes that are kept."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from fxpipe.planner.cost.hardware import OpClass

__all__ = ["PHASES", "Observation", "Op", "Phase"]

Phase = Literal["forward", "backward_input", "backward_weight"]
PHASES: tuple[Phase, ...] = ("forward", "backward_input", "backward_weight")


@dataclass(frozen=True, slots=True)
class Op:
    """One operation that ran, or a collective of a `group` of ranks.

    `num_bytes` are read and written, `state_bytes` of them are parameters or their
    gradients, `key_bytes` keys and values of attention, `routed_bytes` what a stack of
    experts reads besides its weights. `makes_gradient` marks the product that makes the
    gradient of a weight. `experts` is how many experts' weights or gradients are touched,
    `groups` that a token goes to at most so many of so many groups of them, and `launches` how
    often the host starts a kernel for it if each is started by itself.
    """

    name: str
    op_class: OpClass
    dtype: str
    flops: float
    num_bytes: float
    made_bytes: float
    state_bytes: float = 0
    key_bytes: float = 0
    routed_bytes: float = 0
    makes_gradient: bool = False
    group: str = ""
    experts: int = 0
    groups: tuple[int, int] | None = None
    launches: float = 0

    @property
    def fixed_bytes(self) -> float:
        """Bytes that do not follow the number of rows."""
        return self.state_bytes + (self.made_bytes if self.makes_gradient else 0)

    @property
    def is_lookup(self) -> bool:
        return "embedding" in self.name


@dataclass(frozen=True)
class Observation:
    """What one call costs; bytes that belong to parameters are never counted.

    `kept_inside` is alive between forward and backward, made by the call and not an
    output. Kernels that fuse everything around products keep `kept_by_products` of it: what
    products have made, and what they, attention and norms read; `kept_operands` of that are
    operands of products that nothing else needs. `keeps_input[i]` and `keeps_output[j]` say
    whether the storage of an input or output is held. `alias[j]` is the input whose storage
    output j shares. Peaks are the most that was alive at once beyond what was given (for
    backwards: and beyond what was kept).
    `deferred` is what the weight half needs after the input half.
    """

    forward: tuple[Op, ...]
    backward_input: tuple[Op, ...] = ()
    backward_weight: tuple[Op, ...] = ()
    kept_inside: float = 0
    keeps_input: tuple[bool, ...] = ()
    keeps_output: tuple[bool, ...] = ()
    alias: tuple[int | None, ...] = ()
    forward_peak: float = 0
    backward_peak: float = 0
    deferred: float = 0
    is_rough: bool = False
    kept_by_products: float = math.inf
    kept_operands: float = 0

    def ops(self, phase: Phase) -> tuple[Op, ...]:
        found: tuple[Op, ...] = getattr(self, phase)
        return found

    def flops(self, phase: Phase) -> float:
        return sum(op.flops for op in self.ops(phase))
