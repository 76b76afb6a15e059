"""The lists, dicts and objects that a leaf is given, and may change.

A leaf may append to a list or fill a cache that other code reads later. What was
changed becomes a node of its own in front of the call, and its later readers read
it "after" the call.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from torch import fx

from fxpipe.graph.nested import contents, mutable_parts
from fxpipe.graph.record.graph_calls import given
from fxpipe.graph.record.tape import Tape

__all__ = ["Handed"]


class Handed:
    """What could change of the arguments of one call."""

    def __init__(
        self, tape: Tape, argument: Callable[[Any], Any], args: Any, kwargs: dict[str, Any]
    ) -> None:
        self._tape = tape
        self._call = (args, kwargs)
        parts = [part for part in mutable_parts((args, kwargs)) if part is not kwargs]
        self._before = [(part, contents(part)) for part in parts]
        self._holders = [argument(part) for part in parts]
        self._changed: list[tuple[Any, fx.Node]] = []

    def look(self, node_args: Any, node_kwargs: Any) -> tuple[Any, Any]:
        """Return the graph arguments with a node for each part that the call changed."""
        args, kwargs = self._call
        for (part, before), holder in zip(self._before, self._holders, strict=True):
            if contents(part) != before:
                if not isinstance(holder, fx.Node):
                    holder = self._tape.write("call_function", given, (holder,), {})
                    node_args = _with_holder(args, node_args, part, holder)
                    node_kwargs = _with_holder(kwargs, node_kwargs, part, holder)
                self._changed.append((part, holder))
        return node_args, node_kwargs

    def note(self, node: fx.Node) -> None:
        """Remember that the call, by now a node, changed what `look` found."""
        for part, holder in self._changed:
            self._tape.object_changed(part, holder, node)


def _with_holder(value: Any, argument: Any, part: Any, holder: fx.Node) -> Any:
    """Return a graph argument in which one list or dict of the value is a node of its own."""
    if value is part:
        return holder
    if type(value) in (tuple, list) and not isinstance(argument, fx.Node):
        return type(value)(map(_with_holder, value, argument, *_repeated(part, holder)))
    if type(value) is dict and not isinstance(argument, fx.Node):
        return {key: _with_holder(value[key], argument[key], part, holder) for key in value}
    return argument


def _repeated(*values: Any) -> list[Iterator[Any]]:
    return [itertools.repeat(value) for value in values]
