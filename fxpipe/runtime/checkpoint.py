"""Save and load training state by original names, whatever the split.

    save_checkpoint("run/step100", schedule.stages, optimizer)
    load_checkpoint("run/step100", schedule.stages, optimizer)

Every stage writes one file with its parameters, buffers and optimizer state, keyed by
the names of the plain model, and loading reads from whichever files hold a name. So a
model saved with four stages loads into two stages, or into the plain model
(`load_checkpoint(path, model, optimizer)`), and the other way round. A tied
parameter is in the file of each stage that holds it; its copies are equal.

Limits: `fully_shard`ed stages hold a part of each parameter per rank; use
`torch.distributed.checkpoint` with their state dicts, whose keys are original names too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
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
            "model": {plain_name(k): v.detach().cpu() for k, v in module.state_dict().items()}
        }
        if any(hasattr(p, "to_local") for p in module.parameters()):
            raise InputError(
                f"{label} is sharded by fully_shard: save its state_dict() with "
                "torch.distributed.checkpoint, the keys are the original names"
            )
        if optimizer is not None:
            content["optimizer"] = {
                name: _to_cpu(optimizer.state[p])
                for name, p in names.items()
                if p in optimizer.state
            }
            content["groups"] = [
                {k: v for k, v in group.items() if k != "params"}
                for group in optimizer.param_groups
            ]
        # First under another name: a job that is cut off leaves the old file, not half a new one.
        part = folder / f"{label}.part"
        torch.save(content, part)
        part.rename(folder / f"{label}.pt")
        (folder / f"{label}.json").write_text(json.dumps(sorted(content["model"])))


def load_checkpoint(
    path: str | Path, stages: Source, optimizer: torch.optim.Optimizer | None = None
) -> None:
    """Read the state of these stages (or of a plain model) from whatever was saved.

    Only files that hold a needed name are opened.

    Raises:
        InputError: names that no file below `path` holds; nothing has been changed then.
    """
    folder = Path(path)
    held = {file: set(json.loads(file.read_text())) for file in sorted(folder.glob("*.json"))}
    if not held:
        raise InputError(f"there is no checkpoint below {folder}")
    wanted = {label: set(map(plain_name, m.state_dict())) for label, m in _modules(stages)}
    missing = sorted(set[str]().union(*wanted.values()) - set[str]().union(*held.values()))
    if missing:
        raise InputError(f"the checkpoint {folder} lacks {len(missing)} names: {missing[:5]}")
    opened: dict[Path, dict[str, Any]] = {}
    for label, module in _modules(stages):
        files = [file for file, names in held.items() if names & wanted[label]]
        for file in files:
            if file not in opened:
                opened[file] = torch.load(file.with_suffix(".pt"), map_location="cpu", mmap=True)
        model = _merged(opened[file]["model"] for file in files)
        keys = {name: model[plain_name(name)] for name in module.state_dict()}
        module.load_state_dict(keys, strict=True)
        if optimizer is not None:
            _load_optimizer(optimizer, module, [opened[file] for file in files])


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


def _names(module: nn.Module) -> dict[str, nn.Parameter]:
    return {plain_name(name): p for name, p in module.named_parameters(remove_duplicate=False)}


def _merged(parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for part in parts:
        merged.update(part)
    return merged


def _to_cpu(state: dict[str, Any]) -> dict[str, Any]:
    return {k: v.detach().cpu() if isinstance(v, torch.Tensor) else v for k, v in state.items()}
