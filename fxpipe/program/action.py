"""Name every unit of work and every value that it reads or writes.

An `Action` is what one rank does once: compute a stage on a microbatch, move a
value, or handle a stage's parameters. A `Value` is what actions hand to each
other. `reads` and `writes` are the one table of dependencies in fxpipe: the
validator, the lowering, the simulator and the executor all ask it, and nothing
else may know that, say, a backward needs the gradient of the next stage.

Stages form a graph of `Edge`s, by default a chain. An edge that `has_gradient`
returns one in the backward; an edge of integers or of frozen work does not.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from fxpipe.errors import ScheduleError

__all__ = [
    "COMPUTE_KINDS",
    "TRANSFER_KINDS",
    "Action",
    "Edge",
    "Edges",
    "Kind",
    "Value",
    "ValueKind",
    "reads",
    "recv_of",
    "send_of",
    "writes",
]


class Kind(enum.IntEnum):
    """What an action does. The text form of an action uses `Kind.text`.

    What a kind is (`is_compute`, ...) is a plain attribute, since loops over long
    programs ask for it at every action.
    """

    text: str
    is_compute: bool
    is_backward: bool
    is_transfer: bool
    is_send: bool
    is_recv: bool
    is_offload: bool

    FORWARD = 0, "F"
    BACKWARD = 1, "B"
    BACKWARD_INPUT = 2, "I"
    BACKWARD_WEIGHT = 3, "W"
    SEND_ACTIVATION = 4, "SEND_F"
    RECV_ACTIVATION = 5, "RECV_F"
    SEND_GRADIENT = 6, "SEND_B"
    RECV_GRADIENT = 7, "RECV_B"
    UNSHARD = 8, "UNSHARD"
    RESHARD = 9, "RESHARD"
    REDUCE_GRAD = 10, "REDUCE_GRAD"
    OVERLAP = 11, "OVERLAP_F_B"
    OFFLOAD = 12, "OFFLOAD"
    RELOAD = 13, "RELOAD"

    def __new__(cls, number: int, text: str) -> Kind:
        kind = int.__new__(cls, number)
        kind._value_ = number
        kind.text = text
        kind.is_compute = len(text) == 1
        kind.is_backward = text in ("B", "I", "W")
        kind.is_send = text.startswith("SEND")
        kind.is_recv = text.startswith("RECV")
        kind.is_transfer = kind.is_send or kind.is_recv
        kind.is_offload = text in ("OFFLOAD", "RELOAD")
        return kind


COMPUTE_KINDS = tuple(kind for kind in Kind if kind.is_compute)
TRANSFER_KINDS = tuple(kind for kind in Kind if kind.is_transfer)


def neighbour(kind: Kind, stage: int) -> int:
    """The stage at the other end of a transfer that names none: the next or the last one."""
    assert kind.is_transfer, kind
    return stage + (1 if kind in (Kind.SEND_ACTIVATION, Kind.RECV_GRADIENT) else -1)


class Action(NamedTuple):
    """One unit of work of one rank.

    `peer` is the stage at the other end of a transfer. `parts` is set for
    OVERLAP only: a pair of compute actions that may run at the same time; its
    own stage and microbatch are those of the first part.
    """

    kind: Kind
    stage: int
    microbatch: int | None = None
    peer: int | None = None
    parts: tuple[Action, ...] = ()

    @staticmethod
    def overlap(first: Action, second: Action) -> Action:
        """The pair of two compute actions, which may run at the same time."""
        return Action(Kind.OVERLAP, first.stage, first.microbatch, parts=(first, second))

    @property
    def each(self) -> tuple[Action, ...]:
        """The parts of a pair; of any other action, itself."""
        return self.parts or (self,)

    def __str__(self) -> str:
        if self.kind is Kind.OVERLAP:
            return f"({';'.join(map(str, self.parts))}){self.kind.text}"
        text = f"{self.stage}{self.kind.text}"
        if self.microbatch is not None:
            text += str(self.microbatch)
        if self.kind.is_transfer and self.peer != neighbour(self.kind, self.stage):
            text += f"{'>' if self.kind.is_send else '<'}{self.peer}"
        return text


class ValueKind(enum.IntEnum):
    """What a value is."""

    ACTIVATION = 0
    GRADIENT = 1
    RESIDUAL = 2
    DEFERRED = 3
    WEIGHT_GRAD = 4
    OFFLOADED = 5


class Value(NamedTuple):
    """What actions hand to each other.

    For an activation `stage -> peer` follows the edge; for a gradient it runs
    against it. Residual (on the device, or offloaded to the host), deferred weight work and
    weight gradient stay on their stage: `peer` equals `stage`.
    """

    kind: ValueKind
    stage: int
    peer: int
    microbatch: int

    def __str__(self) -> str:
        name = self.kind.name.lower()
        where = str(self.stage) if self.stage == self.peer else f"{self.stage}->{self.peer}"
        return f"{name}({where}, microbatch {self.microbatch})"


class Edge(NamedTuple):
    """Stage `source` feeds stage `target`; the way back exists if `has_gradient`."""

    source: int
    target: int
    has_gradient: bool = True


@dataclass(frozen=True)
class Edges:
    """The graph of stages: who feeds whom. Edges always run to a later stage."""

    num_stages: int
    edges: tuple[Edge, ...]
    _into: tuple[tuple[Edge, ...], ...] = field(init=False, repr=False, compare=False)
    _out_of: tuple[tuple[Edge, ...], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        into: list[list[Edge]] = [[] for _ in range(self.num_stages)]
        out_of: list[list[Edge]] = [[] for _ in range(self.num_stages)]
        seen: set[tuple[int, int]] = set()
        for edge in self.edges:
            source, target, _ = edge
            if not 0 <= source < target < self.num_stages:
                raise ScheduleError(
                    f"edge {source} -> {target} does not run from a stage to a later one "
                    f"among the {self.num_stages} stages"
                )
            if (source, target) in seen:
                raise ScheduleError(f"edge {source} -> {target} is listed twice")
            seen.add((source, target))
            into[target].append(edge)
            out_of[source].append(edge)
        object.__setattr__(self, "_into", tuple(tuple(sorted(e)) for e in into))
        object.__setattr__(self, "_out_of", tuple(tuple(sorted(e)) for e in out_of))

    @staticmethod
    def chain(num_stages: int) -> Edges:
        """Each stage feeds the next one."""
        return Edges(num_stages, tuple(Edge(s, s + 1) for s in range(num_stages - 1)))

    @staticmethod
    def of(num_stages: int, edges: Iterable[tuple[int, int] | Edge]) -> Edges:
        """Edges from pairs `(source, target)` or `Edge`s."""
        return Edges(num_stages, tuple(sorted(Edge(*edge) for edge in edges)))

    def into(self, stage: int) -> tuple[Edge, ...]:
        return self._into[stage]

    def out_of(self, stage: int) -> tuple[Edge, ...]:
        return self._out_of[stage]


def reads(action: Action, edges: Edges) -> tuple[Value, ...]:
    """The values that must exist on the rank before the action runs."""
    kind, stage, microbatch, peer, parts = action
    if kind is Kind.OVERLAP:
        made = {value for part in parts for value in writes(part, edges)}
        return tuple(v for part in parts for v in reads(part, edges) if v not in made)
    if microbatch is None:
        return ()
    if kind is Kind.FORWARD:
        return tuple(
            Value(ValueKind.ACTIVATION, e.source, stage, microbatch) for e in edges.into(stage)
        )
    if kind is Kind.BACKWARD or kind is Kind.BACKWARD_INPUT:
        return (
            *(
                Value(ValueKind.GRADIENT, e.target, stage, microbatch)
                for e in edges.out_of(stage)
                if e.has_gradient
            ),
            Value(ValueKind.RESIDUAL, stage, stage, microbatch),
        )
    if kind is Kind.BACKWARD_WEIGHT:
        return (Value(ValueKind.DEFERRED, stage, stage, microbatch),)
    if kind.is_send:
        assert peer is not None
        return (Value(_CARRIED[kind], stage, peer, microbatch),)
    if kind.is_offload:
        return (Value(_HOST[kind], stage, stage, microbatch),)
    return ()


def writes(action: Action, edges: Edges) -> tuple[Value, ...]:
    """The values that exist on the rank once the action has run."""
    kind, stage, microbatch, peer, parts = action
    if kind is Kind.OVERLAP:
        return tuple(value for part in parts for value in writes(part, edges))
    if microbatch is None:
        return ()
    if kind is Kind.FORWARD:
        return (
            *(
                Value(ValueKind.ACTIVATION, stage, e.target, microbatch)
                for e in edges.out_of(stage)
            ),
            Value(ValueKind.RESIDUAL, stage, stage, microbatch),
        )
    if kind is Kind.BACKWARD or kind is Kind.BACKWARD_INPUT:
        last = ValueKind.WEIGHT_GRAD if kind is Kind.BACKWARD else ValueKind.DEFERRED
        return (
            *(
                Value(ValueKind.GRADIENT, stage, e.source, microbatch)
                for e in edges.into(stage)
                if e.has_gradient
            ),
            Value(last, stage, stage, microbatch),
        )
    if kind is Kind.BACKWARD_WEIGHT:
        return (Value(ValueKind.WEIGHT_GRAD, stage, stage, microbatch),)
    if kind.is_recv:
        assert peer is not None
        return (Value(_CARRIED[kind], peer, stage, microbatch),)
    if kind.is_offload:
        other = Kind.RELOAD if kind is Kind.OFFLOAD else Kind.OFFLOAD
        return (Value(_HOST[other], stage, stage, microbatch),)
    return ()


_CARRIED = {
    Kind.SEND_ACTIVATION: ValueKind.ACTIVATION,
    Kind.RECV_ACTIVATION: ValueKind.ACTIVATION,
    Kind.SEND_GRADIENT: ValueKind.GRADIENT,
    Kind.RECV_GRADIENT: ValueKind.GRADIENT,
}
# What each of the two reads; it writes what the other reads.
_HOST = {Kind.OFFLOAD: ValueKind.RESIDUAL, Kind.RELOAD: ValueKind.OFFLOADED}


def send_of(value: Value) -> Action:
    """The action that sends a value."""
    is_activation = value.kind is ValueKind.ACTIVATION
    kind = Kind.SEND_ACTIVATION if is_activation else Kind.SEND_GRADIENT
    return Action(kind, value.stage, value.microbatch, value.peer)


def recv_of(value: Value) -> Action:
    """The action that receives a value."""
    is_activation = value.kind is ValueKind.ACTIVATION
    kind = Kind.RECV_ACTIVATION if is_activation else Kind.RECV_GRADIENT
    return Action(kind, value.peer, value.microbatch, value.stage)
