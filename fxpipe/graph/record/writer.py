"""Write nodes that only a trace needs: what a stage compares, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from fxpipe.errors import TraceError
from fxpipe.graph.calls.checks import AgreedPart, AgreedSizes
from fxpipe.graph.calls.graph_calls import Refusal
from fxpipe.graph.nested import walk
from fxpipe.graph.record.constant_values import Chance
from fxpipe.graph.record.names import Running
from fxpipe.graph.record.tape import Tape, UnknownTensorError
from fxpipe.graph.source_line import a_draw, an_unknown_tensor, user_frame

__all__ = ["Writer"]


class Writer:
    """Writes on the tape of one trace; `wanted` are modules that should have been open."""

    def __init__(self, running: Running, tape: Tape) -> None:
        self._running = running
        self.tape = tape
        self.chance = Chance()
        self.wanted: set[str] = set()
        self.hooked: set[str] = set()  # leaves with hooks of users
        self._refused: set[str] = set()

    def call(self, target: Callable[..., Any], *args: Any) -> fx.Node:
        """Write the call of a function."""
        return self.tape.write("call_function", target, args, {})

    def argument(self, value: Any) -> Any:
        """Return a value as a graph argument."""
        with self.explained():
            return self.tape.argument(value)

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Say of a tensor that nothing has made where it is used."""
        try:
            yield
        except UnknownTensorError:
            self.wanted |= self.hooked  # a hook in a leaf may have kept it
            raise TraceError(an_unknown_tensor(user_frame())) from None

    def want_open(self) -> None:
        """Ask for the leaves that are running to be opened."""
        names = map(self._running.name_of, self._running.leaves)
        self.wanted.update(name for name in names if name is not None)

    def refuse(self, message: str) -> None:
        """Have the graph refuse to run in the mode that is traced."""
        if message not in self._refused:
            self._refused.add(message)
            self.call(Refusal(message))

    def refuse_draw(self) -> None:
        """Refuse the use of a random number that is not torch's."""
        self.refuse(a_draw(user_frame()))

    def check_chance(self) -> None:
        """Refuse if opened code has drawn such a number since the last time."""
        if self.chance.was_drawn():
            self.refuse_draw()

    def check_sizes(self, output: Any) -> None:
        """Have the stage check that tensors have the sizes that the trace gave them."""
        tensors = [leaf for _, leaf in walk(output) if isinstance(leaf, torch.Tensor)]
        expected = self.argument([list(tensor.shape) for tensor in tensors])
        self.call(AgreedSizes(user_frame()), self.argument(tensors), expected)

    def check_parts(self, node: fx.Node, output: Any) -> None:
        """Have the stage compare the numbers and flags among what a leaf returns."""
        for path, leaf in walk(output):
            is_plain = all(kind == "item" for kind, _ in path)
            if is_plain and isinstance(leaf, (bool, int, float, str)):
                self.call(AgreedPart(user_frame()), leaf, self.tape.part_of(node, path))
