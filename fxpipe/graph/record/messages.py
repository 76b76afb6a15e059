"""What a trace says when it cannot go on: what was found, where, and what to do."""

from __future__ import annotations

from collections.abc import Sequence

from fxpipe.graph.source_line import Place

__all__ = ["a_decisive_draw", "a_draw", "a_value_decides", "an_effect", "an_unknown_tensor"]


def a_value_decides(who: str, place: Place | None) -> str:
    """Say that the value of a tensor decides."""
    where = f"\n  {place}\n    {place.source}" if place is not None else ""
    return (
        f"the value of a tensor decides what {who} does next, so it cannot be captured as "
        f"a graph here{where}\n"
        "keep this code inside a submodule that is not split (fxpipe leaves those as they "
        "are), move the split, or compute the decision from sizes or constants"
    )


def a_draw(place: Place) -> str:
    """Say that opened code uses a random number that is not torch's."""
    return (
        "code that is split draws a random number from Python or numpy, which would be the "
        f"same in every run of a stage\n  at or before {place}\n    {place.source}\n"
        "use torch.rand, keep this code inside a submodule that is not split, or turn it off "
        "(a rate of zero is fine)"
    )


def a_decisive_draw(place: Place, rates: Sequence[str]) -> str:
    """Say that a random number decides which opened code runs; `rates` are what it is held to."""
    setting = " and ".join(rates) or "the rate of LayerDrop or stochastic depth"
    return (
        "a random number decides which part of the model runs, and the graph of a stage has one "
        f"way\n  {place}\n    {place.source}\n"
        f"set {setting} to 0, or keep this code inside a submodule that is not split"
    )


def an_effect(what: str, place: Place) -> str:
    """Say that code does something which a graph cannot repeat."""
    return (
        f"code that is split does something that cannot be written as a graph: {what}\n  {place}\n"
        f"    {place.source}\nkeep this code inside a submodule that is not split"
    )


def an_unknown_tensor(place: Place) -> str:
    """Say that no recorded operation made a tensor."""
    return (
        f"a tensor used at {place} was made by code that fxpipe cannot see\n"
        "move that code into a submodule that is not split, or register the tensor as a buffer"
    )
