"""One run of a model or of a pipe, and everything that can be seen of it.

`Subject` holds the model and its stages as they were. Each run starts from that state and
from the same random seed, and leaves it as it was: parameters, buffers, `.grad`, flags,
attributes, random states. What the run returned and changed is an `Outcome`, a flat
mapping from a name that people understand to a value.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from fxpipe.graph.check.compare import KERNELS
from fxpipe.graph.check.variants import Call, Variant
from fxpipe.graph.guard.stage_guard import StageGuard
from fxpipe.graph.inputs import path_text
from fxpipe.graph.nested import (
    Accessor,
    branch,
    contents,
    map_leaves,
    mutable_parts,
    snapshot,
    walk,
)
from fxpipe.graph.record.state_writes import hook_count
from fxpipe.graph.sandbox.restore import Places, preserved, random_states, seed_all
from fxpipe.torch_inside import (
    BUFFERS,
    MODULES,
    PARAMETERS,
    buffers_of,
    forward_pre_hooks,
    parameters_of,
)

__all__ = ["Outcome", "Subject"]

_SEED = 20240607
_NOT_STATE = frozenset({PARAMETERS, BUFFERS, MODULES, "training"})


@dataclass(slots=True)
class Outcome:
    """What a run left behind, or the error that ended it."""

    items: dict[str, object] = field(default_factory=dict)
    error: Exception | None = None
    seconds: float = 0.0


class Subject:
    """A model and its stages, to run either of them without leaving a trace."""

    def __init__(self, module: nn.Module, stages: Sequence[nn.Module], example: Call) -> None:
        self.module = module
        self._example = example
        # On a busy machine the time of the clock says little about a model on the CPU.
        on_cpu = all(tensor.device.type == "cpu" for tensor in module.parameters())
        self.clock = time.thread_time if on_cpu else time.perf_counter
        self._all = nn.ModuleList([module, *stages])
        hooks = [hook for stage in stages for hook in forward_pre_hooks(stage).values()]
        self._guards = [hook for hook in hooks if isinstance(hook, StageGuard)]
        self._own = _parts((module,))
        self._staged = _parts(stages)
        self._state = {**_tensors(self._staged), **_tensors(self._own)}
        self._saved = {id(t): t.detach().clone() for t in self._state.values()}
        self._places = Places(self._all)
        self._hooks = hook_count(part for _, part in self._own)
        self._before = {name: _attributes(part) for name, part in self._own}

    def run(self, what: Callable[..., object], variant: Variant) -> Outcome:
        """Run the model, or the pipe of its stages, once."""
        try:
            return self._run(what, variant)
        finally:
            for guard in self._guards:
                guard.settle()

    def _run(self, what: Callable[..., object], variant: Variant) -> Outcome:
        outcome = Outcome()
        with ExitStack() as stack:
            stack.enter_context(preserved(self._all, places=self._places))
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.set_grad_enabled(variant.gradients))
            if variant.training is not None:
                for part in self._all.modules():
                    part.training = variant.training
            args, kwargs = _copied(variant.call())
            if variant.is_second:
                self._run_first(what)
            calls: list[str] = []
            watch = _Kernels(calls) if variant.watches_kernels else nullcontext()
            seed_all(_SEED)
            start = self.clock()
            try:
                with watch:
                    output = what(*args, **kwargs)
                gradients = self._gradients(output, (args, kwargs)) if variant.gradients else {}
            except Exception as error:
                outcome.error = error
                self._put_back()
                return outcome
            outcome.seconds = self.clock() - start
            outcome.items.update(_output_items(output))
            outcome.items.update(_random_items())
            outcome.items.update(gradients)
            outcome.items.update(_input_items((args, kwargs)))
            outcome.items.update(self._changed_state(self.module is what))
            if not variant.is_second:  # by then a cache may hold more than stages need
                outcome.items.update(self._changed_attributes())
            if variant.watches_kernels:
                outcome.items[KERNELS] = sorted(calls)
        return outcome

    def _run_first(self, what: Callable[..., object]) -> None:
        """Run the example, so that the next run finds what a run leaves behind."""
        args, kwargs = _copied(self._example)
        with suppress(Exception):
            what(*args, **kwargs)

    def _gradients(self, output: object, call: Call) -> dict[str, object]:
        total = _weighted_sum(output)
        if total is None:
            return {}
        wanted: dict[str, torch.Tensor] = {
            f"gradient of {name}": tensor
            for name, tensor in self.module.named_parameters()
            if tensor.requires_grad
        }
        for path, leaf in walk(call):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                wanted[f"gradient of input {_call_path(path)}"] = leaf
        if not wanted:
            return {}
        return dict(zip(wanted, _differentiated(total, list(wanted.values())), strict=True))

    def _changed_state(self, is_plain: bool) -> dict[str, object]:
        """Parameters and buffers that have other values now; they get back those they had."""
        found: dict[str, object] = {}
        now = _tensors(self._own if is_plain else self._staged)
        for name, tensor in now.items():
            before = self._state.get(name)
            same = before is not None and _equal(tensor, self._saved[id(before)])
            if not same:
                found[f"state {name}"] = tensor.detach().clone()
        for name in self._state.keys() - now.keys() if is_plain else ():
            found[f"state {name}"] = None
        self._put_back()
        return found

    def _put_back(self) -> None:
        with torch.no_grad():
            for tensor in self._state.values():
                saved = self._saved[id(tensor)]
                if not _equal(tensor, saved):
                    tensor.data = saved.clone() if tensor.shape != saved.shape else tensor.data
                    tensor.copy_(saved)

    def _changed_attributes(self) -> dict[str, object]:
        found: dict[str, object] = {}
        puts_hooks = hook_count(part for _, part in self._own) != self._hooks
        for name, part in self._own:
            before = self._before[name]
            for key, value in vars(part).items():
                if key in _NOT_STATE or key.endswith("_hooks"):
                    continue
                if puts_hooks and type(value) is bool:
                    continue  # it remembers that the hooks are there
                if key in before and before[key][0] is value:
                    inside = before[key][1]
                    if inside is None or inside == contents(value):
                        continue
                if all(isinstance(leaf, nn.Module) for _, leaf in walk(value)):
                    continue  # a list of the model's own parts
                found[f"attribute {f'{name}.{key}' if name else key}"] = snapshot(value)
        return found


def _attributes(part: nn.Module) -> dict[str, tuple[object, object]]:
    """The attributes of a module: each object, and what is inside it if that can change."""
    return {
        key: (value, contents(value) if any(True for _ in mutable_parts(value)) else None)
        for key, value in vars(part).items()
        if key not in _NOT_STATE and not key.endswith("_hooks")
    }


def _parts(modules: Sequence[nn.Module]) -> list[tuple[str, nn.Module]]:
    return [found for module in modules for found in module.named_modules(remove_duplicate=False)]


def _tensors(parts: Sequence[tuple[str, nn.Module]]) -> dict[str, torch.Tensor]:
    return {
        f"{name}.{key}" if name else key: tensor
        for name, part in parts
        for held in (parameters_of(part), buffers_of(part))
        for key, tensor in held.items()
        if tensor is not None
    }


def _copied(call: Call) -> Call:
    """The call with clones of its tensors; one tensor given twice stays one."""
    memo: dict[int, torch.Tensor] = {}

    def clone(leaf: object) -> object:
        if isinstance(leaf, torch.Generator):
            return leaf.clone_state()
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in memo:
            memo[id(leaf)] = leaf.detach().clone().requires_grad_(leaf.requires_grad)
        return memo[id(leaf)]

    args, kwargs = map_leaves(clone, snapshot(call))
    return args, kwargs


def _random_items() -> dict[str, object]:
    states = random_states()
    states["Python"] = hash(states["Python"])
    if "numpy" in states:
        kind, keys, *rest = states["numpy"]
        states["numpy"] = (kind, keys.tobytes(), *rest)
    return {f"random state of {name}": state for name, state in states.items()}


def _output_items(output: object) -> dict[str, object]:
    found: dict[str, object] = dict(_kinds(output, ()))
    for path, leaf in walk(output):
        where = _output_path(path)
        if isinstance(leaf, torch.Tensor):
            found[f"{where} requires_grad"] = leaf.requires_grad
            leaf = leaf.detach()
        found[where] = leaf
    return found


def _kinds(value: object, path: tuple[Accessor, ...]) -> Iterator[tuple[str, str]]:
    """What stands at each place of an output."""
    kind = "tensor" if isinstance(value, torch.Tensor) else type(value).__name__
    yield f"kind of {_output_path(path)}", kind
    found = branch(value)
    for accessor, child in zip(found.accessors, found.children, strict=True) if found else ():
        yield from _kinds(child, (*path, accessor))


def _output_path(path: tuple[Accessor, ...]) -> str:
    return f"output{path_text((('item', ''), *path))}"


def _input_items(call: Call) -> dict[str, object]:
    return {
        f"input {_call_path(path)} after the run": leaf.detach()
        for path, leaf in walk(call)
        if isinstance(leaf, torch.Tensor)
    }


def _call_path(path: Sequence[Accessor]) -> str:
    (_, group), (_, name), *rest = path
    return path_text((("item", name if group else f"args[{name}]"), *rest))


def _weighted_sum(output: object) -> torch.Tensor | None:
    """All outputs that have a gradient in one number, each element with its own weight."""
    total: torch.Tensor | None = None
    seen: set[int] = set()
    for _, leaf in walk(output):
        if not isinstance(leaf, torch.Tensor) or not leaf.requires_grad or id(leaf) in seen:
            continue
        seen.add(id(leaf))
        real = torch.view_as_real(leaf) if leaf.is_complex() else leaf
        weights = torch.arange(real.numel(), dtype=torch.float32, device=real.device)
        weights = weights.add_(len(seen)).cos_().view(real.shape)
        part = (real * weights.to(real.dtype)).sum(dtype=torch.promote_types(real.dtype, _F32))
        total = part if total is None else total + part.to(total)
    return total


_F32 = torch.float32


def _differentiated(total: torch.Tensor, wanted: list[torch.Tensor]) -> Sequence[object]:
    try:
        return torch.autograd.grad(total, wanted, allow_unused=True, retain_graph=True)
    except RuntimeError as error:
        if ".grad()" not in str(error):
            raise
    with _without_grad(wanted):  # reentrant checkpoints know only backward()
        torch.autograd.backward(total)
        return [tensor.grad for tensor in wanted]


@contextmanager
def _without_grad(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    held = [tensor.grad for tensor in tensors]
    try:
        for tensor in tensors:
            tensor.grad = None
        yield
    finally:
        for tensor, grad in zip(tensors, held, strict=True):
            tensor.grad = grad


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)


class _Kernels(TorchFunctionMode):
    """Notes each call of an attention kernel: which arguments are tensors, and the others."""

    def __init__(self, calls: list[str]) -> None:
        super().__init__()
        self._calls = calls

    def __torch_function__(
        self, func: Any, types: object, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> object:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            self._calls.append(
                ", ".join(f"{name}={_shown(value)}" for name, value in sorted(given.items()))
            )
        return func(*args, **kwargs)


def _shown(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return str(value)
