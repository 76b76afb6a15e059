"""The folders of a run's checkpoints, written and read by torch.distributed.checkpoint.

    run/000001-step100/.metadata     complete: this file is written last, and renamed
    run/000002-step200/              cut off: nobody reads it, and the next save removes it

torch pickles `.metadata`; here it is read without running anything it names.
"""

from __future__ import annotations

import pathlib
import pickle
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from fxpipe.errors import InputError
from fxpipe.runtime.wire.plain import dumps, loads

__all__ = ["PLAIN", "Reader", "Writer", "as_tensor", "in_words", "newest", "next_name"]

PLAIN = "plain"
"""The key of all that is no tensor."""


class Writer(FileSystemWriter):
    """Writes one checkpoint, and then removes older ones."""

    def __init__(self, run: Path, name: str, keep: int | None) -> None:
        super().__init__(run / name)
        self._run, self._name, self._keep = run, name, keep
        expect_one_process()

    def finish(self, metadata: Metadata, results: Any) -> None:
        """Called on one rank when all have written.

        Raises:
            InputError: what others have written is not there: each host has a disk of its own.
        """
        written = {one.storage_data.relative_path for some in results for one in some}
        missing = sorted(name for name in written if not (self._run / self._name / name).exists())
        if missing:
            raise InputError(
                f"other ranks have written {', '.join(missing[:3])}, but here {self._run} has no "
                "such files: save to a folder that all hosts share"
            )
        super().finish(metadata, results)
        older = [folder for folder in _folders(self._run) if folder.name < self._name]
        complete = [folder for folder in older if _is_complete(folder)]
        kept = complete if self._keep is None else complete[len(complete) - self._keep + 1 :]
        for folder in set(older) - set(kept):
            shutil.rmtree(folder, ignore_errors=True)


class Reader(FileSystemReader):
    """Reads one checkpoint; each process for itself."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.folder = folder
        metadata = self.read_metadata()
        self.sizes: dict[str, TensorStorageMetadata] = {
            key: value
            for key, value in metadata.state_dict_metadata.items()
            if isinstance(value, TensorStorageMetadata)
        }
        self._check_files(metadata)
        written = torch.empty(self.sizes[PLAIN].size, dtype=torch.uint8)
        self.fill({PLAIN: written})
        self.plain: dict[str, Any] = loads(bytes(written.tolist()))

    def fill(self, tensors: dict[str, torch.Tensor]) -> None:
        """Read into these tensors, sharded or not."""
        expect_one_process()
        try:
            load(tensors, storage_reader=self, no_dist=True)
        except CheckpointException as error:
            raise in_words(error, self.folder, "read") from None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        try:
            with (self.folder / ".metadata").open("rb") as file:
                metadata: Metadata = _PlainUnpickler(file).load()
        except InputError:
            raise
        except Exception as error:  # what damaged bytes lead to is anybody's guess
            raise InputError(
                f"{self.folder / '.metadata'} is damaged ({type(error).__name__}: {error}): remove "
                f"{self.folder} to load the checkpoint before it"
            ) from None
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def _check_files(self, metadata: Metadata) -> None:
        ends: dict[str, int] = {}
        for info in (metadata.storage_data or {}).values():
            end = max(ends.get(info.relative_path, 0), info.offset + info.length)
            ends[info.relative_path] = end
        for name, end in ends.items():
            path = self.folder / name
            size = path.stat().st_size if path.is_file() else 0
            if size < end:
                raise InputError(
                    f"{path} has {size} bytes of {end}: the checkpoint was not copied as a whole, "
                    f"or not all hosts share the folder; remove {self.folder} to load the "
                    "checkpoint before it"
                )


class _PlainUnpickler(pickle.Unpickler):
    """Knows the classes of torch's metadata and no others."""

    def find_class(self, module: str, name: str) -> Any:
        known = module.startswith("torch.distributed.checkpoint.") and name in _CLASSES
        known |= module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        known |= (module, name) in _OTHERS
        if not known:
            raise InputError(f"the checkpoint names {module}.{name}, which is no part of one")
        return super().find_class(module, name)


_CLASSES = {
    *("Metadata", "MetadataIndex", "StorageMeta", "BytesStorageMetadata"),
    *("TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata"),
    *("_MEM_FORMAT_ENCODING", "_StorageInfo"),
}
_PATHS = {cls.__name__ for cls in (pathlib.PosixPath, pathlib.WindowsPath)}
_OTHERS = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    *((module, name) for module in ("pathlib", "pathlib._local") for name in _PATHS),
}


def in_words(error: BaseException, folder: Path, what: str) -> BaseException:
    """An error of ours in place of torch's list of tracebacks by rank, which is no Exception."""
    if not isinstance(error, CheckpointException):
        return error
    faults = {f"{type(one).__name__}: {one}" for one, _ in error.failures.values()}
    return InputError(f"the checkpoint {folder} could not be {what}: {'; '.join(sorted(faults))}")


def as_tensor(value: Any) -> torch.Tensor:
    """Plain data as the bytes of its JSON."""
    return torch.frombuffer(bytearray(dumps(value)), dtype=torch.uint8)


def next_name(run: Path, step: int) -> str:
    """A folder that does not exist yet and comes after those that do."""
    numbers = [int(folder.name.partition("-")[0]) for folder in _folders(run)]
    return f"{max(numbers, default=0) + 1:06d}-step{step}"


def newest(run: Path, step: int | None) -> Path:
    """The newest complete checkpoint, or the newest of a step.

    Raises:
        InputError: there is none; says what there is.
    """
    complete = [folder for folder in _folders(run) if _is_complete(folder)]
    wanted = [f for f in complete if step is None or f.name.endswith(f"-step{step}")]
    if not wanted:
        if _is_complete(run):
            raise InputError(
                f"{run} is one checkpoint: pass the folder of all, {run.parent}, and step= if it "
                "is not to be the newest"
            )
        others = ", ".join(folder.name for folder in complete)
        of_step = "" if step is None else f" of step {step}"
        raise InputError(
            f"there is no complete checkpoint{of_step} below {run}"
            + (f"; there are {others}" if others else "")
        )
    return wanted[-1]


def _folders(run: Path) -> list[Path]:
    return sorted(run.glob("[0-9][0-9][0-9][0-9][0-9][0-9]-step*"))


def _is_complete(folder: Path) -> bool:
    return (folder / ".metadata").is_file()


def expect_one_process() -> None:
    """torch warns where a process saves or loads by itself, which is what is meant here."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable")
