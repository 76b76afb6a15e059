"""What the example inputs say, where opened code asks for more than sizes.

Fake tensors have no values, but some models decide by them: whether a mask has any
padding, how many patches each image has. If such a value follows from the model's
inputs alone, it can be computed for the example: the operations recorded so far run
once more, on the example's own tensors. The graph is then right for all inputs that
say the same, and a check in the stage makes sure that they do (see `agreed`).

A count may grow with the batch. So the example is also looked at two and three
times as large, its rows repeated; a number that grows along becomes a formula.

Never computed: what depends on a parameter or on random numbers. And floating-point
inputs decide nothing, for they will hardly be the same the next time; they may be
counted, though (images that are not all zero).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx, nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fxpipe.graph.calls.attention_masks import MaskCall
from fxpipe.graph.calls.value_functions import ValueFunction
from fxpipe.graph.facts import map_arguments
from fxpipe.graph.nested import SYMBOLIC, Args, Kwargs, has_tensor, map_leaves, walk
from fxpipe.graph.record.tape import StageDevice, Tape, UnknownTensorError
from fxpipe.graph.record.torch_functions import sizes_only
from fxpipe.graph.sandbox.fake import FakeState, Left
from fxpipe.graph.sandbox.made_up import another, filled
from fxpipe.graph.sandbox.restore import preserved_values
from fxpipe.graph.sizes.symbols import exprs_in
from fxpipe.torch_inside import FakeTensor, FakeTensorMode, floor_div, known_sizes

__all__ = ["ExampleValues", "NoValueError", "has_unbacked"]

_SCALES = (1, 2, 3)


class NoValueError(Exception):
    """A value that does not follow from the example inputs."""


class ExampleValues:
    """Computes values of one trace for the example inputs."""

    def __init__(
        self,
        module: nn.Module,
        mode: FakeTensorMode,
        state: FakeState,
        tape: Tape,
        inputs: Mapping[str, object],
        fakes: Mapping[str, object],
    ) -> None:
        self._module = module
        self._mode = mode
        self._state = state
        self._tape = tape
        self._inputs = inputs
        self._rows: dict[int, sympy.Symbol] = {}
        self._repeat = 1
        self._is_usable = True
        for (_, real), (_, fake) in zip(walk(dict(inputs)), walk(dict(fakes)), strict=True):
            if isinstance(real, torch.Tensor) and isinstance(fake, torch.Tensor):
                self._look_at(real, fake)

    def _look_at(self, real: torch.Tensor, fake: torch.Tensor) -> None:
        self._is_usable &= not (real.is_meta or isinstance(real, FakeTensor))
        for dim, size in enumerate(fake.shape):
            if not isinstance(size, torch.SymInt):
                continue
            is_rows = dim == 0 and isinstance(size.node.expr, sympy.Symbol)
            if is_rows:
                self._rows[id(real)] = size.node.expr
            hint = int(size.node.expr.xreplace(known_sizes(self._env)))
            if hint != real.shape[dim]:  # an example of size 1 stands for 2
                self._is_usable &= is_rows and hint == 2
                self._repeat = 2

    @property
    def _env(self) -> ShapeEnv:
        assert self._mode.shape_env is not None
        return self._mode.shape_env

    def free_rows(self) -> list[sympy.Symbol]:
        """Return the sizes that grow when the rows of the inputs are repeated."""
        found = {self._env.replace(row): None for row in self._rows.values()}
        return [row for row in found if isinstance(row, sympy.Symbol)]

    def result(self, func: Callable[..., object], args: Args, kwargs: Kwargs) -> object:
        """Return what a function says about the example, numbers in terms of sizes.

        If it depends on the number of rows in no simple way, that number is fixed.

        Raises:
            NoValueError: its arguments do not follow from the inputs, or it returns tensors.
        """
        found = [self._call(func, args, kwargs, 1)]
        if has_tensor(found[0]):
            raise NoValueError
        if self.free_rows():
            try:
                found += [self._call(func, args, kwargs, scale) for scale in _SCALES[1:]]
                return self._joined(found)
            except Exception:
                self.fix_rows()
        return found[0]

    def sizes(
        self,
        func: Callable[..., object],
        args: Args,
        kwargs: Kwargs,
        module: nn.Module | None = None,
    ) -> Any:
        """Return what a function returns as fake tensors, with the sizes of the example.

        Tensors that do not follow from the inputs are made up; if they make a
        difference for a size, there is no telling. The state of `module`, if the
        function is one, is left as it was.

        Raises:
            NoValueError: the sizes do not follow from the inputs.
        """
        first = self._certain(func, args, kwargs, module)
        shapes = _shapes(first)
        if self.free_rows():
            try:
                more = [
                    _shapes(self._call(func, args, kwargs, scale, False, module))
                    for scale in _SCALES[1:]
                ]
                shapes = self._joined([shapes, *more])
            except Exception:
                self.fix_rows()
        remaining = iter(shapes)

        def fake(leaf: object) -> object:
            return another(leaf, next(remaining)) if isinstance(leaf, torch.Tensor) else leaf

        with self._mode:
            return map_leaves(fake, first)

    def _certain(
        self, func: Callable[..., object], args: Args, kwargs: Kwargs, module: nn.Module | None
    ) -> object:
        first = self._call(func, args, kwargs, 1, False, module)
        again = self._call(func, args, kwargs, 1, True, module)
        if not has_tensor(first) or _described(first) != _described(again):
            raise NoValueError
        return first

    def runs(
        self, func: Callable[..., object], args: Args, kwargs: Kwargs, module: nn.Module | None
    ) -> list[object]:
        """As `sizes`, with values: for the example, and with its rows more than once."""
        more = [self._call(func, args, kwargs, scale, False, module) for scale in _SCALES[1:]]
        return [self._certain(func, args, kwargs, module), *more]

    def num_fixed_rows(self) -> int:
        """Return how many inputs have a number of rows that is no size any more."""
        return sum(not self._env.replace(row).free_symbols for row in self._rows.values())

    def whole(self, call: ValueFunction, args: Args, kwargs: Kwargs) -> object:
        """Return what a function of whole numbers returns, as fake tensors.

        Raises:
            NoValueError: some of its arguments are no whole numbers or do not follow from the
                inputs, or it does more than to return tensors.
        """
        tensors = [leaf for _, leaf in walk((args, kwargs)) if isinstance(leaf, FakeTensor)]
        if not tensors or not all(map(self._has_value, tensors)):
            raise NoValueError
        self.run(call.checked, args, kwargs)
        return self.sizes(call, args, kwargs)

    def run(self, func: Callable[..., object], args: Args, kwargs: Kwargs) -> object:
        """Return what a function returns for the example.

        Raises:
            NoValueError: its arguments do not follow from the inputs, or it fails.
        """
        try:
            return self._call(func, args, kwargs, 1)
        except Exception as error:
            raise NoValueError from error

    def shapes(
        self, func: Callable[..., Any], args: Args, kwargs: Kwargs, module: nn.Module
    ) -> Any:
        """Return the sizes of what a module returns for the example, as numbers.

        Raises:
            NoValueError: none of its arguments follows from the inputs.
        """
        tensors = [leaf for _, leaf in walk((args, kwargs)) if isinstance(leaf, FakeTensor)]
        if not any(self._has_value(tensor) for tensor in tensors):
            raise NoValueError
        return _shapes(self._call(func, args, kwargs, 1, False, module))

    def _has_value(self, tensor: torch.Tensor) -> bool:
        if tensor.is_floating_point():
            return False
        with contextlib.suppress(NoValueError, UnknownTensorError):
            self._needed(self._tape.node_of(tensor))
            return self._is_usable
        return False

    def fix_others(self, args: Args, kwargs: Kwargs) -> None:
        """Have all sizes but the number of rows be those of the example, for good."""
        found = {
            symbol for expr in exprs_in((args, kwargs), self._env) for symbol in expr.free_symbols
        }
        for symbol in found - set(self.free_rows()):
            if symbol in known_sizes(self._env):
                self._env.evaluate_expr(sympy.Eq(symbol, known_sizes(self._env)[symbol]))

    def fix_rows(self) -> None:
        """Have the number of rows be that of the example, for good."""
        for row in self.free_rows():
            self._env.evaluate_expr(sympy.Eq(row, known_sizes(self._env)[row]))

    # -- formulas

    def _joined(self, found: Sequence[object]) -> Any:
        paths = [[path for path, _ in walk(one)] for one in found]
        if any(path != paths[0] for path in paths):
            raise NoValueError
        leaves = iter(zip(*([leaf for _, leaf in walk(one)] for one in found), strict=True))
        return map_leaves(lambda _: self.formula(next(leaves)), found[0])

    def formula(self, values: Sequence[int]) -> Any:
        """Return a size for any number of rows; `values` is what it is for the example and more."""
        first = values[0]
        if all(type(value) is type(first) and value == first for value in values):
            return first
        if type(first) is not int or any(type(value) is not int for value in values):
            raise NoValueError
        step = values[1] - first
        if any(later - sooner != step for sooner, later in itertools.pairwise(values)):
            raise NoValueError
        rows = [(row, int(known_sizes(self._env)[row])) for row in self.free_rows()]
        for row, hint in rows:
            if step == hint:
                return self._number(row + first - step, first)
        for row, hint in rows:
            if step % hint == 0:
                return self._number(step // hint * row + first - step, first)
        row, hint = rows[0]
        return self._number(floor_div(step * row, hint) + first - step, first)

    def _number(self, expr: sympy.Expr, hint: int) -> object:
        return self._env.create_symintnode(expr, hint=hint)

    # -- running again

    def _call(
        self,
        func: Callable[..., Any],
        args: Args,
        kwargs: Kwargs,
        scale: int,
        made_up: bool | None = None,
        module: nn.Module | None = None,
    ) -> Any:
        if not self._is_usable:
            raise NoValueError
        if made_up is None and not _is_count(args) and self._reads_floats((args, kwargs)):
            raise NoValueError
        kept = preserved_values(module) if module is not None else contextlib.nullcontext()
        with Left(self._mode), self._state.real(), kept:
            real_args, real_kwargs = self._real((args, kwargs), scale, made_up)
            return func(*real_args, **real_kwargs)

    def _real(self, value: object, scale: int, made_up: bool | None) -> Any:
        """Return arguments with values; `made_up` says with which where they have none."""
        values = self._sizes_at(scale)
        done: dict[fx.Node, object] = {}

        def one(leaf: object) -> object:
            if isinstance(leaf, SYMBOLIC):
                return _number_at(self._env.replace(leaf.node.expr), values)
            if not isinstance(leaf, FakeTensor):
                return leaf
            try:
                return self._value(self._tape.node_of(leaf), scale, done)
            except (NoValueError, UnknownTensorError):
                if made_up is None:
                    raise NoValueError from None
            shape = [_number_at(self._expr(size), values) for size in leaf.shape]
            # As a mask or an index this could decide a size: never the same twice.
            return filled(leaf, shape, torch.device("cpu"), with_ones=made_up)

        return map_leaves(one, value)

    def _expr(self, size: object) -> object:
        return self._env.replace(size.node.expr) if isinstance(size, torch.SymInt) else size

    def _sizes_at(self, scale: int) -> dict[sympy.Symbol, int]:
        rows = set(self.free_rows())
        return {
            symbol: int(value) * (scale if symbol in rows else 1)
            for symbol, value in known_sizes(self._env).items()
        }

    def _reads_floats(self, value: object) -> bool:
        tensors = [leaf for _, leaf in walk(value) if isinstance(leaf, FakeTensor)]
        try:
            needed = set().union(*(self._needed(self._tape.node_of(t)) for t in tensors))
        except UnknownTensorError:
            return True
        inputs = [self._inputs[str(node.target)] for node in needed if node.op == "placeholder"]
        leaves = [leaf for _, leaf in walk(inputs) if isinstance(leaf, torch.Tensor)]
        return any(leaf.is_floating_point() for leaf in leaves)

    def _needed(self, wanted: fx.Node, done: Collection[fx.Node] = ()) -> set[fx.Node]:
        needed: set[fx.Node] = set()
        stack = [wanted]
        while stack:
            node = stack.pop()
            if node not in needed and node not in done:
                self._check(node)
                needed.add(node)
                stack.extend(set(node.all_input_nodes) - sizes_only(node))
        return needed

    def _value(self, wanted: fx.Node, scale: int, done: dict[fx.Node, object]) -> object:
        """Compute one node, and in the order of the graph what it depends on."""
        needed = self._needed(wanted, done)
        with torch.no_grad():
            for node in self._tape.graph.nodes:
                if node in needed:
                    done[node] = self._run(node, scale, done)
        return done[wanted]

    def _check(self, node: fx.Node) -> None:
        if node.op == "get_attr" and str(node.target) not in dict(self._module.named_buffers()):
            raise NoValueError
        is_leaf = node.op == "call_module"
        part = self._module.get_submodule(str(node.target)) if is_leaf else nn.Module()
        if self._tape.facts[node].draws or any(True for _ in part.parameters()):
            raise NoValueError

    def _run(self, node: fx.Node, scale: int, done: Mapping[fx.Node, object]) -> object:
        if node.op == "placeholder":
            return self._input(str(node.target), scale)
        if node.op == "get_attr":
            buffer = self._module.get_buffer(str(node.target))
            if buffer.is_meta:
                raise NoValueError
            return buffer.clone()
        values = self._sizes_at(scale)
        blanks = {source: self._blank(source, values) for source in sizes_only(node)}
        done = {**done, **blanks} if blanks else done
        args, kwargs = self._arguments((node.args, node.kwargs), values, done)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        if node.op == "call_module":
            return self._module.get_submodule(str(node.target))(*args, **kwargs)
        target: Any = node.target.whole if isinstance(node.target, MaskCall) else node.target
        return target(*args, **kwargs)

    def _blank(self, node: fx.Node, values: Mapping[sympy.Symbol, int]) -> object:
        """Return a tensor of a node's size, for code that does not look at its values."""
        fake = self._tape.values.get(node)
        if not isinstance(fake, torch.Tensor):
            raise NoValueError
        shape = [_number_at(self._expr(size), values) for size in fake.shape]
        return torch.zeros(shape, dtype=fake.dtype)

    def _input(self, name: str, scale: int) -> object:
        copies = scale * self._repeat

        def repeated(leaf: object) -> object:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            row = self._rows.get(id(leaf))
            is_free = row is not None and isinstance(self._env.replace(row), sympy.Symbol)
            count = copies if is_free else self._repeat if row is not None else 1
            return torch.cat([leaf.detach()] * count) if count > 1 else leaf.detach().clone()

        return map_leaves(repeated, self._inputs[name])

    def _arguments(
        self, args: object, values: Mapping[sympy.Symbol, int], done: Mapping[fx.Node, object]
    ) -> Any:
        def one(leaf: object) -> object:
            if isinstance(leaf, fx.Node):
                return done[leaf]
            if isinstance(leaf, sympy.Basic):
                return _number_at(self._env.replace(leaf), values)
            if isinstance(leaf, StageDevice):
                return next(iter(self._tape.trace_devices), torch.device("cpu"))
            return leaf

        return map_arguments(one, args)


def has_unbacked(output: object, env: ShapeEnv | None) -> bool:
    """Say whether a size in a nested value comes from data."""
    sizes: Iterable[object] = (
        size
        for _, leaf in walk(output)
        for size in (leaf.shape if isinstance(leaf, torch.Tensor) else (leaf,))
    )
    return env is not None and any(
        isinstance(size, SYMBOLIC)
        and not env.replace(size.node.expr).free_symbols <= known_sizes(env).keys()
        for size in sizes
    )


def _number_at(expr: sympy.Basic, values: Mapping[sympy.Symbol, int]) -> Any:
    if not isinstance(expr, sympy.Basic):
        return expr
    try:
        found: sympy.Basic = sympy.sympify(expr.xreplace(dict(values)))
    except ZeroDivisionError as error:
        raise NoValueError from error
    if found in (sympy.true, sympy.false):
        return bool(found)
    if not found.is_number:
        raise NoValueError
    return int(found) if found.is_integer else float(found)


def _is_count(args: Args) -> bool:
    first = args[0] if len(args) == 1 else None
    whole = (torch.int64, torch.int32, torch.int16, torch.int8)
    return isinstance(first, torch.Tensor) and first.dtype in whole


def _described(output: object) -> list[object]:
    return [leaf.shape if isinstance(leaf, torch.Tensor) else leaf for _, leaf in walk(output)]


def _shapes(output: object) -> list[list[int]]:
    return [
        [int(size) for size in leaf.shape]
        for _, leaf in walk(output)
        if isinstance(leaf, torch.Tensor)
    ]
