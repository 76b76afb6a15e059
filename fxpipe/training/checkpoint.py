"""Save a run and go on with it, on the same or on another number of stages.

    extra = {"lr": lr_schedule, "data": loader}
    save_checkpoint("run", schedule, optimizer, step=100, extra=extra)
    step = load_checkpoint("run", schedule, optimizer, extra=extra).step

All ranks call, those of replicas too. torch.distributed.checkpoint writes: every rank its own
tensors, equal ones only once, sharded ones in parts. What is saved is found again by the names
of the plain model, so any split, schedule or number of ranks loads it, and so does the plain
model itself (`load_checkpoint("run", model)`).

Each save is a new folder below `path`, and counts once its `.metadata` is there, which is
written last and renamed: a job that is cut off leaves the checkpoint before. Loading takes the
newest. Random number generators are restored by rank; they give the same draws where the split
is the same.

Files hold tensors and plain data only, and are read as such: opening a stranger's checkpoint
runs no code of the stranger's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from fxpipe.errors import InputError
from fxpipe.runtime.control.control import Control, agree_on, check_same
from fxpipe.training.restore import Restoring, own_extra
from fxpipe.training.state import (
    Optimizers,
    Part,
    Source,
    agreed,
    check_memory,
    check_nothing_lost,
    check_optimizers,
    check_plain,
    digests,
    gloo_world,
    optimizer_state,
    parts_of,
    random_state,
    set_random_state,
    together,
)
from fxpipe.training.storage import PLAIN, Reader, Writer, as_tensor, in_words, newest, next_name

__all__ = ["Restored", "load_checkpoint", "save_checkpoint"]


@dataclass(frozen=True, slots=True)
class Restored:
    """What a checkpoint says beyond what it was loaded into."""

    step: int
    extra: Mapping[str, Any]
    """What was saved as `extra`: plain values, and the state of objects."""
    path: Path


def save_checkpoint(
    path: str | Path,
    source: Source,
    optimizer: Optimizers | None = None,
    *,
    step: int = 0,
    extra: Mapping[str, Any] | None = None,
    keep: int | None = None,
    wait: bool = True,
) -> Future[Any]:
    """Save everything a run needs below the folder `path`. Call it on every rank.

    Args:
        path: a folder that all ranks see.
        source: a schedule, its stages, or a plain model.
        optimizer: one, or several; saved by parameter name.
        step: a number by which to find the place again.
        extra: by name, objects with a `state_dict()` (learning rate schedule, data loader,
            gradient scaler) or plain values (an epoch).
        keep: remove all but the newest so many checkpoints once this one is complete.
        wait: return when it is written; otherwise as soon as everything is copied. The next
            save waits for this one; wait for the last one yourself: `saving.result()`.

    Returns:
        a future that is done when the checkpoint is complete.

    Raises:
        InputError: on all ranks: something is no plain data, or ranks name different folders.
    """
    _finish_writing()
    run, parts = Path(path), parts_of(source)
    with together("save_checkpoint", source, default_alone=False) as control:
        control.exchange([])
        tensors, name = _agreed_state(control, run, parts, optimizer, step, extra or {}, keep)
        is_alone = control.size == 1
    group = None if is_alone else gloo_world()
    how: dict[str, Any] = {"storage_writer": Writer(run, name, keep), "process_group": group}
    if not wait:
        writing: Any = async_save(tensors, no_dist=is_alone, **how)
        saving = _Saving(run / name)
        writing.add_done_callback(saving.take)
        _WRITING.append(saving)
        return saving
    try:
        save(tensors, no_dist=is_alone, **how)
    except BaseException as error:
        raise in_words(error, run / name, "written") from None
    done: Future[Any] = Future()
    done.set_result(None)
    return done


def load_checkpoint(
    path: str | Path,
    source: Source,
    optimizer: Optimizers | None = None,
    *,
    step: int | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Restored:
    """Load the newest complete checkpoint below `path`. Call it on every rank.

    Each rank reads only what its own stages need. A plain model is loaded by any process alone.

    Args:
        source, optimizer, extra: as for `save_checkpoint`, from any split. Objects with
            `load_state_dict` are loaded; everything is in the result as well.
        step: load the checkpoint of this step instead.

    Raises:
        InputError: on all ranks: there is none, or names, sizes or groups do not fit;
            nothing has been changed then.
    """
    _finish_writing()
    parts = parts_of(source)
    with together("load_checkpoint", source, default_alone=True) as control:
        problem: BaseException | None = None
        chosen, used = "", None
        control.exchange([])
        try:
            check_memory(parts)
            saved = Reader(newest(Path(path), step))
            chosen = saved.folder.name
            found = own_extra(saved.plain["extra"], control.rank, control.size)
            missing = [name for name in extra or {} if name not in found]
            if missing:
                raise InputError(f"the checkpoint {saved.folder} has no extra {missing}")
            restoring = Restoring(saved, parts, optimizer)
            used = restoring.used()
        except Exception as error:
            problem = error
        everybody = agree_on(control, "the checkpoint to load", chosen, problem, used)
        with control.alike():
            restoring.check_rest(everybody)
        with agreed(control):
            restoring.run()
            for name, target in (extra or {}).items():
                if hasattr(target, "load_state_dict"):
                    target.load_state_dict(found[name])
            generators = saved.plain["random"]
            set_random_state(generators[control.rank % len(generators)], parts)
    return Restored(saved.plain["step"], found, saved.folder)


def _agreed_state(
    control: Control,
    run: Path,
    parts: Sequence[Part],
    optimizer: Optimizers | None,
    step: int,
    extra: Mapping[str, Any],
    keep: int | None,
) -> tuple[dict[str, torch.Tensor], str]:
    """The tensors of this rank by their names, and the folder; all ranks have agreed."""
    with agreed(control):
        if keep is not None and keep < 1:
            raise InputError(f"keep must be at least 1, got {keep}: the new checkpoint counts")
        if type(step) is not int or step < 0:
            raise InputError(f"step must be a whole number of at least 0, got {step!r}")
        check_memory(parts)
        if optimizer is not None:
            check_optimizers(parts, optimizer)
            check_nothing_lost(parts, optimizer)
        for part in parts:
            for key, value in part.others().items():
                check_plain(value, repr(key))
        mine = {
            "folder": next_name(run, step),
            "run": str(run),
            "step": step,
            "names": {p.stage: [*p.tensors(), *p.others()] for p in _uncertain(parts)},
            "extra": {name: _saved_as(name, value) for name, value in extra.items()},
            "random": random_state(parts),
            "num_stages": max((part.num_stages for part in parts), default=1),
        }
    said = control.gather(mine)
    runs = {one["run"] for one in said}
    with control.alike():
        check_same("step", [one["step"] for one in said])
        if len(runs) > 1:
            raise InputError(f"all ranks must save to one folder that all see, got {sorted(runs)}")
    own = _own_names(control, said, parts)
    with agreed(control):
        tensors, about = _local_state(parts, optimizer, own)
    described_by_ranks = control.gather(about)
    if control.rank == 0:
        whole: dict[str, Any] = {"step": step, "own": sorted(own)}
        whole["num_stages"] = max(one["num_stages"] for one in said)
        whole |= {key: [one[key] for one in said] for key in ("extra", "random")}
        for key in about:
            whole[key] = {k: v for one in described_by_ranks for k, v in one[key].items()}
        tensors[PLAIN] = as_tensor(whole)
    return tensors, said[0]["folder"]


def _local_state(
    parts: Sequence[Part], optimizer: Optimizers | None, own: frozenset[str]
) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, Any]]]:
    """The tensors of this rank, and by name all its state that is not a tensor."""
    tensors: dict[str, torch.Tensor] = {}
    about: dict[str, dict[str, Any]] = {"state": {}, "groups": {}, "tensors": {}}
    for part in parts:
        for name, tensor in part.tensors().items():
            tensors[f"{part.place(name, own)}model/{name}"] = tensor
        for name, value in part.others().items():
            about["state"][f"{part.place(name, own)}model/{name}"] = value
        if optimizer is None:
            continue
        devices = {name: p.device for name, p in part.parameters().items()}
        for name, state, group in optimizer_state(part, optimizer):
            key = f"{part.place(name, own)}optimizer/{name}"
            held = {k: v for k, v in state.items() if isinstance(v, torch.Tensor)}
            tensors |= {f"{key}/{k}": v.detach() for k, v in held.items()}
            rest = {k: v for k, v in state.items() if k not in held}
            about["state"][key] = check_plain(rest, f"the optimizer's state of {name!r}")
            about["groups"][key] = check_plain(group, f"the parameter group of {name!r}")
            shaped = {k: v.device == devices[name] and v.dim() > 0 for k, v in held.items()}
            about["tensors"][key] = shaped
    return tensors, about


def _uncertain(parts: Sequence[Part]) -> list[Part]:
    """Hand-written stages: what they call their state may be called so elsewhere."""
    return [part for part in parts if not part.has_original_names]


def _own_names(control: Control, said: Sequence[Any], parts: Sequence[Part]) -> frozenset[str]:
    """Names that several hand-written stages give to different values."""
    stages: dict[str, set[int]] = {}
    for one in said:
        for stage, names in one["names"].items():
            for name in names:
                stages.setdefault(name, set()).add(stage)
    several = {name for name, found in stages.items() if len(found) > 1}
    if not several:
        return frozenset()
    values: dict[str, dict[int, list[str]]] = {name: {} for name in several}
    for found in control.gather(digests(_uncertain(parts), several)):
        for key, digest in found.items():
            stage, _, name = key.partition("/")
            values[name].setdefault(int(stage), []).append(digest)
    tied = {name for name, by in values.items() if len({tuple(v) for v in by.values()}) == 1}
    return frozenset(several - tied)


def _saved_as(name: str, value: Any) -> Any:
    state = value.state_dict() if hasattr(value, "state_dict") else value
    return check_plain(state, f"extra {name!r}")


class _Saving(Future[Any]):
    """A save that is written in the background. It knows whether anybody has asked how it went."""

    is_told = False

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def take(self, other: Future[Any]) -> None:
        error = other.exception()
        if error is None:
            self.set_result(None)
        else:
            self.set_exception(in_words(error, self._folder, "written"))

    def result(self, timeout: float | None = None) -> Any:
        try:
            return super().result(timeout)
        finally:
            self.is_told = self.is_told or self.done()


_WRITING: list[_Saving] = []


def _finish_writing() -> None:
    """Wait for the save that is still written in the background, and raise what nobody has seen."""
    while _WRITING:
        saving = _WRITING.pop()
        wait_for([saving])
        if not saving.is_told:
            saving.result()
