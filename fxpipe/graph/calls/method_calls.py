"""Functions that loop over rows, as one call each in the graph.

Vision-language models have methods that loop over the images of a batch, and call modules in
between. As a graph such code fixes the number of images. But where no cut is inside, a stage may
run it as it is, like a leaf: it has the parts of the module that the method uses.

In:  a method of a module that is opened, or a function.
Out: a `MethodCall`, which gets those parts before the arguments. In place of the module the method
     gets a shell: an object of its class with these parts and the attributes without tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from fxpipe.graph.calls.graph_calls import GraphCall
from fxpipe.graph.nested import has_tensor
from fxpipe.torch_inside import BUFFERS, MODULES, PARAMETERS

__all__ = ["MethodCall", "module_at"]

_HOMES = (MODULES, PARAMETERS, BUFFERS)
_USUAL = frozenset({*vars(nn.Module()), "training"})


class MethodCall(GraphCall):
    """A callable that runs a method on parts of its module."""

    def __init__(self, function: Callable[..., object], owner: nn.Module | None) -> None:
        super().__init__(function.__name__)
        self._function = function
        self._kind: type | None = None if owner is None else type(owner)
        self._key = (function, id(owner))
        self.attributes = {
            name: value
            for name, value in (vars(owner).items() if owner is not None else ())
            if name not in _USUAL and not has_tensor(value)
        }
        self._empty = {
            home: [name for name, part in vars(owner)[home].items() if part is None]
            for home in (_HOMES if owner is not None else ())
        }

    def __eq__(self, other: object) -> bool:
        # A trace in each mode makes a call of its own: they are the same.
        return type(other) is type(self) and other._key == self._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __call__(self, parts: Mapping[str, Any], *args: object, **kwargs: object) -> object:
        return self._function(*self._shells(parts), *args, **kwargs)

    def noting(self, parts: Mapping[str, Any], used: dict[str, None]) -> Callable[..., object]:
        """Return a function that runs the method, and notes which parts it uses.

        It raises ValueError if the method puts something into its module.
        """

        def run(*args: object, **kwargs: object) -> object:
            shells = self._shells(parts)
            for place in map(vars, shells):
                place.update({home: _Noted(place[home], used) for home in _HOMES})
            before = list(map(_inside, shells))
            output = self._function(*shells, *args, **kwargs)
            if list(map(_inside, shells)) != before:
                raise ValueError(f"{self.__name__} puts something into its module")
            return output

        return run

    def _shells(self, parts: Mapping[str, Any]) -> tuple[nn.Module, ...]:
        if self._kind is None:
            return ()
        made: nn.Module = object.__new__(self._kind)
        place = vars(made)
        place.update({**vars(nn.Module()), **self.attributes})
        del place["training"]
        for home, names in self._empty.items():
            place[home].update(dict.fromkeys(names))
        for name, part in parts.items():
            is_module = isinstance(part, nn.Module)
            home = PARAMETERS if isinstance(part, nn.Parameter) else BUFFERS
            place[MODULES if is_module else home][name] = part
            if is_module:
                made.training = part.training
        return (made,)


def _inside(shell: nn.Module) -> list[dict[str, int]]:
    """Describe what a shell has, by identity."""
    places = [vars(shell), *(vars(shell)[home].plainly() for home in _HOMES)]
    return [{name: id(value) for name, value in place.items()} for place in places]


class _Noted(dict[str, Any]):
    """The modules, parameters or buffers of a shell; notes which of them somebody takes."""

    def __init__(self, content: Mapping[str, Any], used: dict[str, None]) -> None:
        super().__init__(content)
        self._used = used

    def plainly(self) -> dict[str, Any]:
        """Return what is in it now; nobody has taken that."""
        return dict(super().items())

    def __getitem__(self, name: str) -> Any:
        found = super().__getitem__(name)
        if found is not None:
            self._used[name] = None
        return found

    def __contains__(self, name: object) -> bool:
        is_there = super().__contains__(name)
        if is_there:
            self[str(name)]
        return is_there

    def __iter__(self) -> Iterator[str]:
        return (name for name in list(super().keys()) if name in self)

    def get(self, name: str, default: Any = None) -> Any:
        if name not in self:
            return default
        return self[name]

    def keys(self) -> Iterator[str]:  # type: ignore[override]
        return iter(self)

    def items(self) -> Iterator[tuple[str, Any]]:  # type: ignore[override]
        return ((name, self[name]) for name in self)

    def values(self) -> Iterator[Any]:  # type: ignore[override]
        return (self[name] for name in self)


def module_at(root: nn.Module, name: str) -> nn.Module | None:
    """Return the module of a name; None if a parameter or a buffer has it."""
    try:
        return root.get_submodule(name)
    except AttributeError:
        return None
