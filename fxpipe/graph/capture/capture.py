"""Turn a model and example inputs into a `TracedGraph`.

In:  a module, one microbatch of example inputs, which modules to open and where
     the user asked for splits.
Out: a graph in which every module that was not opened is one call, with the
     inputs by name, symbolic sizes, and the user's split points as nodes.

The model runs a few times on tensors without data (`one_run.py`); a line of the log says how
often, and why. There are two loops. The inner one settles which modules are open and
which sizes: all as symbols; where the model does not take that, the batch alone, then plain
numbers. What the user asked for in `dynamic_shapes` stays a symbol in every run, or is an
error. The outer one begins again with the values of the example, then in the mode that the
model is in and no other, if nothing else will do.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TypeVar

import sympy
from torch import nn

from fxpipe.errors import FxpipeError, TraceError
from fxpipe.graph.calls.graph_calls import Refusal
from fxpipe.graph.capture.dtype_following import (
    Cast,
    drop_certain,
    dtypes_looked_at,
    dtypes_to_follow,
    let_look,
    link_dtypes,
)
from fxpipe.graph.capture.one_row import taking_one
from fxpipe.graph.capture.one_run import OtherSettings, Settings, Task, run_once
from fxpipe.graph.capture.traced_graph import (
    TracedGraph,
    UnknownLengthError,
    UnknownSizeError,
    UnlikeModesError,
)
from fxpipe.graph.capture.train_eval import merge_modes
from fxpipe.graph.dims import free_names, text
from fxpipe.graph.inputs import name_call, parameters_of
from fxpipe.graph.markers import SplitPoint
from fxpipe.graph.record.constant_values import ValueDecidesError
from fxpipe.graph.record.leaf_runs import DATA_DEPENDENT
from fxpipe.graph.sandbox.restore import Places
from fxpipe.graph.sizes.dynamic_shapes import Wishes, read_wishes
from fxpipe.graph.source_line import a_value_decides, failing_frame

__all__ = ["capture", "capture_for"]

_log = logging.getLogger(__name__)

Used = TypeVar("Used")


def capture(
    module: nn.Module,
    args: Iterable[object] = (),
    kwargs: Mapping[str, object] | None = None,
    *,
    opened: Collection[str] = ("",),
    splits: Mapping[str, SplitPoint] | None = None,
    dynamic_shapes: object = None,
) -> TracedGraph:
    """Capture a model; see the module's docstring.

    Where values of the inputs decide, the graph holds what happens for the example, and
    checks.

    Raises:
        TraceError: opened code cannot be captured, or fixes a size that
            `dynamic_shapes` wants open.
        SplitError: a module named in `splits` is never called.
        InputError: the inputs or `dynamic_shapes` do not fit the model.
    """
    return capture_for(
        lambda traced: traced, module, args, kwargs,
        opened=opened, splits=splits, dynamic_shapes=dynamic_shapes,
    )  # fmt: skip


def capture_for(
    use: Callable[[TracedGraph], Used],
    module: nn.Module,
    args: Iterable[object] = (),
    kwargs: Mapping[str, object] | None = None,
    *,
    opened: Collection[str] = ("",),
    splits: Mapping[str, SplitPoint] | None = None,
    may_close: Collection[str] = (),
    dynamic_shapes: object = None,
) -> Used:
    """Capture a model and return what `use` makes of the graph.

    Where `use` needs a size that no formula tells, it gets a second graph, in which sizes
    that depend on values are those of the example. A module of `may_close` stays one call if
    its code cannot be captured.

    Raises:
        TraceError, SplitError, InputError: as `capture`, and whatever `use` raises.
    """
    call = (tuple(args), dict(kwargs or {}))
    named = name_call(parameters_of(module), *call)
    task = Task(module, call, named, splits or {}, Places(module))
    settings = Settings(frozenset(opened), read_wishes(dynamic_shapes, module, call, named))
    try:
        return _use(use, task, settings)
    except FxpipeError as error:
        inside = task.failed_in[-1] if task.failed_in else ""
        closed = {name for name in may_close if inside and f"{name}.".startswith(f"{inside}.")}
        if not closed:
            raise
        _log.info("%s stays one call, since its code cannot be captured", inside)
        try:
            return capture_for(
                use, module, *call, opened=set(opened) - closed, splits=splits,
                may_close=set(may_close) - closed, dynamic_shapes=dynamic_shapes,
            )  # fmt: skip
        except FxpipeError:
            raise error from error.__cause__
    finally:
        _log.info(
            "%s ran %d times on tensors without data: %s",
            type(module).__name__, len(task.runs), "; ".join(task.runs),
        )  # fmt: skip


def _use(use: Callable[[TracedGraph], Used], task: Task, settings: Settings) -> Used:
    """Return what `use` makes of a graph, if need be of one for the example or one mode only."""
    first: Exception | None = None
    while True:
        try:
            traced = _capture_open(task, settings)
        except Exception as error:
            first = first or error
            may_follow = isinstance(error, ValueDecidesError) or not isinstance(error, FxpipeError)
        else:
            try:
                return use(traced)
            except UnknownLengthError as error:
                why = f"with no loop over rows as one call ({_first_line(error)})"
                settings = dataclasses.replace(settings, may_loop=False, why=why)
                continue
            except UnknownSizeError as error:
                first, may_follow = first or error, True
            except UnlikeModesError as error:
                first, may_follow = first or error, False
                task.other_mode.append(error)
        if may_follow and not settings.follows_example:
            why = f"with the values of the example ({_first_line(first)})"
            settings = dataclasses.replace(settings, follows_example=True, why=why)
        elif task.other_mode and not settings.why_one_mode:
            reason = str(_explained(task.other_mode[0], task)).strip()
            why = "in the mode that the model is in, since the other cannot be captured"
            settings = dataclasses.replace(
                settings, follows_example=False, why_one_mode=reason, why=why
            )
        else:
            found = _explained(first, task)
            raise found from found.__cause__


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _explained(error: Exception, task: Task) -> Exception:
    """Say where an error of another kind arose; one that the model does not raise is ours."""
    if isinstance(error, FxpipeError):
        return error
    module = task.module
    place = failing_frame(error)
    where = f"\n  {place}\n    {place.source}" if place is not None else ""
    text = (
        f"{type(module).__name__} was captured on tensors without data{where}\n"
        "if it runs with these inputs, keep this code inside a submodule that is not split"
    )
    is_torchs = type(error).__module__.startswith("torch.")
    made_first = task.run_plainly()
    if made_first:
        names = ", ".join(made_first[:4])
        return TraceError(
            f"the forward of {type(module).__name__} makes {names} when it first runs{where}\n"
            "run the model once with these inputs, then call pipeline()"
        )
    if is_torchs or made_first is not None:
        kind = "" if is_torchs else f"{type(error).__name__}: "
        made = TraceError(f"{kind}{_first_line(error)}\n{text}")
        made.__cause__ = error
        return made
    error.add_note(text)
    return error


def _capture_open(task: Task, settings: Settings) -> TracedGraph:
    """Capture with as many sizes open as the model allows."""
    asked = settings.wishes
    failure: Exception | None = None
    found: TracedGraph | None = None
    attempt: Wishes | None = asked
    while attempt is not None:
        settings = dataclasses.replace(settings, wishes=attempt)
        try:
            made = _capture(task, settings)
        except OtherSettings as other:
            settings = other.settings
            attempt = settings.wishes
            continue
        except FxpipeError:
            raise
        except Exception as error:
            failure, reason = error, _why(error)
            if isinstance(error, DATA_DEPENDENT):
                failure = ValueDecidesError(a_value_decides("the model", failing_frame(error)))
        else:
            # A size of 1 is traced as another one, for which the model may do something else.
            unmet = made.inputs.unmet(task.named)
            fitting = attempt.fixing(*_unmet_text(unmet)) if unmet else attempt
            if len(fitting.dims) < len(attempt.dims):
                settings = dataclasses.replace(settings, why="with sizes of the example fixed")
                attempt = fitting
                continue
            # With all sizes open a model may insist on the batch; alone it may be free.
            faults = attempt.faults(made.inputs.sizes)
            if not faults or found is not None:
                found = found if faults else taking_one(made, task, settings, _capture)
                break
            found, reason = made, f"the batch is fixed if this size is open: {faults[0]}"
        fewer = attempt.fewer(reason)
        if fewer is None and found is None and attempt.dims:
            fewer = asked.fixed(reason)  # if that runs, the sizes that were asked for are to blame
        settings = dataclasses.replace(settings, why=f"with fewer sizes open ({reason})")
        attempt = fewer
    if found is None:
        assert failure is not None
        raise failure
    faults = asked.faults(found.inputs.sizes, required_only=True)
    if faults:
        raise TraceError(
            "the model does not leave open what dynamic_shapes asks for:\n  "
            + "\n  ".join(faults)
            + "\nchange that code, keep it inside a submodule that is not split, or make the "
            "dimension static in dynamic_shapes (Dim.AUTO leaves the choice to the model)"
        )
    return found


def _unmet_text(unmet: Collection[sympy.Basic]) -> tuple[set[str], str]:
    names = {name for condition in unmet for name in free_names(condition)}
    conditions = " and ".join(text(condition) for condition in unmet)
    return names, f"the model does something else than for the example where {conditions}"


def _why(error: Exception) -> str:
    place = failing_frame(error)
    where = f" at {place}: {place.source}" if place is not None else ""
    return f"the model cannot be traced with this size open{where} ({_first_line(error)})"


def _capture(task: Task, settings: Settings) -> TracedGraph:
    """Capture with given settings, in both modes where code asks for the mode."""

    def traced(training: bool | None, why: str) -> TracedGraph:
        graph = run_once(task, dataclasses.replace(settings, why=why), training=training)
        _follow_dtypes(task, settings, training, graph)
        return graph

    first = traced(None, settings.why)
    if not first.flags or _modes(first) is not None:
        _check_refusals(first)
        return dataclasses.replace(first, modes=_modes(first))
    if settings.why_one_mode:
        _check_refusals(first)
        modes = {name: first.module.get_submodule(name).training for name in first.flags}
        return dataclasses.replace(first, modes=modes, why_one_mode=settings.why_one_mode)
    try:
        return _in_both_modes(task, settings, first, traced)
    except OtherSettings:
        raise
    except Exception as error:
        task.other_mode.append(error)
        raise


def _in_both_modes(
    task: Task,
    settings: Settings,
    first: TracedGraph,
    traced: Callable[[bool | None, str], TracedGraph],
) -> TracedGraph:
    """Return one graph for both modes; `first` is that of the mode which the model is in."""
    flags = {part.training for part in task.module.modules()}
    training = first if flags == {True} else traced(True, "in training mode")
    evaluation = first if flags == {False} else traced(False, "in evaluation mode")
    _check_refusals(training, evaluation)
    for graph, other, mode in ((training, evaluation, True), (evaluation, training, False)):
        if reasons := _refusals(other):
            modes = dict.fromkeys(graph.flags | other.flags, mode)
            flagged = dataclasses.replace(graph, flags=frozenset(modes))
            return dataclasses.replace(flagged, modes=modes, why_one_mode="\n".join(reasons))
    if training.inputs.example != evaluation.inputs.example:
        sizes = [*training.inputs.sizes, *evaluation.inputs.sizes]
        fixed = settings.wishes.without(size for size in sizes if not size.is_dynamic)
        assert len(fixed.dims) < len(settings.wishes.dims)
        why = "without sizes that one mode fixes and the other leaves open"
        raise OtherSettings(dataclasses.replace(settings, wishes=fixed, why=why))
    merge_modes(training, evaluation)
    return _joined(training, evaluation)


def _modes(traced: TracedGraph) -> dict[str, bool] | None:
    """Return the training flags that the code asked for if they differ: then one trace is it."""
    found = {name: traced.module.get_submodule(name).training for name in traced.flags}
    return found if len(set(found.values())) > 1 else None


def _follow_dtypes(
    task: Task, settings: Settings, training: bool | None, traced: TracedGraph
) -> None:
    """Let dtypes that opened code read off a tensor follow it; see `dtype_following`."""
    runs: dict[str, TracedGraph | None] = {}

    def run_with(cast: Cast) -> TracedGraph | None:
        text = ", ".join(f"{old} as {new}" for old, new in cast.items())
        if text not in runs:
            why = f"with {text}, since code reads a dtype"
            try:
                other = dataclasses.replace(settings, why=why)
                runs[text] = run_once(task, other, training=training, cast=cast)
            except Exception as error:
                _log.info("the model does not run with %s; its dtypes are fixed: %s", text, error)
                runs[text] = None
        return runs[text]

    follow = dtypes_to_follow(traced)
    other = run_with(follow) if follow else None
    for cast in (follow, *dtypes_looked_at(traced, None if other is None else other.graph, follow)):
        found = run_with(cast) if cast else None
        if found is not None:
            let_look(traced, found.graph, cast)
    if other is not None and not link_dtypes(traced, other.graph, follow):
        _log.info("the model is another graph with other dtypes; its dtypes are fixed")
    drop_certain(traced)


def _check_refusals(*graphs: TracedGraph) -> None:
    """Raise if no mode can run; where one can, the graph is for that mode."""
    found = [_refusals(graph) for graph in graphs]
    if all(found):
        raise TraceError("\n".join(found[0]))


def _refusals(traced: TracedGraph) -> list[str]:
    targets = [node.target for node in traced.graph.nodes]
    return list(dict.fromkeys(t.message for t in targets if isinstance(t, Refusal)))


def _joined(training: TracedGraph, evaluation: TracedGraph) -> TracedGraph:
    conditions = dict.fromkeys((*training.inputs.conditions, *evaluation.inputs.conditions))
    inputs = dataclasses.replace(training.inputs, conditions=tuple(conditions))
    return dataclasses.replace(
        training,
        inputs=inputs,
        world=training.world.joined(evaluation.world),
        flags=training.flags | evaluation.flags,
    )
