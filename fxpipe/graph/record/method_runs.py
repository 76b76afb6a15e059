"""Write functions that loop over rows as one node each, where no cut is inside.

As a graph such code fixes the number of rows. So it runs as it is: here, on the example's own
values with the rows once, twice and three times, and in the stage each time. What it returns has
sizes that grow with the rows, and lists that may be longer (`Many`); the stage compares the sizes.

In:  the call of a function that was seen to fix the number of rows.
Out: a node. A function that holds a cut, changes what it is given, or returns a part of it runs
     like any other code.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Collection
from typing import cast

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from fxpipe.graph.calls.checks import AgreedPart
from fxpipe.graph.calls.late_lists import Many, merged_runs, plain_lists
from fxpipe.graph.calls.method_calls import MethodCall, Seen
from fxpipe.graph.guard.reads import Reads
from fxpipe.graph.nested import SYMBOLIC, Args, Kwargs, contents, is_atom, map_leaves, walk
from fxpipe.graph.record.example_values import ExampleValues
from fxpipe.graph.record.leaf_runs import LeafRuns, attributes_of, changed_attributes
from fxpipe.graph.record.names import Running
from fxpipe.graph.record.operations import Operations, Writer
from fxpipe.graph.record.torch_functions import plain_tuples
from fxpipe.graph.record.whole_calls import LeafCalls, WholeCalls
from fxpipe.graph.sandbox.fake import FakeState
from fxpipe.graph.sandbox.made_up import another
from fxpipe.graph.sandbox.restore import Places
from fxpipe.graph.source_line import user_frame
from fxpipe.torch_inside import (
    FakeTensorMode,
    buffers_of,
    children_of,
    memory_of,
    parameters_of,
    version_of,
)

__all__ = ["MethodRuns"]


class MethodRuns:
    """Runs and writes such calls of one trace; no part of them is in `to_open`."""

    def __init__(
        self,
        mode: FakeTensorMode,
        state: FakeState,
        running: Running,
        writer: Writer,
        operations: Operations,
        inputs: ExampleValues,
        reads: Reads,
        calls: WholeCalls,
        leaves: LeafCalls,
        runs: LeafRuns,
        to_open: Collection[str],
        on_training: Callable[[nn.Module], None],
    ) -> None:
        self._mode = mode
        self._state = state
        self._running = running
        self._writer = writer
        self._tape = writer.tape
        self._operations = operations
        self._inputs = inputs
        self._reads = reads
        self._calls = calls
        self._leaves = leaves
        self._runs = runs
        self._to_open = to_open
        self._on_training = on_training

    def call(self, function: Callable[..., object], args: Args, kwargs: Kwargs) -> object:
        """Write a function that loops over rows as one node, if there is no cut in it.

        It runs on the example's own values, with their rows once, twice and three times.
        """
        may_run = self._running.is_opened() and not self._state.is_sharded
        if not (may_run and self._inputs.free_rows()):
            return self._calls.value_function(function, args, kwargs)
        owner = _owner(function, args)
        call = MethodCall(function, owner)
        rest, kwargs = plain_lists(args if owner is None else args[1:]), plain_lists(kwargs)
        parts = self._parts(owner)
        reals: dict[str, object] = {}
        watch = _Watch(owner, call)
        seen = Seen()

        def run(*args: object, **kwargs: object) -> object:
            reals.update(self._parts(owner))  # by now the tensors are the model's own
            return watch.run(call.noting(reals, seen), args, kwargs)

        wanted, self._runs.draws = set(self._writer.wanted), False
        try:
            _check_arguments((rest, kwargs))
            with self._running.in_leaf(owner or nn.Module()):
                self._running.is_reading = True
                with self._state.trainable(owner or nn.Module()):
                    runs = self._inputs.runs(run, rest, kwargs, owner)
                with self._mode:
                    output = merged_runs(runs, self._inputs.formula)
            _check_comparable(output, runs[0])
        except Exception:
            watch.is_plain = False
        if seen.absent or not watch.is_plain or self._writer.wanted != wanted:
            self._writer.wanted = wanted
            return self._calls.value_function(function, args, kwargs)
        self._reads.note_whole(function, owner, [*call.attributes, *seen.unknown, *call.empty])
        prefix = self._running.name_of(owner) if owner is not None else ""
        given = {name: self._part(prefix or "", name, parts[name]) for name in seen.used}
        node_args = self._writer.argument(plain_tuples(rest))
        node = self._tape.write(
            "call_function", call, (given, *node_args), self._writer.argument(kwargs)
        )
        if owner is not None and "training" in seen.used:
            self._on_training(owner)
        writes = frozenset(f"{prefix}.{name}".strip(".") for name in watch.wrote)
        self._tape.facts.learn(node, draws=watch.draws or self._runs.draws, writes=writes)
        if owner is not None:
            self._leaves.note_left(owner, prefix or "", watch.left)
        self._tape.adopt(node, output)
        for path, leaf in walk(output):
            if isinstance(leaf, Many):
                self._operations.has_lists = True
                leaf.found_at(
                    functools.partial(self._tape.part_of, node, path),
                    functools.partial(self._looked_at, leaf),
                )
        self._writer.check_parts(node, output)
        for path, leaf in walk(output):
            if leaf is None:  # and not a tensor, for other values
                part = self._tape.part_of(node, path)
                self._writer.call(AgreedPart(user_frame()), None, part)
        self._writer.check_sizes(output)
        return output

    def _parts(self, owner: nn.Module | None) -> dict[str, object]:
        """Return the parts of a module that hold no cut."""
        if owner is None:
            return {}
        prefix = self._running.name_of(owner)
        around = f"{prefix}." if prefix else ""
        modules = {
            name: part
            for name, part in children_of(owner).items()
            if not any(f"{other}.".startswith(f"{around}{name}.") for other in self._to_open)
        }
        # Not `owner.training`: that would be noted as read.
        flag = {"training": vars(owner)["training"]}
        parts = {**modules, **parameters_of(owner), **buffers_of(owner), **flag}
        return {name: part for name, part in parts.items() if part is not None}

    def _part(self, prefix: str, name: str, part: object) -> object:
        if not isinstance(part, nn.Module):
            return self._writer.argument(part)
        return self._tape.write("get_attr", f"{prefix}.{name}".strip("."), (), {})

    def _looked_at(self, many: Many) -> object:
        """Return a list that somebody looks at, whose length is the example's from now on."""
        self._inputs.fix_rows()
        with self._running.unseen(), self._mode:
            made = map_leaves(another, many.runs[0])
        self._tape.adopt(many.node(), made)
        self._writer.check_sizes(made)
        return made


class _Watch:
    """Sees what a function does beside returning something; what does too much is not plain."""

    def __init__(self, owner: nn.Module | None, call: MethodCall) -> None:
        self._owner = owner
        self._attributes = call.attributes
        self.is_plain, self.draws = True, False
        self.wrote: set[str] = set()
        self.left: set[tuple[str, str]] = set()

    def run(self, function: Callable[..., object], args: Args, kwargs: Kwargs) -> object:
        """Run the function on real tensors, and look."""
        owner = self._owner or nn.Module()
        tensors = [leaf for _, leaf in walk((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        state = [*owner.parameters(), *owner.buffers()]
        versions, inside = [version_of(tensor) for tensor in tensors], contents((args, kwargs))
        trained = [version_of(parameter) for parameter in owner.parameters()]
        buffers = [(name, buffer, version_of(buffer)) for name, buffer in owner.named_buffers()]
        attributes, random = attributes_of(owner), torch.get_rng_state()
        lists = _lists(owner)
        kept = nn.Module()
        vars(kept).update({**self._attributes, "": (args, kwargs)})
        places = Places(kept, far=False)
        own = {id(inner) for inner in owner.modules()}

        def before(module: nn.Module, _: object) -> None:
            is_others = any(True for _ in (*module.parameters(), *module.buffers()))
            self.is_plain &= id(module) in own or not is_others

        hook = register_module_forward_pre_hook(before)
        try:
            output = function(*args, **kwargs)
            self.is_plain &= not places.have_changed()
        finally:
            hook.remove()
            places.restore()
        self.draws |= not torch.equal(random, torch.get_rng_state())
        self.wrote |= {name for name, buffer, old in buffers if version_of(buffer) != old}
        given = {memory_of(t) for t in (*tensors, *state, *owner.parameters(), *owner.buffers())}
        made = [leaf for _, leaf in walk(output) if isinstance(leaf, torch.Tensor)]
        self.left |= changed_attributes(attributes)
        self.left |= {key for key, (value, old) in lists.items() if contents(value) != old}
        self.is_plain &= (
            versions == [version_of(tensor) for tensor in tensors]
            and trained == [version_of(parameter) for parameter in owner.parameters()]
            and contents((args, kwargs)) == inside
            and not any(memory_of(tensor) in given for tensor in made)
        )
        return output


def _lists(owner: nn.Module) -> dict[tuple[str, str], tuple[object, object]]:
    """Return what the inner modules keep in lists and dicts, beside what is in those now."""
    return {
        (name, key): (value, contents(value))
        for name, part in owner.named_modules()
        for key, value in vars(part).items()
        if name and type(value) in (list, dict) and key not in _OF_TORCH
    }


_OF_TORCH = frozenset(vars(nn.Module()))


def _owner(function: Callable[..., object], args: Args) -> nn.Module | None:
    """Return the module that a function is a method of; a function may also get a module."""
    first = args[0] if args else None
    code = inspect.unwrap(function)
    is_method = isinstance(first, nn.Module) and any(
        isinstance(value, types.FunctionType) and inspect.unwrap(value) is code
        for kind in type(first).__mro__
        for value in vars(kind).values()
    )
    return first if is_method and isinstance(first, nn.Module) else None


def _check_arguments(arguments: object) -> None:
    """Refuse objects: the stage would use those of the trace, and what they hold."""
    for _, leaf in walk(arguments):
        if not isinstance(leaf, (torch.Tensor, *SYMBOLIC)) and not is_atom(leaf):
            raise ValueError(f"an argument is a {type(leaf).__name__}")


def _check_comparable(output: object, example: object) -> None:
    """Refuse what the stage cannot compare with what it was in the trace, and shared memory."""
    reals, memory = dict(walk(example)), set[object]()
    for path, leaf in walk(output):
        if isinstance(leaf, torch.Tensor):
            own = memory_of(cast(torch.Tensor, reals[path]))
            if own in memory:
                raise ValueError("two tensors that are returned share memory")
            memory.add(own)
        if isinstance(leaf, (torch.Tensor, Many, *SYMBOLIC)):
            continue
        is_plain = all(kind == "item" for kind, _ in path)
        if not is_plain or not isinstance(leaf, (bool, int, float, str, type(None))):
            raise ValueError(f"a {type(leaf).__name__} that is returned could be another")
