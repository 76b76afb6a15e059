"""What a stage does before each run: follow the model where it can, else refuse.

A stage has the user's own leaves, but containers of its own in place of the modules
that are split. Their parameters, buffers and training flags are copied from the model.
When the model gets others (`load_state_dict(assign=True)`, `.to(dtype)`, `.eval()`),
the stage takes them, unless it was given its own in the meantime, as by `fully_shard`
or by `stage.train()`. What the code read otherwise must be as it was: see `World`.

The guard is a hook in front of the stage's forward. A copy of a stage, and one that was
saved, stand for themselves and follow no model.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from fxpipe.errors import TraceError
from fxpipe.graph.guard.world import World
from fxpipe.torch_inside import children_of

__all__ = ["StageGuard"]


class _Tensor:
    """A parameter or buffer that a container of the stage has from the model."""

    __slots__ = ("_holder", "_home", "_key", "_last", "_name", "_owner")

    def __init__(self, name: str, owner: nn.Module, holder: nn.Module, home: str) -> None:
        self._name = name
        self._owner = weakref.ref(owner)
        self._holder = weakref.ref(holder)
        self._home = home
        self._key = name.rpartition(".")[2]
        self._last: Any = weakref.ref(getattr(owner, home)[self._key])

    def follow(self) -> None:
        owner, holder = self._owner(), self._holder()
        if owner is None or holder is None:
            return
        now, last = owner.__dict__[self._home].get(self._key), self._last()
        if now is last or last is None:
            return
        place = holder.__dict__[self._home]
        if place.get(self._key) is not last:
            return
        if not isinstance(now, torch.Tensor) or now.shape != last.shape:
            found = "None" if now is None else f"a tensor of size {list(now.shape)}"
            raise TraceError(
                f"{self._name} was of size {list(last.shape)} when pipeline() traced the model, "
                f"and is {found} now; call pipeline() again"
            )
        place[self._key] = now
        self._last = weakref.ref(now)


class _Flag:
    """The training flag of a container of the stage, as the model's module has it."""

    __slots__ = ("_holder", "_last", "_owner")

    def __init__(self, owner: nn.Module, holder: nn.Module) -> None:
        self._owner = weakref.ref(owner)
        self._holder = weakref.ref(holder)
        self._last = owner.training

    def follow(self) -> None:
        owner = self._owner()
        if owner is not None and owner.training is not self._last:
            holder = self._holder()
            if holder is not None and holder.training is self._last:
                holder.training = owner.training
            self._last = owner.training

    def settle(self) -> None:
        owner = self._owner()
        if owner is not None:
            self._last = owner.training

    @property
    def owner(self) -> nn.Module | None:
        return self._owner()

    def take(self) -> None:
        """Give the container the flag that its module has now."""
        owner, holder = self._owner(), self._holder()
        if owner is not None and holder is not None:
            holder.training = owner.training


class _Children:
    """The modules in one that is split: the stage holds those that were there."""

    __slots__ = ("_found", "_owner")

    def __init__(self, owner: nn.Module) -> None:
        self._owner = weakref.ref(owner)
        self._found = {
            name: None if child is None else weakref.ref(child)
            for name, child in children_of(owner).items()
        }

    def check(self) -> None:
        owner = self._owner()
        if owner is None:
            return
        now = children_of(owner)
        changed = [
            name
            for name, known in self._found.items()
            if now.get(name) is not (None if known is None else known())
        ]
        if isinstance(owner, nn.Sequential | nn.ModuleList | nn.ModuleDict):
            changed += [name for name in now if name not in self._found]
        if changed:
            raise TraceError(
                f"the module {changed[0]!r} of a {type(owner).__name__} is not the one that was "
                "there when pipeline() traced the model, and stages would go on with that; call "
                "pipeline() again"
            )


class StageGuard:
    """Called before each forward of a stage."""

    def __init__(self, world: World | None = None) -> None:
        self._world = world or World()
        self._tensors: list[_Tensor] = []
        self._flags: list[_Flag] = []
        self._children: list[_Children] = []
        self._read: dict[str, weakref.ref[nn.Module]] = {}
        self._traced: dict[str, bool] | None = None
        self._why = ""

    def tensor(self, name: str, owner: nn.Module, holder: nn.Module, home: str) -> None:
        """Follow a parameter or buffer of the model."""
        self._tensors.append(_Tensor(name, owner, holder, home))

    def flag(self, owner: nn.Module, holder: nn.Module) -> None:
        """Follow the training flag of a module of the model."""
        self._flags.append(_Flag(owner, holder))
        self._children.append(_Children(owner))

    def settle(self) -> None:
        """Take the flags that the model has now as known: those of a trial run are put back."""
        for flag in self._flags:
            flag.settle()

    def train(self, stage: nn.Module, mode: bool) -> None:
        """Set the flags of a stage as modules do that are split and have a `train` of their own.

        Those of modules in other stages stay as they are.
        """
        mine = {id(part) for part in stage.modules()}
        for flag in self._flags:
            owner: Any = flag.owner
            if owner is None or type(owner).train is nn.Module.train:
                continue
            before = {id(part): (part, part.training) for part in owner.modules()}
            owner.train(mode)
            for other in self._flags:
                if id(other.owner) in before:
                    other.take()
            for part, was in before.values():
                if id(part) not in mine:
                    part.training = was

    def modes(
        self,
        holders: Mapping[str, nn.Module],
        traced: Mapping[str, bool] | None,
        why: str = "",
    ) -> None:
        """Check the flags that the code read: as `traced`, or all the same if that is None.

        `why` says why the model could not be traced in the other mode.
        """
        self._why = why
        self._read = {name: weakref.ref(holder) for name, holder in holders.items()}
        self._traced = None if traced is None else dict(traced)

    def __call__(self, module: nn.Module, args: object) -> None:
        if torch.compiler.is_compiling():
            return
        for flag in self._flags:
            flag.follow()
        for tensor in self._tensors:
            tensor.follow()
        if len(self._read) > 1 or self._traced is not None:
            self._check_modes()
        self._world.check()
        for children in self._children:
            children.check()

    def _check_modes(self) -> None:
        now = {name: found.training for name, ref in self._read.items() if (found := ref())}
        if self._traced is None:
            if len(set(now.values())) > 1:
                raise TraceError(
                    "code that is split asks for the training flags of several modules, and was "
                    f"traced where all are the same; now {_modes(now.items())}\n"
                    "set all of them alike, or call pipeline() while they are as now"
                )
            return
        wrong = [(name, flag) for name, flag in now.items() if flag != self._traced[name]]
        if wrong and self._why:
            mode = "evaluation" if wrong[0][1] is False else "training"
            raise TraceError(f"the model could not be traced in {mode}: {self._why}")
        if wrong:
            raise TraceError(
                "the model was traced with some modules in training and others in evaluation: "
                f"{_modes(self._traced.items())}; now {_modes(wrong)}\n"
                "set the flags back, or call pipeline() again"
            )

    def __deepcopy__(self, memo: dict[int, object]) -> StageGuard:
        return StageGuard()

    def __reduce__(self) -> Any:
        return StageGuard, ()


def _modes(flags: Iterable[tuple[str, bool]]) -> str:
    return ", ".join(
        f"{name or 'the model'} is in {'training' if flag else 'evaluation'}"
        for name, flag in sorted(flags)
    )
