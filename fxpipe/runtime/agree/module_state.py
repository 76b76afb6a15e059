"""Notice that a module is not what it was when something was remembered about it.

Plans remember parameters, modes and shapes. Users replace and change modules between steps:
`load_state_dict(assign=True)`, `stage.submod = ...`, `train()`, freezing, casting, hooks. So the
key of a plan has everything of a module that a plan depends on; objects are compared by identity.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fxpipe.errors import InputError
from fxpipe.runtime.stage.stage_kind import Stage
from fxpipe.torch_inside import (
    backward_hooks,
    buffers_of,
    children_of,
    forward_hooks,
    forward_pre_hooks,
    parameters_of,
)

__all__ = ["ModuleState", "surroundings"]


class ModuleState:
    """The modules of this process's stages. `epoch` counts how often objects were replaced."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = stages
        self._objects: list[Any] = []
        self.epoch = 0
        self.modules: list[tuple[str, nn.Module]] = []
        """All modules with their names, as the latest `key` found them."""
        self.parameters: list[Any] = []

    def key(self) -> tuple[Any, ...]:
        """Equal for two states that a plan need not tell apart."""
        objects: list[Any] = []
        flags: list[Any] = []
        seen: set[int] = set()
        for stage in self._stages:
            objects.append(stage.dw_builder)
            if not isinstance(stage.submod, nn.Module):
                raise InputError(
                    f"the submod of stage {stage.stage_index} must be a torch.nn.Module, got "
                    f"{type(stage.submod).__name__}"
                )
            _collect(stage.submod, objects, flags, seen)
        same = len(objects) == len(self._objects) and all(map(operator.is_, objects, self._objects))
        if not same:
            self._objects = objects  # kept alive: no other object can get the same address
            self.epoch += 1
            self.modules = [
                found
                for stage in self._stages
                for found in stage.submod.named_modules(prefix=f"stage {stage.stage_index}")
            ]
            self.parameters = list(
                {id(p): p for p in objects if isinstance(p, torch.Tensor)}.values()
            )
        return (self.epoch, *flags)


def _collect(module: nn.Module, objects: list[Any], flags: list[Any], seen: set[int]) -> None:
    if id(module) in seen:
        return
    seen.add(id(module))
    objects.append(module)
    flags.append(module.training)
    hooks = (forward_hooks(module), forward_pre_hooks(module), backward_hooks(module))
    flags.extend(tuple(some) for some in hooks if some)
    for p in parameters_of(module).values():
        if p is not None:
            objects.append(p)
            flags += (p.requires_grad, p.dtype, p.shape)
    for b in buffers_of(module).values():
        if b is not None:
            flags += (b.dtype, b.shape)
    for child in children_of(module).values():
        if child is not None:
            _collect(child, objects, flags, seen)


def surroundings(device_types: Sequence[str]) -> tuple[Any, ...]:
    """Settings outside of modules that what they compute depends on."""
    autocast = [
        (kind, torch.get_autocast_dtype(kind))
        for kind in device_types
        if torch.is_autocast_enabled(kind)
    ]
    return (*autocast, torch.get_default_dtype(), torch.is_inference_mode_enabled())
