"""Bring what a checkpoint holds into modules and optimizers, whatever their split.

First everything is looked up and compared (`Restoring`), then read (`Restoring.run`): a
checkpoint that does not fit changes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fxpipe.errors import InputError
from fxpipe.runtime.wire.plain import dumps
from fxpipe.training.state import Optimizers, Part, check_optimizers, listed
from fxpipe.training.storage import Reader

__all__ = ["Restoring", "own_extra"]


class Restoring:
    """What goes where.

    Raises:
        InputError: names that the checkpoint lacks, sizes that differ, other groups.
    """

    def __init__(self, saved: Reader, parts: Sequence[Part], optimizers: Optimizers | None) -> None:
        self._saved, self._parts = saved, parts
        self._own = frozenset(saved.plain["own"])
        self._optimizers = () if optimizers is None else listed(optimizers)
        self._states: list[tuple[torch.optim.Optimizer, nn.Parameter, str]] = []
        self._groups: list[tuple[dict[str, Any], Any]] = []
        self._check_own_names()
        self._check_tensors()
        check_optimizers(parts, self._optimizers)
        for optimizer in self._optimizers:
            self._find_states(optimizer)

    def run(self) -> None:
        """Read the tensors and set the rest."""
        tensors: dict[str, torch.Tensor] = {}
        for part in self._parts:
            for name, tensor in part.tensors().items():
                tensors[self._key(part, name)] = tensor
        states = [(o, p, self._room(p, key)) for o, p, key in self._states]
        for (_, _, key), (_, _, room) in zip(self._states, states, strict=True):
            tensors |= {f"{key}/{name}": tensor for name, tensor in room.items()}
        self._saved.fill(tensors)
        values = self._saved.plain["state"]
        for (optimizer, p, room), (_, _, key) in zip(states, self._states, strict=True):
            optimizer.state[p] = {**values.get(key, {}), **room}
        for group, found in self._groups:
            group.update(found)
        for part in self._parts:
            part.set_others({name: values[self._key(part, name)] for name in part.others()})

    def used(self) -> tuple[list[tuple[int | None, int]], list[str]]:
        """(stage, number of stages) for each part of this process, and the names that it loads."""
        stages = [(part.stage, part.num_stages) for part in self._parts]
        names = [(part, name) for part in self._parts for name in (*part.tensors(), *part.others())]
        return stages, [self._key(part, name) for part, name in names]

    def check_rest(self, used: Sequence[tuple[Any, Any]]) -> None:
        """Look for what no rank loads, given what each uses.

        Raises:
            InputError: all stages are here, and the checkpoint holds more: of another model.
        """
        stages = {tuple(one) for some, _ in used for one in some}
        is_whole = all(len(stages) >= count for _, count in stages)
        every = {*self._saved.sizes, *self._saved.plain["state"]}
        saved = {key for key in every if re.match(r"(stage\d+/)?model/", key)}
        rest = sorted(saved.difference(*(keys for _, keys in used)))
        if stages and is_whole and rest:
            raise InputError(
                f"the checkpoint {self._saved.folder} holds {len(rest)} names that the model "
                f"lacks: {[key.partition('model/')[2] for key in rest[:5]]}"
            )

    def _key(self, part: Part, name: str) -> str:
        return f"{part.place(name, self._own)}model/{name}"

    def _check_own_names(self) -> None:
        was = self._saved.plain["num_stages"]
        for part in self._parts:
            wanted = {*part.tensors(), *part.others()}
            mixed = sorted(wanted & self._own)
            if mixed and part.num_stages != was:
                raise InputError(
                    f"{mixed[0]!r} has different values in the {was} hand-written stages of "
                    f"{self._saved.folder}, so it loads only into the same number of stages, "
                    f"not into {part.num_stages}"
                )

    def _check_tensors(self) -> None:
        sizes, values = self._saved.sizes, self._saved.plain["state"]
        missing, others = [], []
        for part in self._parts:
            missing += [n for n in part.others() if self._key(part, n) not in values]
            for name, tensor in part.tensors().items():
                found = sizes.get(self._key(part, name))
                if found is None:
                    missing.append(name)
                elif found.size != tensor.shape:
                    others.append(f"{name}: saved {list(found.size)}, here {list(tensor.shape)}")
        if missing:
            raise InputError(
                f"the checkpoint {self._saved.folder} lacks {len(missing)} names: "
                f"{sorted(missing)[:5]}"
            )
        if others:
            raise InputError(
                f"{len(others)} tensors of the checkpoint {self._saved.folder} have other "
                "sizes:\n  " + "\n  ".join(others[:5])
            )

    def _find_states(self, optimizer: torch.optim.Optimizer) -> None:
        saved = self._saved.plain["groups"]
        names = {id(p): (part, n) for part in self._parts for n, p in part.parameters().items()}
        for group in optimizer.param_groups:
            first: tuple[str, dict[str, Any]] | None = None
            for p in group["params"]:
                if id(p) not in names:
                    continue
                part, name = names[id(p)]
                key = f"{part.place(name, self._own)}optimizer/{name}"
                if key not in saved:
                    raise InputError(
                        f"the checkpoint {self._saved.folder} has no optimizer state of {name!r}"
                    )
                first = first or (name, saved[key])
                lacking = set(optimizer.defaults).difference(saved[key])
                if lacking and not set(saved[key]) <= {*optimizer.defaults, "initial_lr"}:
                    raise InputError(
                        f"{name!r} was saved by another kind of optimizer, with {saved[key]}, but "
                        f"{type(optimizer).__name__} needs {sorted(lacking)}: load without it"
                    )
                if dumps(first[1]) != dumps(saved[key]):
                    raise InputError(
                        f"{first[0]!r} and {name!r} are in one parameter group of the optimizer, "
                        f"but were saved with {first[1]} and {saved[key]}: make the groups as "
                        "they were"
                    )
                self._states.append((optimizer, p, key))
            if first is not None:
                self._groups.append((group, first[1]))

    def _room(self, p: nn.Parameter, key: str) -> dict[str, torch.Tensor]:
        """Memory for what the optimizer held of a parameter."""
        rooms = {}
        for name, is_beside in self._saved.plain["tensors"].get(key, {}).items():
            found = self._saved.sizes[f"{key}/{name}"]
            dtype = found.properties.dtype
            if found.size == p.shape and is_beside:
                rooms[name] = torch.empty_like(p, dtype=dtype).detach()
            else:  # a count of steps, most often, which optimizers keep on the CPU
                device = p.device if is_beside else "cpu"
                rooms[name] = torch.empty(found.size, dtype=dtype, device=device)
        return rooms


def own_extra(saved: Sequence[Mapping[str, Any]], rank: int, num_ranks: int) -> Mapping[str, Any]:
    """What this rank has saved; with another number of ranks, what all had saved.

    Raises:
        InputError: the ranks saved different values, and there are more or fewer ranks now.
    """
    if len(saved) == num_ranks:
        return saved[rank]
    for name in saved[0]:
        if any(dumps(one.get(name)) != dumps(saved[0][name]) for one in saved):
            raise InputError(
                f"extra {name!r} was not the same on the {len(saved)} ranks that saved it; "
                f"{num_ranks} ranks cannot tell whose to take"
            )
    return saved[0]
