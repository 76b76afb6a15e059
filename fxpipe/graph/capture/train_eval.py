"""One graph for `train()` and `eval()`.

Opened code may look at `self.training`. Then the model is traced in both modes and
the two graphs become one that behaves like either, depending on the flag of the
module whose code it was, read when the stage runs:

    F.dropout(x, 0.1, True) / F.dropout(x, 0.1, False)  ->  F.dropout(x, 0.1, training)
    an argument that differs                            ->  choose(training, a, b)
    a call that happens in one mode only                ->  a node of one mode

Whatever way the two lists of nodes are lined up, the result is right: a node runs
in the mode it was traced in, with the arguments of that mode. Lining them up well
only keeps the graph small.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
from collections.abc import Collection, Hashable
from typing import Any

from torch import fx

from fxpipe.graph.calls.graph_calls import Constant, Rebuild
from fxpipe.graph.capture.traced_graph import TracedGraph
from fxpipe.graph.facts import Facts, map_pairs
from fxpipe.graph.interface import TensorSpec
from fxpipe.graph.markers import pipe_split
from fxpipe.graph.nested import walk

__all__ = ["TrainingFlag", "choose", "flag_of", "merge_modes"]


@dataclasses.dataclass(frozen=True, slots=True)
class TrainingFlag:
    """Stands in a traced graph for the training flag of an opened module."""

    module: str

    def __repr__(self) -> str:
        return f"training({self.module})"


def choose(training: bool, in_training: object, in_evaluation: object) -> object:
    """Return the value for the present mode."""
    return in_training if training else in_evaluation


def flag_of(owner: str, flags: Collection[str]) -> str:
    """Return the module whose flag decides for code of `owner`, one of those that were asked.

    All of them are alike when a stage runs; see `StageGuard.modes`.
    """
    return owner if owner in flags or not flags else min(flags)


def merge_modes(training: TracedGraph, evaluation: TracedGraph) -> None:
    """Change the graph of a trace in training mode so that it also evaluates."""
    _Merge(training, evaluation).run()


class _Merge:
    def __init__(self, training: TracedGraph, evaluation: TracedGraph) -> None:
        self._flags = training.flags | evaluation.flags
        self._graph = training.graph
        self._facts = training.facts
        self._their_facts = evaluation.facts
        self._ours = list(training.graph.nodes)
        self._theirs = list(evaluation.graph.nodes)
        # From nodes of the evaluation graph to nodes of the result.
        self._counterpart: dict[fx.Node, fx.Node] = {}
        self._choices: dict[object, fx.Node] = {}

    def run(self) -> None:
        matcher = difflib.SequenceMatcher(
            None,
            [_key(n, self._facts) for n in self._ours],
            [_key(n, self._their_facts) for n in self._theirs],
            autojunk=False,
        )
        for tag, our_start, our_end, their_start, their_end in matcher.get_opcodes():
            if tag == "equal":
                for ours, theirs in zip(
                    self._ours[our_start:our_end], self._theirs[their_start:their_end], strict=True
                ):
                    self._join(ours, theirs)
                continue
            for ours in self._ours[our_start:our_end]:
                self._only_here(ours)
            for theirs in self._theirs[their_start:their_end]:
                self._insert(theirs, before=self._ours[our_end])

    def _join(self, ours: fx.Node, theirs: fx.Node) -> None:
        self._counterpart[theirs] = ours
        with self._graph.inserting_before(ours):
            ours.args = self._joined(ours.args, theirs.args, ours)
            ours.kwargs = self._joined(ours.kwargs, theirs.kwargs, ours)
        known, other = self._facts[ours], self._their_facts[theirs]
        self._facts.learn(ours, spec=self._common(known.spec, other.spec))

    def _only_here(self, node: fx.Node) -> None:
        if node.op not in ("placeholder", "get_attr", "output"):
            self._facts.learn(node, mode=True)

    def _insert(self, node: fx.Node, before: fx.Node) -> None:
        with self._graph.inserting_before(before):
            made = self._graph.create_node(
                node.op, node.target, self._mapped(node.args), self._mapped(node.kwargs), node.name
            )
        known = self._their_facts[node]
        is_work = node.op not in ("placeholder", "get_attr", "output")
        self._facts[made] = dataclasses.replace(
            known,
            mode=False if is_work else None,
            untouched=tuple(self._counterpart[n] for n in known.untouched),
            dtypes_read={},
        )
        self._counterpart[node] = made

    def _mapped(self, args: Any) -> Any:
        return fx.map_arg(args, lambda node: self._counterpart[node])

    def _joined(self, ours: object, theirs: object, node: fx.Node) -> Any:
        """Return an argument that is `ours` in training and `theirs` in evaluation."""

        def one(ours: object, theirs: object) -> object:
            if isinstance(theirs, fx.Node):
                mapped = self._counterpart[theirs]
                return ours if mapped is ours else self._chosen(ours, mapped, node)
            if type(ours) is type(theirs) and repr(ours) == repr(theirs):
                return ours
            if ours is True and theirs is False:
                return TrainingFlag(flag_of(self._facts[node].owner, self._flags))
            return self._chosen(ours, self._mapped(theirs), node)

        return map_pairs(one, ours, theirs)

    def _chosen(self, ours: object, theirs: object, node: fx.Node) -> fx.Node:
        flag = TrainingFlag(flag_of(self._facts[node].owner, self._flags))
        pair = (ours, theirs) if isinstance(ours, fx.Node) and isinstance(theirs, fx.Node) else None
        if pair in self._choices:
            return self._choices[pair]
        # Choose as soon as both are known: a cut may come before the first use.
        place: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if pair is not None:
            last = self._facts.last_part(max(pair))
            # A part of one of them may be what is written now.
            before = last is node or node < last
            place = (
                self._graph.inserting_before(node) if before else self._graph.inserting_after(last)
            )
        with place:
            chosen: Any = (flag, ours, theirs)
            made = self._graph.create_node("call_function", choose, chosen, {})
        if pair is not None:
            self._choices[pair] = made
        left = self._facts[ours].spec if isinstance(ours, fx.Node) else ours
        right = self._facts[theirs].spec if isinstance(theirs, fx.Node) else theirs
        spec = self._common(left, right)
        self._facts[made] = dataclasses.replace(self._facts[node].origin, spec=spec)
        return made

    def _common(self, ours: object, theirs: object) -> object:
        """Return the spec for both modes; a gradient in either is a gradient."""
        if isinstance(ours, TensorSpec) and isinstance(theirs, TensorSpec):
            if ours.shape == theirs.shape and ours.dtype == theirs.dtype:
                return ours if ours.requires_grad else theirs
            return ModeDependent(ours, theirs)
        is_mixed = isinstance(ours, TensorSpec) or isinstance(theirs, TensorSpec)
        return ModeDependent(ours, theirs) if is_mixed else ours


@dataclasses.dataclass(frozen=True, slots=True)
class ModeDependent:
    """In place of a spec: a tensor that looks different in training and in evaluation.

    Or it is a tensor in one mode only, and something else, such as None, in the other.
    """

    training: object
    evaluation: object

    @property
    def is_always_tensor(self) -> bool:
        return isinstance(self.training, TensorSpec) and isinstance(self.evaluation, TensorSpec)


def _key(node: fx.Node, facts: Facts) -> Hashable:
    target: Any = node.target
    if isinstance(target, (Rebuild, Constant)):
        target = (type(target), target.__name__)
    if node.op == "output":
        return "output"
    known = facts[node]
    shape = tuple(path for path, _ in walk(known.spec))
    runs = node.op not in ("placeholder", "get_attr") and target is not pipe_split
    ambient = known.ambient if runs else None
    return (node.op, target, len(node.args), known.owner, shape, ambient)
