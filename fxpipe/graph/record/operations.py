"""Run the torch functions of opened code, and write a node for each.

A `Writer` also writes nodes that only a trace needs: what a stage compares, and what it refuses.

Where code asks for the value of a tensor it gets the only answer there is, or what the example
inputs say if the trace follows them; then the stage asks again and compares.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import fx, nn

from fxpipe.errors import TraceError
from fxpipe.graph.aux_losses import aux_loss
from fxpipe.graph.calls.checks import (
    Agreed,
    AgreedDtype,
    AgreedGradient,
    AgreedPart,
    AgreedSizes,
    Compared,
    ItemIs,
)
from fxpipe.graph.calls.graph_calls import Hooked, Refusal, TracedDtype
from fxpipe.graph.calls.late_lists import (
    Many,
    joined_late,
    joined_many,
    plain_lists,
    rejoined,
    split_late,
)
from fxpipe.graph.calls.value_functions import Found, running_functions
from fxpipe.graph.nested import Args, Kwargs, has_tensor, map_leaves, walk
from fxpipe.graph.record.constant_values import (
    DECISIONS,
    Chance,
    Decisions,
    ValueDecidesError,
    is_draw,
)
from fxpipe.graph.record.example_values import NoValueError, has_unbacked
from fxpipe.graph.record.leaf_runs import LeafRuns, run_operation
from fxpipe.graph.record.names import Running
from fxpipe.graph.record.tape import Tape, UnknownTensorError
from fxpipe.graph.record.torch_functions import (
    as_node,
    clamped_slices,
    effect_of,
    plain_tuples,
    stacked,
    stacked_indices,
    substitute,
)
from fxpipe.graph.sandbox.fake import Left
from fxpipe.graph.sizes.symbols import Sizes
from fxpipe.graph.source_line import (
    Place,
    a_decisive_draw,
    a_draw,
    an_effect,
    an_unknown_tensor,
    is_compared,
    is_users,
    user_frame,
)
from fxpipe.torch_inside import FakeTensor, FakeTensorMode, version_of

__all__ = [
    "Operations",
    "Writer",
]


class Writer:
    """Writes on the tape of one trace; `wanted` are modules that should have been open."""

    def __init__(self, running: Running, tape: Tape) -> None:
        self._running = running
        self.tape = tape
        self.chance = Chance()
        self.wanted: set[str] = set()
        self.hooked: set[str] = set()  # leaves with hooks of users
        self._refused: set[str] = set()

    def call(self, target: Callable[..., object], *args: object) -> fx.Node:
        """Write the call of a function."""
        return self.tape.write("call_function", target, args, {})

    def argument(self, value: object) -> Any:
        """Return a value as a graph argument."""
        with self.explained():
            return self.tape.argument(value)

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Say of a tensor that nothing has made where it is used."""
        try:
            yield
        except UnknownTensorError:
            self.wanted |= self.hooked  # a hook in a leaf may have kept it
            raise TraceError(an_unknown_tensor(user_frame())) from None

    def want_open(self) -> None:
        """Ask for the leaves that are running to be opened."""
        names = map(self._running.name_of, self._running.leaves)
        self.wanted.update(name for name in names if name is not None)

    def refuse(self, message: str) -> None:
        """Have the graph refuse to run in the mode that is traced."""
        if message not in self._refused:
            self._refused.add(message)
            self.call(Refusal(message))

    def refuse_draw(self) -> None:
        """Refuse the use of a random number that is not torch's."""
        self.refuse(a_draw(user_frame()))

    def check_chance(self) -> None:
        """Refuse if opened code has drawn such a number since the last time."""
        if self.chance.was_drawn():
            self.refuse_draw()

    def check_sizes(self, output: object) -> None:
        """Have the stage check that tensors have the sizes that the trace gave them."""
        tensors = [leaf for _, leaf in walk(output) if isinstance(leaf, torch.Tensor)]
        expected = self.argument([list(tensor.shape) for tensor in tensors])
        self.call(AgreedSizes(user_frame()), self.argument(tensors), expected)

    def check_parts(self, node: fx.Node, output: object) -> None:
        """Have the stage compare the numbers and flags among what a leaf returns."""
        for path, leaf in walk(output):
            is_plain = all(kind == "item" for kind, _ in path)
            if is_plain and isinstance(leaf, (bool, int, float, str)):
                self.call(AgreedPart(user_frame()), leaf, self.tape.part_of(node, path))


_TO_NUMPY = ("numpy", "__array__")


class Operations:
    """Runs and writes the torch functions of one trace."""

    def __init__(
        self,
        mode: FakeTensorMode,
        sizes: Sizes,
        running: Running,
        writer: Writer,
        leaves: LeafRuns,
    ) -> None:
        self._mode = mode
        self._sizes = sizes
        self._running = running
        self._writer = writer
        self._tape = writer.tape
        self._leaves = leaves
        self._decisions = Decisions()
        self.asking: set[Found] = set()  # functions that ask for values of the inputs
        self.looping: set[Found] = set()  # functions that fix the number of rows
        self.asks_for_gradients = False
        self.has_lists = False  # whose length is a size
        self._dtypes_of_state: set[tuple[Place, torch.dtype]] = set()

    def call(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        """Return what a torch function returns, in opened code and in leaves."""
        if getattr(func, "__name__", "") in DECISIONS:
            return self._decision(func, args, kwargs)
        if self.has_lists:
            parts = split_late(func, args, kwargs, self._split)
            if parts is not None:
                return parts
            many = None if self._running.leaves else joined_many(func, args, kwargs)
            if many is not None:
                return self._joined(*many)
            late = joined_late(func, args, kwargs)
            if late is not None and not has_unbacked(late[0], self._sizes.env):
                func, args, kwargs = rejoined, late, {}
            args, kwargs = plain_lists(args), plain_lists(kwargs)
        func = substitute(func, args)
        args = stacked_indices(func, args, self._stacked)
        if self._running.leaves:
            self._leaves.touch((*args, *kwargs.values()))
            self._leaves.draws |= is_draw(func, args, kwargs)
            output = self._leaves.functions.run(func, clamped_slices(func, args), kwargs)
        else:
            output = self.run(func, args, kwargs)
        self._decisions.note(func, args, kwargs, output)
        return output

    def _joined(self, many: Many, dim: int) -> torch.Tensor:
        """Write that a list of tensors is joined; their number is a size."""
        with self._running.unseen(), self._mode:
            output = many.joined(dim)
        node = self._writer.call(torch.cat, many.node(), dim)
        self._tape.adopt(node, output)
        self._writer.check_sizes(output)
        return output

    def _split(self, tensor: torch.Tensor, sizes: object, dim: int) -> Any:
        return self.call(torch.split, (tensor, sizes, dim), {})

    def _stacked(self, values: object) -> Any:
        return stacked(values) if self._running.leaves else self.run(stacked, (values,), {})

    def run(self, func: Any, args: Any, kwargs: Any, *, real: bool = False) -> Any:
        """Run a function and write its node; if fakes fail and `real`, on made-up tensors."""
        self._writer.check_chance()
        effect = effect_of(func)
        if effect:
            raise TraceError(an_effect(effect, user_frame()))
        if getattr(func, "__name__", "") == "register_hook":
            self._hook(args[0], args[1] if len(args) > 1 else kwargs["hook"])
            with self._running.unseen():
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
            lambda leaf: leaf.view_as(leaf) if id(leaf) in known - in_place else leaf, output
        )
        op, target, node_args, node_kwargs = as_node(func, args, kwargs)
        node_args, node_kwargs = plain_tuples(node_args), plain_tuples(node_kwargs)
        node = self._tape.write(
            op, target, self._writer.argument(node_args), self._writer.argument(node_kwargs)
        )
        if is_draw(func, args, kwargs):
            self._tape.facts.learn(node, draws=True)
        self._tape.adopt(node, output, tensors)
        for tensor in changed:
            self._tape.changed(tensor, node)
        if is_agreed:
            self._writer.check_sizes(output)
        return output

    def _decision(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        if isinstance(args[0], FakeTensor):
            with Left(self._mode):
                found = self._decisions.settled(args[0])
                if not found and not self._running.leaves:
                    found = self._drawn(args[0])
                if found:
                    return func(found[0], *args[1:], **kwargs)
        if self._running.leaves:
            self._leaves.touch(args)
            return func(*args, **kwargs)
        owner = self._running.inside
        self.asking.update(running_functions(owner) if owner is not None else ())
        if self._leaves.example is not None:
            with suppress(NoValueError):
                return self._agreed(func, args, kwargs)
        if func.__name__ in _TO_NUMPY:
            raise ValueDecidesError(self._running.data_dependent())
        return self.run(func, args, kwargs)

    def _drawn(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return one of the values that random numbers give a tensor; no stage may run so."""
        found = self._decisions.drawn(tensor)
        if found:
            rates = _settings(self._running.inside or nn.Module(), self._decisions.numbers(tensor))
            self._writer.refuse(a_decisive_draw(user_frame(), rates))
        return found

    def _run_or_follow(
        self, func: Callable[..., object], args: Args, kwargs: Kwargs, real: bool
    ) -> tuple[object, bool]:
        """Run a function; if values matter to it, return what it does for the example.

        The second result says whether the sizes of the output are the example's.
        """
        try:
            output = self.run_unseen(func, args, kwargs, real)
            if self._leaves.example is None or not has_unbacked(output, self._sizes.env):
                return output, False
            with suppress(NoValueError):
                return self._agreed_sizes(func, args, kwargs), True
            return output, False
        except ValueDecidesError:
            if self._leaves.example is None:
                raise
            with suppress(NoValueError):
                return self._agreed(func, args, kwargs), False
            with suppress(NoValueError):
                return self._agreed_sizes(func, args, kwargs), True
            raise

    def _agreed(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        """Return what a function says about the example; the stage will check that."""
        assert self._leaves.example is not None
        with self._running.unseen():
            result = self._leaves.example.result(func, args, kwargs)
        check = Agreed(func, user_frame())

        def on_value() -> None:
            node_args = self._writer.argument((result, *plain_tuples(args)))
            self._tape.write("call_function", check, node_args, self._writer.argument(kwargs))

        def on_answer(asked: ItemIs, other: object, answer: bool) -> None:
            given = self._writer.argument((args[0], other))
            self._writer.call(Agreed(asked, user_frame()), answer, *given)

        if func.__name__ == "item" and isinstance(result, (int, float)) and is_compared():
            return Compared(result, on_answer, on_value)
        on_value()
        return result

    def _agreed_sizes(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        """Return a function's output with the sizes that it has for the example."""
        assert self._leaves.example is not None
        with self._running.unseen():
            return self._leaves.example.sizes(func, args, kwargs)

    def _hook(self, tensor: torch.Tensor, hook: Callable[..., object]) -> None:
        """Write that a tensor gets a hook, right behind what made it."""
        with self._writer.explained():
            node = self._tape.node_of(tensor)
        if node.op in ("placeholder", "get_attr") or has_tensor(hook):
            raise TraceError(an_effect("register_hook", user_frame()))
        with self._tape.graph.inserting_after(self._tape.facts.last_part(node)):
            self._tape.write("call_function", Hooked(hook), (node,), {})

    def run_unseen(
        self, func: Callable[..., object], args: Args, kwargs: Kwargs, real: bool
    ) -> object:
        """Return what a function returns, without writing it down."""
        with self._running.unseen():
            return run_operation(
                self._leaves, func, args, kwargs, real=real, explain=self._running.data_dependent
            )

    # -- what code asks of tensors beside their values

    def flag_read(self, func: object, args: Any, output: bool) -> None:
        """Note that opened code asks whether a tensor requires a gradient."""
        name = getattr(getattr(func, "__self__", None), "__name__", "")
        if name != "requires_grad" or not self._running.is_opened():
            return
        if not is_users(sys._getframe(2).f_code.co_filename):
            return
        self.asks_for_gradients = True
        tensor = args[0]
        if self._tape.knows(tensor) or self._running.names.is_state(tensor):
            node = self._writer.argument(tensor)
            check = AgreedGradient(user_frame())
            self._writer.call(check, output, node)

    def dtype_read(self, tensor: torch.Tensor) -> None:
        """Note that opened code asks for the dtype of a tensor."""
        node: fx.Node | None = None
        is_state = self._running.names.is_state(tensor)
        if not is_state and not self._tape.knows(tensor):
            return
        if not is_state:
            node = self._tape.node_of(tensor)
        self._running.around.dtype_read(tensor.dtype, node)
        place = user_frame()
        if not tensor.is_floating_point() or not is_users(sys._getframe(2).f_code.co_filename):
            return
        if node is None:
            if (place, tensor.dtype) in self._dtypes_of_state:
                return
            self._dtypes_of_state.add((place, tensor.dtype))
            node = self._writer.call(TracedDtype(tensor.dtype, None))
            self._tape.facts.learn(node, spec=tensor.dtype)
        self._writer.call(AgreedDtype(tensor.dtype, place), node)


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
