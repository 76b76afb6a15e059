"""What one stage takes: times, what it holds, and its highest tides.

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
from dataclasses import dataclass, replace

from fxpipe.planner.cost.graph_costs import GraphCosts, NodeInfo, ValueId
from fxpipe.planner.cost.node_runs import Sizes
from fxpipe.planner.cost.workload import NodeLoad, Training, Workload, is_model_input, state_bytes

__all__ = ["EdgeBytes", "StageNumbers", "numbers_of"]

EdgeBytes = Mapping[tuple[int, int], tuple[float, float]]
"""For each edge (source, target) the bytes there, and the gradient bytes back."""


@dataclass(frozen=True, slots=True)
class StageNumbers:
    """Times in seconds for one microbatch, then bytes.

    `kept` is made by the stage and held from forward to backward, `kept_received` is held
    as well and was sent by another stage. Peaks are beyond all that is held when an
    action starts. `gradients` are buffers that live from the first backward on.
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

    @property
    def time(self) -> float:
        return self.forward + self.backward_input + self.backward_weight

    @property
    def state(self) -> float:
        return self.weights + self.gradients + self.optimizer

    def with_times(self, forward: float, backward_input: float, weight: float) -> StageNumbers:
        """The same memory with other times, measured ones say."""
        return replace(self, forward=forward, backward_input=backward_input, backward_weight=weight)


def numbers_of(
    costs: GraphCosts,
    load: Workload,
    stage_of_item: Sequence[int],
    sizes: Sizes,
    training: Training,
) -> tuple[tuple[StageNumbers, ...], EdgeBytes]:
    """Add up the nodes of each stage, and what goes between stages."""
    stage_of = {
        name: stage_of_item[item] for item, names in enumerate(load.nodes) for name in names
    }
    num_stages = max(stage_of_item) + 1
    edges = _edge_bytes(costs, sizes, stage_of, num_stages)
    sent = _sent(costs, stage_of, num_stages)
    stages = []
    for stage in range(num_stages):
        nodes = [node for node in costs.nodes if stage_of[node.name] == stage]
        play = _Play(costs, nodes, load.loads, sizes, training, sent[stage])
        stages.append(play.numbers())
    return tuple(stages), edges


class _Play:
    """One stage's forward and backward, node by node."""

    def __init__(
        self,
        costs: GraphCosts,
        nodes: Sequence[NodeInfo],
        loads: Mapping[str, NodeLoad],
        sizes: Sizes,
        training: Training,
        sent: set[ValueId],
    ) -> None:
        self.costs, self.nodes, self.loads = costs, nodes, loads
        self.sizes, self.training = sizes, training
        self.sent = {costs.root(value) for value in sent}
        self.own = {costs.root((n.name, i)) for n in nodes for i in range(len(n.outputs))}
        self.held = {value for node in nodes for value in loads[node.name].keeps}

    def numbers(self) -> StageNumbers:
        loads = [self.loads[node.name] for node in self.nodes]
        names = dict.fromkeys(name for node in self.nodes for name in node.parameters)
        state = [state_bytes(self.costs, name, self.training) for name in names]
        inside = math.fsum(load.inside for load in loads)
        own = (self.held | self.sent) & self.own
        return StageNumbers(
            math.fsum(load.forward for load in loads),
            math.fsum(load.backward_input for load in loads),
            math.fsum(load.backward_weight for load in loads),
            math.fsum(weights for weights, _, _ in state),
            math.fsum(gradients for _, gradients, _ in state),
            math.fsum(optimizer for _, _, optimizer in state),
            inside + self._bytes(own),
            self._bytes(self.held - self.own),
            math.fsum(load.deferred for load in loads),
            self._forward_peak(),
            self._backward_peak(),
            max((gradients for _, gradients, _ in state), default=0.0),
        )

    def _bytes(self, values: set[ValueId]) -> float:
        found = (value for value in values if not is_model_input(self.costs, value))
        return math.fsum(self.costs.value_bytes(value, self.sizes) for value in found)

    def _forward_peak(self) -> float:
        last_use: dict[ValueId, int] = {}
        for at, node in enumerate(self.nodes):
            for value in node.inputs:
                last_use[self.costs.root(value)] = at
        alive: dict[ValueId, float] = {}
        peak, inside = 0.0, 0.0
        for at, node in enumerate(self.nodes):
            level = inside + math.fsum(alive.values())
            peak = max(peak, level + node.cost.forward_peak(self.sizes))
            inside += self.loads[node.name].inside
            for place in range(len(node.outputs)):
                root = self.costs.root((node.name, place))
                if root in self.own:
                    alive[root] = self.costs.value_bytes(root, self.sizes)
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
            level = node.cost.backward_peak(self.sizes) - freed
            # The gradient of what later nodes of the stage read; others have arrived.
            level += math.fsum(
                self.costs.value_bytes((node.name, place), self.sizes)
                for place, spec in enumerate(node.outputs)
                if spec.requires_grad and (node.name, place) in used
            )
            whole = node.cost.kept_inside(self.sizes)
            if load.inside < whole:
                # The block runs again before its backward and holds everything then.
                level += whole - load.inside
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


def _sent(costs: GraphCosts, stage_of: Mapping[str, int], num_stages: int) -> list[set[ValueId]]:
    sent: list[set[ValueId]] = [set() for _ in range(num_stages)]
    for value, stages in _readers(costs, stage_of, num_stages - 1).items():
        if stages - {stage_of[value[0]]}:
            sent[stage_of[value[0]]].add(value)
    return sent


def _edge_bytes(
    costs: GraphCosts, sizes: Sizes, stage_of: Mapping[str, int], num_stages: int
) -> dict[tuple[int, int], tuple[float, float]]:
    found: dict[tuple[int, int], tuple[float, float]] = {}
    for value, stages in _readers(costs, stage_of, num_stages - 1).items():
        source = stage_of[value[0]]
        size = costs.value_bytes(value, sizes)
        grows = value[0] in costs.grows and costs.specs[value].requires_grad
        for target in stages - {source}:
            there, back = found.get((source, target), (0.0, 0.0))
            found[source, target] = (there + size, back + (size if grows else 0.0))
    return found
