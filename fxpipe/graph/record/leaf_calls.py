"""Write the call of a leaf as one node, with all that the leaf does to its surroundings.

A leaf may change its arguments, its buffers and its attributes, and return its arguments
themselves. What it keeps for code that is opened, or is called with other state than its own,
cannot stay one call: such a leaf is opened in the next run.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

from fxpipe.graph.calls.checks import AgreedLeaf
from fxpipe.graph.calls.late_lists import plain_lists
from fxpipe.graph.nested import map_leaves, walk
from fxpipe.graph.record.leaf_runs import Handed, LeafOutcome, LeafRuns
from fxpipe.graph.record.names import Running
from fxpipe.graph.record.writer import Writer
from fxpipe.graph.sandbox.fake import FakeState
from fxpipe.graph.sandbox.patches import observe, unobserved
from fxpipe.graph.sizes.symbols import Sizes
from fxpipe.graph.source_line import user_frame

__all__ = ["LeafCalls"]


class LeafCalls:
    """Runs and writes the leaves of one trace; those in `to_open` cannot be parts of one."""

    def __init__(
        self,
        state: FakeState,
        sizes: Sizes,
        running: Running,
        writer: Writer,
        leaves: LeafRuns,
        to_open: Collection[str],
    ) -> None:
        self._state = state
        self._sizes = sizes
        self._running = running
        self._writer = writer
        self._tape = writer.tape
        self._leaves = leaves
        self._to_open = to_open
        self._left: dict[tuple[int, str], set[str]] = {}

    def run(
        self, module: nn.Module, name: str, call: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Run a leaf and write its call."""
        self._writer.check_chance()
        self._check_swapped(module, name)
        args, kwargs = plain_lists(args), plain_lists(kwargs)
        node_args, node_kwargs = self._writer.argument(args), self._writer.argument(kwargs)
        handed = Handed(self._tape, self._writer.argument, args, kwargs)
        tensors = [leaf for _, leaf in walk((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        decided = self._sizes.decisions()
        try:
            with self._running.in_leaf(module), unobserved(module):
                outcome = self._leaves.run(module, call, args, kwargs)
        finally:
            self._writer.chance.settle()
        if outcome.is_likely:
            self._sizes.forget(decided)  # of a run that failed
        node_args, node_kwargs = handed.look(node_args, node_kwargs)
        node = self._tape.write("call_module", name, node_args, node_kwargs)
        self._tape.facts.learn(
            node,
            writes=frozenset(f"{name}.{buffer}" for buffer in outcome.wrote),
            untouched=tuple(self._tape.node_of(tensors[i]) for i in outcome.untouched),
            draws=outcome.draws,
            aliases=bool(outcome.aliases),
        )
        for index in outcome.changed:
            self._tape.changed(tensors[index], node)
        for inner, key in outcome.left:
            part = module.get_submodule(inner)
            self._left[id(part), key] = self._around(name, inner)
        outcome = self._aliased(outcome, tensors)
        self._tape.adopt(node, outcome.output)
        self._writer.check_parts(node, outcome.output)
        handed.note(node)
        if outcome.is_likely:
            self._writer.check_sizes(outcome.output)
        if outcome.own is not None:
            made = [leaf for _, leaf in walk(outcome.output) if isinstance(leaf, torch.Tensor)]
            sources = [tensors[index] for index, _ in outcome.own.sources.values()]
            check = AgreedLeaf(user_frame(), outcome.own.shapes, outcome.own.sources)
            self._writer.call(check, *self._writer.argument((made, sources)))
        observe(module, args, outcome.output)
        return outcome.output

    def run_inside(
        self, module: nn.Module, name: str | None, call: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Run a module inside of a leaf, or of code that is not written down."""
        if self._running.is_busy or (self._running.leaves and self._running.leaves[-1] is module):
            return call(*args, **kwargs)
        if name in self._to_open:
            self._writer.want_open()
        with self._running.in_leaf(module):
            return call(*args, **kwargs)

    def on_left(self, holder: Any, name: str) -> None:
        """Open a leaf whose inner module keeps something that opened code reads."""
        self._writer.wanted |= self._left.get((id(holder), name), set())

    def on_kept(self, module: nn.Module) -> None:
        """Open the leaf around a module whose output a hook of a library keeps for later."""
        kinds = {type(part) for part in self._running.leaves if part is not module}
        self._writer.wanted.update(self._running.names.of_kinds(kinds))

    def _check_swapped(self, module: nn.Module, name: str) -> None:
        """Open a leaf that is called with other parameters or buffers than its own."""
        for inner, part in module.named_modules():
            if self._state.is_swapped(part):
                self._writer.wanted |= self._around(name, inner)

    def _around(self, name: str, inner: str) -> set[str]:
        """Return the names from a leaf down to a module inside it."""
        words = inner.split(".") if inner else []
        return {".".join(filter(None, (name, *words[:i]))) for i in range(len(words) + 1)}

    def _aliased(self, outcome: LeafOutcome, tensors: list[torch.Tensor]) -> LeafOutcome:
        """Give outputs of a leaf the memory of the arguments that they are, or are views of."""
        sources = dict(outcome.aliases)
        if not sources:
            return outcome
        positions = itertools.count()

        def one(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            source = sources.get(next(positions))
            if source is None or tensors[source].dtype != leaf.dtype:
                return leaf
            try:
                made = tensors[source].as_strided(leaf.shape, leaf.stride())
            except Exception:
                return leaf
            return made if leaf.requires_grad else made.detach()

        with self._running.unseen():
            return dataclasses.replace(outcome, output=map_leaves(one, outcome.output))
