"""The state of a run as one flat dictionary of tensors, by names of the plain model.

    model/blocks.0.norm.weight              a parameter or buffer
    optimizer/blocks.0.norm.weight/exp_avg  what the optimizer holds for it
    plain                                   everything that is no tensor, as JSON in bytes

So what four stages have saved is what two stages, or the plain model, look for. Hand-written
stages may use one name for different things (`linear.weight` in each): such a name belongs to
its stage and stands below `stage3/`.

All processes save and load together, replicas included, or one process by itself: `together`.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import random
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import nn

from fxpipe.errors import InputError
from fxpipe.runtime.agree.arguments import timeout_seconds
from fxpipe.runtime.control.control import Control, agree
from fxpipe.runtime.control.group_control import control_of
from fxpipe.runtime.parameters.tied import local, plain_name
from fxpipe.runtime.stage.stage_kind import TracedFront
from fxpipe.runtime.wire.failure import Deadline
from fxpipe.runtime.wire.local_group import LocalGroup, resolve_group
from fxpipe.runtime.wire.plain import dumps
from fxpipe.stage import PipelineStage

__all__ = [
    "Optimizers",
    "Part",
    "Source",
    "agreed",
    "check_memory",
    "check_nothing_lost",
    "check_optimizers",
    "check_plain",
    "digests",
    "gloo_world",
    "listed",
    "optimizer_state",
    "parts_of",
    "random_state",
    "set_random_state",
    "stages_of",
    "together",
]


@runtime_checkable
class HasStages(Protocol):
    """A schedule or a `Pipeline`."""

    @property
    def stages(self) -> Sequence[PipelineStage]: ...


Source = nn.Module | PipelineStage | Sequence[PipelineStage] | HasStages
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


@dataclass(frozen=True, slots=True)
class Part:
    """A module of this process and the names of its state. A plain model is stage None."""

    module: nn.Module
    device: torch.device | None
    stage: int | None
    num_stages: int
    has_original_names: bool

    def tensors(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers, which share memory with the module."""
        found = self.module.state_dict().items()
        return {plain_name(k): v.detach() for k, v in found if isinstance(v, torch.Tensor)}

    def others(self) -> dict[str, Any]:
        """What `get_extra_state` of modules gave that is no tensor."""
        found = self.module.state_dict().items()
        return {plain_name(k): v for k, v in found if not isinstance(v, torch.Tensor)}

    def set_others(self, values: Mapping[str, Any]) -> None:
        """Give modules with `set_extra_state` what they gave."""
        if values:
            keys = {plain_name(key): key for key in self.module.state_dict()}
            found = {keys[name]: value for name, value in values.items()}
            self.module.load_state_dict(found, strict=False)

    def parameters(self) -> dict[str, nn.Parameter]:
        named = self.module.named_parameters(remove_duplicate=False)
        return {plain_name(name): p for name, p in named}

    def place(self, name: str, own: frozenset[str]) -> str:
        """Where a name stands: below its stage if it is the stage's own."""
        return f"stage{self.stage}/" if name in own else ""


def stages_of(source: Source) -> list[PipelineStage]:
    """The stages of this process; none for a plain model."""
    if isinstance(source, nn.Module):
        return []
    if isinstance(source, PipelineStage):
        return [source]
    return list(source.stages if isinstance(source, HasStages) else source)


def parts_of(source: Source) -> list[Part]:
    if isinstance(source, nn.Module):
        return [Part(source, None, None, 1, True)]
    return [
        Part(s.submod, s.device, s.stage_index, s.num_stages, isinstance(s.front, TracedFront))
        for s in stages_of(source)
    ]


def check_memory(parts: Sequence[Part]) -> None:
    """Refuse a model that is still on the meta device.

    Raises:
        InputError: names a tensor without memory.
    """
    for part in parts:
        for name, tensor in part.tensors().items():
            if tensor.is_meta:
                raise InputError(
                    f"{name!r} is on the meta device and has no values: call load_weights() or "
                    "materialize() first, and make the optimizer after it"
                )


def check_optimizers(parts: Sequence[Part], optimizers: Optimizers) -> None:
    """Refuse an optimizer that holds none of these parameters: nothing of it would be saved.

    Raises:
        InputError: an optimizer has parameters, and none of these.
    """
    held = [p for part in parts for p in part.parameters().values()]
    known = {id(p) for p in held}
    # An optimizer cannot be empty: where all is frozen it holds something that nobody trains.
    for optimizer in listed(optimizers) if any(p.requires_grad for p in held) else ():
        theirs = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if theirs and not theirs & known:
            raise InputError(
                f"{type(optimizer).__name__} holds none of the {len(known)} parameters of these "
                "stages: make it of their parameters, and after load_weights(), materialize() or "
                "fully_shard(), which replace them"
            )


def check_nothing_lost(parts: Sequence[Part], optimizers: Optimizers) -> None:
    """Refuse to save a part of what optimizers remember.

    Raises:
        InputError: an optimizer has states of parameters that are in no stage.
    """
    known = {id(p) for part in parts for p in part.parameters().values()}
    for optimizer in listed(optimizers):
        others = [
            list(p.shape) for p, held in optimizer.state.items() if held and id(p) not in known
        ]
        if others:
            raise InputError(
                f"{type(optimizer).__name__} has states of {len(others)} parameters that are in no "
                f"stage of this process (sizes {others[:3]}), such as those of a loss: give these "
                "an optimizer of their own, and save it and its module as extra"
            )


def optimizer_state(
    part: Part, optimizers: Optimizers
) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """For each parameter that an optimizer holds: its name, state, and values of its group."""
    pairs = [(one, group) for one in listed(optimizers) for group in one.param_groups]
    groups = {id(p): (one, group) for one, group in pairs for p in group["params"]}
    for name, p in part.parameters().items():
        if id(p) in groups:
            optimizer, group = groups[id(p)]
            values = {key: value for key, value in group.items() if key not in _NOT_VALUES}
            yield name, dict(optimizer.state.get(p, {})), values


_NOT_VALUES = ("params", "param_names")


def listed(optimizers: Optimizers) -> Sequence[torch.optim.Optimizer]:
    return optimizers if isinstance(optimizers, Sequence) else [optimizers]


def digests(parts: Sequence[Part], names: set[str]) -> dict[str, str]:
    """A digest of each value that has one of these names, by `stage/name`."""
    found = {}
    for part in parts:
        for name, value in {**part.tensors(), **part.others()}.items():
            if name in names:
                content = _content(value)
                found[f"{part.stage}/{name}"] = hashlib.sha256(content).hexdigest()
    return found


def _content(value: Any) -> bytes:
    if not isinstance(value, torch.Tensor):
        return dumps(value)
    whole = local(value).cpu().contiguous()
    return ctypes.string_at(whole.data_ptr(), whole.nbytes)


def random_state(parts: Sequence[Part]) -> dict[str, Any]:
    """The state of every random number generator of this process."""
    state: dict[str, Any] = {"python": random.getstate(), "cpu": torch.get_rng_state()}
    if numpy := sys.modules.get("numpy"):
        kind, keys, *rest = numpy.random.get_state()
        state["numpy"] = (kind, keys.tolist(), *rest)
    for kind in _device_types(parts):
        state[kind] = torch.get_device_module(kind).get_rng_state()
    return state


def set_random_state(state: Mapping[str, Any], parts: Sequence[Part]) -> None:
    random.setstate(state["python"])
    torch.set_rng_state(state["cpu"])
    if (numpy := sys.modules.get("numpy")) and "numpy" in state:
        numpy.random.set_state(state["numpy"])
    for kind in _device_types(parts):
        if kind in state:
            torch.get_device_module(kind).set_rng_state(state[kind])


def _device_types(parts: Sequence[Part]) -> list[str]:
    devices = {p.device for part in parts for p in part.module.parameters()}
    return sorted({device.type for device in devices} - {"cpu", "meta"})


def check_plain(value: Any, where: str) -> Any:
    """The value itself, if a checkpoint can hold it.

    Raises:
        InputError: it is not made of tensors, numbers, strings and containers of these.
    """
    try:
        dumps(value)
    except InputError as error:
        raise InputError(
            f"{where} holds a {type(value).__name__} that a checkpoint cannot hold ({error}): "
            "tensors, numbers, strings and lists, tuples and dicts of these can be saved"
        ) from None
    return value


_GLOO: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def together(name: str, source: Source, *, default_alone: bool) -> Iterator[Control]:
    """One of `control.CALLS`, made by all processes; alone where all stages are in this one.

    The block begins with an exchange, which notices ranks that make different calls. A process
    without stages takes part. `default_alone` says what a plain model is: this process's own
    affair, or everybody's.
    """
    stages = stages_of(source)
    is_alone = not (dist.is_available() and dist.is_initialized())
    is_alone |= any(isinstance(resolve_group(stage.group), LocalGroup) for stage in stages)
    is_alone |= default_alone and isinstance(source, nn.Module)
    deadline = Deadline(timeout_seconds(None))
    control: Control = Control() if is_alone else control_of(_world(), deadline)
    with control.call(name, 0, deadline, lambda: name):
        yield control


@contextlib.contextmanager
def agreed(control: Control) -> Iterator[None]:
    """Around work of each rank, in the block of `together`: if it fails on one, all raise."""
    problem: BaseException | None = None
    try:
        yield
    except Exception as error:
        problem = error
    agree(control, problem)


def gloo_world() -> dist.ProcessGroup:
    """A gloo group of all processes, made once. All of them must call this together."""
    world = _world()
    if world not in _GLOO:
        made: Any = dist.new_group(backend="gloo")  # for who is not in it, a number
        _GLOO[world] = made
    return _GLOO[world]


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group
