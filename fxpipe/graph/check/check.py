"""Compare a pipe with its model: run both, in several ways, and let nothing differ.

In:  the model, the stages and how to run them, the example call, a `Budget`.
Out: a `CheckReport` of what was equal and what was not looked at; or a `TraceError` that
     names the first value that differs and the line that made it.

Each run of the plain model is followed by one of the pipe with the same inputs, seed and
modes. Runs are left out when the budget of time is used up. A plain model that differs
from itself, run twice with one seed, is not blamed on the pipe.

A model that is too large to run here, or on the meta device, is checked by a smaller one:
fewer or narrower layers, the same classes. What the two traces decided must be the same:
which functions opened code calls at which lines, with which flags. Sizes may differ, and
so may the number of layers.
"""

from __future__ import annotations

import dataclasses
import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import fx, nn

from fxpipe.errors import FxpipeError, InputError, TraceError
from fxpipe.graph.capture.traced_graph import TracedGraph
from fxpipe.graph.check.compare import (
    Blamed,
    Difference,
    Notes,
    blame,
    first_difference,
    note_plain,
    note_stages,
    noted_differences,
)
from fxpipe.graph.check.outcome import Outcome, Subject
from fxpipe.graph.check.variants import Call, Variant
from fxpipe.graph.facts import Facts
from fxpipe.graph.nested import Args, Kwargs, walk
from fxpipe.torch_inside import FakeTensor, local_tensor

__all__ = [
    "Budget",
    "CheckReport",
    "Checkable",
    "check_runs",
    "check_same_decisions",
    "not_checked",
    "read_budget",
    "why_not",
]

_log = logging.getLogger(__name__)
Run = Callable[[Sequence[Callable[..., object]], Args, Kwargs], object]


@dataclasses.dataclass(frozen=True, slots=True)
class Checkable:
    """A model, its stages, and how to run them one after the other."""

    module: nn.Module
    stages: tuple[fx.GraphModule, ...]
    run_stages: Run
    facts: tuple[Facts, ...]


def why_not(module: nn.Module, call: Call, budget: Budget) -> str:
    """Say why a model cannot be run for a check; empty if it can."""
    state = [*module.parameters(), *module.buffers()]
    inputs = [leaf for _, leaf in walk(call) if isinstance(leaf, torch.Tensor)]
    if any(tensor.is_meta or isinstance(tensor, FakeTensor) for tensor in (*state, *inputs)):
        return "tensors without data; give check_with=(small_model, args) of the same code"
    if any(local_tensor(tensor) is not tensor for tensor in state):
        return "the parameters are sharded"
    if any(tensor.layout is not torch.strided for tensor in state):
        return "it has sparse parameters or buffers"
    if any(isinstance(part, nn.SyncBatchNorm) for part in module.modules()):
        return "SyncBatchNorm communicates while it runs"
    trained = sum(t.nbytes for t in state if t.requires_grad)
    needed = (
        sum(t.numel() * t.element_size() for t in state)
        + 2 * trained
        + 4 * sum(t.nbytes for t in inputs)
    )
    if needed > budget.memory:
        return f"it needs {needed / 1e9:.1f} GB beside the model, the budget is " + (
            f"{budget.memory / 1e9:.1f} GB; check=True checks all the same"
        )
    return ""


def check_runs(
    subject: Checkable,
    call: Call,
    variants: Iterable[list[Variant]],
    budget: Budget,
    progress: Callable[[str], None] | None = None,
) -> CheckReport:
    """Run the variants and compare; see the module's docstring.

    Raises:
        TraceError: the pipe does not do what the model does.
    """
    reason = why_not(subject.module, call, budget)
    if reason:
        return not_checked(reason)
    return _Check(subject, call, budget, progress or (lambda name: None)).run(variants)


class _Check:
    def __init__(
        self, subject: Checkable, call: Call, budget: Budget, progress: Callable[[str], None]
    ) -> None:
        self._subject = subject
        self._begun = time.perf_counter()
        self._budget = budget
        self._runs = Subject(subject.module, subject.stages, call)
        self._start = self._runs.clock()
        self._progress = progress
        self._equal: list[str] = []
        self._refused: list[str] = []
        self._left_out: list[str] = []
        self._noted: dict[str, None] = {}
        self._refusal: FxpipeError | None = None
        self._longest = 0.0

    def run(self, variants: Iterable[list[Variant]]) -> CheckReport:
        for alternatives in variants:
            if self._is_used_up(alternatives[0]):
                continue
            self._first_that_runs(alternatives)
            if not self._equal and not self._refused:
                break  # the plain model does not run the example itself
        if self._refusal is not None and not self._equal:
            raise self._refusal  # it would never run
        return CheckReport(
            tuple(self._equal),
            tuple(self._refused),
            tuple(self._left_out),
            tuple(self._noted),
            time.perf_counter() - self._begun,
        )

    def _is_used_up(self, variant: Variant) -> bool:
        used = self._runs.clock() - self._start
        # A backward costs twice its forward, and both models run.
        if used + 2 * self._longest * (3 if variant.gradients else 1) <= self._budget.seconds:
            return False
        self._left_out.append(f"{variant.name} (the budget of {self._budget.seconds:g} s)")
        return True

    def _first_that_runs(self, alternatives: Sequence[Variant]) -> None:
        outcome = ""
        for variant in alternatives:
            self._progress(variant.name)
            outcome = self._compare(variant)
            if not outcome:
                self._equal.append(variant.name)
                return
        (self._refused if outcome.startswith("!") else self._left_out).append(outcome.lstrip("!"))

    def _compare(self, variant: Variant) -> str:
        """Run both; return why nothing could be compared, with "!" if the pipe refused."""
        plain = self._runs.run(self._subject.module, variant)
        if plain.error is not None and not variant.must_fail:
            return f"{variant.name} (the plain model fails: {_first_line(plain.error)})"
        pipe = self._runs.run(self._pipe, variant)
        if not variant.gradients:
            self._longest = max(self._longest, plain.seconds, pipe.seconds)
        if plain.error is not None:
            if pipe.error is None and self._runs.run(self._subject.module, variant).error:
                raise TraceError(self._text(variant, self._lenient(plain.error), None))
            return f"{variant.name} (the plain model fails: {_first_line(plain.error)})"
        if isinstance(pipe.error, FxpipeError):
            self._refusal = self._refusal or pipe.error
            return f"!{variant.name}: {_first_line(pipe.error)}"
        if pipe.error is not None:
            text = f"the stages fail where the model runs: {_first_line(pipe.error)}"
            raise TraceError(self._text(variant, text, None)) from pipe.error
        return self._judge(variant, plain, pipe)

    def _judge(self, variant: Variant, plain: Outcome, pipe: Outcome) -> str:
        difference = first_difference(plain.items, pipe.items)
        if difference is None:
            for text in noted_differences(plain.items, pipe.items):
                self._noted.setdefault(text)
            return ""
        again = self._runs.run(self._subject.module, variant)
        own = "it fails" if again.error else first_difference(plain.items, again.items)
        if own is not None:
            what = own.what if isinstance(own, Difference) else own
            return f"{variant.name} (the plain model differs from run to run: {what})"
        raise TraceError(self._text(variant, difference.text, self._blame(variant)))

    def _pipe(self, *args: object, **kwargs: object) -> object:
        return self._subject.run_stages(self._subject.stages, args, kwargs)

    def _blame(self, variant: Variant) -> Blamed | None:
        plain, stages = Notes(), Notes()
        subject = self._subject
        noting = note_stages(stages, subject.stages, subject.facts)
        leaves = {
            str(node.target): stage.get_submodule(str(node.target))
            for stage in subject.stages
            for node in stage.graph.nodes
            if node.op == "call_module"
        }

        def run_plain(*args: object, **kwargs: object) -> object:
            with note_plain(plain, leaves):
                return subject.module(*args, **kwargs)

        def run_pipe(*args: object, **kwargs: object) -> object:
            return subject.run_stages(noting, args, kwargs)

        forward = dataclasses.replace(variant, watches_kernels=False)
        try:
            self._runs.run(run_plain, forward)
            self._runs.run(run_pipe, forward)
            return blame(plain, stages)
        except Exception as error:
            _log.info("the first difference could not be found: %s", error)
            return None

    def _lenient(self, error: Exception) -> str:
        return f"the stages run where the model fails: {_first_line(error)}"

    def _text(self, variant: Variant, difference: str, blamed: Blamed | None) -> str:
        name = type(self._subject.module).__name__
        mode = {None: "", True: ", train()", False: ", eval()"}[variant.training]
        lines = [
            f"the stages do not do what {name} does: {difference}",
            f"  run: {variant.name}{'' if mode[2:] in variant.name else mode}",
        ]
        lines += [f"  {blamed}"] if blamed is not None else []
        return "\n".join(
            [
                *lines,
                "keep the code that makes the difference inside a submodule that is not split; "
                "pipeline(..., check=False) splits without this comparison",
            ]
        )


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


@dataclass(frozen=True, slots=True)
class Budget:
    """What the check of a pipe may use: seconds, and bytes beside the model's own."""

    seconds: float = 2.0
    memory: float = 1e9

    def __post_init__(self) -> None:
        if self.seconds <= 0 or self.memory <= 0:
            raise InputError(f"a budget must be positive, got {self}")


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The runs in which the plain model and the pipe were equal, and what is not known.

    `refused` are runs that the pipe refuses with an error of its own, although the plain
    model runs; `left_out` is what was not compared, and why; `noted` is what differs
    although all values are equal: random numbers of Python or numpy.
    """

    equal: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    noted: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def is_checked(self) -> bool:
        return bool(self.equal)

    def lines(self) -> list[str]:
        """The report for people, without times."""
        found = [f"equal to the plain model: {'; '.join(self.equal)}"] if self.equal else []
        found += [f"refused: {text}" for text in self.refused]
        found += [f"different, with equal values: {text}" for text in self.noted]
        return found + [f"not checked: {text}" for text in self.left_out]

    def __str__(self) -> str:
        return "\n".join(self.lines())


def not_checked(reason: str) -> CheckReport:
    """The report of a pipe that never ran beside its model."""
    return CheckReport(left_out=(reason,))


def read_budget(check: object) -> Budget | None:
    """Turn the `check` of `pipeline` into a budget; None means no check.

    Raises:
        InputError: `check` is something else.
    """
    if check is False:
        return None
    if isinstance(check, Budget):
        return check
    if check is True:
        return Budget(float("inf"), float("inf"))
    if check == "auto":
        return Budget()
    raise InputError(f'check must be "auto", True, False or a Budget, got {check!r}')


def check_same_decisions(large: TracedGraph, small: TracedGraph) -> None:
    """Raise unless two traces took the same way through the same code.

    Raises:
        TraceError: lists what only one of them does.
    """
    one, other = dict(_decisions(large)), dict(_decisions(small))
    faults = [f"  only the model itself: {one[key]}" for key in one if key not in other]
    faults += [f"  only the small model: {other[key]}" for key in other if key not in one]
    if faults:
        raise TraceError(
            "the small model of check_with does not decide as the model itself does:\n"
            + "\n".join(faults[:6])
            + "\ngive a small model of the same classes and settings, with inputs of the same kind"
        )


def _decisions(traced: TracedGraph) -> Iterator[tuple[object, str]]:
    for node in traced.graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        place = traced.facts[node].where
        target = _target(node)
        flags = tuple(_flags(node.args)), tuple(sorted(_named_flags(node)))
        shown = ", ".join([*map(str, flags[0]), *(f"{k}={v}" for k, v in flags[1])])
        yield (str(place), target, flags), f"{target}({shown}) at {place}"


def _target(node: fx.Node) -> str:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return re.sub(r"\d+", "#", name) if node.op == "call_module" else str(name)


def _flags(args: Iterable[object]) -> Iterator[object]:
    """What decides among the arguments: flags, words and Nones, but not numbers."""
    for value in args:
        if value is None or isinstance(value, (bool, str)):
            yield str(value)
        elif isinstance(value, (tuple, list)):
            yield from _flags(value)


def _named_flags(node: fx.Node) -> Iterator[tuple[str, str]]:
    for name, value in node.kwargs.items():
        if value is None or isinstance(value, (bool, str)):
            yield name, str(value)
        elif isinstance(value, fx.Node):
            yield name, "a tensor"
