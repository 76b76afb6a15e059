"""Compare a split model with the plain one: outputs, gradients, state.

    before = copy.deepcopy(model)
    pipe = pipeline(model, args, kwargs, split_spec=...)
    assert_parity(before, pipe, args, kwargs)

`assert_parity` runs both from the same RNG state on equal inputs, sums the outputs
to one number in which every element has its own weight, goes backward, and
compares: the output structure and every tensor in it, the gradient of each input
that wants one, the gradient of each parameter as the stages hold it, and every
buffer after the run.
"""

import copy
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import models

__all__ = [
    "Run",
    "assert_parity",
    "assert_same",
    "build_split",
    "gradients",
    "run",
    "stage_state",
    "weighted_sum",
]


@dataclass(frozen=True, slots=True)
class Run:
    """What one forward and backward left behind, all detached."""

    output: Any
    gradients: dict[str, Tensor | None]
    input_gradients: tuple[Tensor | None, ...]
    buffers: dict[str, Tensor]


def build_split(name: str, num_stages: int, *, seed: int = 0, **sizes: Any) -> tuple[Any, Any]:
    """A model of `models/` with the split_spec that cuts it into `num_stages`.

    The spec is None for a model that cuts itself; it is built with the markers.
    """
    module = models.load(name)
    if not module.SPLIT[num_stages]:
        sizes = {**sizes, "stages": num_stages}
    return module.build(seed=seed, **sizes), models.split_spec(module, num_stages)


def weighted_sum(output: Any) -> Tensor | None:
    """All floating tensors of a pytree in one number; None if none wants a gradient.

    The weights differ from element to element, so that two outputs that swap
    places, or two rows, change the sum and its gradient.
    """
    total: Tensor | None = None
    seen: set[int] = set()
    for leaf in pytree.tree_leaves(output):
        if not isinstance(leaf, Tensor) or not leaf.requires_grad or id(leaf) in seen:
            continue
        seen.add(id(leaf))
        real = torch.view_as_real(leaf) if leaf.is_complex() else leaf
        weights = torch.arange(real.numel(), dtype=torch.float64).add(len(seen)).cos()
        part = (real * weights.to(real.dtype).view(real.shape)).sum()
        total = part if total is None else total + part
    return total


def run(
    model: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    seed: int = 0,
    backward: bool = True,
) -> Run:
    """Run a plain module or a Pipe forward and backward on copies of the inputs."""
    kwargs = kwargs or {}
    state = stage_state(model)
    for parameter in state.parameters.values():
        parameter.grad = None
    args, kwargs = _copied((args, dict(kwargs)))
    wanted = [
        leaf
        for leaf in pytree.tree_leaves((args, kwargs))
        if isinstance(leaf, Tensor) and leaf.requires_grad
    ]
    torch.manual_seed(seed)
    grad: AbstractContextManager[Any] = nullcontext() if backward else torch.no_grad()
    with grad:
        output = model(*args, **kwargs)
        total = weighted_sum(output)
    if total is not None and backward:
        total.backward()
    return Run(
        output=pytree.tree_map_only(Tensor, lambda leaf: leaf.detach().clone(), output),
        gradients=gradients(model),
        input_gradients=tuple(leaf.grad for leaf in wanted),
        # Taken after the run, which may have put other tensors in their place.
        buffers={
            name: buffer.detach().clone() for name, buffer in stage_state(model).buffers.items()
        },
    )


@dataclass(frozen=True, slots=True)
class State:
    """Parameters and buffers by every name they have."""

    parameters: dict[str, nn.Parameter]
    buffers: dict[str, Tensor]


def stage_state(model: Any) -> State:
    """The state of a module, or of all stages of a Pipe, tied names included."""
    parts = [model] if isinstance(model, nn.Module) else [stage.module for stage in model.stages]
    if hasattr(model, "stages") and hasattr(model, "interfaces"):
        parts = [stage.module for stage in model.stages]
    parameters: dict[str, nn.Parameter] = {}
    buffers: dict[str, Tensor] = {}
    for part in parts:
        parameters.update(part.named_parameters(remove_duplicate=False))
        buffers.update(part.named_buffers(remove_duplicate=False))
    return State(parameters, buffers)


def gradients(model: Any) -> dict[str, Tensor | None]:
    """The gradient of each parameter by name, detached; None where there is none."""
    return {
        name: None if parameter.grad is None else parameter.grad.detach().clone()
        for name, parameter in stage_state(model).parameters.items()
    }


def assert_parity(
    plain: nn.Module,
    pipe: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    tolerance: float = 1e-5,
    seed: int = 0,
    backward: bool = True,
) -> None:
    """Fail unless the Pipe does what the plain model does.

    `plain` must be a copy of the model, made before it was split or run; it is run
    here, and so are the buffers of both changed.
    """
    expected = run(plain, args, kwargs, seed=seed, backward=backward)
    found = run(pipe, args, kwargs, seed=seed, backward=backward)
    assert_same(expected, found, tolerance=tolerance)


def assert_same(expected: Run, found: Run, *, tolerance: float = 1e-5) -> None:
    """Fail with all differences between two runs, worst first within each kind."""
    faults: list[str] = []
    spec, leaves = _flat(expected.output)
    found_spec, found_leaves = _flat(found.output)
    if spec != found_spec:
        raise AssertionError(f"output structure: expected {spec}, found {found_spec}")
    for (path, a), (_, b) in zip(leaves, found_leaves, strict=True):
        faults += _differences(f"output{path}", a, b, tolerance)
    for index, (a, b) in enumerate(
        zip(expected.input_gradients, found.input_gradients, strict=True)
    ):
        faults += _differences(f"gradient of input {index}", a, b, tolerance)
    # A Pipe need not hold what no stage uses; such a parameter has no gradient either.
    for name, gradient in expected.gradients.items():
        if name in found.gradients or gradient is not None:
            other = found.gradients.get(name)
            faults += _differences(f"gradient of {name}", gradient, other, tolerance)
    faults += [
        f"parameter {name}: unknown to the model"
        for name in found.gradients.keys() - expected.gradients.keys()
    ]
    for name, buffer in expected.buffers.items():
        if name in found.buffers:
            faults += _differences(f"buffer {name}", buffer, found.buffers[name], tolerance)
    if faults:
        raise AssertionError(f"{len(faults)} differences:\n  " + "\n  ".join(faults[:20]))


def _flat(output: Any) -> tuple[str, list[tuple[str, Any]]]:
    leaves, spec = pytree.tree_flatten(output)
    try:
        names = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(output)[0]]
    except ValueError:  # A class that is registered without names for its parts.
        names = [f"[{index}]" for index in range(len(leaves))]
    return str(spec), list(zip(names, leaves, strict=True))


def _copied(inputs: Any) -> Any:
    """Deep copies, so that an in-place model cannot change what the next run reads."""

    def copied(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.detach().clone().requires_grad_(leaf.requires_grad)
        return copy.deepcopy(leaf)

    return pytree.tree_map(copied, inputs)


def _differences(where: str, a: Any, b: Any, tolerance: float) -> list[str]:
    if isinstance(a, Tensor) != isinstance(b, Tensor):
        return [f"{where}: expected {_kind(a)}, found {_kind(b)}"]
    if not isinstance(a, Tensor):
        return [] if type(a) is type(b) and _equal(a, b) else [f"{where}: {a!r} is not {b!r}"]
    if a.shape != b.shape or a.dtype != b.dtype:
        return [f"{where}: expected {_kind(a)}, found {_kind(b)}"]
    if a.dtype.is_floating_point or a.dtype.is_complex:
        if torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True):
            return []
        return [f"{where}: largest difference {(a - b).abs().max().item():.3g}"]
    return [] if torch.equal(a, b) else [f"{where}: {(a != b).sum().item()} elements differ"]


def _equal(a: Any, b: Any) -> bool:
    """Objects without an `==` of their own are compared by what they hold."""
    if type(a).__eq__ is object.__eq__ and hasattr(a, "__dict__"):
        return vars(a).keys() == vars(b).keys()
    return bool(a == b)


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return type(value).__name__
