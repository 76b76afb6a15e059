"""Split one architecture and compare it with the plain model in every way we ask for.

In:  a Case, a number of stages, and who chooses the cuts.
Out: a `Report`: per check "ok", "skip: ..." (the plain model cannot do it), or the
     reason why the split model differs.

Checks: `trace`; `eval` and `train` (same inputs, same RNG); `values` (other inputs);
`batch` (other batch size); `row` (one row); `length` (other sequence length); `state` (the
stages hold exactly the model's state under its names). Each comparison includes the calls of
the attention kernel: sizes, mask, flags. `eager` says whether the plain model
runs at all: nothing else is measured if it does not.
"""

import copy
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fxpipe import SplitPoint, pipeline
from tests.graph.hf.cuts import cuts
from tests.graph.hf.inputs import Shape
from tests.graph.hf.kernels import KernelCalls
from tests.graph.hf.registry import Case
from tests.parity import assert_same, run, stage_state

__all__ = ["CHECKS", "Report", "check"]

CHECKS = ("eager", "trace", "state", "eval", "train", "values", "batch", "row", "length")
TEXT = ("text", "seq2seq", "image_text")


@dataclass(slots=True)
class Report:
    """What happened to one architecture with one number of stages."""

    name: str
    num_stages: int
    split: str
    results: dict[str, str] = field(default_factory=dict)

    @property
    def runs(self) -> bool:
        """Whether the plain model runs, so that the rest means something."""
        return self.results.get("eager") == "ok"

    @property
    def failures(self) -> dict[str, str]:
        """The checks that failed, without those that do not apply."""
        return {
            name: result
            for name, result in self.results.items()
            if result != "ok" and not result.startswith("skip")
        }


def check(case: Case, num_stages: int, *, split: str = "blocks") -> Report:
    """Measure everything; an exception anywhere becomes a reason in the report.

    `split` is "blocks" (cut points found by `cuts`) or "auto" (`num_stages=`).
    """
    report = Report(f"{case.model_type} {case.variant}".strip(), num_stages, split)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _measure(case, num_stages, split, report)
    return report


def _measure(case: Case, num_stages: int, split: str, report: Report) -> None:
    dtype = _attempt(report, "eager", lambda: _working_dtype(case))
    if dtype is None:
        return
    base = Shape(dtype=dtype)
    model = case.build(dtype=dtype)
    plain = copy.deepcopy(model)
    kwargs = case.inputs(model, base)
    names = list(model.state_dict())
    pipe = _attempt(report, "trace", lambda: _split(model, kwargs, num_stages, split))
    if pipe is None:
        return
    _attempt(report, "state", lambda: _check_state(names, pipe))

    def compare(shape: Shape, training: bool) -> None:
        inputs = case.inputs(model, shape)
        plain.train(training)
        for stage in pipe.stages:
            stage.module.train(training)
        before = copy.deepcopy(plain.state_dict())
        try:
            with KernelCalls() as wanted:
                expected = run(plain, (), inputs, seed=shape.seed)
        except Exception as error:
            plain.load_state_dict(before)  # a batch norm counts also what it then refuses
            raise _NotApplicableError(_reason(error)) from error
        with KernelCalls() as ours:
            found = run(pipe, (), inputs, seed=shape.seed)
        assert_same(expected, found, tolerance=1e-5)
        assert ours.calls == wanted.calls, f"attention calls {ours.calls}, wanted {wanted.calls}"

    _attempt(report, "eval", lambda: compare(base, False))
    _attempt(report, "train", lambda: compare(base, True))
    _attempt(report, "values", lambda: compare(Shape(seed=7, dtype=dtype), True))
    _attempt(report, "batch", lambda: compare(Shape(batch=3, seed=1, dtype=dtype), True))
    _attempt(report, "row", lambda: compare(Shape(batch=1, seed=3, dtype=dtype), True))
    if case.kind in TEXT or case.kind is None:
        _attempt(report, "length", lambda: compare(Shape(length=11, seed=2, dtype=dtype), True))


class _NotApplicableError(Exception):
    """The plain model itself does not run on these inputs."""


def _attempt(report: Report, name: str, act: Callable[[], Any]) -> Any:
    try:
        result = act()
    except _NotApplicableError as skipped:
        report.results[name] = f"skip: {skipped}"
        return None
    except Exception as error:
        report.results[name] = _reason(error)
        return None
    report.results[name] = "ok"
    return result


def _working_dtype(case: Case) -> torch.dtype:
    """float64 if the plain model runs and trains in it, else float32.

    The model must also do the same twice: one that draws its own random numbers
    outside of torch's generator cannot be compared.
    """
    last: Exception | None = None
    for dtype in (torch.float64, torch.float32):
        try:
            model = case.build(dtype=dtype)
            inputs = case.inputs(model, Shape(dtype=dtype))
            twin = copy.deepcopy(model)
            assert_same(run(model, (), inputs), run(twin, (), inputs))
            model.eval()
            run(model, (), inputs)
        except Exception as error:
            last = last or error
            continue
        return dtype
    assert last is not None
    raise last


def _split(model: nn.Module, kwargs: dict[str, Any], num_stages: int, split: str) -> Any:
    if split == "auto":
        pipe = pipeline(model, (), kwargs, num_stages=num_stages)
        expected = num_stages
    else:
        names = cuts(model, kwargs, num_stages)
        if not names:
            raise _NotApplicableError("the model has no blocks to cut between")
        pipe = pipeline(model, (), kwargs, split_spec=dict.fromkeys(names, SplitPoint.BEGINNING))
        expected = len(names) + 1
    if pipe.num_stages != expected:
        raise AssertionError(f"asked for {expected} stages, got {pipe.num_stages}")
    return pipe


def _check_state(names: list[str], pipe: Any) -> None:
    """The union of the stages' state dicts has exactly the model's keys."""
    found = {name for stage in pipe.stages for name in stage.module.state_dict()}
    missing, extra = sorted(set(names) - found), sorted(found - set(names))
    assert not missing, f"no stage holds {missing[:5]}"
    assert not extra, f"the model does not know {extra[:5]}"
    assert stage_state(pipe).parameters, "the stages hold no parameter"


def _reason(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    where = next(
        (f"{f.filename.rsplit('/', 2)[-1]}:{f.lineno}" for f in reversed(frames)), "nowhere"
    )
    text = " ".join(str(error).split())
    return f"{type(error).__name__} at {where}: {text[:400]}"
