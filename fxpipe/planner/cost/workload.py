"""Turn the costs of a graph into work to divide: items, flows and what is shared.

In:  `GraphCosts`, sizes, hardware, how the model will be trained (`Training`), and how ranks
     share a stage (`Layout`).
Out: a `Workload`: `Work` for `partition`, and which nodes each item stands for.

Items are the nodes that weigh something. All others (shapes, masks, additions) go with an item
that they need or that needs them, whichever side of a cut makes less to send. Values that
need no gradient and follow from the model's inputs alone are repeated by the
stages that use them, so they are no flows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from fxpipe.planner.cost.collectives import collective_time
from fxpipe.planner.cost.graph_costs import GraphCosts, NodeInfo, ValueId
from fxpipe.planner.cost.hardware import Hardware
from fxpipe.planner.cost.node_runs import Sizes
from fxpipe.planner.cost.parallel import Layout, communication, op_time, share_of
from fxpipe.planner.cost.training import State, Training, as_run, state_of, with_loss
from fxpipe.planner.cost.watch import PHASES, Observation, Op, Phase
from fxpipe.planner.partition.work import Flow, Item, Shared, Work

__all__ = ["NodeLoad", "Workload", "workload_of"]


@dataclass(frozen=True)
class NodeLoad:
    """Numbers for one node: times in seconds, then bytes per microbatch.

    `keeps` are the storages held for the backward besides `inside`; `repeated` is the part
    of `backward_input` in which checkpointing computes the forward again, and `whole` what
    the node holds inside once it did. Peaks are as in `Observation`. `exposed` is the part of
    the times in which the node waits for collectives.
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
    exposed: float = 0.0

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
    layout: Layout
    work: Work
    nodes: tuple[tuple[str, ...], ...]
    loads: Mapping[str, NodeLoad]
    states: Mapping[str, State]

    def item_of(self) -> dict[str, int]:
        return {name: item for item, names in enumerate(self.nodes) for name in names}

    def value_bytes(self, value: ValueId) -> float:
        """What a rank holds of a tensor."""
        return self.costs.value_bytes(value, self.sizes) * self.layout.held_share

    def sent_bytes(self, value: ValueId) -> float:
        """What a rank sends of a tensor to another stage."""
        return self.costs.value_bytes(value, self.sizes) * self.layout.sent_share


def workload_of(
    costs: GraphCosts,
    sizes: Sizes,
    hardware: Hardware,
    training: Training | None = None,
    layout: Layout | None = None,
) -> Workload:
    """Price every node at given sizes on given hardware, and group them into items."""
    training, layout = training or Training(), layout or Layout()
    states = {name: state_of(p, training, layout) for name, p in costs.parameters.items()}
    prices = _Prices(costs, sizes, hardware, training, layout, states)
    blocks = [n.name for n in costs.nodes if n.is_block and n.parameters]
    number = {name: index for index, name in enumerate(blocks)}
    loads = {
        node.name: _load(costs, node, *prices.of(node), training, number.get(node.name, 0))
        for node in costs.nodes
    }
    groups = _group(costs, sizes, loads)
    item_of = {name: item for item, names in enumerate(groups) for name in names}
    by_name = {node.name: node for node in costs.nodes}
    made = Workload(
        costs,
        sizes,
        training,
        layout,
        Work(()),
        tuple(tuple(names) for names in groups),
        loads,
        states,
    )
    items = tuple(_item(names, loads, by_name) for names in groups)
    shared = (*_state(made, item_of), *_kept(made, item_of))
    return replace(made, work=Work(items, _flows(made, item_of), shared))


@dataclass(frozen=True, slots=True)
class _Price:
    """Seconds of each phase, of a forward's cheap parts, of every other product, of waiting."""

    forward: float
    backward_input: float
    backward_weight: float
    cheap: float
    every_other: float
    exposed: float


class _Prices:
    """Prices nodes; equal ones share an observation, which is priced once."""

    def __init__(
        self,
        costs: GraphCosts,
        sizes: Sizes,
        hardware: Hardware,
        training: Training,
        layout: Layout,
        states: Mapping[str, State],
    ) -> None:
        self.costs, self.sizes, self.hardware = costs, sizes, hardware
        self.training, self.layout, self.states = training, layout, states
        self.seen = costs.at(sizes)
        self.results = {value[0] for value in costs.result}
        self._known: dict[object, tuple[Observation, _Price]] = {}

    def of(self, node: NodeInfo) -> tuple[Observation, _Price]:
        is_last = self.training.has_loss and node.name in self.results
        key = (id(self.seen[node.name]), is_last, node.is_block)
        if key not in self._known:
            seen = self._transformed(node, is_last)
            self._known[key] = (seen, self._price(node, seen))
        return self._known[key]

    def _transformed(self, node: NodeInfo, is_last: bool) -> Observation:
        seen = as_run(self.seen[node.name], self.training, is_block=node.is_block)
        floats = [(i, spec) for i, spec in enumerate(node.outputs) if spec.dtype.is_floating_point]
        stream = self.costs.value_bytes((node.name, floats[0][0]), self.sizes) if floats else 0.0
        source = max(
            (
                self.costs.value_bytes(value, self.sizes)
                for value in node.inputs
                if self.costs.specs[value].dtype.is_floating_point
            ),
            default=0.0,
        )
        if is_last and floats:
            size = floats[0][1].dtype.itemsize
            divided = self.layout.tensor > 1
            seen = with_loss(seen, stream / size, size, is_divided=divided)
        regathers = self.training.is_fused
        return share_of(seen, self.layout, stream, source, regathers=regathers)

    def _price(self, node: NodeInfo, seen: Observation) -> _Price:
        machine, layout = self.hardware, self.layout
        times = {
            phase: math.fsum(op_time(op, machine, layout) for op in seen.ops(phase) if not op.group)
            for phase in PHASES
        }
        shown = 0.25 if self.training.kernels == "overlapped" else 1.0
        waits = {
            phase: communication(seen.ops(phase), machine, layout, tensor_share=shown)
            for phase in PHASES
        }
        cheap = math.fsum(
            op_time(op, machine, layout)
            for op in seen.forward
            if op.op_class == "memory" and not op.group
        )
        every_other = math.fsum(op_time(op, machine, layout) for op in _every_other(seen))
        whole = {phase: times[phase] + waits[phase] for phase in PHASES}
        if layout.sharding >= 2 and layout.context * layout.data > 1:
            whole = self._hidden(node, whole)
        exposed = math.fsum(whole.values()) - math.fsum(times.values())
        return _Price(
            whole["forward"], whole["backward_input"], whole["backward_weight"], cheap,
            every_other, exposed,
        )  # fmt: skip

    def _hidden(self, node: NodeInfo, times: Mapping[Phase, float]) -> dict[Phase, float]:
        """Times with gathers of weights and scatters of gradients beside them."""
        gather, scatter = 0.0, 0.0
        for name in node.parameters:
            state = self.states[name]
            group = "experts" if self.costs.parameters[name].is_expert else "replicas"
            ranks = self.layout.group(group)
            scatter += collective_time("reduce_scatter", state.reduced, ranks, self.hardware)
            if self.layout.sharding == 3:
                gather += collective_time("all_gather", state.gathered, ranks, self.hardware)
        backward = times["backward_input"] + times["backward_weight"]
        more = max(gather + scatter - backward, 0.0) if backward else 0.0
        return {
            "forward": max(times["forward"], gather),
            "backward_input": times["backward_input"] + more,
            "backward_weight": times["backward_weight"],
        }


def _every_other(seen: Observation) -> list[Op]:
    """The products that "alternate" checkpointing computes again: the second of every two."""
    return [op for op in seen.forward if op.op_class not in ("memory", "attention")][1::2]


def _load(
    costs: GraphCosts,
    node: NodeInfo,
    seen: Observation,
    price: _Price,
    training: Training,
    number: int,
) -> NodeLoad:
    inside, repeated = float(seen.kept_inside), 0.0
    inputs = [costs.root(value) for value in node.inputs]
    keeps = [value for value, keep in zip(inputs, seen.keeps_input, strict=False) if keep]
    outputs = [costs.root((node.name, place)) for place in range(len(node.outputs))]
    keeps += [value for value, keep in zip(outputs, seen.keeps_output, strict=False) if keep]
    has_backward = price.backward_input or price.backward_weight
    if node.is_block and has_backward and training.recomputes(number):
        keeps = inputs
        products = [op.made_bytes for op in seen.forward if op.op_class != "memory"]
        again = [op.made_bytes for op in _every_other(seen)]
        if training.checkpointing == "selective":
            inside, repeated = min(inside, math.fsum(products)), price.cheap
        elif training.checkpointing == "alternate":
            inside = min(inside, math.fsum(products) - math.fsum(again))
            repeated = price.cheap + price.every_other
        else:
            inside, repeated = 0.0, price.forward
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
        price.exposed,
    )


def is_model_input(costs: GraphCosts, value: ValueId) -> bool:
    """Whether a value is given by the user rather than made by a node."""
    return value[0] not in costs.makers


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


def _flows(load: Workload, item_of: Mapping[str, int]) -> tuple[Flow, ...]:
    costs = load.costs
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
            size = load.sent_bytes(value)
            grows = value[0] in costs.grows and costs.specs[value].requires_grad
            flows.append(Flow(source, others, size, size if grows else 0.0))
    # An order that no tensor shows: a number or a structure goes from one item to another.
    order = {
        (item_of[source], item_of[node.name])
        for node in costs.nodes
        for source in costs.sources[node.name]
        if item_of[source] != item_of[node.name]
    }
    known = {(flow.source, target) for flow in flows for target in flow.targets}
    flows += [Flow(a, (b,)) for a, b in sorted(order - known)]
    return tuple(flows)


def _state(load: Workload, item_of: Mapping[str, int]) -> list[Shared]:
    holders: dict[str, set[int]] = {}
    for node in load.costs.nodes:
        for name in node.parameters:
            holders.setdefault(name, set()).add(item_of[node.name])
    groups: dict[tuple[int, ...], float] = {}
    for name, items in holders.items():
        key = tuple(sorted(items))
        groups[key] = groups.get(key, 0.0) + load.states[name].held
    return [Shared(items, state=size) for items, size in groups.items()]


def _kept(load: Workload, item_of: Mapping[str, int]) -> list[Shared]:
    holders: dict[ValueId, set[int]] = {}
    for name, node in load.loads.items():
        for value in node.keeps:
            holders.setdefault(value, set()).add(item_of[name])
    return [
        Shared(tuple(sorted(items)), residual=load.value_bytes(value))
        for value, items in holders.items()
    ]
