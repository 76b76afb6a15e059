"""Run any module on tensors without data, without anybody noticing.

`probe` gives the outputs of a module as fake tensors: no hooks fire, and buffers,
random states, parameters, flags and attributes stay as they are. A module whose
Python code needs values (an expert loop, `.item()`) cannot run on fakes; it runs
once on made-up tensors of the right sizes, with all its state saved and restored.

`FakeState` is the trick: for the time of a trace every parameter, buffer and
tensor attribute of a model is replaced by a fake one, so nothing real can be
changed, and a model on the meta device counts as being on the CPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from fxpipe.graph.interface import TensorSpec
from fxpipe.graph.nested import Args, Kwargs, map_leaves, walk
from fxpipe.graph.sandbox.made_up import another, grown, run_real
from fxpipe.graph.sandbox.patches import Seer, intercepted
from fxpipe.graph.sandbox.restore import preserved, preserved_values
from fxpipe.graph.sizes.symbols import TracedSizes
from fxpipe.torch_inside import (
    FakeTensor,
    FakeTensorMode,
    buffers_of,
    local_tensor,
    parameters_of,
    shard_precision,
)

__all__ = ["FakeState", "Left", "Slot", "fake_mode", "on_trace_device", "probe"]

_CPU = torch.device("cpu")
_SMALL = 1 << 20  # numbers of a module, or of a tensor


def probe(
    module: nn.Module, args: Iterable[object] = (), kwargs: Mapping[str, object] | None = None
) -> object:
    """Return what the module returns, with a fake tensor for each tensor.

    `args` and `kwargs` may hold real tensors, fake tensors or `TensorSpec`s.
    """
    while type(module).__name__ == "DistributedDataParallel":
        wrapper: Any = module  # its forward may start collectives
        module = wrapper.module
    inputs = (tuple(args), dict(kwargs or {}))
    if _is_small(module, inputs):
        with contextlib.suppress(Exception):
            return _run_small(module, inputs)
    first = next(module.parameters(), None)
    if isinstance(first, FakeTensor):
        return _run_fake(module, inputs, first)
    mode = _mode_of(inputs) or fake_mode()
    with contextlib.ExitStack() as stack:
        stack.enter_context(preserved(module))
        stack.enter_context(intercepted(module, _Casting()))
        stack.enter_context(unlogged())
        stack.enter_context(torch.inference_mode(False))
        state = FakeState(mode, module, all_trainable=False)
        stack.enter_context(state.fake())
        with mode:
            args, kwargs = _made_up(inputs, torch.empty, _faked)
            try:
                return module(*args, **kwargs)
            except Exception as error:
                failure = error
        if state.is_sharded:
            raise failure
        with state.real():
            return run_real(mode, module, module, args, kwargs, failure)


def _run_fake(module: nn.Module, inputs: tuple[Args, Kwargs], state: FakeTensor) -> object:
    """Run a module of the user's own fake tensors, on their device."""
    with preserved(module), state.fake_mode:
        args, kwargs = _made_up(inputs, torch.empty, torch.Tensor.detach, state.device)
        return module(*args, **kwargs)


def _made_up(
    inputs: object,
    make: Callable[..., torch.Tensor],
    take: Callable[[torch.Tensor], torch.Tensor],
    device: torch.device = _CPU,
) -> Any:
    """Return inputs with a tensor for each spec, and another for each tensor."""

    def one(leaf: object) -> object:
        if isinstance(leaf, TensorSpec):
            made = make([int(n) for n in leaf.shape], dtype=leaf.dtype, device=device)
        elif isinstance(leaf, torch.Tensor):
            made = take(leaf)
        else:
            return leaf
        return grown(made) if leaf.requires_grad and not made.requires_grad else made

    return map_leaves(one, inputs)


def _is_small(module: nn.Module, inputs: object) -> bool:
    """Whether a run on made-up tensors is quicker than importing what fakes need: seconds."""
    state = (*module.parameters(), *module.buffers())
    total = sum(tensor.numel() for tensor in state)
    is_plain = all(_is_plain(tensor) and tensor.device == _CPU for tensor in state)
    leaves = [leaf for _, leaf in walk(inputs)]
    given = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    counts = [math.prod(map(int, s.shape)) for s in leaves if isinstance(s, TensorSpec)]
    is_plain &= all(_is_plain(tensor) and tensor.device == _CPU for tensor in given)
    total = max([total, *counts, *(tensor.numel() for tensor in given)])
    return total <= _SMALL and is_plain and not _may_communicate(module)


def _run_small(module: nn.Module, inputs: tuple[Args, Kwargs]) -> object:
    """Run the module on made-up tensors, with all its state put back."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(preserved(module))
        stack.enter_context(preserved_values(module))
        stack.enter_context(intercepted(module, _Casting()))
        stack.enter_context(torch.inference_mode(False))
        args, kwargs = _made_up(inputs, torch.zeros, lambda tensor: tensor.detach().clone())
        return module(*args, **kwargs)


def _may_communicate(module: nn.Module) -> bool:
    """Whether code of the module's own mentions other processes."""
    for kind in {type(part) for part in module.modules()}:
        code = getattr(kind.forward, "__code__", None)
        if kind.__module__.startswith("torch.nn."):
            continue
        names = ("distributed",) if code is None else code.co_names
        space = getattr(kind.forward, "__globals__", {})
        homes = [getattr(space.get(name), "__name__", "") for name in names]
        if any("distributed" in str(text) for text in (*names, *homes)):
            return True
    return False


@contextlib.contextmanager
def unlogged() -> Iterator[None]:
    """Keep torch from logging the failures on fake tensors that we deal with."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before


class _Casting(Seer):
    """Casts like the hooks of sharded modules with mixed precision, which do not run."""

    def on_module(
        self, module: nn.Module, call: Callable[..., object], args: Args, kwargs: Kwargs
    ) -> object:
        policy = shard_precision(module)
        if policy is None:
            return call(*args, **kwargs)
        if policy.cast_forward_inputs and policy.param_dtype is not None:
            args, kwargs = map_leaves(_cast_to(policy.param_dtype), (args, kwargs))
        output = call(*args, **kwargs)
        if policy.output_dtype is not None:
            output = map_leaves(_cast_to(policy.output_dtype), output)
        return output


def _cast_to(dtype: torch.dtype) -> Callable[[object], object]:
    def cast(leaf: Any) -> object:
        is_float = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
        return leaf.to(dtype) if is_float else leaf

    return cast


def fake_mode() -> FakeTensorMode:
    """Make a fake mode with symbolic sizes that takes stray real tensors as they come."""
    env = TracedSizes(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True)
    mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
    # With symbolic sizes looking results up costs more than computing them.
    mode.cache_enabled = False
    return mode


class Left:
    """A `with` block outside of a fake mode, which must be the innermost mode."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode

    def __enter__(self) -> None:
        self._mode.__exit__(None, None, None)

    def __exit__(self, *error: object) -> None:
        self._mode.__enter__()


def on_trace_device(tensor: torch.Tensor) -> torch.device:
    """Return the device a tensor counts as being on during a trace."""
    return _CPU if tensor.is_meta else tensor.device


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """One place where a module keeps a tensor."""

    place: dict[str, Any]
    key: str
    real: torch.Tensor
    fake: torch.Tensor


class FakeState:
    """The parameters, buffers and tensor attributes of a model, and fakes for them."""

    def __init__(
        self,
        mode: FakeTensorMode,
        module: nn.Module,
        *,
        all_trainable: bool,
        cast: Mapping[torch.dtype, torch.dtype] | None = None,
    ) -> None:
        self._mode = mode
        self._cast = cast or {}
        self._fakes: dict[int, torch.Tensor] = {}
        self._slots: list[Slot] = []
        self._slots_of: dict[int, list[Slot]] = {}
        self.real_of: dict[int, torch.Tensor] = {}
        self.is_sharded = False  # a run on the real tensors would start collectives
        self._all_trainable = all_trainable
        with mode:
            self._find(module, None, set())

    def _find(self, module: nn.Module, gathered: torch.dtype | None, seen: set[int]) -> None:
        """Find the tensors of a module; `gathered` is what sharded parameters become."""
        if id(module) in seen:
            return
        seen.add(id(module))
        policy = shard_precision(module)
        gathered = gathered if policy is None else policy.param_dtype
        if isinstance(module, torch.jit.ScriptModule):
            return  # it runs on its own tensors
        for place in (parameters_of(module), buffers_of(module), module.__dict__):
            found = list(self._slots_in(place, gathered))
            self._slots += found
            if place is not module.__dict__:
                self._slots_of.setdefault(id(module), []).extend(found)
        for child in module.children():
            self._find(child, gathered, seen)

    def _slots_in(self, place: dict[str, Any], gathered: torch.dtype | None) -> Iterator[Slot]:
        for key, value in place.items():
            if not isinstance(value, torch.Tensor):
                continue
            sharded = local_tensor(value) is not value
            self.is_sharded |= sharded
            if sharded or _is_plain(value):
                becomes = gathered if sharded and _is_float(value) else None
                yield Slot(place, key, value, self._fake_of(value, becomes))

    def _fake_of(self, real: torch.Tensor, becomes: torch.dtype | None) -> torch.Tensor:
        if id(real) not in self._fakes:
            dtype = becomes or self._cast.get(real.dtype, real.dtype)
            made = torch.empty_strided(
                real.shape, real.stride(), dtype=dtype, device=on_trace_device(real)
            )
            if isinstance(real, nn.Parameter):
                wanted = real.requires_grad or (self._all_trainable and _is_float(real))
                made = nn.Parameter(made, requires_grad=wanted)
            elif real.requires_grad:
                made = grown(made)
            self._fakes[id(real)] = made
            self.real_of[id(made)] = real
        return self._fakes[id(real)]

    @contextlib.contextmanager
    def trainable(self, module: nn.Module) -> Iterator[None]:
        """Have a module's own parameters require gradients where their fakes do, until exit."""
        before = [(p, p.requires_grad) for p in module.parameters() if p.is_leaf]
        try:
            for parameter, _ in before:
                fake = self._fakes.get(id(parameter))
                if fake is not None and fake.requires_grad:
                    parameter.requires_grad_(True)
            yield
        finally:
            for parameter, flag in before:
                parameter.requires_grad_(flag)

    def is_swapped(self, module: nn.Module) -> bool:
        """Say whether a module holds other parameters or buffers than its own fakes."""
        own = self._slots_of.get(id(module), ())
        return any(slot.place.get(slot.key) is not slot.fake for slot in own)

    def reassigned(self) -> list[Slot]:
        """Return the places that hold something else than their fake now."""
        return [slot for slot in self._slots if slot.place.get(slot.key) is not slot.fake]

    @contextlib.contextmanager
    def fake(self) -> Iterator[None]:
        """Have the model hold fakes; `preserved` around it puts everything back."""
        for slot in self._slots:
            slot.place[slot.key] = slot.fake
        try:
            yield
        finally:
            self._put_reals()

    @contextlib.contextmanager
    def real(self) -> Iterator[None]:
        """Have the model hold its own tensors again, for a run on real ones.

        Afterwards it holds what it held: a fake, or what traced code has put in its place.
        """
        missing = object()
        held = [slot.place.get(slot.key, missing) for slot in self._slots]
        self._put_reals()
        try:
            yield
        finally:
            for slot, value in zip(self._slots, held, strict=True):
                slot.place[slot.key] = value
                if value is missing:
                    del slot.place[slot.key]

    def _put_reals(self) -> None:
        for slot in self._slots:
            slot.place[slot.key] = slot.real


def _is_plain(tensor: torch.Tensor) -> bool:
    is_known = type(tensor) in (torch.Tensor, nn.Parameter) or isinstance(tensor, nn.Buffer)
    return is_known and tensor.layout is torch.strided


def _is_float(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _mode_of(inputs: object) -> FakeTensorMode | None:
    found = (leaf.fake_mode for _, leaf in walk(inputs) if isinstance(leaf, FakeTensor))
    return next(found, None)


def _faked(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if isinstance(tensor, FakeTensor) else another(tensor)
