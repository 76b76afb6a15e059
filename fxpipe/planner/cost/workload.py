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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from fxpipe.planner.cost.collectives import collective_time
from fxpipe.planner.cost.graph_costs import GraphCosts, NodeInfo, ValueId
from fxpipe.planner.cost.hardware import Hardware
from fxpipe.planner.cost.measured import Measured
from fxpipe.planner.cost.node_runs import Sizes
from fxpipe.planner.cost.observation import PHASES, Observation, Op, Phase
from fxpipe.planner.cost.parallel import Layout, communication, op_time, share_of
from fxpipe.planner.cost.training import State, Training, as_run, state_of, with_loss
from fxpipe.planner.partition.work import Flow, Item, Shared, Work

__all__ = ["NodeLoad", "Workload", "workload_of"]


@dataclass(frozen=True)
class NodeLoad:
    """Numbers for one node: times in seconds, then bytes per microbatch.

    `keeps` are the storages held for the backward besides `inside`; `whole` is what the node
    holds inside after checkpointing has computed its forward again. Peaks are as in
    `Observation`. `exposed` is the part of the times in which the node waits for collectives.
    """

    forward: float
    backward_input: float
    backward_weight: float
    inside: float
    deferred: float
    whole: float
    forward_peak: float
    backward_peak: float
    exposed: float
    keeps: tuple[ValueId, ...] = ()

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
    *,
    measured: Callable[[str], Measured | None] | None = None,
) -> Workload:
    """Price every node at given sizes on given hardware, and group them into items.

    What was `measured` of a node replaces its estimate.
    """
    training, layout = training or Training(), layout or Layout()
    states = {name: state_of(p, training, layout) for name, p in costs.parameters.items()}
    prices = _Prices(costs, sizes, hardware, training, layout, states, measured)
    blocks = [n.name for n in costs.nodes if n.is_block and n.parameters]
    number = {name: index for index, name in enumerate(blocks)}
    loads = {node.name: prices.of(node, number.get(node.name, 0)) for node in costs.nodes}
    groups = _group(costs, sizes, loads)
    item_of = {name: item for item, names in enumerate(groups) for name in names}
    by_name = {node.name: node for node in costs.nodes}
    nodes = tuple(tuple(names) for names in groups)
    made = Workload(costs, sizes, training, layout, Work(()), nodes, loads, states)
    items = tuple(_item(names, loads, by_name) for names in groups)
    shared = (*_state(made, item_of), *_kept(made, item_of))
    return replace(made, work=Work(items, _flows(made, item_of), shared))


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
        measured: Callable[[str], Measured | None] | None,
    ) -> None:
        self.costs, self.sizes, self.hardware = costs, sizes, hardware
        self.training, self.layout, self.states = training, layout, states
        self.measured = measured
        self.seen = costs.at(sizes)
        self.results = {value[0] for value in costs.result}
        self._known: dict[object, tuple[Observation, NodeLoad]] = {}

    def of(self, node: NodeInfo, number: int) -> NodeLoad:
        """The numbers of a node; `number` counts the blocks."""
        is_last = self.training.has_loss and node.name in self.results
        repeats = node.is_block and self.training.recomputes(number)
        found = None if self.measured is None else self.measured(node.name)
        key = (id(self.seen[node.name]), is_last, node.is_block, repeats, found)
        if key not in self._known:
            seen = self._transformed(node, is_last)
            self._known[key] = (seen, self._load(node, seen, repeats, found))
        seen, load = self._known[key]
        inputs = [self.costs.root(value) for value in node.inputs]
        keeps = [value for value, keep in zip(inputs, seen.keeps_input, strict=False) if keep]
        outputs = [self.costs.root((node.name, place)) for place in range(len(node.outputs))]
        keeps += [value for value, keep in zip(outputs, seen.keeps_output, strict=False) if keep]
        if repeats and (load.backward_input or load.backward_weight):
            keeps = inputs
        made = (value for value in dict.fromkeys(keeps) if not is_model_input(self.costs, value))
        return replace(load, keeps=tuple(made))

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

    def _load(
        self, node: NodeInfo, seen: Observation, repeats: bool, found: Measured | None
    ) -> NodeLoad:
        machine, layout = self.hardware, self.layout
        shown = self.training.tensor_share
        waits = {
            phase: communication(seen.ops(phase), machine, layout, tensor_share=shown)
            for phase in PHASES
        }
        alone = {
            phase: self._time(op for op in seen.ops(phase) if not op.group) for phase in PHASES
        }
        times = {phase: alone[phase] + waits[phase] for phase in PHASES}
        if layout.sharding >= 2 and layout.context * layout.data > 1:
            times = self._hidden(node, times)
        exposed = math.fsum(times.values()) - math.fsum(alone.values())
        inside = seen.kept_inside
        estimated = times["forward"]
        if found is not None:
            times = dict(zip(PHASES, found.times, strict=True))
            inside = inside if found.kept is None else found.kept
        if repeats and (times["backward_input"] or times["backward_weight"]):
            again, inside = self._repeated(seen, estimated)
            times["backward_input"] += times["forward"] * min(again / (estimated or 1.0), 1.0)
        deferred = seen.deferred
        if not self.training.splits_backward:
            times["backward_input"] += times["backward_weight"]
            times["backward_weight"] = deferred = 0.0
        return NodeLoad(
            times["forward"], times["backward_input"], times["backward_weight"], inside,
            deferred, seen.kept_inside, seen.forward_peak, seen.backward_peak, exposed,
        )  # fmt: skip

    def _time(self, ops: Iterable[Op]) -> float:
        return math.fsum(op_time(op, self.hardware, self.layout) for op in ops)

    def _repeated(self, seen: Observation, forward: float) -> tuple[float, float]:
        """How long the repeated part of a block's forward takes, and what is kept of it."""
        products = [op for op in seen.forward if op.op_class != "memory"]
        cheap = [op for op in seen.forward if op.op_class == "memory" and not op.group]
        kept = math.fsum(op.made_bytes for op in products)
        if self.training.checkpointing == "selective":
            return self._time(cheap), min(seen.kept_inside, kept)
        if self.training.checkpointing == "expansions":
            again = self._expansions(seen)
            if self.training.kernels == "overlapped":  # which keeps no more than products need
                reads = (op.num_bytes - op.made_bytes for op in products
                         if op.op_class == "attention" and again)  # fmt: skip
                return self._time(again), seen.kept_inside - math.fsum(reads)
            again = [op for op in products if op.op_class == "matmul" and self._expands(op)]
            kept -= math.fsum(op.made_bytes for op in again)
            return self._time([*cheap, *again]), min(seen.kept_inside, kept)
        if self.training.checkpointing == "alternate":
            # The second of every two products is computed again.
            again = [op for op in products if op.op_class != "attention"][1::2]
            kept -= math.fsum(op.made_bytes for op in again)
            return self._time([*cheap, *again]), min(seen.kept_inside, kept)
        return forward, 0.0

    def _expansions(self, seen: Observation) -> list[Op]:
        """From the first product of few numbers to what attention reads."""
        at = [place for place, op in enumerate(seen.forward) if op.op_class == "attention"]
        found: list[Op] = []
        for op in seen.forward[: max(at, default=0)]:
            is_product = op.op_class == "matmul"
            if not op.group and (self._expands(op) if is_product else found):
                found.append(op)
        return found

    def _expands(self, op: Op) -> bool:
        """Whether a product makes more than four numbers of each it reads."""
        size = 4 if op.dtype == "float32" else 2
        width = op.flops / (2 * op.made_bytes / size) if op.made_bytes else math.inf
        return op.state_bytes * self.layout.tensor > 4 * size * width * (width + 1)  # and a bias

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


def is_model_input(costs: GraphCosts, value: ValueId) -> bool:
    """Whether a value is given by the user rather than made by a node."""
    return value[0] not in costs.makers


def _item(names: list[str], loads: Mapping[str, NodeLoad], by_name: Mapping[str, NodeInfo]) -> Item:
    heaviest = max(names, key=lambda name: (loads[name].time, len(by_name[name].parameters)))
    node = by_name[heaviest]
    return Item(
        node.module or node.name,
        math.fsum(loads[name].time for name in names),
        residual=math.fsum(loads[name].inside for name in names),
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
