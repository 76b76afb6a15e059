"""Run a model once on tensors without data and write down what it does.

In:  a `Task` (the model and its call), `Settings` (what may vary between runs).
Out: a `TracedGraph`; or `OtherSettings`, if the run has shown that it needs others.

The model and the process are left as they were.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import nn

from fxpipe.errors import SplitError, TraceError
from fxpipe.graph.calls.attention_masks import watched_masks
from fxpipe.graph.calls.late_lists import Many, ManySpec, watched_lists
from fxpipe.graph.calls.value_functions import Found, watched_functions
from fxpipe.graph.capture.dtype_following import cast_inputs
from fxpipe.graph.capture.second_run import forgive_carried
from fxpipe.graph.capture.traced_graph import TracedGraph
from fxpipe.graph.guard.world import World
from fxpipe.graph.inputs import InputSignature, name_call, parameters_of, spec_inputs
from fxpipe.graph.markers import SplitPoint, listening
from fxpipe.graph.nested import Args, Kwargs, map_leaves, walk
from fxpipe.graph.record.constant_values import watched_draws
from fxpipe.graph.record.recorder import Trace
from fxpipe.graph.record.tape import STAGE_DEVICE
from fxpipe.graph.sandbox.fake import FakeState, fake_mode, on_trace_device, unlogged
from fxpipe.graph.sandbox.patches import intercepted
from fxpipe.graph.sandbox.restore import Places, device_kinds, preserved, preserved_values
from fxpipe.graph.sizes.dynamic_shapes import Wishes
from fxpipe.graph.sizes.symbols import Sizes
from fxpipe.torch_inside import FakeTensor, FakeTensorMode, local_tensor

__all__ = ["OtherSettings", "Settings", "Task", "run_once"]


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """What is captured, and why each run of the model was made so far.

    `other_mode` are the errors of the mode that the model is not in, `asking` the functions that
    were seen to ask for values of the inputs, `looping` those that were seen to fix the rows.
    """

    module: nn.Module
    call: tuple[tuple[object, ...], dict[str, object]]
    named: Mapping[str, object]
    splits: Mapping[str, SplitPoint]
    places: Places
    runs: list[str] = dataclasses.field(default_factory=list)
    other_mode: list[Exception] = dataclasses.field(default_factory=list)
    failed_in: list[str] = dataclasses.field(default_factory=list)
    asking: set[Found] = dataclasses.field(default_factory=set)
    looping: set[Found] = dataclasses.field(default_factory=set)

    def run_plainly(self) -> list[str] | None:
        """Run the model; return the names of what it makes when it first runs, None if it fails.

        It is not run without data.
        """
        module = self.module
        tensors = [leaf for _, leaf in walk(self.call) if isinstance(leaf, torch.Tensor)]
        tensors += [*module.parameters(), *module.buffers()]
        if any(t.is_meta or isinstance(t, FakeTensor) or local_tensor(t) is not t for t in tensors):
            return None
        before = _names_in(module)
        with preserved(module, places=self.places), preserved_values(module), torch.no_grad():
            try:
                args, kwargs = map_leaves(_cloned, self.call)
                module(*args, **kwargs)
            except Exception:
                return None
            return sorted(_names_in(module) - before)


def _names_in(module: nn.Module) -> set[str]:
    """Return the names of modules, parameters and buffers, without those inside them."""
    found = [module.named_modules(), module.named_parameters(), module.named_buffers()]
    names = {name for group in found for name, _ in group}
    return {name for name in names if name}


def _cloned(leaf: object) -> object:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """What differs between the runs of one capture; `why` says what this one is for.

    With `true_flags` only those parameters require gradients that do in the model: some code
    asks. Otherwise all do, so that freezing some later changes no graph. With `why_one_mode` the
    model is captured in the mode it is in, and not in the other. Without `may_loop` no function
    that loops over rows is one call.
    """

    opened: frozenset[str]
    wishes: Wishes
    follows_example: bool = False
    true_flags: bool = False
    why_one_mode: str = ""
    may_loop: bool = True
    why: str = "to record it"


class OtherSettings(Exception):  # noqa: N818  it is no error
    """A run has shown that it must be made with other settings."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings.why)
        self.settings = settings


def run_once(
    task: Task,
    settings: Settings,
    *,
    training: bool | None = None,
    cast: Mapping[torch.dtype, torch.dtype] | None = None,
) -> TracedGraph:
    """Record one run: in a given mode, or with state and inputs cast to other dtypes.

    Raises:
        OtherSettings: more modules must be open, or code asks for `requires_grad`.
        SplitError: a module named in `splits` is never called.
    """
    task.runs.append(settings.why)
    module = task.module
    mode = fake_mode()
    sizes = Sizes(mode, settings.wishes.dims)
    with ExitStack() as stack:
        stack.enter_context(preserved(module, places=task.places))
        stack.enter_context(unlogged())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        state = FakeState(mode, module, all_trainable=not settings.true_flags, cast=cast)
        stack.enter_context(state.fake())
        if training is not None:
            for part in module.modules():
                part.training = training
        fakes = sizes.fake(cast_inputs(task.named, cast or {}), on_trace_device)
        given = {name: _contents(value) for name, value in fakes.items()}
        try:
            trace = _recorded(task, settings, mode, sizes, state, fakes)
        finally:
            _check_inputs(given, fakes)
        _check_opened(task, settings, trace)
        if trace.carried:
            decided = sizes.decisions()
            trace.reads.empty_caches()
            with suppress(Exception):
                forgive_carried(trace, _recorded(task, settings, mode, sizes, state, fakes))
            sizes.forget(decided)
    _check_called(task.splits, trace.called)
    graph = _finished(task, settings, trace, sizes, fakes)
    _check_flags(settings, trace, module)
    return graph


def _recorded(
    task: Task,
    settings: Settings,
    mode: FakeTensorMode,
    sizes: Sizes,
    state: FakeState,
    fakes: Mapping[str, object],
) -> Trace:
    """Record a run of the model from the state in which it is."""
    module = task.module
    opened = set(settings.opened)
    trace = Trace(module, mode, sizes, state, opened, task.splits, task.named, fakes)
    _place_inputs(trace, fakes)
    trace.tape.trace_devices = _devices(state, task.named)
    if settings.follows_example:
        trace.follow()
    with ExitStack() as stack:
        stack.enter_context(intercepted(module, trace))
        stack.enter_context(listening(trace.on_pipe_split))
        stack.enter_context(watched_masks(module, trace.calls.mask, trace.is_opened))
        stack.enter_context(watched_lists(trace.calls.list_of))
        looping = task.looping if settings.may_loop else set[Found]()
        asking = task.asking - looping
        stack.enter_context(watched_functions(asking, trace.calls.value_function))
        stack.enter_context(watched_functions(looping, trace.methods.call))
        stack.enter_context(
            watched_draws(trace.is_opened, trace.writer.refuse_draw, trace.writer.refuse, module)
        )
        stack.enter_context(mode)
        stack.enter_context(trace.reads.watching())
        try:
            with trace:
                args, kwargs = _refill(module, task.call, fakes)
                output = module(*args, **kwargs)
            trace.finish(output)
        except Exception:
            _check_opened(task, settings, trace)
            task.failed_in.append(trace.failed_in)
            raise
    return trace


def _check_inputs(given: Mapping[str, object], now: Mapping[str, object]) -> None:
    """Raise if the model has put other things into the lists and dicts that it was given."""
    for name, before in given.items():
        if _contents(now[name]) != before:
            raise TraceError(
                f"the model changes what is in its input {name!r}, a {type(now[name]).__name__}; a "
                "stage would do that to a copy of its own\ngive it tensors, or have the model make "
                "a list or dict of its own: dict(inputs), list(inputs)"
            )


def _contents(value: Any) -> Any:
    """Describe what is in plain lists and dicts."""
    if type(value) in (list, tuple):
        return [_contents(part) for part in value]
    if type(value) is dict:
        return [(key, _contents(part)) for key, part in value.items()]
    return id(value)


def _check_opened(task: Task, settings: Settings, trace: Trace) -> None:
    """Raise if splits were found inside leaves, or functions that could stay one call."""
    more = trace.writer.wanted - settings.opened
    if more:
        why = f"to open {', '.join(sorted(more))}, where a split was found"
        opened = settings.opened | more
        raise OtherSettings(dataclasses.replace(settings, opened=opened, why=why)) from None
    asking = trace.operations.asking - task.asking
    if asking:
        task.asking.update(asking)
        names = ", ".join(sorted({found.name for found in asking}))
        why = f"with {names} as one call each, since they ask for values"
        raise OtherSettings(dataclasses.replace(settings, why=why)) from None
    looping = trace.looping() - task.looping
    if looping and settings.may_loop:
        task.looping.update(looping)
        names = ", ".join(sorted({found.name for found in looping}))
        why = f"with {names} as one call each, since they fix the number of rows"
        raise OtherSettings(dataclasses.replace(settings, why=why)) from None


def _check_flags(settings: Settings, trace: Trace, module: nn.Module) -> None:
    if settings.true_flags or not trace.operations.asks_for_gradients:
        return
    if any(p.is_floating_point() for p in module.parameters() if not p.requires_grad):
        why = "with frozen parameters frozen, since code asks for requires_grad"
        raise OtherSettings(dataclasses.replace(settings, true_flags=True, why=why))


def _place_inputs(trace: Trace, fakes: Mapping[str, object]) -> None:
    for name, value in fakes.items():
        if any(isinstance(leaf, torch.Tensor) for _, leaf in walk(value)):
            node = trace.tape.graph.placeholder(name)
            trace.tape.adopt(node, value)


def _devices(state: FakeState, named: Mapping[str, object]) -> frozenset[torch.device]:
    tensors = [*state.real_of.values()]
    tensors += [leaf for _, leaf in walk(dict(named)) if isinstance(leaf, torch.Tensor)]
    return frozenset(on_trace_device(tensor) for tensor in tensors)


def _refill(module: nn.Module, call: tuple[Args, Kwargs], fakes: Mapping[str, Any]) -> Any:
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
            "split_spec names modules that are never called with these inputs, or only inside "
            "torch.vmap or an autograd function: "
            + ", ".join(map(repr, never))
            + "\nname a module whose forward runs (for a ModuleList, one of its entries)"
        )


def _finished(
    task: Task, settings: Settings, trace: Trace, sizes: Sizes, fakes: Mapping[str, object]
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
        sizes.conditions(settings.wishes.conditions),
        settings.wishes.outcome(example, sizes.place),
    )
    return TracedGraph(
        module, graph, facts, signature, sizes.free(), sizes.hints(), settings.opened,
        _autocast_is_on(), World.of(trace.reads, _parts(module, settings.opened), trace.real_of),
        frozenset(trace.training_read),
    )  # fmt: skip


def _parts(module: nn.Module, names: frozenset[str]) -> dict[str, nn.Module]:
    parts = module.named_modules(remove_duplicate=False)
    return {name: part for name, part in parts if name in names}


def _autocast_is_on() -> bool:
    return any(torch.is_autocast_enabled(kind) for kind in device_kinds())


def _described(sizes: Sizes, devices: frozenset[torch.device], leaf: object) -> object:
    if isinstance(leaf, torch.device):
        return STAGE_DEVICE if leaf in devices else leaf
    if isinstance(leaf, torch.Tensor):
        return sizes.spec(leaf)
    if isinstance(leaf, Many):
        if leaf.made is None:
            return ManySpec()
        return map_leaves(functools.partial(_described, sizes, devices), leaf.made)
    if isinstance(leaf, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return sizes.plain(leaf.node.expr)
    return leaf
