"""Which values cross which stage boundary.

In:  a traced graph and a stage for each of its nodes.
Out: a `Flow`: for each stage the nodes it computes (its own, and those it repeats)
     and the nodes it receives.

Only tensors travel. A nested value is sent as its tensors. A number that comes from
data (`.item()`), a size that a stage cannot read off any tensor it has, or the dtype of a
value is sent as a 0-d tensor. A view of a tensor that a later stage changes in place is not sent;
its base is, and the view is taken again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import fx

from fxpipe.errors import SplitError
from fxpipe.graph.calls.graph_calls import ACCESS, Constant, Rebuild, dtype_of, given
from fxpipe.graph.calls.late_lists import ManySpec
from fxpipe.graph.capture.traced_graph import (
    TracedGraph,
    UnknownLengthError,
    UnknownSizeError,
    UnlikeModesError,
)
from fxpipe.graph.capture.train_eval import ModeDependent, choose
from fxpipe.graph.dims import symbol
from fxpipe.graph.facts import Facts, leaves_of
from fxpipe.graph.interface import TensorSpec
from fxpipe.graph.markers import pipe_split
from fxpipe.graph.nested import branch, walk

__all__ = [
    "Flow",
    "as_tensor",
    "is_free",
    "symbols_in",
    "work_nodes",
]


def is_free(node: fx.Node, facts: Facts) -> bool:
    """Say whether a node belongs to no stage: it is taken wherever it is needed."""
    while facts[node].is_part and node.op == "call_function":
        node = node.args[0]  # type: ignore[assignment]
    if node.op in ("placeholder", "get_attr"):
        return True
    if node.target is choose:  # what is no tensor in each mode does not travel: stages ask a flag
        spec = facts[node].spec
        if isinstance(spec, ModeDependent):
            return not spec.is_always_tensor
        return not any(isinstance(leaf, (TensorSpec, sympy.Basic)) for _, leaf in walk(spec))
    return node.op == "call_function" and isinstance(node.target, (Constant, Rebuild))


def work_nodes(traced: TracedGraph) -> list[fx.Node]:
    """Return the nodes that a stage has to run, in order."""
    return [
        node
        for node in traced.graph.nodes
        if node.op != "output" and node.target is not pipe_split and not is_free(node, traced.facts)
    ]


def symbols_in(args: object) -> Iterator[str]:
    """Yield the names of the sizes that graph arguments use."""
    for leaf in leaves_of(args):
        if isinstance(leaf, sympy.Basic):
            yield from (size.name for size in leaf.free_symbols)


def as_tensor(value: object) -> torch.Tensor:
    """Return a number as a tensor that can be sent, with all its digits."""
    return torch.as_tensor(value, dtype=torch.float64 if isinstance(value, float) else None)


def zero_like(value: torch.Tensor) -> torch.Tensor:
    """Return a zero that has the dtype of a tensor."""
    return value.new_zeros(())


class Flow:
    """The values that go between stages."""

    def __init__(self, traced: TracedGraph, stage_of: Mapping[str, int], num_stages: int) -> None:
        self.traced = traced
        self.facts = traced.facts
        self.num_stages = num_stages
        self.output = next(n for n in traced.graph.nodes if n.op == "output")
        self.stage_of = _checked(traced, stage_of)
        self._last_change = self._changes()
        # Nodes that a stage computes although another stage computes them too.
        self.repeated: list[set[fx.Node]] = [set() for _ in range(num_stages)]
        # Model inputs that a stage is sent, rather than reading them from the user.
        self.lent: list[dict[fx.Node, fx.Node]] = [{} for _ in range(num_stages)]
        # Arguments of repeated modules of which only size and dtype matter.
        # None stands for a blank tensor of that size.
        self.stand_ins: list[dict[fx.Node, fx.Node | None]] = [{} for _ in range(num_stages)]
        self._reached: dict[int, tuple[dict[fx.Node, None], dict[fx.Node, None]]] = {}
        self._where_sizes: dict[str, list[tuple[fx.Node, int]]] = {}
        self._numbers: dict[str, fx.Node] = {}
        self._note_sizes()

    # -- what belongs to a stage

    def own(self, stage: int) -> list[fx.Node]:
        """Return the nodes that a stage runs, in order, the model's output included."""
        nodes = [n for n in work_nodes(self.traced) if self.stage_of[n] == stage]
        return [*nodes, self.output] if stage == self.num_stages - 1 else nodes

    def is_local(self, node: fx.Node, stage: int) -> bool:
        """Say whether a stage computes a node itself."""
        if is_free(node, self.facts):
            return True
        if self.stage_of[node] == stage or node in self.repeated[stage]:
            return True
        return self._is_taken_again(node)

    def needs(self, stage: int) -> dict[fx.Node, None]:
        """Return the tensors of earlier stages that a stage reads, as nodes."""
        local, received = self._reach(stage)
        found = dict(received)
        for name in sorted(self._missing_sizes(stage, local, found)):
            size = self._size_node(name, stage)
            if self.stage_of[size] == stage:
                return self.needs(stage)  # the stage reads an input now
            for part in self.sendable(size):
                found[part] = None
        return found

    def local(self, stage: int) -> list[fx.Node]:
        """Return everything a stage computes or takes for itself."""
        return list(self._reach(stage)[0])

    def inputs(self, stage: int) -> set[fx.Node]:
        """Return the model inputs that a stage's nodes read."""
        return {node for node in self.local(stage) if node.op == "placeholder"}

    def repeat(
        self, stage: int, nodes: set[fx.Node], stand_ins: Mapping[fx.Node, fx.Node | None]
    ) -> None:
        """Have a stage compute nodes that another stage computes too."""
        self.repeated[stage] |= nodes
        self.stand_ins[stage].update(stand_ins)
        self._reached.clear()

    def _reach(self, stage: int) -> tuple[dict[fx.Node, None], dict[fx.Node, None]]:
        """Return what a stage computes to run its nodes, and what it receives for it."""
        if stage in self._reached:
            return self._reached[stage]
        local: dict[fx.Node, None] = {}
        found: dict[fx.Node, None] = {}
        stack = list(reversed(self.own(stage)))
        while stack:
            node = stack.pop()
            if node in local:
                continue
            if node in self.lent[stage]:
                found[self.lent[stage][node]] = None
                continue
            if node is not self.output and not self.is_local(node, stage):
                for part in self.sendable(node):
                    found[part] = None
                continue
            local[node] = None
            stack.extend(reversed(self._local_sources(node, stage)))
        self._reached[stage] = (local, found)
        return local, found

    def _local_sources(self, node: fx.Node, stage: int) -> list[fx.Node]:
        sources = self.sources(node)
        if node in self.repeated[stage]:
            swap = self.stand_ins[stage]
            untouched = self.facts[node].untouched
            shown = (swap.get(n, n) if n in untouched else n for n in sources)
            return [n for n in shown if n is not None]
        return sources

    def blanks(self, stage: int, node: fx.Node) -> list[fx.Node]:
        """Return the values of which a node is shown a blank tensor of their size."""
        if node not in self.repeated[stage]:
            return []
        swap, untouched = self.stand_ins[stage], self.facts[node].untouched
        return [n for n in node.all_input_nodes if n in untouched and swap.get(n, n) is None]

    def lend(self, placeholder: fx.Node, stage: int) -> None:
        """Have the first stage that reads a model input send it to another."""
        first = min(s for s in range(self.num_stages) if placeholder in self.inputs(s))
        made = next((user for user in placeholder.users if user.target is given), None)
        if made is None:
            made = self._add(
                self._behind_inputs(), "call_function", given, (placeholder,),
                f"{placeholder.name}_sent", self.facts[placeholder].spec,
            )  # fmt: skip
            self.stage_of[made] = first
        self.lent[stage][placeholder] = made
        self._reached.clear()

    def _first_stage(self, node: fx.Node) -> int | None:
        if not is_free(node, self.facts):
            return self.stage_of[node]
        if node.op != "placeholder":
            return None
        return next((s for s in range(self.num_stages) if node in self.inputs(s)), None)

    def _behind_inputs(self) -> fx.Node:
        inputs: list[fx.Node] = [n for n in self.traced.graph.nodes if n.op == "placeholder"]
        return inputs[-1]

    def sources(self, node: fx.Node) -> list[fx.Node]:
        """Return the nodes that a node reads, numbers from data included."""
        numbers = {
            self._numbers[name]
            for name in symbols_in((node.args, node.kwargs))
            if name in self._numbers
        }
        return [*node.all_input_nodes, *sorted(numbers)]

    # -- mutation

    def _is_taken_again(self, node: fx.Node) -> bool:
        known = self.facts[node]
        if known.storage is None or not known.is_view:
            return False
        return self._last_change.get(known.storage, -1) > self.stage_of[node]

    def _changes(self) -> dict[int, int]:
        last: dict[int, int] = {}
        for node, stage in self.stage_of.items():
            for storage in self.facts[node].changes:
                last[storage] = max(stage, last.get(storage, -1))
        return last

    # -- what can be sent

    def sendable(self, node: fx.Node) -> list[fx.Node]:
        """Return the tensors of a node's value, as nodes of the stage that makes it."""
        spec = self.facts[node].spec
        if node.target is dtype_of:
            return [self._dtype_tensor(node)]
        if isinstance(spec, TensorSpec):
            self._check_known(node, spec)
            return [node]
        if isinstance(spec, ManySpec):
            raise UnknownLengthError(self._a_list(node))
        if isinstance(spec, ModeDependent):
            raise UnlikeModesError(
                f"{node.name} ({self.facts[node].where}) is {spec.training} in training and "
                f"{spec.evaluation} in evaluation, so it cannot cross a stage boundary; "
                "move the split"
            )
        if isinstance(spec, sympy.Basic):
            return [self._number_tensor(node)]
        return list(self._parts(node))

    def _a_list(self, node: fx.Node) -> str:
        return (
            f"{node.name} ({self.facts[node].where}) has a list whose length depends on the number "
            "of rows, so it cannot cross a stage boundary; move the split"
        )

    def _check_known(self, node: fx.Node, spec: TensorSpec) -> None:
        unknown = spec.symbols - set(self.traced.symbols)
        if unknown:
            raise UnknownSizeError(
                f"the size of {node.name} ({self.facts[node].where}), {spec}, depends on the data, "
                "so the next stage cannot know it in advance; move the split"
            )

    def _number_tensor(self, node: fx.Node) -> fx.Node:
        for user in node.users:
            if user.target is as_tensor:
                return user
        whole = self.facts[node].spec.is_integer
        spec = TensorSpec((), torch.int64 if whole else torch.float64)
        return self._add(node, "call_function", as_tensor, (node,), f"{node.name}_value", spec)

    def _dtype_tensor(self, node: fx.Node) -> fx.Node:
        """Return a tensor that shows the dtype which a node reads off a value."""
        source = node.args[0]
        assert isinstance(source, fx.Node)
        for user in [user for user in source.users if user.target is zero_like]:
            return user
        behind = source if source in self.stage_of else self._behind_inputs()
        spec, name = TensorSpec((), self.facts[source].spec.dtype), f"{source.name}_dtype"
        made = self._add(behind, "call_function", zero_like, (source,), name, spec)
        self.stage_of.setdefault(made, self.stage_of[node])
        return made

    def _add(
        self, behind: fx.Node, op: str, target: Any, args: Any, name: str, spec: object
    ) -> fx.Node:
        with behind.graph.inserting_after(self.facts.last_part(behind)):
            made = behind.graph.create_node(op, target, args, {}, name)
        known = self.facts[behind]
        self.facts[made] = replace(known.origin, spec=spec, mode=known.mode)
        if behind in self.stage_of:
            self.stage_of[made] = self.stage_of[behind]
        self._reached.clear()
        return made

    def _parts(self, node: fx.Node) -> Iterator[fx.Node]:
        """Yield nodes for the tensors inside a node's value, writing them if need be."""
        found = branch(self.facts[node].spec)
        if found is None:
            return
        for (kind, key), child in zip(found.accessors, found.children, strict=True):
            if isinstance(child, ManySpec):
                raise UnknownLengthError(self._a_list(node))
            if not isinstance(child, TensorSpec) and branch(child) is None:
                continue
            part = self.facts.part(node, key)
            if part is None:
                part = self._add(
                    node, "call_function", ACCESS[kind], (node, key), f"{node.name}_{key}", child
                )
                self.facts.learn(part, is_part=True)
            if isinstance(child, TensorSpec):
                self._check_known(part, child)
                yield part
            else:
                yield from self._parts(part)

    # -- sizes

    def number_node(self, name: str) -> fx.Node | None:
        """Return the node that gives a number which comes from data, by its symbol."""
        return self._numbers.get(name)

    def _note_sizes(self) -> None:
        for node in self.traced.graph.nodes:
            spec = self.facts[node].spec
            if isinstance(spec, TensorSpec):
                for dim, size in enumerate(spec.shape):
                    if isinstance(size, sympy.Symbol):
                        self._where_sizes.setdefault(size.name, []).append((node, dim))
            elif isinstance(spec, sympy.Symbol) and spec.name not in self.traced.symbols:
                self._numbers.setdefault(spec.name, node)

    def _missing_sizes(
        self, stage: int, local: Iterable[fx.Node], received: Iterable[fx.Node]
    ) -> set[str]:
        """Return the sizes that a stage uses before it has a tensor to read them off."""
        local = set(local)
        known = {*received, *(node for node in local if node.op == "placeholder")}
        have = {name for node in known for name in self._plain_sizes(node)}
        missing: set[str] = set()
        for node in self.traced.graph.nodes:
            if node in local:
                used = set(symbols_in((node.args, node.kwargs)))
                for blank in self.blanks(stage, node):
                    used |= self.facts[blank].spec.symbols
                missing |= used - have - self._numbers.keys()
                have |= set(self._plain_sizes(node))
                if self.facts[node].mode is not None:
                    for spec in self.facts.tensors(node):
                        missing |= spec.symbols - have
        return missing

    def _plain_sizes(self, node: fx.Node) -> list[str]:
        spec = self.facts[node].spec
        if not isinstance(spec, TensorSpec):
            return []
        return [size.name for size in spec.shape if isinstance(size, sympy.Symbol)]

    def _size_node(self, name: str, stage: int) -> fx.Node:
        for node, dim in self._where_sizes.get(name, []):
            made_in = self._first_stage(node)
            if made_in is None or made_in >= stage:
                continue
            for user in node.users:
                if user.target == "size" and user.args[1:] == (dim,) and user in self.stage_of:
                    return user
            behind = self._behind_inputs() if is_free(node, self.facts) else node
            made = self._add(behind, "call_method", "size", (node, dim), name, symbol(name))
            self.stage_of[made] = made_in
            return made
        for node, dim in self._where_sizes.get(name, []):
            if node.op == "placeholder":  # the stage itself takes the input
                made = self._add(
                    self._behind_inputs(), "call_method", "size", (node, dim), name, symbol(name)
                )
                self.stage_of[made] = stage
                return made
        raise SplitError(
            f"stage {stage} needs the size {name}, and no earlier stage has it; move the split"
        )


def _checked(traced: TracedGraph, stage_of: Mapping[str, int]) -> dict[fx.Node, int]:
    found: dict[fx.Node, int] = {}
    missing: list[str] = []
    for node in work_nodes(traced):
        if traced.facts[node].is_part:
            found[node] = found[node.args[0]]  # type: ignore[index]
        elif node.name in stage_of:
            found[node] = stage_of[node.name]
        else:
            missing.append(node.name)
    if missing:
        raise SplitError(f"the assignment leaves out {', '.join(missing)}")
    faults = [
        f"{node.name} (stage {stage}) reads {source.name} (stage {found[source]})"
        for node, stage in found.items()
        for source in node.all_input_nodes
        if source in found and found[source] > stage
    ]
    if faults:
        raise SplitError("values would have to go backwards:\n  " + "\n  ".join(faults))
    return found
