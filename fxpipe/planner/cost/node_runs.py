"""Run single nodes of a traced graph on tensors without data, to see what they cost.

In:  a `TracedGraph`, a node of it, a value for each size symbol.
Out: an `Observation` of that node.

A node runs alone: its inputs are made up from the specs of the nodes before it. Equal nodes
(same module structure, same kinds of arguments, same sizes) run once. A module that looks at
values runs on made-up real tensors instead; if that fails too (a data-dependent module on the
meta device), its cost is estimated from its parameters and marked as rough.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import fx, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fxpipe.graph.capture.traced_graph import TracedGraph
from fxpipe.graph.capture.train_eval import TrainingFlag
from fxpipe.graph.cut.stage_writer import Within
from fxpipe.graph.dims import evaluate
from fxpipe.graph.facts import Ambient, Facts, leaves_of, map_arguments
from fxpipe.graph.interface import TensorSpec
from fxpipe.graph.nested import map_leaves, walk
from fxpipe.graph.record.call_keys import module_key
from fxpipe.graph.record.tape import Constant, StageDevice
from fxpipe.graph.sandbox.fake import FakeState, unlogged
from fxpipe.graph.sandbox.patches import Seer, intercepted
from fxpipe.graph.sandbox.restore import Places, preserved, preserved_random, preserved_values
from fxpipe.planner.cost.mask_runs import MaskRuns, Sizes
from fxpipe.planner.cost.observation import Observation, Op
from fxpipe.planner.cost.watch import entry, observe
from fxpipe.torch_inside import FakeTensorMode

__all__ = ["Bench", "Call", "Sizes", "fixed_attention", "inputs_of"]

logger = logging.getLogger(__name__)

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Call:
    """A node to run alone: `function(*args, **kwargs)` of what `build` makes anew each time.

    `parameters` has the node's parameters once `build` was called.
    """

    function: Callable[..., Any]
    build: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]
    parameters: list[torch.Tensor]


class Bench:
    """Observes the nodes of one graph."""

    def __init__(
        self,
        traced: TracedGraph,
        *,
        fused_attention: bool = True,
        device: torch.device = _CPU,
    ) -> None:
        self.traced = traced
        self.device = device
        self._fused = fused_attention
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._known: dict[Hashable, Observation] = {}
        self._kinds: dict[str, Hashable] = {}
        self._masks = MaskRuns(traced)
        self._far: Places | None = None
        self.grows = _growing(traced)
        self.runs = 0

    @contextlib.contextmanager
    def many(self) -> Iterator[None]:
        """Observe several nodes: what lies beyond a node's own modules is put back at the end."""
        self._far = Places(self.traced.module)
        # A function may have a module's parameters in it that are not replaced for its run.
        gradients = [(parameter, parameter.grad) for parameter in self.traced.module.parameters()]
        try:
            yield
        finally:
            self._far.restore()
            self._far = None
            for parameter, gradient in gradients:
                parameter.grad = gradient

    def observe(self, node: fx.Node, sizes: Sizes) -> Observation:
        """What a node costs at given sizes."""
        key = self.key(node, sizes)
        if key is None or key not in self._known:
            found = self._observe(node, sizes)
            if key is None:
                return found
            self._known[key] = found
        return self._known[key]

    def key(self, node: fx.Node, sizes: Sizes) -> Hashable | None:
        """Equal for nodes that cost the same; None if there is no telling."""
        inputs = tuple(
            (_bound(self._spec(source, sizes), sizes), source in self.grows)
            for source in node.all_input_nodes
        )
        key = (node.op, self._kind(node), inputs, self._constants(node, sizes))
        try:
            hash(key)
        except TypeError:
            return None
        return key

    def _spec(self, node: fx.Node, sizes: Sizes) -> Any:
        """What a node gives to others: None for a mask that is not made."""
        return None if self._masks.is_none(node, sizes) else self.traced.facts[node].spec

    def _kind(self, node: fx.Node) -> Hashable:
        known = self.traced.facts[node]
        if node.op != "call_module":
            return str(node.target), str(known.ambient), known.mode
        name = str(node.target)
        if name not in self._kinds:
            module = self.traced.module.get_submodule(name)
            flags = tuple(p.requires_grad for p in module.parameters())
            modes = tuple(part.training for part in module.modules())
            self._kinds[name] = (module_key(module), flags, modes)
        return self._kinds[name], str(known.ambient)

    def _constants(self, node: fx.Node, sizes: Sizes) -> str:
        def one(value: Any) -> Any:
            if isinstance(value, fx.Node):
                return "?"
            return evaluate(value, sizes) if isinstance(value, sympy.Basic) else value

        return repr(map_arguments(one, (node.args, node.kwargs)))

    def _observe(self, node: fx.Node, sizes: Sizes) -> Observation:
        self.runs += 1
        if self.traced.facts[node].mode is False or self._masks.is_none(node, sizes):
            return Observation(())
        module = self._module_of(node)
        try:
            with self._faked(module):
                return self._run(node, sizes, module, _fake)
        except Exception as error:
            failure = error
        logger.debug("%s does not run on fake tensors: %s", node.name, failure)
        state = () if module is None else tuple(module.parameters())
        if not any(tensor.is_meta for tensor in state):
            try:
                with self._real(module):
                    return self._run(node, sizes, module, _real)
            except Exception as error:
                logger.debug("%s does not run on made-up tensors: %s", node.name, error)
        return _rough(self.traced.facts, node, sizes, state)

    def _module_of(self, node: fx.Node) -> nn.Module | None:
        if node.op != "call_module":
            return None
        return self.traced.module.get_submodule(str(node.target))

    def _run(
        self,
        node: fx.Node,
        sizes: Sizes,
        module: nn.Module | None,
        make: Callable[[TensorSpec], torch.Tensor],
    ) -> Observation:
        call = self.prepare(node, sizes, module, make)
        seen = observe(call.function, call.build, lambda: call.parameters)
        return self._with_places(seen, node, sizes)

    def _with_places(self, seen: Observation, node: fx.Node, sizes: Sizes) -> Observation:
        """Return what was seen, with a place among the inputs for masks that are not made."""
        sources = [source for source, _ in inputs_of(node, self.traced.facts)]
        is_given = [not self._masks.is_none(source, sizes) for source in sources]
        if all(is_given):
            return seen
        places = [place for place, was_given in enumerate(is_given) if was_given]
        kept = {place for place, keep in zip(places, seen.keeps_input, strict=False) if keep}
        return replace(
            seen,
            keeps_input=tuple(place in kept for place in range(len(sources))),
            alias=tuple(None if a is None else places[a] for a in seen.alias),
        )

    def prepare(
        self,
        node: fx.Node,
        sizes: Sizes,
        module: nn.Module | None,
        make: Callable[[TensorSpec], torch.Tensor],
    ) -> Call:
        """A node ready to run alone, on tensors that `make` makes from specs."""
        facts = self.traced.facts
        made: dict[fx.Node, Any] = {}
        free: list[torch.Tensor] = [] if module is None else list(module.parameters())
        stash: list[torch.Tensor] = []

        def leaf(source: fx.Node, value: Any) -> Any:
            if isinstance(value, TensorSpec):
                tensor = make(value.bind(sizes))
                grows = value.requires_grad and source in self.grows
                return entry(tensor, stash) if grows else tensor
            return _plain(value, sizes, self.device)

        def argument(value: Any) -> Any:
            if not isinstance(value, fx.Node):
                return self._constant(value, sizes)
            if value not in made:
                if value.op == "get_attr":
                    made[value] = self._state(str(value.target), make)
                    free.append(made[value])
                elif isinstance(value.target, Constant) and facts[value].spec is None:
                    made[value] = value.target()
                else:
                    spec = self._spec(value, sizes)
                    made[value] = map_leaves(lambda part: leaf(value, part), spec)
            return made[value]

        def build() -> tuple[tuple[Any, ...], dict[str, Any]]:
            stash.clear()
            args, kwargs = map_arguments(argument, (tuple(node.args), dict(node.kwargs)))
            made.clear()
            return args, kwargs

        return Call(_callable(node, module, facts[node].ambient), build, free)

    def _state(self, name: str, make: Callable[[TensorSpec], torch.Tensor]) -> Any:
        owner, _, key = name.rpartition(".")
        real = getattr(self.traced.module.get_submodule(owner), key)
        if not isinstance(real, torch.Tensor):
            return real
        tensor = make(TensorSpec(tuple(real.shape), real.dtype))
        if isinstance(real, nn.Parameter):
            return nn.Parameter(tensor, requires_grad=real.requires_grad)
        return tensor

    def _constant(self, value: Any, sizes: Sizes) -> Any:
        if isinstance(value, TrainingFlag):
            return bool(self.traced.module.get_submodule(value.module).training)
        return _plain(value, sizes, self.device)

    @contextlib.contextmanager
    def _faked(self, module: nn.Module | None) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            self._enter(stack, module)
            if module is not None:
                stack.enter_context(FakeState(self._mode, module, all_trainable=False).fake())
            stack.enter_context(self._mode)
            yield

    @contextlib.contextmanager
    def _real(self, module: nn.Module | None) -> Iterator[None]:
        if self._far is not None:
            self._far.restore()  # fake tensors that earlier nodes have left
        with contextlib.ExitStack() as stack:
            self._enter(stack, module)
            grads: list[tuple[nn.Parameter, Any]] = []
            if module is not None:
                stack.enter_context(preserved_values(module))
                grads = [(parameter, parameter.grad) for parameter in module.parameters()]
            stack.enter_context(preserved_random())
            torch.manual_seed(0)
            try:
                yield
            finally:
                for parameter, grad in grads:
                    parameter.grad = grad

    def _enter(self, stack: contextlib.ExitStack, module: nn.Module | None) -> None:
        if module is not None:
            stack.enter_context(preserved(module, far=self._far is None))
            stack.enter_context(intercepted(module, Seer()))
        stack.enter_context(unlogged())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        if self._fused:
            stack.enter_context(fixed_attention())


class fixed_attention(TorchFunctionMode):  # noqa: N801
    """Attention without dropout, for accelerators, whose fused kernel drops out by itself.

    On a CPU dropout makes torch fall back to plain products, which keep the whole
    matrix of weights.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs = {**kwargs, "dropout_p": 0.0} if "dropout_p" in kwargs else kwargs
        return func(*args, **kwargs)


def inputs_of(node: fx.Node, facts: Facts) -> list[tuple[fx.Node, int]]:
    """The tensors a node reads, as (node that has it, place among its tensors), each once.

    Parameters and constants are left out. The order is that of `Observation.keeps_input`.
    """
    found: dict[tuple[fx.Node, int], None] = {}

    for value in leaves_of((node.args, node.kwargs)):
        if not isinstance(value, fx.Node) or value.op == "get_attr":
            continue
        if not isinstance(value.target, Constant):
            found.update({(value, place): None for place, _ in enumerate(facts.tensors(value))})
    return list(found)


def _growing(traced: TracedGraph) -> set[fx.Node]:
    """The nodes whose values want a gradient with the parameters as they are now."""
    trainable = {name for name, p in traced.module.named_parameters() if p.requires_grad}
    growing: set[fx.Node] = set()
    for node in traced.graph.nodes:
        specs = list(traced.facts.tensors(node))
        if node.op == "placeholder":
            grows = any(spec.requires_grad for spec in specs)
        elif node.op == "get_attr":
            name = str(node.target)
            grows = any(found == name or found.startswith(f"{name}.") for found in trainable)
        else:
            grows = any(source in growing for source in node.all_input_nodes)
            if node.op == "call_module":
                module = traced.module.get_submodule(str(node.target))
                grows = grows or any(p.requires_grad for p in module.parameters())
            grows = grows and any(spec.requires_grad for spec in specs)
        if grows:
            growing.add(node)
    return growing


def _bound(spec: Any, sizes: Sizes) -> Hashable:
    leaves: list[Hashable] = []
    for path, leaf in walk(spec):
        if isinstance(leaf, TensorSpec):
            leaves.append((path, leaf.bind(sizes)))
        else:
            leaves.append((path, repr(_plain(leaf, sizes, _CPU))))
    return tuple(leaves)


def _plain(value: Any, sizes: Sizes, device: torch.device) -> Any:
    if isinstance(value, sympy.Basic):
        return evaluate(value, sizes)
    return device if isinstance(value, StageDevice) else value


def _callable(node: fx.Node, module: nn.Module | None, ambient: Ambient) -> Callable[..., Any]:
    call: Any = module if module is not None else node.target
    if node.op == "call_method":
        name = str(node.target)

        def call(first: Any, *args: Any, **kwargs: Any) -> Any:
            return getattr(first, name)(*args, **kwargs)

    return call if ambient == Ambient() else Within(ambient, call)


def _fake(spec: TensorSpec) -> torch.Tensor:
    return torch.empty([int(size) for size in spec.shape], dtype=spec.dtype, device=_CPU)


def _real(spec: TensorSpec) -> torch.Tensor:
    shape = [int(size) for size in spec.shape]
    if spec.dtype.is_floating_point or spec.dtype.is_complex:
        return torch.randn(shape, dtype=spec.dtype)
    return torch.ones(shape, dtype=spec.dtype)


def _rough(
    facts: Facts, node: fx.Node, sizes: Sizes, state: tuple[torch.Tensor, ...]
) -> Observation:
    """A guess for a module that does not run: each parameter multiplies each row once."""
    outputs = list(facts.tensors(node))
    if not outputs:
        return Observation((), is_rough=True)
    shape = [int(size) for size in outputs[0].bind(sizes).shape]
    width = shape[-1] if shape else 1
    rows = 1
    for size in shape[:-1]:
        rows *= size
    flops = 2 * rows * sum(tensor.numel() for tensor in state if tensor.dim() > 1)
    size = outputs[0].dtype.itemsize
    moved = rows * width * size + sum(tensor.numel() * size for tensor in state)
    dtype = str(outputs[0].dtype).removeprefix("torch.")
    op = Op(f"estimate.{node.name}", "matmul", dtype, flops, moved, rows * width * size)
    count = len(inputs_of(node, facts))
    return Observation(
        (op,),
        (op,),
        (op,),
        4 * rows * width * size,
        (True,) * count,
        (False,) * len(outputs),
        (None,) * len(outputs),
        rows * width * size,
        rows * width * size,
        2 * rows * width * size,
        is_rough=True,
    )
