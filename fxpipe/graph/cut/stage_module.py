"""Make ordinary modules of stage graphs: original names, original submodules.

A stage holds the user's own modules, parameters and buffers, under the names
they have in the model, inside plain containers. Parameters and buffers that no
stage uses go where their neighbours are, so that the stages' state dicts together
have exactly the keys of the model's.

All stages together are one module again: one `state_dict`, in which a parameter that several
stages hold appears once, the way back, and an fx graph that calls the stages.
"""

from __future__ import annotations

import copy
import keyword
import operator
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import torch.fx
from torch import fx, nn

from fxpipe.errors import SplitError
from fxpipe.graph.capture.traced_graph import TracedGraph
from fxpipe.graph.cut.stage_writer import StageGraph
from fxpipe.graph.guard.stage_guard import StageGuard
from fxpipe.graph.interface import StageInterface, Tied
from fxpipe.graph.source_line import user_depth
from fxpipe.torch_inside import (
    BUFFERS,
    MODULES,
    PARAMETERS,
    IncompatibleKeys,
    backward_hooks,
    backward_pre_hooks,
    buffers_of,
    children_of,
    forward_pre_hooks,
    has_global_hooks,
    parameters_of,
    transient_buffers,
)

__all__ = [
    "StageModule",
    "build_modules",
    "find_tied",
    "graph_of_stages",
    "load_parts",
    "merged_state",
]

_HOMES = (MODULES, PARAMETERS, BUFFERS)


class StageModule(fx.GraphModule):
    """One stage: an fx graph over the user's own submodules."""

    def __init__(self, index: int) -> None:
        super().__init__(nn.Module(), fx.Graph(), f"Stage{index}")

    def finish(self, graph: fx.Graph) -> None:
        """Take the graph, once all that it calls is there."""
        _spell_names(self, graph)
        held = [(place, dict(place)) for place in map(vars(self).__getitem__, _HOMES)]
        for place, _ in held:
            place.clear()  # or what is called `graph` there would be in the way
        self.graph = graph
        for place, content in held:
            place.update(content)
        # fx keeps a way back from the graph to the module; without it a stage that is
        # no longer needed is freed at once, not at the next garbage collection.
        graph.owning_module = None

    def __deepcopy__(self, memo: dict[int, object]) -> StageModule:
        made: StageModule = type(self).__new__(type(self))
        memo[id(self)] = made
        state = {name: value for name, value in vars(self).items() if name != "_graph"}
        vars(made).update(copy.deepcopy(state, memo))
        made.finish(copy.deepcopy(self.graph, memo))
        return made

    def train(self, mode: bool = True) -> Self:
        """Set the mode, as the model does whose parts the stage has."""
        super().train(mode)
        for hook in forward_pre_hooks(self).values():
            if isinstance(hook, StageGuard):
                hook.train(self, mode)
        return self

    def get_submodule(self, target: str) -> nn.Module:
        """Return a module of the stage, also one that is called `graph` or `code`."""
        found = _part(self, target)
        if found is None:
            raise AttributeError(f"the stage has no module {target!r}")
        return found


class _Renaming:
    """Called before a stage: gives inputs names that generated code can have."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = dict(names)

    def __call__(self, module: nn.Module, args: object, kwargs: Mapping[str, object]) -> Any:
        return args, {self._names.get(name, name): value for name, value in kwargs.items()}


def build_modules(traced: TracedGraph, stages: Sequence[StageGraph]) -> tuple[StageModule, ...]:
    """Return a module for each stage, holding the state that it uses."""
    module = traced.module
    homes = _homes(module, stages)
    built = []
    guards = [StageGuard(traced.world) for _ in stages]
    for index, stage in enumerate(stages):
        made = StageModule(index)
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
        if stage.parameter_names:
            made.register_forward_pre_hook(_Renaming(stage.parameter_names), with_kwargs=True)
        made.finish(stage.graph)
    _keep_extra_state(module, built)
    _check_hooks(module, built)
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


def _spell_names(stage: StageModule, graph: fx.Graph) -> None:
    """Have generated code find what is called `class` or `graph` in the dicts of its module."""
    spelled: dict[str, tuple[str, str]] = {}
    for node in graph.nodes:
        if node.op in ("call_module", "get_attr"):
            usual, safe = _access(stage, str(node.target))
            if usual != safe:
                spelled[node.name] = (usual, safe)
    if not spelled:
        return

    def spell(body: list[str]) -> list[str]:
        made = []
        for line in body:
            usual, safe = spelled.get(line.split(" ", 1)[0], ("", ""))
            made.append(line.replace(usual, safe, 1) if usual else line)
        return made

    graph.on_generate_code(lambda current: spell)


def _access(stage: nn.Module, target: str) -> tuple[str, str]:
    """Return how fx writes the way to a part of a module, and a way that works for any name."""
    usual = safe = "self"
    holder: Any = stage
    for word in target.split("."):
        is_word = word.isidentifier()
        usual = f"{usual}.{word}" if is_word else f'getattr({usual}, "{word}")'
        home = next((home for home in _HOMES if word in getattr(holder, home, ())), "")
        held = getattr(holder, home)[word] if home else None
        if home and (keyword.iskeyword(word) or _is_own(holder, word)):
            safe = f"{safe}.{home}[{word!r}]"
        else:
            safe = f"{safe}.{word}" if is_word else f'getattr({safe}, "{word}")'
        holder = held
    return usual, safe


def _part(stage: nn.Module, name: str) -> nn.Module | None:
    found: Any = stage
    for word in name.split(".") if name else ():
        found = children_of(found).get(word) if found is not None else None
    part: nn.Module | None = found
    return part


def _check_hooks(module: nn.Module, stages: Sequence[StageModule]) -> None:
    """Refuse hooks on the backward of modules that are split, and warn of those on all modules."""
    opened = {
        name: original
        for stage in stages
        for name, part in stage.named_modules()
        if (original := module.get_submodule(name)) is not part
    }
    hooked = [
        n or "the model" for n, p in opened.items() if backward_hooks(p) or backward_pre_hooks(p)
    ]
    if hooked:
        raise SplitError(
            f"there are backward hooks on modules that are split: {', '.join(sorted(hooked))}\n"
            "no stage has the whole backward of these; put the hooks on modules inside, which are "
            "called as before"
        )
    if has_global_hooks():
        names = ", ".join(sorted(name or "the model itself" for name in opened))
        warnings.warn(
            f"hooks for all modules do not fire for modules that are split: {names}",
            stacklevel=user_depth(),
        )


def _copy_flags(stage: nn.Module, module: nn.Module, guard: StageGuard) -> None:
    # Only of the containers made here: the user's own modules keep theirs.
    for name, part in stage.named_modules():
        original = module.get_submodule(name)
        if part is not original:
            part.training = original.training
            guard.flag(original, part)


def find_tied(stages: Sequence[nn.Module]) -> tuple[Tied, ...]:
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
    _register(holder, MODULES, last, value)


def _is_own(holder: nn.Module, name: str) -> bool:
    """Say whether a module uses a name for itself."""
    return name in vars(holder) or hasattr(type(holder), name)


def _register(holder: nn.Module, home: str, name: str, value: Any) -> None:
    """Put a module, parameter or buffer under a name that the holder may use for itself."""
    if isinstance(holder, StageModule) and _is_own(holder, name):
        getattr(holder, home)[name] = value
    elif home == MODULES:
        holder.add_module(name, value)
    elif home == PARAMETERS:
        holder.register_parameter(name, value)
    else:
        holder.register_buffer(name, value)


def _set_tensor(stage: nn.Module, name: str, module: nn.Module, guard: StageGuard) -> None:
    path, _, last = name.rpartition(".")
    owner = module.get_submodule(path)
    holder = _container(stage, path)
    if last in parameters_of(owner):
        _register(holder, PARAMETERS, last, parameters_of(owner)[last])
        guard.tensor(name, owner, holder, PARAMETERS)
    else:
        is_transient = last in transient_buffers(owner)  # asked first: holder may be the owner
        _register(holder, BUFFERS, last, buffers_of(owner)[last])
        if is_transient:
            transient_buffers(holder).add(last)
        guard.tensor(name, owner, holder, BUFFERS)


def _container(stage: nn.Module, path: str) -> nn.Module:
    holder: Any = stage
    for part in path.split(".") if path else ():
        if part not in children_of(holder):
            _register(holder, MODULES, part, nn.Module())
        holder = children_of(holder)[part]
    made: nn.Module = holder
    return made


def merged_state(
    parts: Iterable[nn.Module],
    destination: object = None,
    prefix: str = "",
    keep_vars: bool = False,
) -> object:
    """The state of all parts under their own names."""
    found: Any = OrderedDict() if destination is None else destination
    for part in parts:
        part.state_dict(destination=found, prefix=prefix, keep_vars=keep_vars)
    return found


def load_parts(
    parts: Iterable[nn.Module], state: Mapping[str, object], *, strict: bool, assign: bool
) -> object:
    """Load into each part what it has of the state.

    Raises:
        RuntimeError: as `nn.Module.load_state_dict`, if `strict`: names or shapes do not fit.
    """
    modules = list(parts)
    names = [set(part.state_dict()) for part in modules]
    missing = sorted(set().union(*names) - set(state))
    unexpected = [name for name in state if not any(name in known for known in names)]
    if strict and (missing or unexpected):
        raise RuntimeError(
            f"the state does not fit the pipe: it lacks {missing} and has unknown {unexpected}"
        )
    for part, known in zip(modules, names, strict=True):
        mine = {name: value for name, value in state.items() if name in known}
        part.load_state_dict(mine, strict=strict, assign=assign)
    return IncompatibleKeys(missing, unexpected)


def graph_of_stages(interfaces: Sequence[StageInterface]) -> torch.fx.Graph:
    """A graph of model inputs, one call of each stage (`submod_0`, ...), and the output."""
    graph = torch.fx.Graph()
    names = dict.fromkeys(name for interface in interfaces for name in interface.model_inputs)
    inputs = {name: graph.placeholder(name) for name in names}
    values: dict[tuple[int, str], torch.fx.Node] = {}
    made: Any = None
    for index, interface in enumerate(interfaces):
        received = tuple(values[one.source_stage, one.port.name] for one in interface.received)
        named: dict[str, Any] = {name: inputs[name] for name in interface.model_inputs}
        made = graph.call_module(f"submod_{index}", received, named)
        for place, sent in enumerate(interface.sent):
            is_one = len(interface.sent) == 1
            node = made if is_one else graph.call_function(operator.getitem, (made, place))
            values[index, sent.port.name] = node
    graph.output(made)
    return graph
