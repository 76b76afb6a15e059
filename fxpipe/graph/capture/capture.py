"""Turn a model and example inputs into a `TracedGraph`.

In:  a module, one microbatch of example inputs, which modules to open and where
     the user asked for splits.
Out: a graph in which every module that was not opened is one call, with the
     inputs by name, symbolic sizes, and the user's split points as nodes.

The model runs once (or a few times) on fake tensors; it and the process are left
as they were. Sizes are tried as symbols; where the model does not take that, the
batch alone is tried, then plain numbers. What the user asked for in `dynamic_shapes`
stays a symbol in every attempt, or is an error.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import fx, nn

from fxpipe.errors import FxpipeError, SplitError, TraceError
from fxpipe.graph.capture.dtype_following import cast_inputs, dtypes_to_follow, link_dtypes
from fxpipe.graph.capture.train_eval import merge_modes
from fxpipe.graph.facts import Facts
from fxpipe.graph.guard.world import World
from fxpipe.graph.inputs import InputSignature, name_call, parameters_of, spec_inputs
from fxpipe.graph.markers import SplitPoint, listening
from fxpipe.graph.nested import map_leaves, walk
from fxpipe.graph.record.attention_masks import watched_masks
from fxpipe.graph.record.constant_values import ValueDecidesError
from fxpipe.graph.record.example_values import ExampleValues
from fxpipe.graph.record.graph_calls import Refusal
from fxpipe.graph.record.leaf_runs import DATA_DEPENDENT
from fxpipe.graph.record.messages import a_value_decides
from fxpipe.graph.record.python_random import watched_draws
from fxpipe.graph.record.recorder import Trace
from fxpipe.graph.record.tape import STAGE_DEVICE
from fxpipe.graph.sandbox.fake import FakeState, fake_mode, on_trace_device, unlogged
from fxpipe.graph.sandbox.patches import intercepted
from fxpipe.graph.sandbox.restore import preserved
from fxpipe.graph.sizes.dynamic_shapes import Wishes, read_wishes
from fxpipe.graph.sizes.symbols import Sizes
from fxpipe.graph.source_line import failing_frame

__all__ = ["TracedGraph", "capture"]

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class TracedGraph:
    """A model as a graph of leaf calls and torch functions.

    `facts` says what is known about each node. Sizes among the arguments are sympy
    expressions. `world` is what the code read of Python's world, `flags` are the modules
    whose training flag it asked for; with `modes` the graph is for these flags only.
    """

    module: nn.Module
    graph: fx.Graph
    facts: Facts
    inputs: InputSignature
    symbols: tuple[str, ...]
    hints: Mapping[str, int]
    opened: frozenset[str]
    autocast: bool
    world: World
    flags: frozenset[str] = frozenset()
    modes: Mapping[str, bool] | None = None


def capture(
    module: nn.Module,
    args: Iterable[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    opened: Collection[str] = ("",),
    splits: Mapping[str, SplitPoint] | None = None,
    dynamic_shapes: Any = None,
    follows_example: bool = False,
) -> TracedGraph:
    """Capture a model; see the module's docstring.

    Where values of the inputs decide, the graph holds what happens for the example, and
    checks; `follows_example` has sizes that depend on values be those of the example, too.

    Raises:
        TraceError: opened code cannot be captured, or fixes a size that
            `dynamic_shapes` wants open.
        SplitError: a module named in `splits` is never called.
        InputError: the inputs or `dynamic_shapes` do not fit the model.
    """
    call = (tuple(args), dict(kwargs or {}))
    named = name_call(parameters_of(module), *call)
    task = _Task(module, call, named, set(opened), splits or {})
    wishes = read_wishes(dynamic_shapes, module, call, named)
    if follows_example:
        return _capture_open(dataclasses.replace(task, follows_example=True), wishes)
    try:
        return _capture_open(task, wishes)
    except Exception as error:
        if isinstance(error, FxpipeError) and not isinstance(error, ValueDecidesError):
            raise
        first = error
    try:
        return _capture_open(dataclasses.replace(task, follows_example=True), wishes)
    except Exception:
        found = _explained(first, module)
    raise found from found.__cause__


def _explained(error: Exception, module: nn.Module) -> Exception:
    """Say where an error of another kind arose; torch's own tracing errors become ours."""
    if isinstance(error, FxpipeError):
        return error
    place = failing_frame(error)
    where = f"\n  {place}\n    {place.source}" if place is not None else ""
    text = (
        f"{type(module).__name__} was captured on tensors without data{where}\n"
        "if it runs with these inputs, keep this code inside a submodule that is not split"
    )
    if type(error).__module__.startswith("torch."):
        lines = str(error).strip().splitlines() or [type(error).__name__]
        made = TraceError(f"{lines[0]}\n{text}")
        made.__cause__ = error
        return made
    error.add_note(text)
    return error


def _capture_open(task: _Task, wishes: Wishes) -> TracedGraph:
    """Capture with as many sizes open as the model allows."""
    failure: Exception | None = None
    fixed: TracedGraph | None = None
    attempt: Wishes | None = wishes
    while attempt is not None:
        try:
            found = _capture(task, attempt)
        except FxpipeError:
            raise
        except Exception as error:
            failure = error
            if isinstance(error, DATA_DEPENDENT):
                failure = ValueDecidesError(a_value_decides("the model", failing_frame(error)))
            attempt = attempt.fewer(_why(error))
            continue
        # With all sizes open a model may insist on the batch; alone it may be free.
        if not attempt.faults(found.inputs.sizes):
            return found
        fixed = fixed or found
        attempt = attempt.fewer("the batch is fixed if this size is open")
    if fixed is None:
        assert failure is not None
        fixed = _capture_fixed(task, wishes, failure)
    faults = wishes.faults(fixed.inputs.sizes, required_only=True)
    if faults:
        raise TraceError(
            "the model does not leave open what dynamic_shapes asks for:\n  "
            + "\n  ".join(faults)
            + "\nchange that code, keep it inside a submodule that is not split, or make the "
            "dimension static in dynamic_shapes (Dim.AUTO leaves the choice to the model)"
        )
    return fixed


def _capture_fixed(task: _Task, wishes: Wishes, failure: Exception) -> TracedGraph:
    """Find out whether a failure comes from the open sizes: then, all fixed, there is none."""
    if not wishes.required:
        raise failure
    try:
        return _capture(task, wishes.fixed(_why(failure)))
    except Exception:
        raise failure from None


def _why(error: Exception) -> str:
    place = failing_frame(error)
    lines = str(error).splitlines() or [type(error).__name__]
    where = f" at {place}: {place.source}" if place is not None else ""
    return f"the model cannot be traced with this size open{where} ({lines[0][:200]})"


@dataclasses.dataclass(frozen=True, slots=True)
class _Task:
    """What is captured; `opened` grows while splits inside leaves are found."""

    module: nn.Module
    call: tuple[Any, Any]
    named: Mapping[str, Any]
    opened: set[str]
    splits: Mapping[str, SplitPoint]
    follows_example: bool = False
    # Filled if code asks whether tensors require gradients: then frozen ones do not.
    true_flags: list[bool] = dataclasses.field(default_factory=list)


def _capture(task: _Task, wishes: Wishes) -> TracedGraph:
    module = task.module

    def traced(training: bool | None) -> _Traced:
        while True:
            try:
                result = _trace_once(task, wishes, training)
            except _MustOpenError as error:
                task.opened.update(error.names)
                continue
            if not result.wanted - task.opened:
                _follow_dtypes(task, wishes, training, result.graph)
                return result
            task.opened.update(result.wanted)

    flags = {part.training for part in module.modules()}
    first = traced(None)
    if not first.graph.flags or _modes(first.graph) is not None:
        _check_refusals(first.graph)
        return dataclasses.replace(first.graph, modes=_modes(first.graph))
    training = first if flags == {True} else traced(True)
    evaluation = first if flags == {False} else traced(False)
    if training.graph.inputs.example != evaluation.graph.inputs.example:
        # One mode insists on a size that the other leaves open: no symbol for it then.
        fixed = [
            size
            for graph in (training.graph, evaluation.graph)
            for size in graph.inputs.sizes
            if not size.is_dynamic
        ]
        return _capture(task, wishes.without(fixed))
    _check_refusals(training.graph, evaluation.graph)
    merge_modes(
        training.graph.graph, training.graph.facts,
        evaluation.graph.graph, evaluation.graph.facts,
        training.graph.flags | evaluation.graph.flags,
    )  # fmt: skip
    return _joined(training.graph, evaluation.graph)


def _modes(traced: TracedGraph) -> dict[str, bool] | None:
    """Return the training flags that the code asked for if they differ: then one trace is it."""
    found = {name: traced.module.get_submodule(name).training for name in traced.flags}
    return found if len(set(found.values())) > 1 else None


def _follow_dtypes(task: _Task, wishes: Wishes, training: bool | None, traced: TracedGraph) -> None:
    """Have dtypes that opened code read off a tensor follow it; see `dtypes`."""
    cast = dtypes_to_follow(traced.graph, traced.facts)
    if not cast:
        return
    try:
        other = _trace_once(task, wishes, training, cast).graph
    except Exception as error:
        _log.info("the model does not run as %s; its dtypes are fixed: %s", cast, error)
        return
    if not link_dtypes(task.module, traced.graph, traced.facts, other.graph, cast):
        _log.info("the model is another graph as %s; its dtypes are fixed", cast)


def _check_refusals(*graphs: TracedGraph) -> None:
    """Raise if no mode can run; one mode alone refuses when a stage runs in it."""
    found = [
        [n.target.message for n in graph.graph.nodes if isinstance(n.target, Refusal)]
        for graph in graphs
    ]
    if all(found):
        raise TraceError("\n".join(dict.fromkeys(found[0])))


def _joined(training: TracedGraph, evaluation: TracedGraph) -> TracedGraph:
    conditions = dict.fromkeys((*training.inputs.conditions, *evaluation.inputs.conditions))
    inputs = dataclasses.replace(training.inputs, conditions=tuple(conditions))
    return dataclasses.replace(
        training,
        inputs=inputs,
        world=training.world.joined(evaluation.world),
        flags=training.flags | evaluation.flags,
    )


class _MustOpenError(Exception):
    """The trace failed, and more modules must be opened anyway."""

    def __init__(self, names: set[str]) -> None:
        super().__init__(names)
        self.names = names


@dataclasses.dataclass(frozen=True, slots=True)
class _Traced:
    graph: TracedGraph
    wanted: set[str]


def _trace_once(
    task: _Task,
    wishes: Wishes,
    training: bool | None,
    cast: Mapping[torch.dtype, torch.dtype] | None = None,
) -> _Traced:
    module, named, opened = task.module, task.named, task.opened
    mode = fake_mode()
    sizes = Sizes(mode, wishes.dims)
    with ExitStack() as stack:
        stack.enter_context(preserved(module))
        stack.enter_context(unlogged())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        state = FakeState(mode, module, all_trainable=not task.true_flags, cast=cast)
        stack.enter_context(state.fake())
        if training is not None:
            for part in module.modules():
                part.training = training
        trace = Trace(module, mode, sizes, state, opened, task.splits)
        fakes = sizes.fake(cast_inputs(named, cast or {}), on_trace_device)
        _place_inputs(trace, fakes)
        trace.tape.trace_devices = _devices(state, named)
        if task.follows_example:
            trace.follow(ExampleValues(module, mode, state, trace.tape, named, fakes))
        stack.enter_context(intercepted(module, trace))
        stack.enter_context(listening(trace.on_pipe_split))
        stack.enter_context(watched_masks(module, trace.on_mask))
        stack.enter_context(watched_draws(trace.is_opened, trace.on_draw, trace.refuse, module))
        stack.enter_context(mode)
        stack.enter_context(trace.reads.watching())
        try:
            with trace:
                args, kwargs = _refill(module, task.call, fakes)
                output = module(*args, **kwargs)
            trace.finish(output)
        except Exception:
            if trace.wanted - opened:
                raise _MustOpenError(trace.wanted) from None
            raise
    if not trace.wanted - opened:
        _check_called(task.splits, trace.called)
    graph = _finished(task, trace, sizes, fakes, wishes)
    if trace.asks_for_gradients and not task.true_flags:
        frozen = [p for p in module.parameters() if not p.requires_grad]
        if any(p.is_floating_point() for p in frozen):
            task.true_flags.append(True)
            raise _MustOpenError(set())
    return _Traced(graph, trace.wanted)


def _place_inputs(trace: Trace, fakes: Mapping[str, Any]) -> None:
    for name, value in fakes.items():
        if any(isinstance(leaf, torch.Tensor) for _, leaf in walk(value)):
            node = trace.tape.graph.placeholder(name)
            trace.tape.adopt(node, value)


def _devices(state: FakeState, named: Mapping[str, Any]) -> frozenset[torch.device]:
    tensors = [*state.real_of.values()]
    tensors += [leaf for _, leaf in walk(dict(named)) if isinstance(leaf, torch.Tensor)]
    return frozenset(on_trace_device(tensor) for tensor in tensors)


def _refill(module: nn.Module, call: tuple[Any, Any], fakes: Mapping[str, Any]) -> Any:
    """Return the call with fakes, found by position: one tensor may be given twice."""
    args, kwargs = call
    positions = tuple(range(len(args)))
    named = name_call(parameters_of(module), positions, {name: name for name in kwargs})
    at: dict[Any, Any] = {}
    for name, place in named.items():
        if isinstance(place, tuple):
            at.update(zip(place, fakes[name], strict=True))
        else:
            at[place] = fakes[name]
    return tuple(at[position] for position in positions), {name: at[name] for name in kwargs}


def _check_called(splits: Mapping[str, SplitPoint], called: set[str]) -> None:
    never = [name for name in splits if name not in called]
    if never:
        raise SplitError(
            "split_spec names modules that are never called with these inputs: "
            + ", ".join(map(repr, never))
            + "\nname a module whose forward runs (for a ModuleList, one of its entries)"
        )


def _finished(
    task: _Task, trace: Trace, sizes: Sizes, fakes: Mapping[str, Any], wishes: Wishes
) -> TracedGraph:
    module, graph, facts = task.module, trace.tape.graph, trace.tape.facts
    describe = functools.partial(_described, sizes, trace.tape.trace_devices)
    for node in graph.nodes:
        if node in trace.tape.values:
            facts.learn(node, spec=map_leaves(describe, trace.tape.values[node]))
        node.args = sizes.plain_arguments(node.args)
        node.kwargs = sizes.plain_arguments(node.kwargs)
    example = spec_inputs(fakes, sizes.spec)
    signature = InputSignature(
        parameters_of(module),
        example,
        sizes.conditions(wishes.conditions),
        wishes.outcome(example, sizes.place),
    )
    return TracedGraph(
        module, graph, facts, signature, sizes.free(), sizes.hints(), frozenset(task.opened),
        _autocast_is_on(), World.of(trace.reads, _opened_parts(task), trace.real_of),
        frozenset(trace.training_read),
    )  # fmt: skip


def _opened_parts(task: _Task) -> dict[str, nn.Module]:
    parts = task.module.named_modules(remove_duplicate=False)
    return {name: part for name, part in parts if name in task.opened}


def _autocast_is_on() -> bool:
    return any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda"))


def _described(sizes: Sizes, devices: frozenset[torch.device], leaf: Any) -> Any:
    if isinstance(leaf, torch.device):
        return STAGE_DEVICE if leaf in devices else leaf
    if isinstance(leaf, torch.Tensor):
        return sizes.spec(leaf)
    if isinstance(leaf, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return sizes.plain(leaf.node.expr)
    return leaf
