"""Run a model once on fake tensors and write down what its opened code does.

A `Trace` sees every torch function (as a TorchFunctionMode) and every module call.
In opened modules each torch function becomes a node (`operations.py`), and so do some other
calls (`whole_calls.py`). Any other module is a leaf: one `call_module` node, whatever happens
inside. Splits asked for by `pipe_split()` or by name become `pipe_split` nodes.

A split inside a leaf cannot be honoured in this run; the trace then says in
`writer.wanted` which modules would have to be opened, and the caller traces again.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from fxpipe.errors import SplitError
from fxpipe.graph.calls.graph_calls import Applied, Mapped, Scripted, function_modes
from fxpipe.graph.calls.late_lists import LateList
from fxpipe.graph.calls.value_functions import Found, running_functions
from fxpipe.graph.facts import NodeFacts
from fxpipe.graph.guard.reads import Reads
from fxpipe.graph.markers import SplitPoint, pipe_split
from fxpipe.graph.nested import Args, Kwargs, Symbolic, walk
from fxpipe.graph.record.constant_values import ValueDecidesError
from fxpipe.graph.record.example_values import ExampleValues
from fxpipe.graph.record.leaf_runs import LeafRuns
from fxpipe.graph.record.method_runs import MethodRuns
from fxpipe.graph.record.names import Running
from fxpipe.graph.record.operations import Operations, Writer
from fxpipe.graph.record.state_writes import Carried, StateWatch
from fxpipe.graph.record.tape import Tape
from fxpipe.graph.record.torch_functions import is_metadata
from fxpipe.graph.record.whole_calls import LeafCalls, WholeCalls
from fxpipe.graph.sandbox.fake import FakeState
from fxpipe.graph.sandbox.patches import Seer, collector
from fxpipe.graph.sizes.symbols import Sizes, TracedSizes
from fxpipe.graph.source_line import is_users, user_frame
from fxpipe.torch_inside import FakeTensorMode

__all__ = ["Trace"]


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
        inputs: Mapping[str, object],
        fakes: Mapping[str, object],
    ) -> None:
        super().__init__()
        self._sizes = sizes
        self._opened = set(opened)
        self._splits = dict(splits)
        self._leaves = LeafRuns(mode, state, sizes)
        running = self._running = Running(module)
        self.tape = Tape(running.name_of_state, state.real_of)
        self.tape.describe = self._describe
        self.tape.generators = frozenset(
            id(value)
            for part in module.modules()
            for value in vars(part).values()
            if isinstance(value, torch.Generator)
        )
        self._inputs = ExampleValues(module, mode, state, self.tape, inputs, fakes)
        writer = self.writer = Writer(running, self.tape)
        self.operations = Operations(mode, sizes, running, writer, self._leaves)
        self.calls = WholeCalls(sizes, running, writer, self._leaves, self.operations, self._inputs)
        to_open = {*opened, *splits}
        self._leaf_calls = LeafCalls(state, sizes, running, writer, self._leaves, to_open)
        self._watch = StateWatch(module, opened, state)
        self.reads = Reads(module, running.is_read, self._leaf_calls.on_left)
        self.methods = MethodRuns(
            mode, state, running, writer, self.operations, self._inputs, self.reads, self.calls,
            self._leaf_calls, self._leaves, to_open, self.on_training,
        )  # fmt: skip
        self._num_fixed_rows = 0
        if isinstance(sizes.env, TracedSizes):
            sizes.env.trace = weakref.ref(self)  # torch keeps the environment for longer
        self.is_opened = running.is_opened
        self.real_of = state.real_of
        self.carried: list[Carried] = []
        self.called: set[str] = set()
        self.training_read: set[str] = set()
        self.failed_in = ""

    # -- what torch and the model tell us

    def __torch_function__(
        self, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not (self._running.is_busy or is_metadata(func)):
            return self.operations.call(func, args, kwargs)
        output = func(*args, **kwargs)
        if isinstance(output, torch.dtype) and self.is_opened():
            self.operations.dtype_read(args[0])
        if output is True or output is False:
            self.operations.flag_read(func, args, output)
        return output

    def on_module(
        self,
        module: nn.Module,
        call: Callable[..., object],
        args: Args,
        kwargs: Kwargs,
    ) -> object:
        name = self._running.name_of(module)
        if name is not None and not self._running.is_busy:
            self.called.add(name)
        if isinstance(module, torch.jit.ScriptModule):
            call = functools.partial(self._scripted, call)
        if self._running.is_elsewhere:
            return self._leaf_calls.run_inside(module, name, call, args, kwargs)
        if self._running.inside is module:
            return call(*args, **kwargs)  # an overridden __call__ on its way to the forward
        self._split_at(name, SplitPoint.BEGINNING)
        if name is None or name in self._opened:
            self._running.opened.append(module)
            self.reads.note_module(module)
            try:
                output = call(*args, **kwargs)
                if len(self._running.opened) == 1:
                    self.calls.settle_lists(output)
            except Exception:
                self.failed_in = self.failed_in or name or ""
                raise
            finally:
                self._running.opened.pop()
        else:
            output = self._leaf_calls.run(module, name, call, args, kwargs)
        self._split_at(name, SplitPoint.END)
        return output

    def on_function(self, function: type, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self._is_elsewhere(args, kwargs):
            return call(*args, **kwargs)
        if function is CheckpointFunction:
            return self._running.around.reentrant(*args)
        return self.operations.run(Applied(function), args, kwargs, real=True)

    def on_vmap(self, call: Callable[..., object], args: Args, kwargs: Kwargs) -> object:
        if self._is_elsewhere(args, kwargs):
            return call(*args, **kwargs)
        modes = function_modes()
        return self.operations.run(Mapped(modes[modes.index(self) + 1 :]), args, kwargs)

    def on_script(self, function: Callable[..., object], args: Args, kwargs: Kwargs) -> object:
        if self._is_elsewhere(args, kwargs):
            return self._scripted(function, *args, **kwargs)
        return self.operations.run(Scripted(function), args, kwargs, real=True)

    def _is_elsewhere(self, args: Args, kwargs: Kwargs) -> bool:
        """Say whether a call is not opened code's; a leaf uses its arguments."""
        if self._running.leaves:
            self._leaves.touch(leaf for _, leaf in walk((args, kwargs)))
        return self._running.is_elsewhere

    def _scripted(self, call: Callable[..., object], *args: object, **kwargs: object) -> object:
        """Run compiled code on real tensors: given a symbol, it takes the number for granted."""
        with suppress(Exception):
            failure = ValueDecidesError("compiled code fails")
            return self._leaves.run_function_real(call, args, kwargs, failure)
        return call(*args, **kwargs)

    def on_decision(self, value: Symbolic) -> None:
        if not self._running.is_elsewhere:
            self._sizes.decided(value)
        elif self._running.leaves and is_users(sys._getframe(2).f_code.co_filename):
            self._sizes.decided(value, inside_leaf=True)

    def on_settled(self) -> None:
        """Take note of the functions that run when the number of rows becomes a fixed one."""
        before, self._num_fixed_rows = self._num_fixed_rows, self._inputs.num_fixed_rows()
        inside = self._running.inside
        if self._num_fixed_rows > before and inside is not None:
            found = running_functions(inside)
            self.operations.looping.update(one for one in found if one.name != "forward")

    def looping(self) -> set[Found]:
        """Return the functions that have fixed the number of rows, if it is fixed now."""
        return self.operations.looping if self._inputs.num_fixed_rows() else set()

    def on_check(self, condition: object) -> bool:
        return self.calls.check(condition)

    def on_kept(self, module: nn.Module) -> None:
        if collector() is self._running.collector:  # and not one that the leaf reads itself
            self._leaf_calls.on_kept(module)

    def on_hook(
        self, hook: Callable[..., object], module: nn.Module, values: tuple[object, ...]
    ) -> object:
        return self.calls.hook(hook, module, values)

    def on_training(self, module: nn.Module) -> None:
        name = None if self._running.is_elsewhere else self._running.name_of(module)
        if name is not None:
            self.training_read.add(name)

    def on_checkpoint(self, entering: bool, options: dict[str, object]) -> None:
        if not self._running.is_elsewhere:
            self._running.around.checkpoint(options, entering)

    def on_autocast(self, region: object, entering: bool) -> None:
        if not self._running.is_elsewhere:
            self._running.around.autocast(region, entering)

    def on_pipe_split(self) -> None:
        """Take note of a `pipe_split()` that ran."""
        if self._running.is_busy:
            raise SplitError(
                f"pipe_split() at {user_frame()} is inside torch.vmap or an autograd function, "
                "which stay in one piece; put it before or behind"
            )
        if self._running.leaves:
            self.writer.want_open()
        else:
            self.writer.call(pipe_split)

    def follow(self) -> None:
        """Have opened code see the values that the example inputs have."""
        self._leaves.example = self._inputs

    def finish(self, output: object) -> None:
        """Write the model's output, the last node."""
        self.writer.check_chance()
        faults, self.carried = self._watch.finish(self.reads, self.tape)
        for fault in faults:
            self.writer.refuse(fault)
        for _, leaf in walk(output):
            if isinstance(leaf, LateList):
                leaf.plain()
        with self.writer.explained():
            self.tape.finish(output)

    def _describe(self) -> NodeFacts:
        self.reads.note_code(sys._getframe(1))
        return self._running.facts()

    def _split_at(self, name: str | None, point: SplitPoint) -> None:
        if name is not None and self._splits.get(name) is point:
            self.writer.call(pipe_split)
