"""Count the arithmetic of each stage, without running anything on data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fxpipe.graph.info import PipeInfo
from fxpipe.graph.interface import TensorSpec
from fxpipe.graph.nested import map_leaves
from fxpipe.graph.sandbox.fake import probe

__all__ = ["forward_flops"]


class _Counted(nn.Module):
    """A stage that counts; inside, so that the counter sees what the stage calls."""

    def __init__(self, stage: nn.Module, note: Callable[[int], None]) -> None:
        super().__init__()
        self.stage = stage
        self.note = note

    def forward(self, *args: object, **kwargs: object) -> object:
        with FlopCounterMode(display=False) as counter:
            output = self.stage(*args, **kwargs)
        self.note(counter.get_total_flops())
        return output


def forward_flops(
    modules: Sequence[nn.Module], info: PipeInfo, sizes: Mapping[str, int] | None = None
) -> tuple[int, ...]:
    """The FLOPs of one microbatch's forward on each stage, at the sizes given."""
    values = {**info.example_sizes, **(sizes or {})}

    def bound(leaf: object) -> object:
        return leaf.bind(values) if isinstance(leaf, TensorSpec) else leaf

    found = []
    for module, interface in zip(modules, info.interfaces, strict=True):
        counts: list[int] = []
        args = [bound(received.port.spec) for received in interface.received]
        kwargs = {
            name: map_leaves(bound, info.inputs.example[name]) for name in interface.model_inputs
        }
        with torch.no_grad():
            probe(_Counted(module, counts.append), args, kwargs)
        found.append(counts[-1])
    return tuple(found)
