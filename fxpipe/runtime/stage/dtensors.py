"""Let DTensors cross a boundary: the local part travels, the layout is part of the port.

The layout (mesh, placements, whole shape) is found once, with the shapes, and told to all ranks.
The receiver has a mesh of its own with the same names and sizes: `get_mesh` of the stage gives it,
or it is that of a parameter or of a declared example of the stage.

Gradients come back in the placements of the value, with partial sums added up; a stage that was
given `output_grads` says otherwise.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from fxpipe.errors import InputError
from fxpipe.runtime.parameters.fsdp import fsdp_roots
from fxpipe.torch_inside import pytree

if TYPE_CHECKING:
    from fxpipe.runtime.stage.stage_kind import Stage

__all__ = [
    "Layout",
    "as_dtensor",
    "find_mesh",
    "finished",
    "is_dtensor",
    "is_parallel",
    "layout_of",
    "local_part",
]

Placements = tuple[tuple[str, Any], ...]


class Layout(NamedTuple):
    """How a DTensor is spread over a mesh; plain data, the same on all ranks."""

    names: tuple[str, ...] | None
    mesh: tuple[int, ...]
    placements: Placements
    gradient: Placements
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def is_replicated(self) -> bool:
        return all(kind == "replicate" for kind, _ in (*self.placements, *self.gradient))

    def __str__(self) -> str:
        kinds = ", ".join(kind if of is None else f"{kind} {of}" for kind, of in self.placements)
        return f"DTensor {list(self.shape)}, {kinds} over the mesh {self.names} {list(self.mesh)}"


def _library() -> Any:
    # Importing it takes seconds; who made a DTensor has done so already.
    return sys.modules.get("torch.distributed.tensor")


def is_dtensor(value: object) -> bool:
    """Whether it is a DTensor; asks nothing of a library that nobody has imported."""
    library = _library()
    return library is not None and isinstance(value, library.DTensor)


def is_parallel(module: nn.Module) -> bool:
    """Whether a module computes on DTensors; what `fully_shard` gathers is none by then."""
    if _library() is None or fsdp_roots(module):
        return False
    return any(map(is_dtensor, (*module.parameters(), *module.buffers())))


def layout_of(tensor: Any, gradient: Any = None) -> Layout | None:
    """The layout of a DTensor; None for any other tensor. `gradient`: an example of its gradient.

    Raises:
        InputError: a placement that cannot be told to another rank.
    """
    if not is_dtensor(tensor):
        return None
    mesh = tensor.device_mesh
    placements = tuple(map(_plain, tensor.placements))
    back = tuple(
        ("replicate", None) if kind == "partial" else (kind, of) for kind, of in placements
    )
    if is_dtensor(gradient):
        back = tuple(map(_plain, gradient.placements))
    names = None if mesh.mesh_dim_names is None else tuple(mesh.mesh_dim_names)
    sizes = (tuple(map(int, tensor.shape)), tuple(map(int, tensor.stride())))
    return Layout(names, tuple(mesh.shape), placements, back, *sizes)


def _plain(placement: Any) -> tuple[str, Any]:
    library = _library()
    if type(placement) is library.Shard:
        return "shard", placement.dim
    if type(placement) is library.Replicate:
        return "replicate", None
    if type(placement) is library.Partial:
        return "partial", placement.reduce_op
    raise InputError(
        f"a DTensor with the placement {placement} cannot cross a boundary: redistribute it to "
        "Shard, Replicate or Partial before the stage returns it"
    )


def _placements(plain: Placements) -> list[Any]:
    library = _library()
    kinds = {"shard": library.Shard, "partial": library.Partial}
    return [library.Replicate() if of is None else kinds[kind](of) for kind, of in plain]


def local_part(tensor: torch.Tensor, layout: Layout | None, where: str) -> torch.Tensor:
    """What travels of a value; its gradient comes back in the layout's placements.

    Raises:
        InputError: the value is not laid out as agreed.
    """
    found = layout_of(tensor)
    if layout is None and found is None:
        return tensor
    if layout is None or found is None or found[:3] != layout[:3] or found.shape != layout.shape:
        raise InputError(
            f"{where} is laid out as {found or 'a plain tensor'}, agreed was "
            f"{layout or 'a plain tensor'}; it must be the same in every microbatch"
        )
    spread: Any = tensor
    part: torch.Tensor = spread.to_local(grad_placements=_placements(layout.gradient))
    return part


def finished(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, where it stands for what a collective still makes: that has no memory."""
    if type(tensor) is torch.Tensor or type(tensor).__name__ != "AsyncCollectiveTensor":
        return tensor
    pending: Any = tensor
    made: torch.Tensor = pending.trigger_wait()
    return made


def as_dtensor(part: torch.Tensor, layout: Layout | None, mesh: Any) -> torch.Tensor:
    """The value again, on the other side."""
    if layout is None:
        return part
    usual = tuple(("replicate", None) if k == "partial" else (k, of) for k, of in layout.placements)
    more = {} if layout.gradient == usual else {"grad_placements": _placements(layout.gradient)}
    made: torch.Tensor = _library().DTensor.from_local(
        part,
        mesh,
        _placements(layout.placements),
        run_check=False,
        shape=torch.Size(layout.shape),
        stride=layout.stride,
        **more,
    )
    return made


def find_mesh(stage: Stage, layout: Layout) -> Any:
    """This rank's mesh for what a stage receives.

    Raises:
        InputError: there is none.
    """
    if _library() is None:
        import torch.distributed.tensor  # noqa: F401  the sender has it, too
    get_mesh = stage.get_mesh
    found = get_mesh(layout.names, layout.mesh) if get_mesh is not None else None
    if found is not None:
        return found
    examples = pytree.tree_leaves((stage.front.input_args, stage.front.output_args))
    for tensor in (*stage.submod.parameters(), *stage.submod.buffers(), *examples):
        known = layout_of(tensor) if is_dtensor(tensor) else None
        if known is not None and known[:2] == layout[:2]:
            return tensor.device_mesh
    raise InputError(
        f"stage {stage.stage_index} receives a {layout}, but has no such mesh: give "
        "PipelineStage(..., get_mesh=lambda names, sizes: ...) this rank's mesh"
    )
