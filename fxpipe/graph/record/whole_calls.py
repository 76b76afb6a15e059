"""Write calls that stay whole as one node each: leaves, and some calls of opened code.

A leaf may change its arguments, its buffers and its attributes, and return its arguments
themselves. What it keeps for code that is opened, or is called with other state than its own,
cannot stay one call: such a leaf is opened in the next run.

Of opened code these are mask functions, functions of whole numbers, hooks that only look, and
checks that the user makes. What turns out to be something else runs like any other code.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from fxpipe.graph.calls.attention_masks import MaskCall
from fxpipe.graph.calls.checks import AgreedLeaf, Asserted
from fxpipe.graph.calls.graph_calls import Observed
from fxpipe.graph.calls.late_lists import LateList, Numbers, plain_lists
from fxpipe.graph.calls.value_functions import ValueFunction
from fxpipe.graph.nested import Args, Kwargs, map_leaves, walk
from fxpipe.graph.record.constant_values import ValueDecidesError
from fxpipe.graph.record.example_values import ExampleValues, NoValueError, has_unbacked
from fxpipe.graph.record.leaf_runs import Handed, LeafOutcome, LeafRuns
from fxpipe.graph.record.leaf_sizes import numbers_in
from fxpipe.graph.record.names import Running
from fxpipe.graph.record.operations import Operations, Writer
from fxpipe.graph.record.torch_functions import plain_tuples
from fxpipe.graph.sandbox.fake import FakeState
from fxpipe.graph.sandbox.patches import observe, unobserved
from fxpipe.graph.sandbox.restore import Places
from fxpipe.graph.sizes.symbols import Sizes
from fxpipe.graph.source_line import user_frame
from fxpipe.torch_inside import FakeTensor, version_of

__all__ = ["LeafCalls", "WholeCalls"]


class WholeCalls:
    """Runs and writes calls of opened code; `inputs` are the values of the example."""

    def __init__(
        self,
        sizes: Sizes,
        running: Running,
        writer: Writer,
        leaves: LeafRuns,
        operations: Operations,
        inputs: ExampleValues,
    ) -> None:
        self._sizes = sizes
        self._running = running
        self._writer = writer
        self._tape = writer.tape
        self._leaves = leaves
        self._operations = operations
        self._inputs = inputs

    def mask(self, call: MaskCall, args: Args, kwargs: Kwargs) -> object:
        """Write the making of an attention mask as one node, if there is a mask."""
        if not self._running.is_opened():
            return call(*args, **kwargs)
        try:
            output = self._operations.run_unseen(call, args, kwargs, False)
        except Exception:
            return call(*args, **kwargs)  # as any other code
        tensors = [leaf for _, leaf in walk((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        made = [leaf for _, leaf in walk(output) if isinstance(leaf, torch.Tensor)]
        if not made or any(leaf is tensor for leaf in made for tensor in tensors):
            return call(*args, **kwargs)
        node_args, node_kwargs = self._writer.argument(args), self._writer.argument(kwargs)
        node = self._tape.write("call_function", call, node_args, node_kwargs)
        shown = tuple(self._tape.node_of(tensor) for tensor in call.shown(args, kwargs))
        self._tape.facts.learn(node, untouched=shown)
        self._tape.adopt(node, output, tensors)
        return output

    def value_function(self, function: Callable[..., object], args: Args, kwargs: Kwargs) -> object:
        """Write a function of whole numbers as one node, if it is one."""
        if not self._running.is_opened():
            return function(*args, **kwargs)
        owner = args[0] if args and isinstance(args[0], nn.Module) else None
        call = ValueFunction(function, owner)
        rest = args if owner is None else args[1:]
        try:
            with self._running.unseen():
                output = self._inputs.whole(call, rest, kwargs)
                self._running.is_reading = True
                self._inputs.run(function, args, kwargs)
        except NoValueError:
            return function(*args, **kwargs)  # as any other code
        finally:
            self._running.is_reading = False
        node_args, node_kwargs = (
            self._writer.argument(plain_tuples(rest)),
            self._writer.argument(kwargs),
        )
        node = self._tape.write("call_function", call, node_args, node_kwargs)
        self._tape.adopt(node, output)
        self._writer.check_parts(node, output)
        self._writer.check_sizes(output)
        return output

    def list_of(self, tensor: torch.Tensor, make: Callable[[], object]) -> object:
        """Return the values of a tensor as a list, made late if its length is a size."""
        if self._running.is_busy or not _has_open_length(tensor):
            return make()
        if self._running.leaves and self._leaves.example is not None and not self._leaves.may_list:
            raise ValueDecidesError(
                self._running.data_dependent()
            )  # the leaf runs on the example then
        if not self._running.is_opened():
            return make()
        self._operations.has_lists = True
        return Numbers(tensor, make)

    def settle_lists(self, output: object) -> None:
        """Make the lists that the model returns: whoever takes them will look at them."""
        for _, leaf in walk(output):
            if isinstance(leaf, LateList):
                leaf.plain()

    def hook(self, hook: Callable[..., object], module: nn.Module, values: Args) -> object:
        """Run a user's hook; one that only looks is a node, and looks again in the stage.

        In a leaf it is part of the call. There, one that fails on fakes looks at values.
        """
        if not self._running.is_opened():
            names = {self._running.name_of(part) for part in self._running.leaves}
            self._writer.hooked.update(name for name in names if name is not None)
            holder = nn.Module()
            vars(holder)["hook"] = hook
            made_up = (leaf for _, leaf in walk(values) if isinstance(leaf, torch.Tensor))
            places = None if all(isinstance(t, FakeTensor) for t in made_up) else Places(holder)
            try:
                with suppress(Exception):
                    return hook(module, *values)
                return None
            finally:
                if places is not None and places.have_changed():
                    places.restore()  # what it keeps of made-up values would be a constant
                    self._writer.want_open()
        tensors = [leaf for _, leaf in walk(values) if isinstance(leaf, torch.Tensor)]
        versions = [version_of(tensor) for tensor in tensors]
        counts = [sys.getrefcount(tensor) for tensor in tensors]
        with self._running.in_leaf(module), self._leaves.touching() as touched:
            try:
                changed = hook(module, *values)
            except Exception:
                changed, touched = None, {id(tensor) for tensor in tensors}
        if changed is not None or [version_of(tensor) for tensor in tensors] != versions:
            return hook(module, *values)  # as any other opened code
        for tensor, count in zip(tensors, counts, strict=True):
            if sys.getrefcount(tensor) > count:
                touched.add(id(tensor))
        shown = {id(leaf) for _, leaf in walk(values[-1])} | touched
        # What the hook does not look at need not travel to the stage that shows the rest.
        values = map_leaves(
            lambda leaf: None if isinstance(leaf, torch.Tensor) and id(leaf) not in shown else leaf,
            values,
        )
        self._tape.write("call_function", Observed(hook, module), self._writer.argument(values), {})
        return None

    def check(self, condition: object) -> bool:
        """Write down a check of values that the user makes; one of sizes is a condition."""
        if not self._running.is_opened():
            return False
        if isinstance(condition, FakeTensor):
            node = self._writer.argument(condition)
            self._tape.write("call_function", Asserted(user_frame()), (node,), {})
            return True
        if has_unbacked(condition, self._sizes.env):
            raise ValueDecidesError(self._running.data_dependent())
        if isinstance(condition, torch.SymBool):
            self._sizes.decided(condition)
        return False


def _has_open_length(tensor: torch.Tensor) -> bool:
    is_list = tensor.dim() == 1 and not (tensor.is_floating_point() or tensor.is_complex())
    return is_list and isinstance(tensor.shape[0], torch.SymInt)


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
        self, module: nn.Module, name: str, call: Callable[..., object], args: Args, kwargs: Kwargs
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
        self.note_left(module, name, outcome.left)
        outcome = self._aliased(outcome, tensors)
        self._tape.adopt(node, outcome.output)
        self._writer.check_parts(node, outcome.output)
        handed.note(node)
        if outcome.is_likely:
            self._writer.check_sizes(outcome.output)
        if outcome.own is not None:
            made = [leaf for _, leaf in walk(outcome.output) if isinstance(leaf, torch.Tensor)]
            given = [*tensors, *numbers_in((args, kwargs))]
            sources = [given[index] for index, _ in outcome.own.sources.values()]
            check = AgreedLeaf(user_frame(), outcome.own.shapes, outcome.own.sources)
            self._writer.call(check, *self._writer.argument((made, sources)))
        observe(module, args, outcome.output)
        return outcome.output

    def run_inside(
        self,
        module: nn.Module,
        name: str | None,
        call: Callable[..., object],
        args: Args,
        kwargs: Kwargs,
    ) -> object:
        """Run a module inside of a leaf, or of code that is not written down."""
        if self._running.is_busy or (self._running.leaves and self._running.leaves[-1] is module):
            return call(*args, **kwargs)
        if name in self._to_open:
            self._writer.want_open()
        with self._running.in_leaf(module):
            return call(*args, **kwargs)

    def note_left(self, module: nn.Module, name: str, left: Collection[tuple[str, str]]) -> None:
        """Take note of the attributes that a call has changed: inner module and name."""
        for inner, key in left:
            part = module.get_submodule(inner)
            self._left[id(part), key] = self._around(name, inner)

    def on_left(self, holder: object, name: str) -> None:
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
