"""Save and load training state by original names, whatever the split.

    save_checkpoint("run/step100", schedule.stages, optimizer)
    load_checkpoint("run/step100", schedule.stages, optimizer)

Every stage writes one file with its parameters, buffers and optimizer state, keyed by
the names of the plain model, and loading reads from whichever files hold a name. So a
model saved with four stages loads into two stages, or into the plain model
(`load_checkpoint(path, model, optimizer)`), and the other way round. A tied
parameter is in the file of each stage that holds it; its copies are equal.

Hand-written stages may use one name for different things (`linear.weight` in each). Such
a name belongs to its stage: it is loaded from the file of the same stage, and refused
where the number of stages is another.

Files hold tensors and plain data only, and are read as such: opening a stranger's
checkpoint runs no code of the stranger's.

Limits: `fully_shard`ed stages hold a part of each parameter per rank; use
`torch.distributed.checkpoint` with their state dicts, whose keys are original names too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fxpipe.errors import InputError
from fxpipe.runtime.parameters.tied import plain_name
from fxpipe.runtime.stage.stage_kind import Stage

__all__ = ["load_checkpoint", "save_checkpoint"]

Source = nn.Module | Stage | Sequence[Stage]


def save_checkpoint(
    path: str | Path, stages: Source, optimizer: torch.optim.Optimizer | None = None
) -> None:
    """Write the state of these stages (or of a plain model) below the folder `path`.

    Call it on every rank; each writes its own files, named after the stages.
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    for label, module in _modules(stages):
        names = _names(module)
        content: dict[str, Any] = {
            "model": {
                plain_name(k): _plain(v, f"{label}, {k!r}") for k, v in module.state_dict().items()
            }
        }
        if any(hasattr(p, "to_local") for p in module.parameters()):
            raise InputError(
                f"{label} is sharded by fully_shard: save its state_dict() with "
                "torch.distributed.checkpoint, the keys are the original names"
            )
        if optimizer is not None:
            content["optimizer"] = {
                name: _plain(optimizer.state[p], f"the optimizer's state of {name!r}")
                for name, p in names.items()
                if p in optimizer.state
            }
            content["groups"] = [
                _plain({k: v for k, v in group.items() if k != "params"}, "a parameter group")
                for group in optimizer.param_groups
            ]
        # First under another name: a job that is cut off leaves the old file, not half a new one.
        part = folder / f"{label}.part"
        torch.save(content, part)
        part.rename(folder / f"{label}.pt")
        about = {"num_stages": _num_stages(stages), "names": sorted(content["model"])}
        (folder / f"{label}.json").write_text(json.dumps(about))


def load_checkpoint(
    path: str | Path, stages: Source, optimizer: torch.optim.Optimizer | None = None
) -> None:
    """Read the state of these stages (or of a plain model) from whatever was saved.

    Only files that hold a needed name are opened.

    Raises:
        InputError: names that no file below `path` holds; nothing has been changed then.
    """
    folder = Path(path)
    saved = {file.stem: _read(file) for file in sorted(folder.glob("*.json"))}
    if not saved:
        raise InputError(f"there is no checkpoint below {folder}")
    held = {label: about["names"] for label, about in saved.items()}
    modules = _modules(stages)
    wanted = {label: set(map(plain_name, m.state_dict())) for label, m in modules}
    missing = sorted(set[str]().union(*wanted.values()) - set[str]().union(*held.values()))
    if missing:
        raise InputError(f"the checkpoint {folder} lacks {len(missing)} names: {missing[:5]}")
    opened: dict[str, dict[str, Any]] = {}
    sources: dict[str, list[str]] = {}
    for label, _ in modules:
        # The stage's own file last: it has the last word.
        files = [one for one, names in held.items() if names & wanted[label] and one != label]
        sources[label] = files + [label] * (label in held)
        for one in sources[label]:
            if one not in opened:
                file = folder / f"{one}.pt"
                opened[one] = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    counts = {about["num_stages"] for about in saved.values()}
    _check_own_names(opened, wanted, is_same_split=counts == {_num_stages(stages)})
    for label, module in modules:
        contents = [opened[one] for one in sources[label]]
        model = _merged(content["model"] for content in contents)
        keys = {name: model[plain_name(name)] for name in module.state_dict()}
        module.load_state_dict(keys, strict=True)
        if optimizer is not None:
            _load_optimizer(optimizer, module, contents)


def _read(file: Path) -> dict[str, Any]:
    about = json.loads(file.read_text())
    if isinstance(about, list):  # written before the number of stages was
        about = {"num_stages": None, "names": about}
    return {"num_stages": about["num_stages"], "names": set(about["names"])}


def _check_own_names(
    opened: Mapping[str, Mapping[str, Any]], wanted: Mapping[str, set[str]], *, is_same_split: bool
) -> None:
    """Refuse names that mean different things in different files, where none is the stage's."""
    for label, names in wanted.items():
        for name in sorted(names):
            found = {one: c["model"][name] for one, c in opened.items() if name in c["model"]}
            if len(found) == 1 or (is_same_split and label in found):
                continue
            first, *others = found.values()
            if not all(_is_equal(first, other) for other in others):
                raise InputError(
                    f"{name!r} has different values in {', '.join(sorted(found))}: it is a name "
                    f"of hand-written stages, so it loads only into the same number of stages"
                )


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


def _load_optimizer(
    optimizer: torch.optim.Optimizer, module: nn.Module, contents: Sequence[dict[str, Any]]
) -> None:
    state = _merged(content.get("optimizer", {}) for content in contents)
    for name, p in _names(module).items():
        if name in state:
            optimizer.state[p] = {
                k: v.to(p.device) if isinstance(v, torch.Tensor) and v.dim() else v
                for k, v in state[name].items()
            }
    saved = contents[0].get("groups", [])
    if len(saved) == len(optimizer.param_groups):
        for group, values in zip(optimizer.param_groups, saved, strict=True):
            group.update(values)


def _modules(stages: Source) -> list[tuple[str, nn.Module]]:
    if isinstance(stages, nn.Module):
        return [("model", stages)]
    found = list(stages) if isinstance(stages, list | tuple) else [stages]
    return [(f"stage{stage.stage_index:04d}", stage.submod) for stage in found]  # type: ignore[union-attr]


def _num_stages(stages: Source) -> int:
    if isinstance(stages, nn.Module):
        return 1
    found = list(stages) if isinstance(stages, list | tuple) else [stages]
    return int(found[0].num_stages) if found else 0  # type: ignore[union-attr]


def _names(module: nn.Module) -> dict[str, nn.Parameter]:
    return {plain_name(name): p for name, p in module.named_parameters(remove_duplicate=False)}


def _merged(parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for part in parts:
        merged.update(part)
    return merged


def _plain(value: Any, where: str) -> Any:
    """Tensors on the CPU inside plain containers, which load without running code.

    Raises:
        InputError: anything else.
    """
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if value is None or type(value) in (bool, int, float, complex, str, bytes):
        return value
    if isinstance(value, Mapping):
        return {_plain(k, where): _plain(v, where) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_plain(one, where) for one in value)
    raise InputError(
        f"{where} holds a {type(value).__name__}, which a checkpoint cannot hold: tensors, "
        "numbers, strings and lists, tuples and dicts of these can be saved"
    )
