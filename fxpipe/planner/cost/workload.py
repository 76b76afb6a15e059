"""Turn the costs of a graph into work to divide: items, flows and what is shared.

In:  `GraphCosts`, sizes, hardware, and how the model will be trained (`Training`).
Out: a `Workload`: `Work` for `partition`, and which nodes each item stands for.

Items are the nodes that weigh something. All others (shapes, masks, additions) go with an item
that they need or that needs them, whichever side of a cut makes less to send. Values that
need no gradient and follow from the model's inputs alone are repeated by the
stages that use them, so they are no flows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from fxpipe.errors import PlanError
from fxpipe.planner.cost.graph_costs import GraphCosts, NodeInfo, ValueId
from fxpipe.planner.cost.hardware import Hardware
from fxpipe.planner.cost.node_runs import Sizes
from fxpipe.planner.cost.watch import Observation, Phase
from fxpipe.planner.partition.work import Flow, Item, Shared, Work

__all__ = ["CHECKPOINTS", "OPTIMIZERS", "Checkpointing", "Training", "Workload", "workload_of"]

Checkpointing = Literal["none", "selective", "full"]
CHECKPOINTS: tuple[Checkpointing, ...] = ("none", "selective", "full")

OPTIMIZERS: Mapping[str, tuple[float, float]] = {
    "none": (0.0, 0.0),
    "sgd": (0.0, 0.0),
    "momentum": (1.0, 0.0),
    "adam": (2.0, 0.0),
    "adamw": (2.0, 0.0),
    "adamw-master": (0.0, 12.0),
}
"""Bytes of optimizer state: per byte of a trainable parameter, and per element besides."""


@dataclass(frozen=True, slots=True)
class Training:
    """How the model will be trained.

    Checkpointing applies to blocks (modules with parts): "full" keeps a block's inputs
    and runs its forward again, "selective" also keeps the results of products and
    repeats only the rest.
    """

    optimizer: str = "adamw"
    checkpointing: Checkpointing = "none"

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            raise PlanError(f"unknown optimizer {self.optimizer!r}; known: {', '.join(OPTIMIZERS)}")
        if self.checkpointing not in CHECKPOINTS:
            raise PlanError(
                f"unknown checkpointing {self.checkpointing!r}; known: {', '.join(CHECKPOINTS)}"
            )


@dataclass(frozen=True)
class NodeLoad:
    """Numbers for one node: times in seconds, then bytes per microbatch.

    `keeps` are the storages held for the backward besides `inside`; `repeated` is the part
    of `backward_input` in which checkpointing computes the forward again, and `whole` what
    the node holds inside once it did. Peaks are as in `Observation`.
    """

    forward: float
    backward_input: float
    backward_weight: float
    inside: float
    keeps: tuple[ValueId, ...]
    deferred: float
    repeated: float = 0.0
    whole: float = 0.0
    forward_peak: float = 0.0
    backward_peak: float = 0.0

    @property
    def time(self) -> float:
        return self.forward + self.backward_input + self.backward_weight


@dataclass(frozen=True)
class Workload:
    """A graph priced for one microbatch: work to divide, and how it maps to the graph.

    `nodes[i]` names the nodes of item i; `loads` has the numbers of each node.
    """

    costs: GraphCosts
    sizes: Sizes
    training: Training
    work: Work
    nodes: tuple[tuple[str, ...], ...]
    loads: Mapping[str, NodeLoad]

    def item_of(self) -> dict[str, int]:
        return {name: item for item, names in enumerate(self.nodes) for name in names}

    def value_bytes(self, value: ValueId) -> float:
        return self.costs.value_bytes(value, self.sizes)


def workload_of(
    costs: GraphCosts, sizes: Sizes, hardware: Hardware, training: Training | None = None
) -> Workload:
    """Price every node at given sizes on given hardware, and group them into items."""
    training = training or Training()
    seen = costs.at(sizes)
    # Equal blocks share one observation, which needs to be priced once.
    prices = {id(found): _Price.of(found, hardware) for found in seen.values()}
    loads = {
        node.name: _load(costs, node, seen[node.name], prices[id(seen[node.name])], training)
        for node in costs.nodes
    }
    groups = _group(costs, sizes, loads)
    item_of = {name: item for item, names in enumerate(groups) for name in names}
    by_name = {node.name: node for node in costs.nodes}
    items = [_item(names, loads, by_name) for names in groups]
    shared = [*_state(costs, item_of, training), *_kept(costs, sizes, item_of, loads)]
    return Workload(
        costs,
        sizes,
        training,
        Work(tuple(items), _flows(costs, sizes, item_of), tuple(shared)),
        tuple(tuple(names) for names in groups),
        loads,
    )


@dataclass(frozen=True, slots=True)
class _Price:
    """Seconds of each phase, and of the part of the forward that is not products."""

    forward: float
    backward_input: float
    backward_weight: float
    cheap: float

    @staticmethod
    def of(seen: Observation, hardware: Hardware) -> _Price:
        def time(phase: Phase, *, all_classes: bool = True) -> float:
            return math.fsum(
                hardware.time(op.op_class, op.dtype, op.flops, op.num_bytes)
                for op in seen.ops(phase)
                if all_classes or op.op_class == "memory"
            )

        return _Price(
            time("forward"),
            time("backward_input"),
            time("backward_weight"),
            time("forward", all_classes=False),
        )


def _load(
    costs: GraphCosts, node: NodeInfo, seen: Observation, price: _Price, training: Training
) -> NodeLoad:
    inside, repeated = float(seen.kept_inside), 0.0
    inputs = [costs.root(value) for value in node.inputs]
    keeps = [value for value, keep in zip(inputs, seen.keeps_input, strict=False) if keep]
    outputs = [costs.root((node.name, place)) for place in range(len(node.outputs))]
    keeps += [value for value, keep in zip(outputs, seen.keeps_output, strict=False) if keep]
    has_backward = price.backward_input or price.backward_weight
    if node.is_block and has_backward and training.checkpointing != "none":
        keeps = inputs
        is_full = training.checkpointing == "full"
        products = sum(op.made_bytes for op in seen.forward if op.op_class != "memory")
        inside = 0.0 if is_full else min(inside, products)
        repeated = price.forward if is_full else price.cheap
    kept = tuple(value for value in dict.fromkeys(keeps) if not is_model_input(costs, value))
    return NodeLoad(
        price.forward,
        price.backward_input + repeated,
        price.backward_weight,
        inside,
        kept,
        seen.deferred,
        repeated,
        seen.kept_inside,
        seen.forward_peak,
        seen.backward_peak,
    )


def is_model_input(costs: GraphCosts, value: ValueId) -> bool:
    """Whether a value is given by the user rather than made by a node."""
    return value[0] not in costs.makers


def state_bytes(costs: GraphCosts, name: str, training: Training) -> tuple[float, float, float]:
    """Bytes of a parameter's weight, gradient and optimizer state."""
    parameter = costs.parameters[name]
    if not parameter.is_trainable:
        return float(parameter.num_bytes), 0.0, 0.0
    per_byte, per_element = OPTIMIZERS[training.optimizer]
    optimizer = per_byte * parameter.num_bytes + per_element * parameter.numel
    return float(parameter.num_bytes), float(parameter.num_bytes), optimizer


def _item(names: list[str], loads: Mapping[str, NodeLoad], by_name: Mapping[str, NodeInfo]) -> Item:
    heaviest = max(names, key=lambda name: (loads[name].time, len(by_name[name].parameters)))
    node = by_name[heaviest]
    return Item(
        node.module or node.name,
        math.fsum(loads[name].forward for name in names),
        math.fsum(loads[name].backward_input for name in names),
        math.fsum(loads[name].backward_weight for name in names),
        0.0,
        math.fsum(loads[name].inside for name in names),
    )


_SHARE = 1e-3
"""A node below this share of the whole time, without parameters, is no item of its own."""


def _group(costs: GraphCosts, sizes: Sizes, loads: Mapping[str, NodeLoad]) -> list[list[str]]:
    """Put nodes that weigh nothing with an item before or after them."""
    total = math.fsum(load.time for load in loads.values())
    heavy = [
        node.name
        for node in costs.nodes
        if node.parameters or loads[node.name].time > _SHARE * total
    ] or [costs.nodes[0].name]
    item_of: dict[str, int] = {name: item for item, name in enumerate(heavy)}
    earliest: dict[str, int] = {}
    for node in costs.nodes:
        before = [earliest[source] for source in costs.sources[node.name]]
        earliest[node.name] = item_of.get(node.name, max(before, default=0))
    place: dict[str, int] = dict(item_of)
    users = costs.users
    for node in reversed(costs.nodes):
        if node.name in item_of:
            continue
        after = [place[user] for user in users.get(node.name, ()) if user in place]
        made = math.fsum(costs.value_bytes((node.name, i), sizes) for i in range(len(node.outputs)))
        read = math.fsum(costs.value_bytes(value, sizes) for value in node.inputs)
        late = min(after, default=len(heavy) - 1)
        place[node.name] = late if after and made > read else earliest[node.name]
        if not after and not users.get(node.name):
            place[node.name] = earliest[node.name]
    # A node that waits for its user must not come before what it reads.
    for node in costs.nodes:
        before = [place[source] for source in costs.sources[node.name]]
        place[node.name] = max([place[node.name], *before])
    groups: list[list[str]] = [[] for _ in heavy]
    for node in costs.nodes:
        groups[place[node.name]].append(node.name)
    return groups


def _flows(costs: GraphCosts, sizes: Sizes, item_of: Mapping[str, int]) -> tuple[Flow, ...]:
    readers: dict[ValueId, set[int]] = {}
    last = max(item_of.values(), default=0)
    for node in costs.nodes:
        for value in node.inputs:
            readers.setdefault(value, set()).add(item_of[node.name])
    for value in costs.result:
        readers.setdefault(value, set()).add(last)
    flows = []
    for value, targets in readers.items():
        source = item_of.get(value[0])
        if source is None or costs.is_repeatable(value[0]):
            continue
        others = tuple(sorted(target for target in targets if target != source))
        if others:
            size = costs.value_bytes(value, sizes)
            grows = value[0] in costs.grows and costs.specs[value].requires_grad
            flows.append(Flow(source, others, size, size if grows else 0.0))
    # What stays together in the order of data without a tensor that travels.
    order = {
        (item_of[source], item_of[node.name])
        for node in costs.nodes
        for source in costs.sources[node.name]
        if item_of[source] != item_of[node.name]
    }
    known = {(flow.source, target) for flow in flows for target in flow.targets}
    flows += [Flow(a, (b,)) for a, b in sorted(order - known)]
    return tuple(flows)


def _state(costs: GraphCosts, item_of: Mapping[str, int], training: Training) -> list[Shared]:
    holders: dict[str, set[int]] = {}
    for node in costs.nodes:
        for name in node.parameters:
            holders.setdefault(name, set()).add(item_of[node.name])
    groups: dict[tuple[int, ...], float] = {}
    for name, items in holders.items():
        key = tuple(sorted(items))
        groups[key] = groups.get(key, 0.0) + math.fsum(state_bytes(costs, name, training))
    return [Shared(items, state=size) for items, size in groups.items()]


def _kept(
    costs: GraphCosts, sizes: Sizes, item_of: Mapping[str, int], loads: Mapping[str, NodeLoad]
) -> list[Shared]:
    holders: dict[ValueId, set[int]] = {}
    for name, load in loads.items():
        for value in load.keeps:
            holders.setdefault(value, set()).add(item_of[name])
    return [
        Shared(tuple(sorted(items)), residual=costs.value_bytes(value, sizes))
        for value, items in holders.items()
    ]
