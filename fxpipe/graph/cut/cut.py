"""Cut a traced graph into one graph per stage.

In:  a TracedGraph and an Assignment of its nodes to stages.
Out: a StageGraph per stage: an ordinary fx graph whose placeholders are the
     values it receives and the model inputs it reads, and the interface to match.

A value that a later stage uses travels straight there, once per stage. Values
that cost nothing to have (parameters, model inputs, constants, parts of a
received value) are taken where they are needed.

Each stage has its own copy of what it holds, in a process of its own. So a cut is refused
that leaves a buffer, a parameter or an argument which one stage changes in another stage.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import fx, nn

from fxpipe.errors import SplitError
from fxpipe.graph.calls.checks import AgreedPart
from fxpipe.graph.calls.graph_calls import Hooked, Kept, Observed, after, given
from fxpipe.graph.calls.method_calls import MethodCall, module_at
from fxpipe.graph.capture.traced_graph import TracedGraph
from fxpipe.graph.cut.flow import Flow, is_free, work_nodes
from fxpipe.graph.cut.recompute import choose_repeated
from fxpipe.graph.cut.stage_writer import StageGraph, StageWriter
from fxpipe.graph.interface import Port, Received, Sent
from fxpipe.graph.markers import pipe_split
from fxpipe.graph.source_line import Place
from fxpipe.torch_inside import NormBase, buffers_of, parameters_of, transient_buffers

__all__ = ["Assignment", "by_markers", "check_state_writes", "cut"]


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
                raise SplitError(_empty("before", traced.facts[node].where))
            stage, is_empty, last = stage if is_empty else stage + 1, True, node
        elif node.op != "output" and not is_free(node, traced.facts):
            stage_of[node.name], is_empty = stage, False
    if last is not None and is_empty:
        raise SplitError(_empty("after", traced.facts[last].where))
    return Assignment(stage_of)


def _empty(where: str, place: Place | None) -> str:
    return (
        f"a split point at {place} would make an empty stage: "
        f"nothing runs {where} it\nremove it, or move it between two modules"
    )


def cut(traced: TracedGraph, assignment: Assignment) -> tuple[StageGraph, ...]:
    """Cut the graph; see the module's docstring.

    Raises:
        SplitError: the assignment misses nodes or sends values backwards, or a stage uses
            a buffer that another one changes.
    """
    stage_of = _with_late_draws(traced, assignment)
    flow = Flow(traced, stage_of, assignment.num_stages)
    repeated = choose_repeated(flow)
    check_state_writes(flow)
    _check_aliases(flow)
    needs = [flow.needs(stage) for stage in range(flow.num_stages)]
    targets: dict[fx.Node, list[int]] = {}
    for stage, found in enumerate(needs):
        for node in found:
            targets.setdefault(node, []).append(stage)

    def port(node: fx.Node) -> Port:
        return Port(node.name, traced.facts[node].spec)

    order = {node: index for index, node in enumerate(traced.graph.nodes)}
    graphs = []
    for stage in range(flow.num_stages):
        sent = sorted((n for n in targets if flow.stage_of[n] == stage), key=order.__getitem__)
        received = sorted(needs[stage], key=order.__getitem__)
        writer = StageWriter(flow, stage, received, sent)
        for node in flow.own(stage):
            if node.op != "output":
                writer.copy(node)
        graphs.append(
            writer.finish(
                tuple(Received(port(node), flow.stage_of[node]) for node in received),
                tuple(Sent(port(node), tuple(targets[node])) for node in sent),
                flow.output if stage == flow.num_stages - 1 else sent,
                tuple(repeated[stage]),
            )
        )
    return tuple(graphs)


def _with_late_draws(traced: TracedGraph, assignment: Assignment) -> dict[str, int]:
    """Return the stages, with draws of random numbers in the order of the plain model.

    A dropout that reads little could run in an early stage, but there it would take the
    numbers that in the plain model go to a dropout which comes first.
    """
    stage_of = dict(assignment.stage_of)
    latest = 0
    moved: dict[fx.Node, int] = {}
    for node in work_nodes(traced):
        if node.name not in stage_of:
            continue
        wanted = max((moved.get(source, 0) for source in node.all_input_nodes), default=0)
        if traced.facts[node].draws:
            wanted = max(wanted, latest)
        if wanted > stage_of[node.name]:
            stage_of[node.name] = moved[node] = wanted
        if traced.facts[node].draws:
            latest = max(latest, stage_of[node.name])
    for node in work_nodes(traced):
        if isinstance(node.target, (Hooked, Kept, AgreedPart, Observed)):
            stage_of[node.name] = _made_in(traced, stage_of, node.all_input_nodes)
        elif node.target in (given, after) and node.users:
            stage_of[node.name] = _made_in(traced, stage_of, [_changing(node)])
    return stage_of


def _changing(node: fx.Node) -> fx.Node:
    """Return the call that changes a list or dict, which must be made where the call is."""
    found: object = node.args[1] if node.target is after else next(iter(node.users))
    assert isinstance(found, fx.Node)
    return found


def _made_in(traced: TracedGraph, stage_of: Mapping[str, int], nodes: Iterable[fx.Node]) -> int:
    """Return the stage in which the last of some values is there."""
    makers = [_maker(traced, node) for node in nodes]
    return max(
        (
            stage_of[maker.name]
            if maker.name in stage_of
            else _made_in(traced, stage_of, maker.all_input_nodes)
            for maker in makers
        ),
        default=0,
    )


def _maker(traced: TracedGraph, node: fx.Node) -> fx.Node:
    """Return the node whose value this one is, or is a part of."""
    while traced.facts[node].is_part:
        node = node.all_input_nodes[0]
    return node


def _check_aliases(flow: Flow) -> None:
    """Check that what a leaf returned of its argument's own memory changes in its stage only.

    What changed the memory before the leaf ran changed the argument, not a copy.
    """
    facts = flow.traced.facts
    order = {node: index for index, node in enumerate(flow.traced.graph.nodes)}
    changes = [node for node in flow.stage_of if facts[node].changes]
    for value in order if changes else ():
        leaf = _maker(flow.traced, value)
        if not facts[leaf].aliases or leaf not in flow.stage_of:
            continue
        home = flow.stage_of[leaf]
        for node in changes:
            is_later = order[node] > order[leaf] and flow.stage_of[node] != home
            if is_later and facts[value].storage in facts[node].changes:
                raise SplitError(
                    f"{leaf.name} returns its argument itself, or a view of it, and "
                    f"{facts[node].where} changes that in place in stage {flow.stage_of[node]}, "
                    f"where it would be a copy (stage {home} has the module)\nmove the split, "
                    "or make it an operation that is not in place"
                )


def check_state_writes(flow: Flow) -> None:
    """Check that no stage uses a buffer that another one changes.

    Raises:
        SplitError: lists every such buffer, and where it is changed and used.
    """
    module = flow.traced.module
    writers: dict[int, tuple[str, int, fx.Node]] = {}
    for node, stage in flow.stage_of.items():
        for name in _written(module, node, flow.facts[node].writes):
            writers.setdefault(id(_tensor(module, name)), (name, stage, node))
    if not writers:
        return
    faults: dict[str, None] = {}
    for stage in range(flow.num_stages):
        for node in flow.local(stage):
            for tensor in _tensors(module, node):
                name, home, writer = writers.get(id(tensor), ("", stage, node))
                if home != stage:
                    faults[
                        f"{name!r} is changed in stage {home} ({flow.facts[writer].where}) and "
                        f"used in stage {stage} ({flow.facts[node].where})"
                    ] = None
    if faults:
        raise SplitError(
            "a buffer or parameter that is changed in one stage cannot be used in another, which "
            "has its own copy:\n  "
            + "\n  ".join(faults)
            + "\nmove the split so that one stage has both"
        )


def _written(module: nn.Module, node: fx.Node, writes: frozenset[str]) -> set[str]:
    names = set(writes)
    for held in _modules_of(module, node):
        for inner, part in module.get_submodule(held).named_modules():
            prefix = ".".join(filter(None, (held, inner)))
            if isinstance(part, NormBase) and part.running_mean is not None:
                names |= {f"{prefix}.{key}" for key, _ in part.named_buffers()}
            # What is not saved is a cache that every stage fills for itself.
            names -= {f"{prefix}.{key}" for key in transient_buffers(part)}
    return names


def _modules_of(module: nn.Module, node: fx.Node) -> list[str]:
    """Return the names of the modules that a node runs."""
    if node.op == "call_module":
        return [str(node.target)]
    parts = node.all_input_nodes if isinstance(node.target, MethodCall) else ()
    names = [str(part.target) for part in parts if part.op == "get_attr"]
    return [name for name in names if module_at(module, name) is not None]


def _tensors(module: nn.Module, node: fx.Node) -> Iterator[torch.Tensor]:
    if node.op == "call_module":
        yield from module.get_submodule(str(node.target)).buffers()
        yield from module.get_submodule(str(node.target)).parameters()
    elif node.op == "get_attr":
        part = module_at(module, str(node.target))
        if part is not None:
            yield from itertools.chain(part.buffers(), part.parameters())
            return
        found = _tensor(module, str(node.target))
        if found is not None:
            yield found


def _tensor(module: nn.Module, name: str) -> torch.Tensor | None:
    path, _, key = name.rpartition(".")
    owner = module.get_submodule(path)
    return {**parameters_of(owner), **buffers_of(owner)}.get(key)
