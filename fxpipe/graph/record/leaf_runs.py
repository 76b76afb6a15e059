"""Learn what a leaf module returns, running equal leaves only once.

A leaf stays one call in the graph; all the trace needs is its output's structure
and sizes. It runs on fake tensors whose sizes are symbols, so its sizes are formulas
that hold under the conditions that it met on the way. Two leaves are equal if they have
the same class, the same shapes of parameters and buffers, the same plain attributes (a
layer's own index aside) and get the same kind of arguments: then the outputs look alike,
and the second leaf does not run. Code that may call `pipe_split()` always runs.

A leaf may append to a list or fill a cache that other code reads later (`Handed`). What it
changed becomes a node of its own in front of the call, and later readers read it "after" the call.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from fxpipe.graph.calls.graph_calls import Scripted, given
from fxpipe.graph.nested import Args, Kwargs, contents, map_leaves, mutable_parts, walk
from fxpipe.graph.record.call_keys import FunctionRuns, call_key, module_key, storage_of
from fxpipe.graph.record.constant_values import ValueDecidesError
from fxpipe.graph.record.example_values import ExampleValues, has_unbacked
from fxpipe.graph.record.leaf_sizes import OwnSizes, StandIns
from fxpipe.graph.record.tape import Tape
from fxpipe.graph.record.torch_functions import clamped_slices
from fxpipe.graph.sandbox.fake import FakeState, Left
from fxpipe.graph.sandbox.made_up import another, run_real
from fxpipe.graph.sandbox.restore import preserved
from fxpipe.graph.sizes.symbols import Sizes, number_at
from fxpipe.torch_inside import (
    BUFFERS,
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    known_sizes,
    version_of,
)

__all__ = [
    "DATA_DEPENDENT",
    "Handed",
    "LeafOutcome",
    "LeafRuns",
    "attributes_of",
    "changed_attributes",
    "run_operation",
]


@dataclasses.dataclass(frozen=True, slots=True)
class LeafOutcome:
    """What a leaf returned, and what it did to its tensor arguments (by position).

    `changed` were modified in place. `untouched` are inputs whose values no operation used.
    `is_likely`: its sizes may depend on values, and were learnt from some of them.
    `wrote` names the buffers of the leaf that it changed in place. `draws`: it takes
    random numbers. `left` are the attributes that it changed: inner module and name.
    `aliases` are positions in its output and its arguments that share memory.
    `own` are the sizes that it should return, if it decides by sizes.
    """

    output: object
    changed: tuple[int, ...]
    untouched: tuple[int, ...]
    is_likely: bool = False
    wrote: tuple[str, ...] = ()
    draws: bool = False
    left: frozenset[tuple[str, str]] = frozenset()
    aliases: tuple[tuple[int, int], ...] = ()
    own: OwnSizes | None = None


class LeafRuns:
    """Runs leaves of one trace on fake tensors and remembers the outcomes."""

    def __init__(self, mode: FakeTensorMode, state: FakeState, sizes: Sizes) -> None:
        self._mode = mode
        self._state = state
        self._sizes = sizes
        self._stand_ins = StandIns(sizes)
        self._outcomes: dict[Hashable, LeafOutcome] = {}
        self._kinds: dict[int, Hashable] = {}
        self._alive: list[object] = []
        self._touched: set[int] | None = set()
        self.example: ExampleValues | None = None
        self.functions = FunctionRuns()
        self.draws = False
        self.may_list = False  # whether a leaf may make a list whose length is a size
        self.runs = 0
        self._left: set[tuple[str, str]] = set()
        self._leaf: nn.Module | None = None

    def run(
        self, module: nn.Module, call: Callable[..., object], args: Args, kwargs: Kwargs
    ) -> LeafOutcome:
        """Return the outcome of a call; its tensors are new objects each time."""
        key = self._key(module, args, kwargs)
        if key is None or key not in self._outcomes:
            before = contents((args, kwargs))
            buffers = [
                (name, buffer, version_of(buffer)) for name, buffer in module.named_buffers()
            ]
            self.draws, self._left, self._leaf = False, set(), module
            outcome = self._run(module, call, args, kwargs)
            self._leaf = None
            wrote = tuple(name for name, buffer, old in buffers if version_of(buffer) != old)
            outcome = dataclasses.replace(
                outcome, wrote=wrote, draws=self.draws, left=frozenset(self._left)
            )
            is_special = outcome.is_likely and self.example is not None
            if key is None or is_special or contents((args, kwargs)) != before:
                return outcome
            self._outcomes[key] = outcome
        known = self._outcomes[key]
        return dataclasses.replace(known, output=map_leaves(another, known.output))

    def run_function_real(
        self, func: Callable[..., object], args: Args, kwargs: Kwargs, failure: Exception
    ) -> object:
        """Return what a function returns, by running it on made-up real tensors."""
        with Left(self._mode), self._state.real():
            return run_real(self._mode, nn.Module(), func, args, kwargs, failure)

    @contextlib.contextmanager
    def touching(self) -> Iterator[set[int]]:
        """Return the tensors whose values are used until exit, by identity."""
        before, found = self._touched, set[int]()
        self._touched = found
        try:
            yield found
        finally:
            self._touched = before

    def touch(self, args: Iterable[object]) -> None:
        """Take note of the tensors that an operation inside a leaf uses."""
        if self._touched is None:
            return
        for arg in args:
            if isinstance(arg, torch.Tensor):
                self._touched.add(id(arg))
            elif isinstance(arg, (tuple, list)):
                self.touch(arg)

    def _run(
        self, module: nn.Module, call: Callable[..., object], args: Args, kwargs: Kwargs
    ) -> LeafOutcome:
        self.runs += 1
        failure: Exception = ValueDecidesError("the sizes of what a module returns depend on data")
        hidden = self._stand_ins.hidden(args, kwargs)
        mark, before = self._sizes.mark(), self._sizes.conditions_so_far()
        # With sizes of the model a leaf may meet what opened code has settled before it.
        for inputs in (hidden, (args, kwargs)) if hidden else ((args, kwargs),):
            try:
                with preserved(module, far=False):
                    found = self._run_as_is(call, *inputs)
                met = self._sizes.met_since(mark)
                if self.example is None or not has_unbacked(found.output, self._mode.shape_env):
                    if inputs is not hidden:
                        return found
                    return self._settled(module, call, (args, kwargs), found, met)
            except Exception as error:
                failure = error
            self._sizes.take_back(before)
            self.functions.forget()  # with the conditions that the run has met
        try:
            return LeafOutcome(self._run_real(module, call, args, kwargs, failure), (), (), True)
        except ValueDecidesError:
            if self.may_list:
                raise
            self.may_list = True  # it settles the length then
            try:
                return self._run(module, call, args, kwargs)
            finally:
                self.may_list = False

    def _settled(
        self,
        module: nn.Module,
        call: Callable[..., object],
        inputs: tuple[Args, Kwargs],
        found: LeafOutcome,
        met: Sequence[object],
    ) -> LeafOutcome:
        """Return an outcome in sizes of the model."""

        def run(args: Args, kwargs: Kwargs) -> object:
            with preserved(module, far=False):
                return call(*args, **kwargs)

        count = sum(isinstance(leaf, torch.Tensor) for _, leaf in walk(inputs))
        used = [i for i in range(count) if i not in found.untouched]
        output, own = self._stand_ins.settled(found.output, met, inputs, used, run)
        return dataclasses.replace(found, output=output, own=own)

    def _run_real(
        self,
        module: nn.Module,
        call: Callable[..., object],
        args: Args,
        kwargs: Kwargs,
        failure: Exception,
    ) -> object:
        expected: object = None
        if self.example is not None:
            with contextlib.suppress(Exception):
                expected = self.example.shapes(call, args, kwargs, module)
        try:
            with Left(self._mode), self._state.real(), preserved(module, far=False):
                output = run_real(self._mode, module, call, args, kwargs, failure)
            if expected is None or expected == self._shapes_at_hints(output):
                return output
        except Exception:
            if expected is None:
                raise
        # Made-up values give other sizes than the example's: follow the example.
        assert self.example is not None
        self.example.fix_others(args, kwargs)
        return self.example.sizes(call, args, kwargs, module)

    def _shapes_at_hints(self, output: object) -> list[list[int]]:
        env = self._mode.shape_env
        assert env is not None
        hints = known_sizes(env)
        return [
            [number_at(size, env, hints) for size in leaf.shape]
            for _, leaf in walk(output)
            if isinstance(leaf, torch.Tensor)
        ]

    def _run_as_is(self, call: Callable[..., object], args: Args, kwargs: Kwargs) -> LeafOutcome:
        tensors = [leaf for _, leaf in walk((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        versions = [version_of(tensor) for tensor in tensors]
        self._touched = set()
        attributes = attributes_of(self._leaf)
        try:
            output = call(*args, **kwargs)
        finally:
            self._left |= changed_attributes(attributes)
        # Now: asking a tensor for its memory below would count as a use of it.
        touched = (self._touched or set()) | {id(leaf) for _, leaf in walk(output)}
        storages = {storage_of(t): i for i, t in enumerate(tensors)}
        made = [leaf for _, leaf in walk(output) if isinstance(leaf, torch.Tensor)]
        aliases = [
            (i, storages[storage_of(t)]) for i, t in enumerate(made) if storage_of(t) in storages
        ]
        changed = [version_of(t) != v for t, v in zip(tensors, versions, strict=True)]
        return LeafOutcome(
            map_leaves(another, output),
            tuple(index for index, was_changed in enumerate(changed) if was_changed),
            tuple(index for index, tensor in enumerate(tensors) if id(tensor) not in touched),
            aliases=tuple(aliases),
        )

    def _key(self, module: nn.Module, args: Args, kwargs: Kwargs) -> Hashable | None:
        return call_key(self._kind(module), args, kwargs)

    def _kind(self, module: nn.Module) -> Hashable:
        if id(module) not in self._kinds:
            self._alive.append(module)
            self._kinds[id(module)] = module_key(module)
        return self._kinds[id(module)]


def attributes_of(
    module: nn.Module | None,
) -> list[tuple[str, dict[str, object], dict[str, object]]]:
    """Return the attributes and buffers of a leaf's modules, each beside a copy."""
    return [
        (name, place, dict(place))
        for name, part in (module.named_modules() if module is not None else ())
        for place in (vars(part), vars(part).get(BUFFERS))
        if place is not None
    ]


def changed_attributes(
    attributes: list[tuple[str, dict[str, object], dict[str, object]]],
) -> set[tuple[str, str]]:
    """Return the attributes that are others now, by inner module and name."""
    return {
        (name, key)
        for name, place, before in attributes
        for key, value in place.items()
        if before.get(key, before) is not value
    }


DATA_DEPENDENT = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    GuardOnDataDependentSymNode,
)


def run_operation(
    leaves: LeafRuns,
    func: Callable[..., object],
    args: Args,
    kwargs: Kwargs,
    *,
    real: bool,
    explain: Callable[[], str],
) -> object:
    """Return what a torch function of opened code returns.

    `real` allows a run on made-up tensors, if the function cannot follow symbolic sizes.

    Raises:
        ValueDecidesError: values decide what happens, with the text of `explain`.
    """
    if isinstance(func, Scripted):  # given a symbol, compiled code takes its number for granted
        failure = ValueDecidesError(explain())
        return leaves.run_function_real(func, args, kwargs, failure)
    try:
        return leaves.functions.run(func, clamped_slices(func, args), kwargs)
    except Exception as error:
        if real:
            return leaves.run_function_real(func, args, kwargs, error)
        if isinstance(error, DATA_DEPENDENT):
            raise ValueDecidesError(explain()) from None
        raise


class Handed:
    """The lists, dicts and objects that a leaf is given, and may change."""

    def __init__(
        self, tape: Tape, argument: Callable[[object], object], args: Args, kwargs: Kwargs
    ) -> None:
        self._tape = tape
        self._call = (args, kwargs)
        parts = [part for part in mutable_parts((args, kwargs)) if part is not kwargs]
        self._before = [(part, contents(part)) for part in parts]
        self._holders = [argument(part) for part in parts]
        self._changed: list[tuple[object, fx.Node]] = []

    def look(self, node_args: object, node_kwargs: object) -> tuple[object, object]:
        """Return the graph arguments with a node for each part that the call changed."""
        args, kwargs = self._call
        for (part, before), holder in zip(self._before, self._holders, strict=True):
            if contents(part) != before:
                if not isinstance(holder, fx.Node):
                    holder = self._tape.write("call_function", given, (holder,), {})
                    node_args = _with_holder(args, node_args, part, holder)
                    node_kwargs = _with_holder(kwargs, node_kwargs, part, holder)
                self._changed.append((part, holder))
        return node_args, node_kwargs

    def note(self, node: fx.Node) -> None:
        """Remember that the call, by now a node, changed what `look` found."""
        for part, holder in self._changed:
            self._tape.object_changed(part, holder, node)


def _with_holder(value: Any, argument: Any, part: Any, holder: fx.Node) -> object:
    """Return a graph argument in which one list or dict of the value is a node of its own."""
    if value is part:
        return holder
    if type(value) in (tuple, list) and not isinstance(argument, fx.Node):
        return type(value)(map(_with_holder, value, argument, *_repeated(part, holder)))
    if type(value) is dict and not isinstance(argument, fx.Node):
        return {key: _with_holder(value[key], argument[key], part, holder) for key in value}
    return argument


def _repeated(*values: Any) -> list[Iterator[Any]]:
    return [itertools.repeat(value) for value in values]
