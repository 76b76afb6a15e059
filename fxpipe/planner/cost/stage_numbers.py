"""What one stage takes: times, what it holds, and its peaks.

In:  a `Workload` and the stage of each item.
Out: a `StageNumbers` per stage, and the bytes on each edge.

A stage's forward and backward are played through node by node, so that the peak in the
middle of an action is known too: temporaries of a node come on top of what nodes before
it left behind. Between its forward and backward a stage holds what autograd keeps, and
what it has sent (the backward starts from there).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fxpipe.planner.cost.graph_costs import GraphCosts, NodeInfo, ValueId
from fxpipe.planner.cost.workload import Workload, is_model_input
from fxpipe.program import Kind

__all__ = ["EdgeBytes", "StageNumbers", "numbers_of"]

EdgeBytes = Mapping[tuple[int, int], tuple[float, float]]
"""For each edge (source, target) the bytes there, and the gradient bytes back."""


@dataclass(frozen=True, slots=True)
class StageNumbers:
    """Times in seconds for one microbatch, then bytes.

    `kept` is made by the stage and held from forward to backward, `kept_received` is held
    as well and was sent by another stage. Peaks are beyond all that is held when an
    action starts. `gradients` are buffers that live from the first backward on; `reduced` and
    `gathered` are what gradients and weights come to in collectives of the replicas. `exposed`
    is the part of the times in which collectives are waited for. `staging` are buffers in which
    weights arrive, `remade` gradients that are freed after each step.
    """

    forward: float = 0.0
    backward_input: float = 0.0
    backward_weight: float = 0.0
    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    kept: float = 0.0
    kept_received: float = 0.0
    deferred: float = 0.0
    forward_peak: float = 0.0
    backward_peak: float = 0.0
    weight_peak: float = 0.0
    reduced: float = 0.0
    gathered: float = 0.0
    exposed: float = 0.0
    staging: float = 0.0
    remade: float = 0.0

    @property
    def time(self) -> float:
        return self.forward + self.backward_input + self.backward_weight

    @property
    def state(self) -> float:
        return self.weights + self.gradients + self.optimizer

    def peak(self, kind: Kind) -> float:
        """What a compute action needs beyond all that is held when it starts."""
        if kind is Kind.FORWARD:
            return self.forward_peak
        return self.weight_peak if kind is Kind.BACKWARD_WEIGHT else self.backward_peak


def numbers_of(
    load: Workload, stage_of_item: Sequence[int]
) -> tuple[tuple[StageNumbers, ...], EdgeBytes]:
    """Add up the nodes of each stage, and what goes between stages."""
    stage_of = {
        name: stage_of_item[item] for item, names in enumerate(load.nodes) for name in names
    }
    num_stages = max(stage_of_item) + 1
    readers = _readers(load.costs, stage_of, num_stages - 1)
    sent: list[set[ValueId]] = [set() for _ in range(num_stages)]
    for value, stages in readers.items():
        if stages - {stage_of[value[0]]}:
            sent[stage_of[value[0]]].add(value)
    nodes: list[list[NodeInfo]] = [[] for _ in range(num_stages)]
    for node in load.costs.nodes:
        nodes[stage_of[node.name]].append(node)
    found = [_Play(load, own, out).numbers() for own, out in zip(nodes, sent, strict=True)]
    return tuple(found), _edge_bytes(load, readers, stage_of)


class _Play:
    """One stage's forward and backward, node by node."""

    def __init__(self, load: Workload, nodes: Sequence[NodeInfo], sent: set[ValueId]) -> None:
        self.load, self.costs, self.nodes, self.loads = load, load.costs, nodes, load.loads
        root = load.costs.root
        self.sent = {root(value) for value in sent}
        self.own = {root((n.name, i)) for n in nodes for i in range(len(n.outputs))}
        self.held = {value for node in nodes for value in load.loads[node.name].keeps}
        self.whole = [self._whole(node) for node in nodes]

    def numbers(self) -> StageNumbers:
        loads = [self.loads[node.name] for node in self.nodes]
        names = dict.fromkeys(name for node in self.nodes for name in node.parameters)
        state = [self.load.states[name] for name in names]
        inside = math.fsum(load.inside for load in loads)
        own = (self.held | self.sent) & self.own
        return StageNumbers(
            math.fsum(load.forward for load in loads),
            math.fsum(load.backward_input for load in loads),
            math.fsum(load.backward_weight for load in loads),
            math.fsum(one.weights for one in state),
            math.fsum(one.gradients for one in state),
            math.fsum(one.optimizer for one in state),
            inside + self._bytes(own),
            self._bytes(self.held - self.own),
            math.fsum(load.deferred for load in loads),
            self._forward_peak(),
            self._backward_peak(),
            max((one.gradients for one in state), default=0.0),
            math.fsum(one.reduced for one in state),
            math.fsum(one.gathered for one in state),
            math.fsum(load.exposed for load in loads),
            self._staging(),
            0.0 if self.load.training.is_fused else math.fsum(one.gradients for one in state),
        )

    def _staging(self) -> float:
        """Torch gathers a block's weights in a buffer of another stream, while the last is read.

        The allocator gives that memory to no other stream (`foreach_all_gather` and
        `AllGatherState` of torch.distributed.fsdp). Weights that are gathered all the time are
        among the peaks; hand-written kernels gather weights in place.
        """
        layout, states = self.load.layout, self.load.states
        ranks = layout.context * layout.data
        if layout.sharding not in (1, 2) or ranks == 1 or self.load.training.is_fused:
            return 0.0
        sizes = (math.fsum(states[p].gathered for p in node.parameters) for node in self.nodes)
        return 2 * max(sizes, default=0.0)

    def _whole(self, node: NodeInfo) -> tuple[float, float, float]:
        """What sharding holds of a node at a time: weights, new gradients, those in reduction.

        Gradients of a block are made in the weights' precision and wait for each other.
        """
        layout, states = self.load.layout, self.load.states
        if not layout.sharding or layout.context * layout.data == 1:
            return 0.0, 0.0, 0.0
        weights = math.fsum(states[p].gathered for p in node.parameters)
        reduced = math.fsum(states[p].reduced for p in node.parameters)
        fresh = weights if node.is_block and not self.load.training.is_fused else 0.0
        return (
            weights if layout.sharding == 3 else 0.0,
            fresh,
            reduced if layout.sharding >= 2 else 0.0,
        )

    def _bytes(self, values: set[ValueId]) -> float:
        found = (value for value in values if not is_model_input(self.costs, value))
        return math.fsum(self.load.value_bytes(value) for value in found)

    def _forward_peak(self) -> float:
        last_use: dict[ValueId, int] = {}
        for at, node in enumerate(self.nodes):
            for value in node.inputs:
                last_use[self.costs.root(value)] = at
        alive: dict[ValueId, float] = {}
        peak, inside = 0.0, 0.0
        for at, node in enumerate(self.nodes):
            level = inside + math.fsum(alive.values())
            # Sharded weights are whole on the node and, ahead of time, on the next.
            level += math.fsum(weights for weights, _, _ in self.whole[at : at + 2])
            peak = max(peak, level + self.loads[node.name].forward_peak)
            inside += self.loads[node.name].inside
            for place in range(len(node.outputs)):
                root = self.costs.root((node.name, place))
                if root in self.own:
                    alive[root] = self.load.value_bytes(root)
            for value in list(alive):
                is_needed = last_use.get(value, -1) > at or value in self.sent
                if not is_needed and value not in self.held:
                    del alive[value]
        return peak

    def _backward_peak(self) -> float:
        first_keeper: dict[ValueId, int] = {}
        used: set[ValueId] = set()
        for at, node in enumerate(self.nodes):
            used |= set(node.inputs)
            for value in self.loads[node.name].keeps:
                first_keeper.setdefault(value, at)
        peak, freed = 0.0, 0.0
        for at in reversed(range(len(self.nodes))):
            node = self.nodes[at]
            load = self.loads[node.name]
            level = load.backward_peak - freed
            weights, fresh, reduced = self.whole[at]
            level += weights + fresh + (self.whole[at - 1][0] if at else 0.0)
            # While a node is at work, the gradients of the one before are on their way.
            level += self.whole[at + 1][2] if at + 1 < len(self.nodes) else 0.0
            peak = max(peak, level - load.backward_peak + reduced)
            # The gradient of what later nodes of the stage read; others have arrived.
            level += math.fsum(
                self.load.value_bytes((node.name, place))
                for place, spec in enumerate(node.outputs)
                if spec.requires_grad and (node.name, place) in used
            )
            # A checkpointed block runs again before its backward and holds everything then.
            level += max(load.whole - load.inside, 0.0)
            peak = max(peak, level)
            freed += load.inside
            # What was sent stays until the backward, which starts from it, is over.
            freed += self._bytes(
                {v for v in load.keeps if first_keeper[v] == at and v not in self.sent}
            )
        return max(peak, 0.0)


def _readers(costs: GraphCosts, stage_of: Mapping[str, int], last: int) -> dict[ValueId, set[int]]:
    """For each value the stages that read it."""
    readers: dict[ValueId, set[int]] = {}
    for node in costs.nodes:
        for value in node.inputs:
            if value[0] in stage_of and not costs.is_repeatable(value[0]):
                readers.setdefault(value, set()).add(stage_of[node.name])
    for value in costs.result:
        if value[0] in stage_of:
            readers.setdefault(value, set()).add(last)
    return readers


def _edge_bytes(
    load: Workload, readers: Mapping[ValueId, set[int]], stage_of: Mapping[str, int]
) -> dict[tuple[int, int], tuple[float, float]]:
    found: dict[tuple[int, int], tuple[float, float]] = {}
    for value, stages in readers.items():
        source, size = stage_of[value[0]], load.sent_bytes(value)
        grows = value[0] in load.costs.grows and load.costs.specs[value].requires_grad
        for target in stages - {source}:
            there, back = found.get((source, target), (0.0, 0.0))
            found[source, target] = (there + size, back + (size if grows else 0.0))
    return found
