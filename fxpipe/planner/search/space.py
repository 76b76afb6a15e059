"""What may be chosen: the wishes of a user, refused before any work if they make no sense.

In:  values as people give them: one or several, None for "you choose".
Out: a `Space` of tuples, checked numbers and names, or a `PlanError` that names all faults.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fxpipe.errors import PlanError, ScheduleError
from fxpipe.planner.cost.training import CHECKPOINTS, Checkpointing, Training
from fxpipe.program.generators import get_schedule

__all__ = ["Space", "Wishes", "check_amount", "check_whole", "space_of", "wishes_of"]

Wishes = tuple[dict[str, int], tuple[tuple[str, ...], ...]]
"""The stage of each pinned module, and groups of modules that share a stage."""


@dataclass(frozen=True)
class Space:
    """What may be chosen; None leaves the choice to the planner."""

    schedules: tuple[str, ...] | None = None
    microbatch_sizes: tuple[int, ...] | None = None
    data_parallel: tuple[int, ...] | None = None
    stages_per_rank: tuple[int, ...] | None = None
    checkpointing: tuple[Checkpointing, ...] = CHECKPOINTS
    tensor_parallel: tuple[int, ...] = (1,)
    context_parallel: tuple[int, ...] = (1,)
    expert_parallel: tuple[int, ...] = (1,)
    sharding: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        faults = [
            f"{name} is {list(values)}"
            for name in (
                "stages_per_rank",
                "microbatch_sizes",
                "data_parallel",
                "tensor_parallel",
                "context_parallel",
                "expert_parallel",
            )
            if (values := getattr(self, name)) is not None
            and (not values or not all(_is_whole(value) and value >= 1 for value in values))
        ]
        if faults:
            raise PlanError(f"{'; '.join(faults)}; give whole numbers from 1 up")
        stages = self.sharding
        if not stages or not all(_is_whole(stage) and 0 <= stage <= 3 for stage in stages):
            raise PlanError(f"sharding is {list(stages)}; give stages of ZeRO, 0 to 3")
        for mode in self.checkpointing or ("",):
            try:
                Training(checkpointing=mode)  # type: ignore[arg-type]
            except PlanError as error:
                raise PlanError(
                    f"checkpointing is {list(self.checkpointing)}; known: "
                    f"{str(error).split('known: ')[-1]}"
                ) from error
        if self.schedules is not None:
            object.__setattr__(self, "schedules", _schedules(self.schedules))


def _schedules(names: tuple[str, ...]) -> tuple[str, ...]:
    if not names:
        raise PlanError("schedules is []; name at least one, or leave it out for all")
    try:
        found = tuple(get_schedule(name).name for name in names)
    except ScheduleError as error:
        raise PlanError(str(error)) from error
    if "ForwardOnly" in found:
        raise PlanError("ForwardOnly has no backward, and a plan is for training; leave it out")
    return found


def space_of(**choices: object) -> Space:
    """A space of what may be chosen: for each name one value, several, or None."""
    return Space(**{name: _several(name, value) for name, value in choices.items()})  # type: ignore[arg-type]


def _several(name: str, value: object) -> tuple[object, ...] | None:
    if value is None and getattr(Space, name) is not None:
        raise PlanError(f"{name} is None; give one choice or several")
    if value is None:
        return None
    if isinstance(value, Iterable) and not isinstance(value, str):
        return tuple(value)
    return (value,)


def check_whole(*, least: int = 1, **counts: object) -> None:
    """Refuse what is not a whole number from `least` up."""
    faults = [
        f"{name} is {value!r}"
        for name, value in counts.items()
        if not _is_whole(value) or value < least  # type: ignore[operator]
    ]
    if faults:
        raise PlanError(f"{'; '.join(faults)}; it must be a whole number from {least} up")


def check_amount(name: str, value: object) -> float:
    """A number of bytes above 0."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or math.isnan(value) or value <= 0:  # type: ignore[arg-type, operator]
        raise PlanError(f"{name} is {value!r}; it must be a number of bytes above 0, such as 40e9")
    return float(value)  # type: ignore[arg-type]


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def wishes_of(pin: object, together: object) -> Wishes:
    """Checked `pin` and `together`.

    Raises:
        PlanError: they are not of the form that is asked for.
    """
    pins = {} if pin is None else pin
    if not isinstance(pins, Mapping) or not all(
        isinstance(name, str) and _is_whole(stage) and stage >= 0 for name, stage in pins.items()
    ):
        raise PlanError(f"pin is {pin!r}; give the stage of modules by name, such as {{'head': 3}}")
    groups: list[tuple[str, ...]] = []
    for group in together if isinstance(together, Iterable) else (together,):
        names = () if isinstance(group, str) or not isinstance(group, Iterable) else tuple(group)
        if not names or not all(isinstance(name, str) for name in names):
            raise PlanError(
                f"together is {together!r}; give groups of names, such as [('embed', 'head')]"
            )
        groups.append(names)
    return dict(pins), tuple(groups)
