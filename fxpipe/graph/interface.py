"""What each stage reads and writes, as data that every rank can compare.

A `TensorSpec` describes a tensor with sizes as expressions of the input sizes, so
a rank that knows the input sizes knows every boundary shape. A `StageInterface`
lists the ports of one stage. `check_interfaces` compares both ends of every
boundary and reports all misfits at once; it works for traced and for
hand-written stages alike.

`TensorSpec.requires_grad` on a port says that a gradient *can* come back through
it, computed as if every floating parameter were trainable. What is frozen may
change after the trace; the interface does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import sympy
import torch

from fxpipe.errors import PipeliningShapeError
from fxpipe.graph.dims import Dim, evaluate, free_names, plain, text

__all__ = [
    "Port",
    "Received",
    "Sent",
    "StageEdge",
    "StageInterface",
    "TensorSpec",
    "Tied",
    "check_interfaces",
    "edges_of",
]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a tensor on a stage boundary looks like; prints as `float32[batch, 4, 8]`."""

    shape: tuple[Dim, ...]
    dtype: torch.dtype
    requires_grad: bool = False
    is_atom: ClassVar[bool] = True  # inside a nested value it stands for a tensor

    def __post_init__(self) -> None:
        if self.requires_grad and not (self.dtype.is_floating_point or self.dtype.is_complex):
            raise ValueError(f"a {self.dtype} tensor cannot require a gradient")
        shape = tuple(int(d) if isinstance(d, sympy.Integer) else d for d in self.shape)
        object.__setattr__(self, "shape", shape)

    @classmethod
    def of(
        cls,
        tensor: torch.Tensor,
        names: Mapping[sympy.Symbol, sympy.Expr] | None = None,
    ) -> TensorSpec:
        """Describe a tensor; `names` renames the symbols of a fake tensor's sizes."""
        return cls(
            tuple(_dim_of(size, names) for size in tensor.shape), tensor.dtype, tensor.requires_grad
        )

    @property
    def symbols(self) -> frozenset[str]:
        """Names of the input sizes that the shape depends on."""
        return frozenset[str]().union(*(free_names(dim) for dim in self.shape))

    def bind(self, values: Mapping[str, int]) -> TensorSpec:
        """Return the spec with every size a number."""
        if not self.symbols:
            return self
        shape = tuple(int(evaluate(dim, values)) for dim in self.shape)
        return TensorSpec(shape, self.dtype, self.requires_grad)

    def __str__(self) -> str:
        dims = ", ".join(text(dim) for dim in self.shape)
        return f"{str(self.dtype).removeprefix('torch.')}[{dims}]"


def _dim_of(size: int | torch.SymInt, names: Mapping[sympy.Symbol, sympy.Expr] | None) -> Dim:
    if isinstance(size, torch.SymInt):
        dim: Dim = plain(size.node.expr, names)
        return dim
    return int(size)


@dataclass(frozen=True, slots=True)
class Port:
    """A named tensor on a stage boundary."""

    name: str
    spec: TensorSpec

    def __str__(self) -> str:
        return f"{self.name}: {self.spec}"


@dataclass(frozen=True, slots=True)
class Received:
    """A port of a stage that is filled by an earlier stage."""

    port: Port
    source_stage: int


@dataclass(frozen=True, slots=True)
class Sent:
    """A port of a stage that later stages read; sent once to each of them."""

    port: Port
    target_stages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StageInterface:
    """What one stage reads and writes.

    A stage module is called as `module(*received, **model_inputs)`. It returns its
    sent tensors in order, a single one bare; the last stage returns the model's output.
    """

    stage: int
    received: tuple[Received, ...]
    model_inputs: tuple[str, ...]
    sent: tuple[Sent, ...]
    state: tuple[str, ...]

    def __post_init__(self) -> None:
        for received in self.received:
            if received.source_stage == self.stage:
                raise ValueError(f"stage {self.stage} receives {received.port} from itself")
        for sent in self.sent:
            if self.stage in sent.target_stages or not sent.target_stages:
                raise ValueError(
                    f"stage {self.stage} sends {sent.port} to stages {sent.target_stages}"
                )

    def bind(self, values: Mapping[str, int]) -> StageInterface:
        """Return the interface with every size a number."""
        return StageInterface(
            self.stage,
            tuple(
                Received(Port(r.port.name, r.port.spec.bind(values)), r.source_stage)
                for r in self.received
            ),
            self.model_inputs,
            tuple(
                Sent(Port(s.port.name, s.port.spec.bind(values)), s.target_stages)
                for s in self.sent
            ),
            self.state,
        )

    def __str__(self) -> str:
        lines = [f"stage {self.stage}"]
        lines += [f"  receives {r.port} from stage {r.source_stage}" for r in self.received]
        lines += [f"  reads    model input {name}" for name in self.model_inputs]
        for s in self.sent:
            targets = ", ".join(map(str, s.target_stages))
            lines.append(f"  sends    {s.port} to stage {targets}")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class StageEdge:
    """The ports that one stage sends to another; `has_gradient` if any returns one."""

    source: int
    target: int
    ports: tuple[Port, ...]
    has_gradient: bool


@dataclass(frozen=True, slots=True)
class Tied:
    """Places, as (stage, parameter name), that hold one and the same parameter."""

    locations: tuple[tuple[int, str], ...]

    def __post_init__(self) -> None:
        if len(self.locations) < 2:
            raise ValueError(f"a tie needs at least two locations, got {self.locations}")


def edges_of(interfaces: Iterable[StageInterface]) -> tuple[StageEdge, ...]:
    """Return one edge for each pair of stages with a value between them."""
    ports: dict[tuple[int, int], list[Port]] = {}
    for interface in interfaces:
        for received in interface.received:
            key = (received.source_stage, interface.stage)
            ports.setdefault(key, []).append(received.port)
    return tuple(
        StageEdge(source, target, tuple(found), any(port.spec.requires_grad for port in found))
        for (source, target), found in sorted(ports.items())
    )


def check_interfaces(interfaces: Sequence[StageInterface]) -> None:
    """Compare both ends of every boundary.

    Raises:
        PipeliningShapeError: some port is missing at one end, or differs in shape or
            dtype; the message lists every misfit.
    """
    by_stage = {interface.stage: interface for interface in interfaces}
    misfits: list[str] = []
    for interface in interfaces:
        for received in interface.received:
            sender = by_stage.get(received.source_stage)
            misfits += _receive_misfits(interface.stage, received, sender)
        for sent in interface.sent:
            misfits += _send_misfits(interface.stage, sent, by_stage)
    if misfits:
        noun = "tensor does" if len(misfits) == 1 else "tensors do"
        raise PipeliningShapeError(
            f"{len(misfits)} {noun} not fit between stages:\n  " + "\n  ".join(misfits)
        )


def _receive_misfits(stage: int, received: Received, sender: StageInterface | None) -> list[str]:
    source, port = received.source_stage, received.port
    where = f"stage {source} -> {stage}, {port.name!r}"
    if sender is None:
        return [f"{where}: expected {port.spec}, but there is no stage {source}"]
    found = [s for s in sender.sent if s.port.name == port.name and stage in s.target_stages]
    if not found:
        offers = [str(s.port) for s in sender.sent if stage in s.target_stages]
        return [f"{where}: expected {port.spec}, sent {', '.join(offers) or 'nothing'}"]
    spec = found[0].port.spec
    if spec.dtype != port.spec.dtype or not _same_shape(spec.shape, port.spec.shape):
        return [f"{where}: sent {spec}, expected {port.spec}"]
    return []


def _send_misfits(stage: int, sent: Sent, by_stage: Mapping[int, StageInterface]) -> list[str]:
    misfits = []
    for target in sent.target_stages:
        where = f"stage {stage} -> {target}, {sent.port.name!r}"
        receiver = by_stage.get(target)
        if receiver is None:
            misfits.append(f"{where}: sent {sent.port.spec}, but there is no stage {target}")
        elif not any(
            r.source_stage == stage and r.port.name == sent.port.name for r in receiver.received
        ):
            misfits.append(f"{where}: sent {sent.port.spec}, expected nothing of this name")
    return misfits


def _same_shape(left: tuple[Dim, ...], right: tuple[Dim, ...]) -> bool:
    return len(left) == len(right) and all(
        a == b or sympy.expand(a - b) == 0 for a, b in zip(left, right, strict=True)
    )
