"""What a capture makes: a model as a graph of leaf calls and torch functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from torch import fx, nn

from fxpipe.errors import SplitError
from fxpipe.graph.facts import Facts
from fxpipe.graph.guard.world import World
from fxpipe.graph.inputs import InputSignature

__all__ = ["TracedGraph", "UnknownLengthError", "UnknownSizeError", "UnlikeModesError"]


@dataclasses.dataclass(frozen=True, slots=True)
class TracedGraph:
    """A model as a graph of leaf calls and torch functions.

    `facts` says what is known about each node. Sizes among the arguments are sympy
    expressions. `world` is what the code read of Python's world, `flags` are the modules
    whose training flag it asked for; with `modes` the graph is for these flags only, and
    `why_one_mode` says why the model could not be captured in the other mode.
    """

    module: nn.Module
    graph: fx.Graph
    facts: Facts
    inputs: InputSignature
    symbols: tuple[str, ...]
    hints: Mapping[str, int]
    opened: frozenset[str]
    autocast: bool
    world: World
    flags: frozenset[str] = frozenset()
    modes: Mapping[str, bool] | None = None
    why_one_mode: str = ""


class UnknownLengthError(SplitError):
    """A list would cross a boundary whose length is a size."""


class UnlikeModesError(SplitError):
    """A value on a stage boundary looks different in training and in evaluation."""


class UnknownSizeError(SplitError):
    """A size on a stage boundary depends on data."""
