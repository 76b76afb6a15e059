"""Where in the model the code is that runs now: the names it uses, the settings it is under.

A module or tensor may have several names; which is meant depends on whose code uses it. The
settings are for the stage to restore: autocast and gradient settings, `checkpoint()` regions,
and the dtypes that the code read off tensors before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import fx, nn

from fxpipe.graph.facts import Ambient, NodeFacts, Region
from fxpipe.graph.sandbox.patches import collector
from fxpipe.graph.source_line import a_value_decides, user_frame
from fxpipe.torch_inside import autocast_settings

__all__ = ["Names", "Running", "Surroundings"]


class Names:
    """Names by object; `inside` is the module whose code is running, if any."""

    def __init__(self, module: nn.Module) -> None:
        self._modules: dict[int, list[str]] = {}
        self._kinds: dict[type, list[str]] = {}
        self._state: dict[int, list[str]] = {}
        for name, part in module.named_modules(remove_duplicate=False):
            self._modules.setdefault(id(part), []).append(name)
            self._kinds.setdefault(type(part), []).append(name)
        for name, tensor in (
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        ):
            self._state.setdefault(id(tensor), []).append(name)

    def of(self, module: nn.Module, inside: nn.Module | None) -> str | None:
        """Return a module's name, one inside the running module if there are several."""
        names = self._modules.get(id(module))
        if not names:
            return None
        if len(names) > 1 and inside is not None:
            around = self._modules.get(id(inside), [""])[0]
            for name in names:
                if name.startswith(f"{around}."):
                    return name
        return names[0]

    def of_kinds(self, kinds: Collection[type]) -> list[str]:
        """Return the names of all modules of some classes."""
        return [name for kind, names in self._kinds.items() if kind in kinds for name in names]

    def is_state(self, tensor: torch.Tensor) -> bool:
        """Say whether a tensor is a parameter or a buffer."""
        return id(tensor) in self._state

    def of_state(self, tensor: torch.Tensor, inside: nn.Module | None) -> str | None:
        """Return the name of a parameter or buffer, preferably the running module's own."""
        names = self._state.get(id(tensor))
        if not names:
            return None
        owner = self.of(inside, inside) if inside is not None else ""
        for name in names:
            if name.rpartition(".")[0] == owner:
                return name
        return names[0]


class Surroundings:
    """The settings at this point of the run."""

    def __init__(self) -> None:
        self._autocast: list[tuple[object, ...]] = []
        self._regions: list[Region] = []
        self.dtypes_read: Mapping[torch.dtype, fx.Node | None] = {}

    def autocast(self, region: object, entering: bool) -> None:
        """Follow an autocast region."""
        if entering:
            self._autocast.append(autocast_settings(region))
        elif self._autocast:
            self._autocast.pop()

    def checkpoint(self, options: Mapping[str, object], entering: bool) -> None:
        """Follow a `checkpoint()`."""
        if entering:
            self._regions.append(Region(options))
        else:
            self._regions.pop()

    def reentrant(self, run: Callable[..., object], preserve: bool, *args: object) -> object:
        """Run what a `checkpoint()` with `use_reentrant=True` runs."""
        if not any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args):
            with torch.no_grad():  # as this variant of checkpoint does it
                return run(*args)
        options = {"preserve_rng_state": preserve}
        self.checkpoint(options, entering=True)
        try:
            return run(*args)
        finally:
            self.checkpoint(options, entering=False)

    def dtype_read(self, dtype: torch.dtype, source: fx.Node | None) -> None:
        """Remember the tensor that a dtype was last read off; None for state."""
        self.dtypes_read = {**self.dtypes_read, dtype: source}

    def ambient(self) -> Ambient:
        """Return the settings that are not the usual ones."""
        return Ambient(None if torch.is_grad_enabled() else False, tuple(self._autocast))

    def regions(self) -> tuple[Region, ...]:
        """Return the `checkpoint()`s that are running, outermost first."""
        return tuple(self._regions)


class Running:
    """Whose code runs now; `opened` and `leaves` are modules, the outermost first."""

    def __init__(self, module: nn.Module) -> None:
        self.names = Names(module)
        self.around = Surroundings()
        self.opened: list[nn.Module] = []
        self.leaves: list[nn.Module] = []
        self.collector: object = None  # what kept outputs when the outermost leaf was called
        self.is_busy = False  # with what is not written down
        self.is_reading = False  # code that runs beside the trace, whose reads count
        self._thread = threading.get_ident()

    @property
    def is_elsewhere(self) -> bool:
        """Whether the code of a leaf runs, or code that is not written down."""
        return bool(self.leaves) or self.is_busy

    @property
    def inside(self) -> nn.Module | None:
        """The innermost opened module whose forward runs."""
        return self.opened[-1] if self.opened else None

    def is_opened(self) -> bool:
        """Say whether opened code of the model is running."""
        is_here = threading.get_ident() == self._thread
        return is_here and bool(self.opened) and not self.is_elsewhere

    def is_read(self) -> bool:
        """Say whether what is read now decides what a stage does."""
        return self.is_reading or self.is_opened()

    @contextmanager
    def in_leaf(self, module: nn.Module) -> Iterator[None]:
        """Take code for that of a leaf, until exit."""
        if not self.leaves:
            self.collector = collector()
        self.leaves.append(module)
        before, self.is_reading = self.is_reading, False
        try:
            yield
        finally:
            self.is_reading = before
            self.leaves.pop()

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Have functions run without being written down, until exit."""
        self.is_busy = True
        try:
            yield
        finally:
            self.is_busy = False

    def name_of(self, module: nn.Module) -> str | None:
        return self.names.of(module, self.inside)

    def name_of_state(self, tensor: torch.Tensor) -> str | None:
        return self.names.of_state(tensor, self.inside)

    def facts(self) -> NodeFacts:
        """Say what is known about a node that is written now."""
        owner = self.name_of(self.inside) if self.inside is not None else ""
        return NodeFacts(
            owner=owner or "",
            where=user_frame(),
            ambient=self.around.ambient(),
            regions=self.around.regions(),
            dtypes_read=self.around.dtypes_read,
        )

    def data_dependent(self) -> str:
        """Say that a value decides what the running code does."""
        who = "the model" if self.inside is None else type(self.inside).__name__
        return a_value_decides(who, user_frame())
