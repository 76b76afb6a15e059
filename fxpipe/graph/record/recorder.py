"""Run a model once on fake tensors and write down what its opened code does.

A `Trace` sees every torch function (as a TorchFunctionMode) and every module call.
In opened modules each torch function becomes a node. Any other module is a leaf:
one `call_module` node, whatever happens inside. Splits asked for by `pipe_split()`
or by name become `pipe_split` nodes.

A split inside a leaf cannot be honoured in this run; the trace then says in
`wanted` which modules would have to be opened, and the caller traces again.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from fxpipe.errors import TraceError
from fxpipe.graph.aux_losses import aux_loss
from fxpipe.graph.calls.attention_masks import MaskCall
from fxpipe.graph.calls.graph_calls import (
    Agreed,
    AgreedDtype,
    AgreedGradient,
    AgreedLeaf,
    AgreedPart,
    AgreedSizes,
    Applied,
    Asserted,
    Hooked,
    Kept,
    Mapped,
    Observed,
    Refusal,
    Scripted,
    TracedDtype,
    function_modes,
)
from fxpipe.graph.calls.late_lists import (
    Numbers,
    joined_late,
    plain_lists,
    rejoined,
    split_late,
)
from fxpipe.graph.calls.value_functions import Found, ValueFunction, running_functions
from fxpipe.graph.facts import NodeFacts
from fxpipe.graph.guard.reads import Reads
from fxpipe.graph.markers import SplitPoint, pipe_split
from fxpipe.graph.nested import has_tensor, is_atom, map_leaves, walk
from fxpipe.graph.record.constant_values import (
    DECISIONS,
    Chance,
    Decisions,
    ValueDecidesError,
    is_draw,
)
from fxpipe.graph.record.example_values import ExampleValues, NoValueError, has_unbacked
from fxpipe.graph.record.leaf_runs import Handed, LeafOutcome, LeafRuns, run_operation
from fxpipe.graph.record.names import Names, Surroundings
from fxpipe.graph.record.state_writes import Carried, StateWatch, moved_settings
from fxpipe.graph.record.tape import Tape, UnknownTensorError
from fxpipe.graph.record.torch_functions import (
    as_node,
    clamped_slices,
    effect_of,
    is_metadata,
    plain_tuples,
    stacked,
    stacked_indices,
    substitute,
)
from fxpipe.graph.sandbox.fake import FakeState, Left
from fxpipe.graph.sandbox.patches import Seer, observe, unobserved
from fxpipe.graph.sizes.symbols import Sizes
from fxpipe.graph.source_line import (
    Place,
    a_decisive_draw,
    a_draw,
    a_value_decides,
    an_effect,
    an_unknown_tensor,
    is_users,
    user_frame,
)
from fxpipe.torch_inside import FakeTensor, FakeTensorMode, version_of

__all__ = ["Trace"]

_TO_NUMPY = ("numpy", "__array__")


class Trace(TorchFunctionMode, Seer):
    """One run of a model under observation; the graph grows on `tape`."""

    def __init__(
        self,
        module: nn.Module,
        mode: FakeTensorMode,
        sizes: Sizes,
        state: FakeState,
        opened: Collection[str],
        splits: Mapping[str, SplitPoint],
        inputs: Mapping[str, Any],
        fakes: Mapping[str, Any],
    ) -> None:
        super().__init__()
        self._names = Names(module)
        self._mode = mode
        self._sizes = sizes
        self._state = state
        self._opened = set(opened)
        self._splits = dict(splits)
        self._leaves = LeafRuns(mode, state, sizes)
        self._decisions = Decisions()
        self._stack: list[nn.Module] = []
        self._leaf_stack: list[nn.Module] = []
        self._busy = False
        self._is_reading = False
        self._has_late_lists = False
        self._surroundings = Surroundings()
        self._example: ExampleValues | None = None
        self._thread = threading.get_ident()
        self._chance = Chance()
        self._watch = StateWatch(module, opened, state)
        self._refused: set[str] = set()
        self._dtypes_of_state: set[tuple[Place, torch.dtype]] = set()
        self.carried: list[Carried] = []
        self.wanted: set[str] = set()
        self.asking: set[Found] = set()  # functions that ask for values of the inputs
        self.called: set[str] = set()
        self.training_read: set[str] = set()
        self.asks_for_gradients = False
        self.failed_in = ""
        self.real_of = state.real_of
        self.reads = Reads(module, self._is_read, self.on_left)
        self._left: dict[tuple[int, str], set[str]] = {}
        self._hooked: set[str] = set()
        self.tape = Tape(self._name_of_state, state.real_of)
        self.tape.describe = self._describe
        self._inputs = ExampleValues(module, mode, state, self.tape, inputs, fakes)
        self.tape.generators = frozenset(
            id(value)
            for part in module.modules()
            for value in vars(part).values()
            if isinstance(value, torch.Generator)
        )

    # -- what torch and the model tell us

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._busy or is_metadata(func):
            output = func(*args, **kwargs)
            if isinstance(output, torch.dtype) and self.is_opened():
                self._dtype_read(args[0])
            if output is True or output is False:
                self._flag_read(func, args, output)
            return output
        if getattr(func, "__name__", "") in DECISIONS:
            return self._decision(func, args, kwargs)
        if self._has_late_lists:
            parts = split_late(func, args, kwargs, self._split)
            if parts is not None:
                return parts
            late = joined_late(func, args, kwargs)
            if late is not None and not has_unbacked(late[0], self._sizes.env):
                func, args, kwargs = rejoined, late, {}
            args, kwargs = plain_lists(args), plain_lists(kwargs)
        func = substitute(func, args)
        args = stacked_indices(func, args, self._stacked)
        if self._leaf_stack:
            self._leaves.touch((*args, *kwargs.values()))
            self._leaves.draws |= is_draw(func, args, kwargs)
            output = self._leaves.functions.run(func, clamped_slices(func, args), kwargs)
        else:
            output = self._operation(func, args, kwargs)
        self._decisions.note(func, args, kwargs, output)
        return output

    def _split(self, tensor: torch.Tensor, sizes: Any, dim: int) -> Any:
        return self.__torch_function__(torch.split, (), (tensor, sizes, dim))

    def _stacked(self, values: Any) -> Any:
        return stacked(values) if self._leaf_stack else self._operation(stacked, (values,), {})

    def on_module(self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        name = self._name_of(module)
        if name is not None:
            self.called.add(name)
        if isinstance(module, torch.jit.ScriptModule):
            call = functools.partial(self._scripted, call)
        if self._leaf_stack or self._busy:
            return self._inside_leaf(module, name, call, args, kwargs)
        if self._stack and self._stack[-1] is module:
            return call(*args, **kwargs)  # an overridden __call__ on its way to the forward
        self._split_at(name, SplitPoint.BEGINNING)
        if name is None or name in self._opened:
            self._stack.append(module)
            self.reads.note_module(module)
            try:
                output = call(*args, **kwargs)
            except Exception:
                self.failed_in = self.failed_in or name or ""
                raise
            finally:
                self._stack.pop()
        else:
            output = self._leaf(module, name, call, args, kwargs)
        self._split_at(name, SplitPoint.END)
        return output

    def on_function(self, function: type, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self._leaf_stack:
            self._leaves.touch((*args, *kwargs.values()))
        if self._leaf_stack or self._busy:
            return call(*args, **kwargs)
        if function is CheckpointFunction:
            return self._surroundings.reentrant(*args)
        return self._operation(Applied(function), args, kwargs, real=True)

    def on_decision(self, value: Any) -> None:
        if not (self._leaf_stack or self._busy):
            self._sizes.decided(value)
        elif self._leaf_stack and is_users(sys._getframe(2).f_code.co_filename):
            self._sizes.decided(value, inside_leaf=True)

    def on_check(self, condition: Any) -> bool:
        """Write down a check of values that the user makes; one of sizes is a condition."""
        if not self.is_opened():
            return False
        if isinstance(condition, FakeTensor):
            node = self._argument(condition)
            self.tape.write("call_function", Asserted(user_frame()), (node,), {})
            return True
        if has_unbacked(condition, self._sizes.env):
            raise ValueDecidesError(self._data_dependent())
        if isinstance(condition, torch.SymBool):
            self._sizes.decided(condition)
        return False

    def on_vmap(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self._leaf_stack:
            self._leaves.touch(leaf for _, leaf in walk((args, kwargs)))
        if self._leaf_stack or self._busy:
            return call(*args, **kwargs)
        modes = function_modes()
        return self._operation(Mapped(modes[modes.index(self) + 1 :]), args, kwargs)

    def on_script(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self._leaf_stack:
            self._leaves.touch(leaf for _, leaf in walk((args, kwargs)))
        if self._leaf_stack or self._busy:
            return self._scripted(function, *args, **kwargs)
        return self._operation(Scripted(function), args, kwargs, real=True)

    def _scripted(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run compiled code on real tensors: given a symbol, it takes the number for granted."""
        with suppress(Exception):
            failure = ValueDecidesError("compiled code fails")
            return self._leaves.run_function_real(call, args, kwargs, failure)
        return call(*args, **kwargs)

    def on_mask(self, call: MaskCall, args: Any, kwargs: Any) -> Any:
        """Write the making of an attention mask as one node, if there is a mask."""
        if not self.is_opened():
            return call(*args, **kwargs)
        try:
            output = self._run(call, args, kwargs, False)
        except Exception:
            return call(*args, **kwargs)  # as any other code
        tensors = [leaf for _, leaf in walk((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        made = [leaf for _, leaf in walk(output) if isinstance(leaf, torch.Tensor)]
        if not made or any(leaf is tensor for leaf in made for tensor in tensors):
            return call(*args, **kwargs)
        node_args, node_kwargs = self._argument(args), self._argument(kwargs)
        node = self.tape.write("call_function", call, node_args, node_kwargs)
        shown = tuple(self.tape.node_of(tensor) for tensor in call.shown(args, kwargs))
        self.tape.facts.learn(node, untouched=shown)
        self.tape.adopt(node, output, tensors)
        return output

    def on_training(self, module: nn.Module) -> None:
        if not (self._leaf_stack or self._busy):
            name = self._name_of(module)
            if name is not None:
                self.training_read.add(name)

    def on_checkpoint(self, entering: bool, options: dict[str, Any]) -> None:
        if self._leaf_stack or self._busy:
            return
        self._surroundings.checkpoint(options, entering)

    def on_autocast(self, region: Any, entering: bool) -> None:
        if self._leaf_stack or self._busy:
            return
        self._surroundings.autocast(region, entering)

    def on_draw(self) -> None:
        """Take note that opened code uses a random number that is not torch's."""
        self.refuse(a_draw(user_frame()))

    def refuse(self, message: str) -> None:
        """Have the graph refuse to run in the mode that is traced."""
        if message not in self._refused:
            self._refused.add(message)
            self.tape.write("call_function", Refusal(message), (), {})

    def is_opened(self) -> bool:
        """Say whether opened code of the model is running."""
        is_here = threading.get_ident() == self._thread
        return is_here and bool(self._stack) and not (self._leaf_stack or self._busy)

    def _is_read(self) -> bool:
        return self._is_reading or self.is_opened()

    def on_value_function(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Write a function of whole numbers as one node, if it is one."""
        if not self.is_opened():
            return function(*args, **kwargs)
        owner = args[0] if args and isinstance(args[0], nn.Module) else None
        call = ValueFunction(function, owner)
        rest = args if owner is None else args[1:]
        try:
            with self._unseen():
                output = self._inputs.whole(call, rest, kwargs)
                self._is_reading = True
                self._inputs.run(function, args, kwargs)
        except NoValueError:
            return function(*args, **kwargs)  # as any other code
        finally:
            self._is_reading = False
        node_args, node_kwargs = self._argument(plain_tuples(rest)), self._argument(kwargs)
        node = self.tape.write("call_function", call, node_args, node_kwargs)
        self.tape.adopt(node, output)
        self._check_parts(node, output)
        self._check_sizes(output)
        return output

    def on_list(self, tensor: torch.Tensor, make: Callable[[], Any]) -> Any:
        """Return the values of a tensor as a list, made late if its length is a size."""
        if self._busy or not _has_open_length(tensor):
            return make()
        if self._leaf_stack and self._example is not None and not self._leaves.may_list:
            raise ValueDecidesError(self._data_dependent())  # the leaf runs on the example then
        if not self.is_opened():
            return make()
        self._has_late_lists = True
        return Numbers(tensor, make)

    def on_kept(self, module: nn.Module) -> None:
        """Open the leaf around a module whose output a hook of a library keeps for later."""
        kinds = {type(part) for part in self._leaf_stack if part is not module}
        self.wanted.update(self._names.of_kinds(kinds))

    def on_hook(self, hook: Callable[..., Any], module: nn.Module, values: tuple[Any, ...]) -> Any:
        """Run a user's hook; one that only looks is a node, and looks again in the stage.

        In a leaf it is part of the call. There, one that fails on fakes looks at values.
        """
        if not self.is_opened():
            names = {self._name_of(part) for part in self._leaf_stack}
            self._hooked.update(name for name in names if name is not None)
            with suppress(Exception):
                return hook(module, *values)
            return None
        tensors = [leaf for _, leaf in walk(values) if isinstance(leaf, torch.Tensor)]
        versions = [version_of(tensor) for tensor in tensors]
        counts = [sys.getrefcount(tensor) for tensor in tensors]
        self._leaf_stack.append(module)
        with self._leaves.touching() as touched:
            try:
                changed = hook(module, *values)
            except Exception:
                changed, touched = None, {id(tensor) for tensor in tensors}
            finally:
                self._leaf_stack.pop()
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
        self.tape.write("call_function", Observed(hook, module), self._argument(values), {})
        return None

    def on_pipe_split(self) -> None:
        """Take note of a `pipe_split()` that ran."""
        if self._leaf_stack:
            self._want_open()
        else:
            self.tape.write("call_function", pipe_split, (), {})

    def follow(self) -> None:
        """Have opened code see the values that the example inputs have."""
        self._example = self._leaves.example = self._inputs

    def finish(self, output: Any) -> None:
        """Write the model's output, the last node."""
        self._check_chance()
        faults = self._watch.write(self.tape) + moved_settings(self.reads, self.tape)
        self.carried = self._watch.carried(self.reads, self.tape)
        for one in self.carried:
            if is_atom(one.value):
                left = Kept(one.read.holder, one.read.name)
                self.tape.write("call_function", left, (one.value,), {})
        for fault in (*faults, *(carried.fault for carried in self.carried)):
            self.refuse(fault)
        with self._explained():
            self.tape.finish(output)

    def _check_chance(self) -> None:
        if self._chance.was_drawn():
            self.on_draw()

    # -- writing nodes

    def _leaf(
        self, module: nn.Module, name: str, call: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        self._check_chance()
        self._check_swapped(module, name)
        args, kwargs = plain_lists(args), plain_lists(kwargs)
        node_args, node_kwargs = self._argument(args), self._argument(kwargs)
        handed = Handed(self.tape, self._argument, args, kwargs)
        tensors = [leaf for _, leaf in walk((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        decided = self._sizes.decisions()
        self._leaf_stack.append(module)
        try:
            with unobserved(module):
                outcome = self._leaves.run(module, call, args, kwargs)
        finally:
            self._leaf_stack.pop()
            self._chance.settle()
        if outcome.is_likely:
            self._sizes.forget(decided)  # of a run that failed
        node_args, node_kwargs = handed.look(node_args, node_kwargs)
        node = self.tape.write("call_module", name, node_args, node_kwargs)
        self.tape.facts.learn(
            node,
            writes=frozenset(f"{name}.{buffer}" for buffer in outcome.wrote),
            untouched=tuple(self.tape.node_of(tensors[i]) for i in outcome.untouched),
            draws=outcome.draws,
            aliases=bool(outcome.aliases),
        )
        for index in outcome.changed:
            self.tape.changed(tensors[index], node)
        for inner, key in outcome.left:
            part = module.get_submodule(inner)
            self._left[id(part), key] = self._around(name, inner)
        outcome = self._aliased(outcome, tensors)
        self.tape.adopt(node, outcome.output)
        self._check_parts(node, outcome.output)
        handed.note(node)
        if outcome.is_likely:
            self._check_sizes(outcome.output)
        if outcome.own is not None:
            made = [leaf for _, leaf in walk(outcome.output) if isinstance(leaf, torch.Tensor)]
            sources = [tensors[index] for index, _ in outcome.own.sources.values()]
            check = AgreedLeaf(user_frame(), outcome.own.shapes, outcome.own.sources)
            self.tape.write("call_function", check, self._argument((made, sources)), {})
        observe(module, args, outcome.output)
        return outcome.output

    def _check_swapped(self, module: nn.Module, name: str) -> None:
        """Open a leaf that is called with other parameters or buffers than its own."""
        for inner, part in module.named_modules():
            if self._state.is_swapped(part):
                self.wanted |= self._around(name, inner)

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

        with self._unseen():
            return dataclasses.replace(outcome, output=map_leaves(one, outcome.output))

    def _check_parts(self, node: fx.Node, output: Any) -> None:
        """Have the stage compare the numbers and flags among what a leaf returns."""
        for path, leaf in walk(output):
            is_plain = all(kind == "item" for kind, _ in path)
            if is_plain and isinstance(leaf, (bool, int, float, str)):
                part = self.tape.part_of(node, path)
                self.tape.write("call_function", AgreedPart(user_frame()), (leaf, part), {})

    def _flag_read(self, func: Any, args: Any, output: bool) -> None:
        """Note that opened code asks whether a tensor requires a gradient."""
        name = getattr(getattr(func, "__self__", None), "__name__", "")
        if name != "requires_grad" or not self.is_opened():
            return
        if not is_users(sys._getframe(2).f_code.co_filename):
            return
        self.asks_for_gradients = True
        tensor = args[0]
        if self.tape.knows(tensor) or self._names.is_state(tensor):
            node = self._argument(tensor)
            check = AgreedGradient(user_frame())
            self.tape.write("call_function", check, (output, node), {})

    def on_left(self, holder: Any, name: str) -> None:
        """Open a leaf whose inner module keeps something that opened code reads."""
        self.wanted |= self._left.get((id(holder), name), set())

    def _hook(self, tensor: torch.Tensor, hook: Any) -> None:
        """Write that a tensor gets a hook, right behind what made it."""
        with self._explained():
            node = self.tape.node_of(tensor)
        if node.op in ("placeholder", "get_attr") or has_tensor(hook):
            raise TraceError(an_effect("register_hook", user_frame()))
        with self.tape.graph.inserting_after(self.tape.facts.last_part(node)):
            self.tape.write("call_function", Hooked(hook), (node,), {})

    def _operation(self, func: Any, args: Any, kwargs: Any, *, real: bool = False) -> Any:
        """Run a function and write its node; if fakes fail and `real`, on made-up tensors."""
        self._check_chance()
        effect = effect_of(func)
        if effect:
            raise TraceError(an_effect(effect, user_frame()))
        if getattr(func, "__name__", "") == "register_hook":
            self._hook(args[0], args[1] if len(args) > 1 else kwargs["hook"])
            with self._unseen():
                return func(*args, **kwargs)
        tensors = [leaf for _, leaf in walk((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        versions = [version_of(tensor) for tensor in tensors]
        output, is_agreed = self._run_or_follow(func, args, kwargs, real)
        changed = [
            t for t, version in zip(tensors, versions, strict=True) if version_of(t) != version
        ]
        if not changed and not has_tensor(output) and func is not aux_loss:
            return output
        known = {id(tensor) for tensor in tensors}
        in_place = {id(tensor) for tensor in changed}
        output = map_leaves(
            lambda leaf: self._alias(leaf) if id(leaf) in known - in_place else leaf, output
        )
        op, target, node_args, node_kwargs = as_node(func, args, kwargs)
        node_args, node_kwargs = plain_tuples(node_args), plain_tuples(node_kwargs)
        node = self.tape.write(op, target, self._argument(node_args), self._argument(node_kwargs))
        if is_draw(func, args, kwargs):
            self.tape.facts.learn(node, draws=True)
        self.tape.adopt(node, output, tensors)
        for tensor in changed:
            self.tape.changed(tensor, node)
        if is_agreed:
            self._check_sizes(output)
        return output

    def _check_sizes(self, output: Any) -> None:
        """Have the stage check that tensors have the sizes that the trace gave them."""
        tensors = [leaf for _, leaf in walk(output) if isinstance(leaf, torch.Tensor)]
        expected = self._argument([list(tensor.shape) for tensor in tensors])
        check = AgreedSizes(user_frame())
        self.tape.write("call_function", check, (self._argument(tensors), expected), {})

    def _decision(self, func: Any, args: Any, kwargs: Any) -> Any:
        if isinstance(args[0], FakeTensor):
            with Left(self._mode):
                found = self._decisions.settled(args[0])
                if not found and not self._leaf_stack:
                    found = self._drawn(args[0])
                if found:
                    return func(found[0], *args[1:], **kwargs)
        if self._leaf_stack:
            self._leaves.touch(args)
            return func(*args, **kwargs)
        self.asking.update(running_functions(self._stack[-1]) if self._stack else ())
        if self._example is not None:
            with suppress(NoValueError):
                return self._agreed(func, args, kwargs)
        if func.__name__ in _TO_NUMPY:
            raise ValueDecidesError(self._data_dependent())
        return self._operation(func, args, kwargs)

    def _drawn(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return one of the values that random numbers give a tensor; no stage may run so."""
        found = self._decisions.drawn(tensor)
        if found:
            owner = self._stack[-1] if self._stack else nn.Module()
            rates = _settings(owner, self._decisions.numbers(tensor))
            self.refuse(a_decisive_draw(user_frame(), rates))
        return found

    def _run_or_follow(self, func: Any, args: Any, kwargs: Any, real: bool) -> tuple[Any, bool]:
        """Run a function; if values matter to it, return what it does for the example.

        The second result says whether the sizes of the output are the example's.
        """
        try:
            output = self._run(func, args, kwargs, real)
            if self._example is None or not has_unbacked(output, self._sizes.env):
                return output, False
            with suppress(NoValueError):
                return self._agreed_sizes(func, args, kwargs), True
            return output, False
        except ValueDecidesError:
            if self._example is None:
                raise
            with suppress(NoValueError):
                return self._agreed(func, args, kwargs), False
            with suppress(NoValueError):
                return self._agreed_sizes(func, args, kwargs), True
            raise

    def _agreed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return what a function says about the example; the stage will check that."""
        assert self._example is not None
        with self._unseen():
            result = self._example.result(func, args, kwargs)
        node_args = self._argument((result, *plain_tuples(args)))
        check = Agreed(func, user_frame())
        self.tape.write("call_function", check, node_args, self._argument(kwargs))
        return result

    def _agreed_sizes(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return a function's output with the sizes that it has for the example."""
        assert self._example is not None
        with self._unseen():
            return self._example.sizes(func, args, kwargs)

    @contextmanager
    def _unseen(self) -> Iterator[None]:
        """Have functions run without being written down, until exit."""
        self._busy = True
        try:
            yield
        finally:
            self._busy = False

    def _alias(self, leaf: Any) -> Any:
        return leaf.view_as(leaf) if isinstance(leaf, torch.Tensor) else leaf

    def _run(self, func: Any, args: Any, kwargs: Any, real: bool) -> Any:
        with self._unseen():
            return run_operation(
                self._leaves, func, args, kwargs, real=real, explain=self._data_dependent
            )

    def _argument(self, value: Any) -> Any:
        with self._explained():
            return self.tape.argument(value)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except UnknownTensorError:
            self.wanted |= self._hooked  # a hook in a leaf may have kept it
            raise TraceError(an_unknown_tensor(user_frame())) from None

    def _describe(self) -> NodeFacts:
        """Say what is known about a node that is written now."""
        self.reads.note_code(sys._getframe(1))
        owner = self._name_of(self._stack[-1]) if self._stack else ""
        around = self._surroundings
        return NodeFacts(
            owner=owner or "",
            where=user_frame(),
            ambient=around.ambient(),
            regions=around.regions(),
            dtypes_read=around.dtypes_read,
        )

    def _dtype_read(self, tensor: torch.Tensor) -> None:
        node: fx.Node | None = None
        is_state = self._names.is_state(tensor)
        if not is_state and not self.tape.knows(tensor):
            return
        if not is_state:
            node = self.tape.node_of(tensor)
        self._surroundings.dtype_read(tensor.dtype, node)
        place = user_frame()
        if not tensor.is_floating_point() or not is_users(sys._getframe(2).f_code.co_filename):
            return
        if node is None:
            if (place, tensor.dtype) in self._dtypes_of_state:
                return
            self._dtypes_of_state.add((place, tensor.dtype))
            node = self.tape.write("call_function", TracedDtype(tensor.dtype, None), (), {})
            self.tape.facts.learn(node, spec=tensor.dtype)
        self.tape.write("call_function", AgreedDtype(tensor.dtype, place), (node,), {})

    # -- splits

    def _split_at(self, name: str | None, point: SplitPoint) -> None:
        if name is not None and self._splits.get(name) is point:
            self.tape.write("call_function", pipe_split, (), {})

    def _inside_leaf(
        self, module: nn.Module, name: str | None, call: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        if self._busy or (self._leaf_stack and self._leaf_stack[-1] is module):
            return call(*args, **kwargs)
        if name in self._splits or name in self._opened:
            self._want_open()
        self._leaf_stack.append(module)
        try:
            return call(*args, **kwargs)
        finally:
            self._leaf_stack.pop()

    def _want_open(self) -> None:
        for module in self._leaf_stack:
            name = self._name_of(module)
            if name is not None:
                self.wanted.add(name)

    # -- names

    def _name_of(self, module: nn.Module) -> str | None:
        return self._names.of(module, self._inside())

    def _name_of_state(self, tensor: torch.Tensor) -> str | None:
        return self._names.of_state(tensor, self._inside())

    def _inside(self) -> nn.Module | None:
        return self._stack[-1] if self._stack else None

    def _data_dependent(self) -> str:
        module = type(self._stack[-1]).__name__ if self._stack else "the model"
        return a_value_decides(module, user_frame())


def _has_open_length(tensor: torch.Tensor) -> bool:
    is_list = tensor.dim() == 1 and not (tensor.is_floating_point() or tensor.is_complex())
    return is_list and isinstance(tensor.shape[0], torch.SymInt)


def _settings(module: nn.Module, values: Collection[float]) -> list[str]:
    """Name what a module's code reads off it, or its configuration, and has one of these values."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    holders = {"": module, "config.": getattr(module, "config", None)}
    return [
        f"{prefix}{name} of {type(module).__name__}"
        for prefix, holder in holders.items()
        for name, value in getattr(holder, "__dict__", {}).items()
        if isinstance(value, float) and value in values and code and name in code.co_names
    ]
