"""Cut a traced graph into one graph per stage.

In:  a TracedGraph and an Assignment of its nodes to stages.
Out: a StageGraph per stage: an ordinary fx graph whose placeholders are the
     values it receives and the model inputs it reads, and the interface to match.

A value that a later stage uses travels straight there, once per stage. Values
that cost nothing to have (parameters, model inputs, constants, parts of a
received value) are taken where they are needed. Only tensors travel: a nested
value is sent as its tensors and put together again.

A view of a tensor that a later stage changes in place is not sent: its base is,
and the view is taken again there, so that the change is seen through it.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import fx

from fxpipe.errors import SplitError
from fxpipe.graph.capture import TracedGraph
from fxpipe.graph.interface import Port, Received, Sent, TensorSpec
from fxpipe.graph.markers import pipe_split
from fxpipe.graph.stagegraph import StageGraph, StageWriter
from fxpipe.graph.structure import branch
from fxpipe.graph.tape import Constant, Rebuild, child_of

__all__ = ["Assignment", "by_markers", "cut"]


@dataclasses.dataclass(frozen=True, slots=True)
class Assignment:
    """Which stage runs which node: dense from 0, never decreasing along data flow."""

    stage_of: Mapping[str, int]

    def __post_init__(self) -> None:
        used = set(self.stage_of.values())
        if used != set(range(len(used))):
            raise SplitError(
                f"stages must be numbered 0, 1, 2, ... without holes; got {sorted(used)}"
            )

    @property
    def num_stages(self) -> int:
        return max(self.stage_of.values(), default=-1) + 1


def is_free(node: fx.Node) -> bool:
    """Say whether a node belongs to no stage: it is taken wherever it is needed."""
    if node.op in ("placeholder", "get_attr"):
        return True
    if node.op != "call_function":
        return False
    if isinstance(node.target, (Constant, Rebuild)):
        return True
    return bool(node.meta.get("accessor")) and is_free(node.args[0])  # type: ignore[arg-type]


def work_nodes(traced: TracedGraph) -> list[fx.Node]:
    """Return the nodes that a stage has to run, in order."""
    return [
        node
        for node in traced.graph.nodes
        if node.op != "output" and node.target is not pipe_split and not is_free(node)
    ]


def by_markers(traced: TracedGraph) -> Assignment:
    """Start a new stage at each split point of the graph.

    Raises:
        SplitError: nothing runs before the first or after the last split point.
    """
    stage_of: dict[str, int] = {}
    stage, is_empty, last = 0, True, None
    for node in traced.graph.nodes:
        if node.target is pipe_split:
            if not stage_of:
                raise SplitError(_empty("before", node))
            stage, is_empty, last = stage if is_empty else stage + 1, True, node
        elif node.op != "output" and not is_free(node):
            stage_of[node.name], is_empty = stage, False
    if last is not None and is_empty:
        raise SplitError(_empty("after", last))
    return Assignment(stage_of)


def _empty(where: str, node: fx.Node) -> str:
    return (
        f"a split point at {node.meta.get('where')} would make an empty stage: "
        f"nothing runs {where} it\nremove it, or move it between two modules"
    )


def cut(traced: TracedGraph, assignment: Assignment) -> tuple[StageGraph, ...]:
    """Cut the graph; see the module's docstring.

    Raises:
        SplitError: the assignment misses nodes or sends values backwards.
    """
    return _Cut(traced, assignment).run()


class _Cut:
    def __init__(self, traced: TracedGraph, assignment: Assignment) -> None:
        self._traced = traced
        self._stage_of = _checked(traced, assignment)
        self._num_stages = assignment.num_stages
        self._last_change = self._changes()
        # For each stage the values it must receive, in order, and where they come from.
        self._received: list[dict[fx.Node, int]] = [{} for _ in range(self._num_stages)]
        self._writers: list[StageWriter] = []

    def run(self) -> tuple[StageGraph, ...]:
        output = next(n for n in self._traced.graph.nodes if n.op == "output")
        lists: list[list[fx.Node]] = [[] for _ in range(self._num_stages)]
        for node in work_nodes(self._traced):
            lists[self._stage_of[node]].append(node)
        needs = [
            self._needs(stage, [*nodes, *self._outputs(stage, output)])
            for stage, nodes in enumerate(lists)
        ]
        return self._write(lists, needs, output)

    def _outputs(self, stage: int, output: fx.Node) -> Iterable[fx.Node]:
        return [output] if stage == self._num_stages - 1 else []

    # -- what a stage needs from outside

    def _needs(self, stage: int, nodes: list[fx.Node]) -> dict[fx.Node, None]:
        """Return the nodes of earlier stages, sendable ones only, that a stage reads."""
        found: dict[fx.Node, None] = {}
        seen: set[fx.Node] = set()

        def visit(node: fx.Node) -> None:
            if node in seen:
                return
            seen.add(node)
            if self._is_local(node, stage):
                for source in node.all_input_nodes:
                    visit(source)
            else:
                for part in self._sendable(node):
                    found[part] = None

        for node in nodes:
            for source in node.all_input_nodes:
                visit(source)
        return found

    def _is_local(self, node: fx.Node, stage: int) -> bool:
        """Say whether a stage computes a node itself."""
        if is_free(node):
            return True
        made = self._stage_of[node]
        return made == stage or self._is_taken_again(node)

    def _is_taken_again(self, node: fx.Node) -> bool:
        storage = node.meta.get("storage")
        if storage is None or not node.meta.get("is_view"):
            return False
        return self._last_change.get(storage, -1) > self._stage_of[node]

    def _changes(self) -> dict[int, int]:
        last: dict[int, int] = {}
        for node, stage in self._stage_of.items():
            for storage in node.meta.get("changes", ()):
                last[storage] = max(stage, last.get(storage, -1))
        return last

    def _sendable(self, node: fx.Node) -> list[fx.Node]:
        """Return the tensors of a node's value, as nodes of the stage that makes it."""
        if isinstance(node.meta.get("spec"), TensorSpec):
            return [node]
        return list(_tensor_parts(node, self._stage_of))

    # -- writing

    def _write(
        self, lists: list[list[fx.Node]], needs: list[dict[fx.Node, None]], output: fx.Node
    ) -> tuple[StageGraph, ...]:
        targets: dict[fx.Node, list[int]] = {}
        for stage, found in enumerate(needs):
            for node in found:
                targets.setdefault(node, []).append(stage)
        graphs = []
        for stage, nodes in enumerate(lists):
            received = tuple(
                Received(Port(node.name, node.meta["spec"]), self._stage_of[node])
                for node in needs[stage]
            )
            sent = [node for node in targets if self._stage_of[node] == stage]
            order = {node: index for index, node in enumerate(self._traced.graph.nodes)}
            sent.sort(key=lambda node: order[node])
            writer = StageWriter(self._traced, stage, needs[stage], self._is_local)
            for node in nodes:
                writer.copy(node)
            is_last = stage == self._num_stages - 1
            ports = tuple(
                Sent(Port(node.name, node.meta["spec"]), tuple(targets[node])) for node in sent
            )
            graphs.append(writer.finish(received, ports, output if is_last else sent))
        return tuple(graphs)


def _checked(traced: TracedGraph, assignment: Assignment) -> dict[fx.Node, int]:
    stage_of: dict[fx.Node, int] = {}
    missing: list[str] = []
    for node in work_nodes(traced):
        if node.meta.get("accessor"):
            stage_of[node] = stage_of[node.args[0]]  # type: ignore[index]
        elif node.name in assignment.stage_of:
            stage_of[node] = assignment.stage_of[node.name]
        else:
            missing.append(node.name)
    if missing:
        raise SplitError(f"the assignment leaves out {', '.join(missing)}")
    faults = [
        f"{node.name} (stage {stage}) reads {source.name} (stage {stage_of[source]})"
        for node, stage in stage_of.items()
        for source in node.all_input_nodes
        if source in stage_of and stage_of[source] > stage
    ]
    if faults:
        raise SplitError("values would have to go backwards:\n  " + "\n  ".join(faults))
    return stage_of


def _tensor_parts(node: fx.Node, stage_of: dict[fx.Node, int]) -> Iterable[fx.Node]:
    """Write nodes for the tensors inside a node's value; needed when it crosses a boundary."""
    targets: dict[str, Callable[..., Any]] = {
        "item": operator.getitem,
        "attr": getattr,
        "child": child_of,
    }
    found = branch(node.meta.get("spec"))
    if found is None:
        return
    for (kind, key), child in zip(found.accessors, found.children, strict=True):
        if not isinstance(child, TensorSpec) and branch(child) is None:
            continue
        part = next(
            (u for u in node.users if u.meta.get("accessor") and u.args[1:] == (key,)), None
        )
        if part is None:
            with node.graph.inserting_after(node):
                part = node.graph.create_node(
                    "call_function", targets[kind], (node, key), {}, f"{node.name}_{key}"
                )
            part.meta.update(node.meta)
            part.meta.update(accessor=True, spec=child)
            stage_of[part] = stage_of[node]
        if isinstance(child, TensorSpec):
            yield part
        else:
            yield from _tensor_parts(part, stage_of)
