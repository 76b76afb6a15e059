"""Write the graph of one stage: copies of traced nodes, with everything resolved.

What stayed symbolic in the traced graph gets its meaning here. A size is read off
a tensor that the stage has; the stage's device is that of a tensor it receives or
of a parameter; settings such as autocast that opened code was under are entered
again around each call.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from fxpipe.graph.calls.attention_masks import MaskCall, masks_of, may_be_none
from fxpipe.graph.calls.graph_calls import (
    Constant,
    Formula,
    Fresh,
    OnlyIf,
    Rebuild,
    TracedDtype,
    Within,
    blank,
    device_of,
    dtype_of,
    given,
    like,
    or_zeros,
)
from fxpipe.graph.calls.method_calls import module_at
from fxpipe.graph.capture.train_eval import TrainingFlag, flag_of
from fxpipe.graph.cut.checkpoint_regions import with_checkpoints
from fxpipe.graph.cut.flow import Flow, as_tensor
from fxpipe.graph.facts import Ambient, Facts, NodeFacts, map_arguments, new_graph
from fxpipe.graph.interface import Received, Sent, TensorSpec
from fxpipe.graph.nested import branch, mutable_parts
from fxpipe.graph.record.tape import WRITABLE, StageDevice

__all__ = ["StageGraph", "StageWriter", "Within"]


@dataclasses.dataclass(frozen=True, slots=True)
class StageGraph:
    """A stage before it becomes a module."""

    graph: fx.Graph
    facts: Facts
    received: tuple[Received, ...]
    model_inputs: tuple[str, ...]
    parameter_names: dict[str, str]  # of inputs that Python code cannot call by their name
    sent: tuple[Sent, ...]
    modules: tuple[str, ...]
    tensors: tuple[str, ...]
    containers: tuple[str, ...]
    repeated: tuple[str, ...]


class StageWriter:
    """Copies nodes of a traced graph into the graph of one stage."""

    def __init__(
        self,
        flow: Flow,
        stage: int,
        received: Iterable[fx.Node],
        sent: Iterable[fx.Node],
    ) -> None:
        self._flow = flow
        self._sent = frozenset(sent)
        self._known = flow.facts
        self._stage = stage
        self._graph = new_graph()
        self._facts = Facts()
        self._copies: dict[fx.Node, fx.Node] = {}
        self._inputs: dict[str, fx.Node] = {}
        self._renamed: dict[str, str] = {}
        self._modules: dict[str, None] = {}
        self._tensors: dict[str, None] = {}
        self._sizes: dict[str, fx.Node] = {}
        self._dims: dict[str, tuple[fx.Node, int]] = {}
        self._flags: dict[str, fx.Node] = {}
        self._shown: dict[fx.Node, fx.Node] = {}
        self._sent_numbers: dict[str, fx.Node] = {}
        self._device: fx.Node | None = None
        self._placeholders: list[fx.Node] = []
        for node in received:
            made = self._graph.placeholder(node.name)
            self._facts[made] = NodeFacts(spec=self._known[node].spec)
            self._placeholders.append(made)
            self._copies[node] = made
            self._note_dims(made)
            if node.target is as_tensor:
                number: Any = node.args[0]
                self._sent_numbers[self._known[number].spec.name] = made
        self._first = self._graph.create_node("call_function", _start, (), {})

    # -- nodes

    def copy(self, node: fx.Node) -> Any:
        """Return a node's counterpart in this stage, writing it if need be."""
        if node in self._copies:
            return self._copies[node]
        if node in self._flow.lent[self._stage]:
            return self._copies[self._flow.lent[self._stage][node]]
        if node.op == "placeholder":
            return self._input(node)
        if not self._flow.is_local(node, self._stage):
            made = self._put_together(node)
        else:
            args, kwargs = self._arguments(node)
            made = self._call(node, args, kwargs)
        known = self._known[node]
        self._facts[made] = dataclasses.replace(
            known.origin, spec=known.spec, is_part=known.is_part, regions=known.regions
        )
        self._copies[node] = made
        self._note_dims(made)
        return made

    def _arguments(self, node: fx.Node) -> tuple[object, object]:
        swap = self._flow.stand_ins[self._stage]
        untouched = self._known[node].untouched
        if node not in self._flow.repeated[self._stage] or not any(n in swap for n in untouched):
            return self.argument(node.args), self.argument(node.kwargs)

        def shown(source: fx.Node) -> fx.Node:
            if source not in untouched or source not in swap:
                return source
            if source not in self._shown:
                self._shown[source] = self._stand_in(source, swap[source])
                self._copies[self._shown[source]] = self._shown[source]
            return self._shown[source]

        args, kwargs = fx.map_arg(node.args, shown), fx.map_arg(node.kwargs, shown)
        return self.argument(args), self.argument(kwargs)

    def _stand_in(self, source: fx.Node, received: fx.Node | None) -> fx.Node:
        """Write what a call is shown that reads size, dtype and device of a value."""
        spec: TensorSpec = self._known[source].spec
        if received is None:
            args = (self.argument(spec.shape), spec.dtype, self._stage_device())
            return self._graph.call_function(blank, args)
        return self._graph.call_function(
            like, (self._copies[received], self._module_with(spec.dtype))
        )

    def _module_with(self, dtype: torch.dtype) -> fx.Node | None:
        """Return a module of the stage whose floating parameters have a dtype."""
        for node in self._flow.own(self._stage):
            if node.op == "call_module":
                module = self._flow.traced.module.get_submodule(str(node.target))
                dtypes = {p.dtype for p in module.parameters() if p.is_floating_point()}
                if dtypes == {dtype}:
                    self._modules[str(node.target)] = None
                    return self._graph.create_node("get_attr", str(node.target), (), {}, "module")
        return None

    def _call(self, node: fx.Node, args: Any, kwargs: Any) -> fx.Node:
        target: Any = node.target
        if node.op == "get_attr":
            is_module = module_at(self._flow.traced.module, target) is not None
            (self._modules if is_module else self._tensors)[target] = None
            return self._graph.create_node("get_attr", target, (), {}, node.name)
        if isinstance(target, TracedDtype):
            return self._dtype(target)
        if isinstance(target, MaskCall):
            is_sent = any(mask in self._sent for mask in (node, *masks_of(node)))
            target = target.whole if is_sent or not may_be_none(node) else target
        known = self._known[node]
        is_usual = known.ambient == Ambient()
        if node.op == "call_module":
            self._modules[target] = None
        if isinstance(target, Rebuild) or (is_usual and known.mode is None):
            return self._graph.create_node(node.op, target, args, kwargs, node.name)
        if node.op == "call_module":
            args = (self._graph.create_node("get_attr", target, (), {}), *args)
            target = None
        if not is_usual:
            target = Within(known.ambient, target)
        if known.mode is not None:
            args = (self._training(flag_of(known.owner, self._flow.traced.flags)), *args)
            target = OnlyIf(known.mode, target)
        return self._graph.create_node("call_function", target, args, kwargs, node.name)

    def _dtype(self, traced: TracedDtype) -> fx.Node:
        """Read a dtype off a module of the stage, or off a tensor it receives."""
        source = self._module_with(traced.dtype)
        for made in self._placeholders if source is None else ():
            spec = self._facts[made].spec
            if spec.requires_grad and spec.dtype == traced.dtype:
                source = made
        if source is None:
            return self._graph.create_node("call_function", traced, (), {})
        return self._graph.create_node("call_function", dtype_of, (source, traced.limit), {})

    def _input(self, node: fx.Node) -> fx.Node:
        name = str(node.target)
        if name not in self._inputs:
            with self._graph.inserting_before(self._first):
                made = self._graph.placeholder(name)
            if made.name != name:  # a keyword, or a name that generated code needs
                made.target = self._renamed[name] = made.name
            self._facts[made] = NodeFacts(spec=self._known[node].spec)
            self._inputs[name] = made
            self._copies[node] = made
            self._note_dims(made)
        return self._inputs[name]

    def _put_together(self, node: fx.Node) -> fx.Node:
        """Build a number or a nested value from the tensors of it that were received."""
        spec = self._known[node].spec
        if isinstance(spec, sympy.Basic):
            (tensor,) = self._flow.sendable(node)
            return self._graph.call_method("item", (self._copies[tensor],))
        if node.target is dtype_of:
            (tensor,) = self._flow.sendable(node)
            arguments = (self._copies[tensor], node.args[1])
            return self._graph.create_node("call_function", dtype_of, arguments, {})
        built = self._built(spec, node)
        if isinstance(built, fx.Node):
            return built
        return self._graph.create_node("call_function", given, (built,), {})

    def _built(self, spec: object, owner: fx.Node | None) -> Any:
        if isinstance(spec, TensorSpec):
            assert owner is not None
            return self._copies[owner]
        found = branch(spec)
        if found is None:
            return self._constant(spec)
        children = []
        for (_, key), child in zip(found.accessors, found.children, strict=True):
            part = self._known.part(owner, key) if owner is not None else None
            children.append(self._built(child, part))
        if found.is_plain:
            return found.make(tuple(children))
        rebuild = Rebuild(type(spec), found.make)
        return self._graph.create_node("call_function", rebuild, tuple(children), {})

    def _constant(self, value: object) -> object:
        if isinstance(value, (*WRITABLE, sympy.Basic, StageDevice)):
            return self.argument(value)
        kind = Fresh if any(True for _ in mutable_parts(value)) else Constant
        return self._graph.create_node("call_function", kind(value), (), {})

    # -- arguments

    def argument(self, value: object) -> Any:
        """Return an argument with nodes, sizes and the device of this stage."""
        return map_arguments(self._leaf, value)

    def _leaf(self, value: object) -> object:
        if isinstance(value, fx.Node):
            return self.copy(value)
        if isinstance(value, sympy.Basic):
            return self._number(value)
        if isinstance(value, StageDevice):
            return self._stage_device()
        if isinstance(value, TrainingFlag):
            return self._training(value.module)
        return value

    def _training(self, module: str) -> fx.Node:
        # Read where it is used: the flag may change between runs, not within one.
        name = f"{module}.training" if module else "training"
        if name not in self._flags:
            with self._graph.inserting_after(self._first):
                self._flags[name] = self._graph.create_node("get_attr", name, (), {}, "training")
        return self._flags[name]

    def _number(self, expr: sympy.Basic) -> fx.Node | int:
        if isinstance(expr, sympy.Symbol):
            return self._size(expr.name)
        if isinstance(expr, sympy.Integer):
            return int(expr)
        if isinstance(expr, (sympy.Add, sympy.Mul)) and all(
            arg.is_integer and (arg.is_Integer or arg.is_Symbol) for arg in expr.args
        ):
            apply = operator.add if isinstance(expr, sympy.Add) else operator.mul
            first, *rest = [self._number(arg) for arg in expr.args]
            for part in rest:
                first = self._graph.call_function(apply, (first, part))
            return first
        names = sorted(symbol.name for symbol in expr.free_symbols)
        sizes = tuple(self._size(name) for name in names)
        return self._graph.call_function(Formula(expr, names), sizes)

    def _size(self, name: str) -> fx.Node:
        if name not in self._sizes:
            number = self._flow.number_node(name)
            if name in self._sent_numbers:
                self._sizes[name] = self._graph.call_method("item", (self._sent_numbers[name],))
            elif number is not None:
                self._sizes[name] = self.copy(number)
            else:
                if name not in self._dims:
                    self._read_inputs_with(name)
                tensor, dim = self._dims[name]
                self._sizes[name] = self._graph.create_node(
                    "call_method", "size", (tensor, dim), {}, name
                )
        return self._sizes[name]

    def _read_inputs_with(self, name: str) -> None:
        for node in self._flow.inputs(self._stage):
            spec = self._known[node].spec
            if isinstance(spec, TensorSpec) and name in spec.symbols:
                self._input(node)

    def _note_dims(self, node: fx.Node) -> None:
        spec = self._facts[node].spec
        if isinstance(spec, TensorSpec):
            for dim, size in enumerate(spec.shape):
                if isinstance(size, sympy.Symbol):
                    self._dims.setdefault(size.name, (node, dim))

    def _stage_device(self) -> fx.Node:
        if self._device is None:
            source = self._device_source()
            place = source if isinstance(source, fx.Node) and source.op == "get_attr" else None
            with self._graph.inserting_after(place or self._first):
                self._device = self._graph.call_function(device_of, (source,))
        return self._device

    def _device_source(self) -> fx.Node | None:
        """Return a tensor that is where the stage is: received, its own, or an input."""
        if self._placeholders:
            return self._placeholders[0]
        for node in self._flow.own(self._stage):
            if node.op == "call_module" and _has_parameters(self._flow, str(node.target)):
                self._modules[str(node.target)] = None
                with self._graph.inserting_after(self._first):
                    return self._graph.create_node("get_attr", str(node.target), (), {}, "module")
        for node in self._flow.traced.graph.nodes:
            if node.op == "placeholder" and isinstance(self._known[node].spec, TensorSpec):
                return self._input(node)
        return None

    # -- the end

    def _sendable(self, node: fx.Node) -> fx.Node:
        """Return a node's tensor; one that exists in one mode only is zeros in the other."""
        made: fx.Node = self.copy(node)
        if self._known[node].mode is None:
            return made
        spec: TensorSpec = self._known[node].spec
        shape = tuple(self.argument(sympy.sympify(size)) for size in spec.shape)
        return self._graph.call_function(or_zeros, (made, shape, spec.dtype, self._stage_device()))

    def finish(
        self,
        received: tuple[Received, ...],
        sent: tuple[Sent, ...],
        output: fx.Node | Sequence[fx.Node],
        repeated: tuple[str, ...],
    ) -> StageGraph:
        """Write the output and return the finished stage."""
        if isinstance(output, fx.Node):
            self._graph.output(self.argument(output.args[0]))
        else:
            values = tuple(self._sendable(node) for node in output)
            self._graph.output(values[0] if len(values) == 1 else values)
        self._graph.erase_node(self._first)
        return StageGraph(
            with_checkpoints(self._graph, self._facts),
            self._facts,
            received,
            tuple(self._inputs),
            self._renamed,
            sent,
            tuple(self._modules),
            tuple(self._tensors),
            tuple(name.rpartition(".")[0] for name in self._flags),
            repeated,
        )


def _start() -> None:
    """Mark the end of the placeholders while a graph is written."""


def _has_parameters(flow: Flow, name: str) -> bool:
    return any(True for _ in flow.traced.module.get_submodule(name).parameters())
