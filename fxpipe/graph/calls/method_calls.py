"""Functions that loop over rows, as one call each in the graph.

Vision-language models have methods that loop over the images of a batch, and call modules in
between. As a graph such code fixes the number of images. But where no cut is inside, a stage may
run it as it is, like a leaf: it has the parts of the module that the method uses.

In:  a method of a module that is opened, or a function.
Out: a `MethodCall`, which gets those parts before the arguments. In place of the module the method
     gets a shell: an object of its class with these parts and the attributes without tensors.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Iterator, Mapping

from torch import nn

from fxpipe.errors import InputError
from fxpipe.graph.calls.graph_calls import GraphCall
from fxpipe.graph.nested import has_tensor
from fxpipe.torch_inside import BUFFERS, MODULES, PARAMETERS

__all__ = ["MethodCall", "Seen", "module_at"]

_HOMES = (MODULES, PARAMETERS, BUFFERS)
_USUAL = frozenset({*vars(nn.Module()), "training"})


class MethodCall(GraphCall):
    """A callable that runs a method on parts of its module."""

    def __init__(self, function: Callable[..., object], owner: nn.Module | None) -> None:
        super().__init__(function.__name__)
        self._function = function
        self._kind: type | None = None if owner is None else type(owner)
        self._key = (function, id(owner))
        known = {} if owner is None else vars(owner)
        self.attributes = {
            name: value
            for name, value in known.items()
            if name not in _USUAL and not has_tensor(value) and not _has_module(value)
        }
        self._homes = {home: tuple(known.get(home, ())) for home in _HOMES}
        self._empty = {
            home: [name for name in names if known[home][name] is None]
            for home, names in self._homes.items()
        }
        self.empty = [name for names in self._empty.values() for name in names]
        self._others = set(known) - set(self.attributes) - _USUAL | {"training"}

    def __eq__(self, other: object) -> bool:
        # A trace in each mode makes a call of its own: they are the same.
        return type(other) is type(self) and other._key == self._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __call__(self, parts: Mapping[str, object], *args: object, **kwargs: object) -> object:
        return self._function(*self._shells(parts, Seen()), *args, **kwargs)

    def noting(self, parts: Mapping[str, object], seen: Seen) -> Callable[..., object]:
        """Return a function that runs the method, and notes what it reads of its module.

        It raises ValueError if the method puts something into its module, or reads more.
        """

        def run(*args: object, **kwargs: object) -> object:
            shells = self._shells(parts, seen)
            before = list(map(_inside, shells))
            output = self._function(*shells, *args, **kwargs)
            if seen.absent or list(map(_inside, shells)) != before:
                raise ValueError(f"{self.__name__} does more with its module than to read parts")
            return output

        return run

    def _shells(self, parts: Mapping[str, object], seen: Seen) -> tuple[nn.Module, ...]:
        if self._kind is None:
            return ()
        made: nn.Module = object.__new__(self._kind)
        place = vars(made)
        place.update({**vars(nn.Module()), **self.attributes})
        del place["training"]
        for home, names in self._homes.items():
            here = {name: parts[name] for name in names if name in parts}
            here |= dict.fromkeys(self._empty[home])
            place[home] = _Home(self.__name__, here, names, seen)
        # Python asks the modules last for a name that is nowhere else.
        modules = place[MODULES]
        modules.elsewhere = self._others - set(parts)
        modules.training = parts.get("training")
        return (made,)


@dataclasses.dataclass(frozen=True, slots=True)
class Seen:
    """What a method has read of its module: parts, names that nothing has, and what is not here."""

    used: dict[str, None] = dataclasses.field(default_factory=dict)
    unknown: set[str] = dataclasses.field(default_factory=set)
    absent: set[str] = dataclasses.field(default_factory=set)


def _has_module(value: object) -> bool:
    if isinstance(value, (list, tuple, set, dict)):
        return any(map(_has_module, value.values() if isinstance(value, dict) else value))
    bound = getattr(value, "__self__", None) if isinstance(value, types.MethodType) else None
    return isinstance(value, nn.Module) or isinstance(bound, nn.Module)


def _inside(shell: nn.Module) -> list[dict[str, int]]:
    """Describe what a shell has, by identity."""
    places = [vars(shell), *(vars(shell)[home].plainly() for home in _HOMES)]
    return [{name: id(value) for name, value in place.items()} for place in places]


class _Home(dict[str, object]):
    """The modules, parameters or buffers of a shell; notes which of them somebody takes.

    A name that the module has and the shell has not is refused: without it the code could do
    something else (`hasattr`, `parameters()`).
    """

    def __init__(
        self, by: str, content: Mapping[str, object], names: tuple[str, ...], seen: Seen
    ) -> None:
        super().__init__(content)
        self._by, self._names, self._seen = by, names, seen
        self.elsewhere: set[str] | None = None  # attributes that are not here; None: not asked
        self.training: bool | None = None

    def plainly(self) -> dict[str, object]:
        """Return what is in it now; nobody has taken that."""
        return dict(super().items())

    def _refuse(self, name: str) -> None:
        self._seen.absent.add(name)
        raise InputError(
            f"{self._by}() reads {name} of its module, and did not when it was "
            "traced, so its stage does not have that; trace it with inputs for which it does"
        )

    def __getitem__(self, name: str) -> object:
        if name == "training" and self.training is not None:
            self._seen.used[name] = None
            return self.training
        found = super().__getitem__(name)
        if found is not None:
            self._seen.used[name] = None
        return found

    def __contains__(self, name: object) -> bool:
        is_there = super().__contains__(name) or (name == "training" and self.training is not None)
        if is_there:
            self[str(name)]
        elif name in self._names or name in (self.elsewhere or ()):
            self._refuse(str(name))
        elif self.elsewhere is not None:
            self._seen.unknown.add(str(name))
        return is_there

    def __iter__(self) -> Iterator[str]:
        # Lazily: who asks for the first parameter reads no other.
        return (name for name in [*self._names, *self._added()] if name in self)

    def _added(self) -> list[str]:
        return [name for name in dict.keys(self) if name not in self._names]

    def __len__(self) -> int:
        return len(list(iter(self)))

    def get(self, name: str, default: object = None) -> object:
        if name not in self:
            return default
        return self[name]

    def keys(self) -> Iterator[str]:  # type: ignore[override]
        return iter(self)

    def items(self) -> Iterator[tuple[str, object]]:  # type: ignore[override]
        return ((name, self[name]) for name in self)

    def values(self) -> Iterator[object]:  # type: ignore[override]
        return (self[name] for name in self)


def module_at(root: nn.Module, name: str) -> nn.Module | None:
    """Return the module of a name; None if a parameter or a buffer has it."""
    try:
        return root.get_submodule(name)
    except AttributeError:
        return None
