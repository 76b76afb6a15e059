"""Measure on this machine what the cost model otherwise estimates.

    measured = profile(model, (x,), batch_sizes=(1, 2, 4))
    found = plan(model, (x,), measured.hardware("cpu core"), 2, 16, profile=measured)

In:  a model with an example call, microbatch sizes, a device.
Out: a `Profile`: for each kind of part the seconds of its forward and of both halves of its
     backward, and what it holds; the link between two processes if it was measured.

Equal parts are measured once, on a copy of the first of them with made-up weights if it is on the
meta device, so that a model need not fit. Results are cached by a fingerprint of model, shapes
and device.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from fxpipe.errors import PlanError
from fxpipe.graph.capture.capture import capture
from fxpipe.graph.capture.traced_graph import TracedGraph
from fxpipe.graph.cut.flow import work_nodes
from fxpipe.graph.interface import TensorSpec
from fxpipe.planner.cost.measured import Measured, Profile, fingerprint_of
from fxpipe.planner.cost.node_runs import Bench, Call
from fxpipe.planner.cost.watch import observe, tensors_in
from fxpipe.planner.search.subject import opened_for
from fxpipe.program import Link

__all__ = ["Profile", "profile"]

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]


def profile(
    model: nn.Module,
    example_args: Sequence[Any],
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    batch_sizes: Iterable[int] | None = None,
    device: torch.device | str = "cpu",
    repeats: int = 7,
    average: Callable[[Sequence[float]], float] = statistics.median,
    link: Link | None = None,
    cache: bool | str | os.PathLike[str] = True,
    progress: Progress | None = None,
) -> Profile:
    """Measure the parts of a model.

    Args:
        example_args, example_kwargs: one call of the model.
        batch_sizes: microbatch sizes to measure, by default that of the example and its
            double. Times of others follow a line through them.
        device: where to measure.
        repeats: runs of each part.
        average: what counts of them; the mean is right where others always use the machine too.
        link: what was measured between two processes; see `fxpipe.runtime.wire.measure_link`.
        cache: whether to use and keep results, or the folder for them; by default
            $FXPIPE_CACHE or ~/.cache/fxpipe.
        progress: called with (done, of all) as measuring goes on.

    Raises:
        PlanError: a part does not run alone, or the model cannot take a batch size.
    """
    where = torch.device(device)
    traced = capture(model, example_args, example_kwargs, opened=opened_for(model, sys.maxsize))
    sizes = _batch_sizes(traced, batch_sizes)
    fingerprint = fingerprint_of(traced, sizes, where, f"{repeats} {average.__name__}")
    folder = _folder(cache)
    kept = None if folder is None else folder / f"profile-{fingerprint}.json"
    if kept is not None and kept.is_file():
        with contextlib.suppress(PlanError):
            return Profile.load(kept).with_link(link)
    tell = progress or (lambda done, total: None)
    parts = _measure_all(traced, sizes, where, repeats, average, tell)
    found = Profile(fingerprint, str(where), tuple(sorted(traced.opened)), parts, link)
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        found.save(kept)
    return found


def _batch_sizes(traced: TracedGraph, wanted: Iterable[int] | None) -> tuple[int, ...]:
    example = traced.hints.get("batch")
    if example is None:
        if wanted is not None:
            raise PlanError("the model takes batches as in the example only; leave batch_sizes out")
        return (0,)
    sizes = (example, 2 * example) if wanted is None else tuple(dict.fromkeys(wanted))
    if not sizes or min(sizes) < 1:
        raise PlanError(f"batch_sizes must be whole numbers from 1 up, got {list(sizes)}")
    return tuple(sorted(sizes))


def _folder(cache: bool | str | os.PathLike[str]) -> Path | None:
    if cache is False:
        return None
    if cache is not True:
        return Path(cache)
    return Path(os.environ.get("FXPIPE_CACHE") or Path.home() / ".cache" / "fxpipe")


def _measure_all(
    traced: TracedGraph,
    batch_sizes: Sequence[int],
    device: torch.device,
    repeats: int,
    average: Callable[[Sequence[float]], float],
    tell: Progress,
) -> dict[str, dict[int, Measured]]:
    """For each node, by batch size, what was measured for it or for an equal one."""
    bench = Bench(traced, fused_attention=False, device=device)
    nodes = [node for node in work_nodes(traced) if not traced.facts[node].is_part]
    known: dict[object, Measured] = {}
    found: dict[str, dict[int, Measured]] = {node.name: {} for node in nodes}
    done, total = 0, len(nodes) * len(batch_sizes)
    for batch in batch_sizes:
        sizes = {**traced.hints, "batch": batch} if batch else dict(traced.hints)
        for node in nodes:
            key = bench.key(node, sizes)
            if key is None or key not in known:
                result = _measure(bench, node, sizes, repeats, average)
                if key is not None:
                    known[key] = result
            else:
                result = known[key]
            found[node.name][batch] = result
            done += 1
            tell(done, total)
    return found


def _measure(
    bench: Bench,
    node: fx.Node,
    sizes: Mapping[str, int],
    repeats: int,
    average: Callable[[Sequence[float]], float],
) -> Measured:
    if bench.traced.facts[node].mode is False:
        return Measured(0.0, 0.0, 0.0)
    module = None
    if node.op == "call_module":
        original = bench.traced.module.get_submodule(str(node.target))
        module = _own_copy(original, bench.device)

    def make(spec: TensorSpec) -> torch.Tensor:
        shape = [int(size) for size in spec.shape]
        if spec.dtype.is_floating_point or spec.dtype.is_complex:
            return torch.randn(shape, dtype=spec.dtype, device=bench.device)
        return torch.ones(shape, dtype=spec.dtype, device=bench.device)

    call = bench.prepare(node, sizes, module, make)
    rng = torch.get_rng_state()
    try:
        with torch.inference_mode(False), torch.enable_grad():
            seen = observe(call.function, call.build, lambda: call.parameters)
            runs = [_run(call, bench.device) for _ in range(repeats + 2)][2:]
    except Exception as error:
        raise PlanError(f"{node.target} does not run alone on {bench.device}: {error}") from error
    finally:
        torch.set_rng_state(rng)
    forward, backward_input, backward = (average(part) for part in zip(*runs, strict=True))
    if not backward_input:
        return Measured(forward, 0.0, backward, float(seen.kept_inside))
    weight = max(backward - backward_input, 0.0)
    return Measured(forward, backward_input, weight, float(seen.kept_inside))


def _own_copy(module: nn.Module, device: torch.device) -> nn.Module:
    """A copy on the device, so that nothing of the user's changes."""
    if not any(t.is_meta for t in (*module.parameters(), *module.buffers())):
        return copy.deepcopy(module).to(device)
    made = copy.deepcopy(module).to_empty(device=device)
    with torch.no_grad():
        for tensor in (*made.parameters(), *made.buffers()):
            if tensor.is_floating_point():
                tensor.normal_(std=0.02)
            else:
                tensor.zero_()
    return made


def _run(call: Call, device: torch.device) -> tuple[float, float, float]:
    """Seconds of the forward, of the backward to the inputs, and of the whole backward."""
    args, kwargs = call.build()
    state = {id(parameter) for parameter in call.parameters}
    given = [t for t in tensors_in((args, kwargs)) if t.requires_grad and id(t) not in state]
    edges = [torch.autograd.graph.get_gradient_edge(tensor) for tensor in given]
    for parameter in call.parameters:
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    start = _now(device)
    output = call.function(*args, **kwargs)
    forward = _now(device) - start
    results = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
    if not results:
        return forward, 0.0, 0.0
    seeds = [torch.ones_like(tensor) for tensor in results]
    to_inputs = 0.0
    has_weights = any(parameter.requires_grad for parameter in call.parameters)
    if edges and has_weights:
        start = _now(device)
        torch.autograd.grad(results, edges, seeds, retain_graph=True, allow_unused=True)
        to_inputs = _now(device) - start
    start = _now(device)
    torch.autograd.backward(results, seeds)
    whole = _now(device) - start
    return forward, (whole if edges and not has_weights else to_inputs), whole


def _now(device: torch.device) -> float:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()
