"""Make an ordinary module of a stage graph: original names, original submodules.

The stage holds the user's own modules, parameters and buffers, under the names
they have in the model, inside plain containers. Parameters and buffers that no
stage uses go where their neighbours are, so that the stages' state dicts together
have exactly the keys of the model's.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

from torch import fx, nn

from fxpipe.errors import SplitError
from fxpipe.graph.capture.traced_graph import TracedGraph
from fxpipe.graph.cut.stage_writer import StageGraph
from fxpipe.graph.guard.stage_guard import StageGuard
from fxpipe.graph.interface import Tied
from fxpipe.graph.sandbox.patches import user_hooks
from fxpipe.graph.source_line import user_depth
from fxpipe.torch_inside import (
    BUFFERS,
    PARAMETERS,
    buffers_of,
    children_of,
    has_global_hooks,
    parameters_of,
    transient_buffers,
)

__all__ = ["StageModule", "build_modules", "find_tied"]


class StageModule(fx.GraphModule):
    """One stage: an fx graph over the user's own submodules."""

    def __init__(self, index: int, graph: fx.Graph) -> None:
        super().__init__(nn.Module(), fx.Graph(), f"Stage{index}")
        self.graph = graph
        # fx keeps a way back from the graph to the module; without it a stage that is
        # no longer needed is freed at once, not at the next garbage collection.
        graph.owning_module = None


def build_modules(traced: TracedGraph, stages: Sequence[StageGraph]) -> tuple[StageModule, ...]:
    """Return a module for each stage, holding the state that it uses."""
    module = traced.module
    homes = _homes(module, stages)
    built = []
    guards = [StageGuard(traced.world) for _ in stages]
    for index, stage in enumerate(stages):
        made = StageModule(index, stage.graph)
        for name in stage.modules:
            _set_module(made, name, module.get_submodule(name))
        for name in stage.tensors:
            _set_tensor(made, name, module, guards[index])
        built.append(made)
    for name, stage_index in homes.items():
        _set_tensor(built[stage_index], name, module, guards[stage_index])
    for stage, made, guard in zip(stages, built, guards, strict=True):
        # A stage that asks for one flag has all of them, to see whether they are alike.
        flags = traced.flags if stage.containers or traced.modes is not None else frozenset()
        for name in (*stage.containers, *sorted(flags)):
            _container(made, name)
        _copy_flags(made, module, guard)
        holders = {name: made.get_submodule(name) for name in flags}
        guard.modes(holders, traced.modes, traced.why_one_mode)
        made.register_forward_pre_hook(guard)
        made.recompile()
        made.graph.owning_module = None
    _keep_extra_state(module, built)
    _warn_of_hooks(module, built)
    return tuple(built)


def _keep_extra_state(module: nn.Module, stages: Sequence[StageModule]) -> None:
    """Give the extra state of a module that was opened to the first stage with a part of it."""
    for name, original in module.named_modules():
        kind: Any = type(original)
        if kind.get_extra_state is nn.Module.get_extra_state:
            continue
        found = [part for stage in stages if (part := _part(stage, name)) is not None]
        if not found or original in found:
            continue
        if name:
            found[0].__class__ = kind
        else:
            own: Any = type(found[0])  # fx makes a class for each graph module
            own.get_extra_state, own.set_extra_state = kind.get_extra_state, kind.set_extra_state
        usual = vars(nn.Module())
        for key, value in vars(original).items():
            if key not in usual:
                vars(found[0]).setdefault(key, value)
        try:
            found[0].get_extra_state()
        except Exception as error:
            raise SplitError(
                f"the extra state of {name or 'the model'} ({kind.__name__}) cannot be kept, as "
                f"its parts are split: {error}\nput it into a submodule that is not split"
            ) from error


def _part(stage: nn.Module, name: str) -> nn.Module | None:
    found: Any = stage
    for word in name.split(".") if name else ():
        found = children_of(found).get(word) if found is not None else None
    part: nn.Module | None = found
    return part


def _warn_of_hooks(module: nn.Module, stages: Sequence[StageModule]) -> None:
    opened = {
        name: original
        for stage in stages
        for name, part in stage.named_modules()
        if (original := module.get_submodule(name)) is not part
    }
    hooked = [name or "the model itself" for name, part in opened.items() if user_hooks(part)]
    if has_global_hooks():
        hooked = [name or "the model itself" for name in opened]
    if hooked:
        warnings.warn(
            f"hooks do not fire for modules that are split: {', '.join(sorted(hooked))}\n"
            "put them on modules inside, which are called as before",
            stacklevel=user_depth(),
        )


def _copy_flags(stage: nn.Module, module: nn.Module, guard: StageGuard) -> None:
    # Only of the containers made here: the user's own modules keep theirs.
    for name, part in stage.named_modules():
        original = module.get_submodule(name)
        if part is not original:
            part.training = original.training
            guard.flag(original, part)


def find_tied(module: nn.Module, stages: Sequence[nn.Module]) -> tuple[Tied, ...]:
    """Return the parameters that are held in more than one place, by any name."""
    places: dict[int, list[tuple[int, str]]] = {}
    for index, stage in enumerate(stages):
        for name, parameter in stage.named_parameters(remove_duplicate=False):
            places.setdefault(id(parameter), []).append((index, name))
    tied = [found for found in places.values() if len({stage for stage, _ in found}) > 1]
    return tuple(Tied(tuple(sorted(found))) for found in tied)


def _homes(module: nn.Module, stages: Sequence[StageGraph]) -> dict[str, int]:
    """Return a stage for each parameter and buffer that no stage uses."""
    owners: dict[str, int] = {}
    for index, stage in enumerate(stages):
        for name in (*stage.modules, *stage.tensors):
            owners.setdefault(name, index)
    covered = {name for stage in stages for name in stage.modules}
    taken = {name for stage in stages for name in stage.tensors}
    homes: dict[str, int] = {}
    previous = 0
    for name in _state_names(module):
        if name in taken or _inside(name, covered):
            previous = _owner(name, owners, previous)
        else:
            homes[name] = _neighbour(name, owners, previous)
    return homes


def _state_names(module: nn.Module) -> list[str]:
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    return names + [name for name, _ in module.named_buffers(remove_duplicate=False)]


def _inside(name: str, modules: set[str]) -> bool:
    return any(prefix in modules for prefix in _prefixes(name))


def _prefixes(name: str) -> Iterable[str]:
    while name:
        name = name.rpartition(".")[0]
        yield name


def _owner(name: str, owners: dict[str, int], default: int) -> int:
    if name in owners:
        return owners[name]
    return next((owners[prefix] for prefix in _prefixes(name) if prefix in owners), default)


def _neighbour(name: str, owners: dict[str, int], default: int) -> int:
    for prefix in _prefixes(name):
        inside = [stage for other, stage in owners.items() if other.startswith(f"{prefix}.")]
        if prefix and inside:
            return min(inside)
    return default


def _set_module(stage: nn.Module, name: str, value: nn.Module) -> None:
    path, _, last = name.rpartition(".")
    holder = _container(stage, path)
    existing = children_of(holder).get(last)
    if existing is value:
        return
    holder.add_module(last, value)


def _set_tensor(stage: nn.Module, name: str, module: nn.Module, guard: StageGuard) -> None:
    path, _, last = name.rpartition(".")
    owner = module.get_submodule(path)
    holder = _container(stage, path)
    if last in parameters_of(owner):
        holder.register_parameter(last, parameters_of(owner)[last])
        guard.tensor(name, owner, holder, PARAMETERS)
    else:
        persistent = last not in transient_buffers(owner)
        holder.register_buffer(last, buffers_of(owner)[last], persistent=persistent)
        guard.tensor(name, owner, holder, BUFFERS)


def _container(stage: nn.Module, path: str) -> nn.Module:
    holder: Any = stage
    for part in path.split(".") if path else ():
        if part not in children_of(holder):
            holder.add_module(part, nn.Module())
        holder = children_of(holder)[part]
    made: nn.Module = holder
    return made
