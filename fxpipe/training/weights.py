"""Hugging Face safetensors in and out, each rank its own stages only.

    load_weights("Llama-3.1-8B", stage)             on every rank, by itself
    save_weights("exported", schedule)              on every rank, together

Files are those of `from_pretrained` and `save_pretrained`: `*.safetensors` with the names of the
plain model. A model on the meta device gets memory here, stage by stage; tensor after tensor is
read into it, so a rank never holds more than its stages and one tensor.

Needs the package safetensors (in the extra `hf`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fxpipe.errors import InputError
from fxpipe.runtime.control.control import agree, agree_on
from fxpipe.runtime.parameters.tied import plain_name
from fxpipe.runtime.stage.stage_kind import TracedFront
from fxpipe.torch_inside import buffers_of, parameters_of
from fxpipe.training.state import Part, Source, check_memory, parts_of, stages_of, together

__all__ = ["load_weights", "materialize", "save_weights"]

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def load_weights(
    folder: str | Path, source: Source, *, init: Callable[[nn.Module], Any] | None = None
) -> None:
    """Load the weights of these stages, or of a plain model, from safetensors files.

    Needs no other rank. `init` is for models on the meta device; see `materialize`.

    Raises:
        InputError: names that no file holds or that several do, a broken file; nothing has been
            changed then.
    """
    from safetensors import safe_open

    where = _files_by_name(Path(folder))
    aliases = _aliases(source)
    wanted: dict[Path, list[tuple[int, str, str]]] = {}
    missing = []
    for index, part in enumerate(parts_of(source)):
        for name in part.tensors():
            found = next((n for n in (name, *aliases.get(name, ())) if n in where), None)
            if found is None:
                missing.append(name)
            else:
                wanted.setdefault(where[found], []).append((index, name, found))
    if missing:
        raise InputError(
            f"the safetensors files below {folder} lack {len(missing)} names: {sorted(missing)[:5]}"
        )
    materialize(source, init=init)
    targets = [part.tensors() for part in parts_of(source)]
    with torch.no_grad():
        for file, names in wanted.items():
            for index, name, saved in names:
                # Opened for each: what an open file has read stays in memory.
                with safe_open(file, framework="pt") as content:
                    _fill(targets[index][name], content.get_slice(saved), name)


def save_weights(folder: str | Path, source: Source) -> None:
    """Write the weights as `from_pretrained` reads them: one file per stage, and an index.

    Call it on every rank. Of replicas, the first writes. Weights that the folder held before are
    removed, as `save_pretrained` does.
    """
    from safetensors.torch import save_file

    target, parts = Path(folder), parts_of(source)
    problem: BaseException | None = None
    mine = [
        f"model-{(part.stage or 0) + 1:05d}-of-{part.num_stages:05d}.safetensors" for part in parts
    ]
    with together("save_weights", source, default_alone=True) as control:
        control.exchange([])
        try:
            check_memory(parts)
        except InputError as error:
            problem = error
        held = agree_on(control, "the folder of save_weights()", str(target), problem, mine)
        written: dict[str, list[str]] = {}
        for part, file in zip(parts, mine, strict=True):
            tensors = {name: _whole(tensor) for name, tensor in part.tensors().items()}
            if control.rank != next(rank for rank, files in enumerate(held) if file in files):
                continue
            try:
                target.mkdir(parents=True, exist_ok=True)
                save_file(_unshared(tensors), target / f"{file}.part", metadata={"format": "pt"})
                (target / f"{file}.part").rename(target / file)
                written[file] = list(tensors)
            except Exception as error:
                problem = error
        agree(control, problem)
        everybody = control.gather(written)
        if control.rank == 0:
            _write_index(target, {file: names for one in everybody for file, names in one.items()})
        control.gather(None)  # nobody goes on before the index is there


def materialize(source: Source, *, init: Callable[[nn.Module], Any] | None = None) -> None:
    """Give memory to what is on the meta device, and to nothing else.

    Make optimizers afterwards: parameters are new objects. Buffers that no file holds, such
    as the frequencies of rotary embeddings, must be computed: `init(module)` is called for each
    module that has some (Hugging Face: `init=model._init_weights`).

    Raises:
        InputError: there are such buffers and no `init`.
    """
    made: dict[int, torch.Tensor] = {}  # shared ones stay shared
    for part in parts_of(source):
        lost = _lost_buffers(part)
        if lost and init is None:
            names = sorted(name for some in lost.values() for name in some)
            raise InputError(
                f"{len(names)} buffers are on the meta device and in no state dict, so their "
                f"values are unknown: {names[:5]}; pass init=, called with each of their modules "
                "(Hugging Face: init=model._init_weights)"
            )
        if any(hasattr(p, "to_local") for p in part.module.parameters()):
            part.module.to_empty(device=part.device or "cpu")  # tells fully_shard, too
        else:
            _give_memory(part, made)
        for module in lost:
            assert init is not None
            init(module)


def _write_index(target: Path, written: dict[str, list[str]]) -> None:
    """Say which file holds what, and remove files that would be read instead."""
    where = {name: file for file, names in written.items() for name in names}
    text = json.dumps({"metadata": {}, "weight_map": where}, indent=2)
    (target / f"{INDEX}.part").write_text(text, encoding="utf-8")
    (target / f"{INDEX}.part").rename(target / INDEX)
    for file in (target / WHOLE, *target.glob("model-*-of-*.safetensors")):
        if file.name not in written:
            file.unlink(missing_ok=True)


def _files_by_name(folder: Path) -> dict[str, Path]:
    """The file of each tensor, found as `from_pretrained` does.

    Files that the index does not name are not the model: other formats, adapters, older exports.
    """
    from safetensors import SafetensorError, safe_open

    if (folder / INDEX).is_file() and not (folder / WHOLE).is_file():
        try:
            listed = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        except (ValueError, KeyError) as error:
            raise InputError(f"{folder / INDEX} is no index of weights: {error!r}") from None
        lost = sorted({file for file in listed.values() if not (folder / file).is_file()})
        if lost:
            raise InputError(f"{folder / INDEX} names {', '.join(lost[:3])}, which is not there")
        return {name: folder / file for name, file in listed.items()}
    files = [folder / WHOLE] if (folder / WHOLE).is_file() else folder.glob("*.safetensors")
    where: dict[str, Path] = {}
    for file in sorted(files):
        try:
            with safe_open(file, framework="pt") as content:
                names = list(content.keys())
        except SafetensorError as error:
            raise InputError(f"{file} cannot be read: {error}") from None
        twice = [name for name in names if name in where]
        if twice:
            raise InputError(
                f"{twice[0]!r} is in {where[twice[0]].name} and in {file.name}, and {folder} has "
                f"no {INDEX} that says which is the model's: move the other file away"
            )
        where |= dict.fromkeys(names, file)
    return where


def _give_memory(part: Part, made: dict[int, torch.Tensor]) -> None:
    for module in part.module.modules():
        for held in (parameters_of(module), buffers_of(module)):
            for name, tensor in held.items():
                if tensor is None or not tensor.is_meta:
                    continue
                if id(tensor) not in made:
                    new = torch.empty_like(tensor, device=part.device or "cpu")
                    if isinstance(tensor, nn.Parameter):
                        new = nn.Parameter(new, requires_grad=tensor.requires_grad)
                    made[id(tensor)] = new
                held[name] = made[id(tensor)]  # type: ignore[assignment]


def _lost_buffers(part: Part) -> dict[nn.Module, list[str]]:
    """Modules with buffers on the meta device that a state dict does not hold."""
    held = part.tensors()
    found: dict[nn.Module, list[str]] = {}
    for path, module in part.module.named_modules():
        for name, buffer in module.named_buffers(prefix=path, recurse=False):
            if buffer.is_meta and plain_name(name) not in held:
                found.setdefault(module, []).append(name)
    return found


def _aliases(source: Source) -> dict[str, list[str]]:
    """Other names of tied parameters: files hold only one of them."""
    aliases: dict[str, list[str]] = {}
    groups = [
        [name for _, name in tied.locations]
        for stage in stages_of(source)
        if isinstance(stage.front, TracedFront)
        for tied in stage.front.info.tied
    ]
    for part in parts_of(source):
        same: dict[int, list[str]] = {}
        for name, p in part.parameters().items():
            same.setdefault(id(p), []).append(name)
        groups += same.values()
    for names in groups:
        for name in names:
            aliases.setdefault(name, []).extend(names)
    return aliases


def _fill(target: torch.Tensor, saved: Any, name: str) -> None:
    """Copy a saved tensor, of a sharded one this rank's rows only."""
    shape = list(saved.get_shape())
    if shape != list(target.shape):
        raise InputError(f"{name} has the size {shape} in its file and {list(target.shape)} here")
    cut = tuple(slice(0, size) for size in shape)
    if hasattr(target, "to_local"):
        (part,) = target.__create_chunk_list__()  # type: ignore[attr-defined]
        cut = tuple(slice(o, o + n) for o, n in zip(part.offsets, part.sizes, strict=True))
        target = target.to_local()
    target.copy_(saved[cut or ...])


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _unshared(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same on the CPU, each with memory of its own, as safetensors wants it."""
    seen: set[int] = set()
    found = {}
    for name, tensor in tensors.items():
        plain = tensor.cpu().contiguous()
        is_shared = plain.untyped_storage().data_ptr() in seen and plain.numel() > 0
        seen.add(plain.untyped_storage().data_ptr())
        found[name] = plain.clone() if is_shared else plain
    return found
