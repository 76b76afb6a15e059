"""Refuse a cut that leaves a buffer or parameter which is changed in more than one stage.

Each stage has its own copy of what it holds, in a process of its own. A copy that
one stage changes would be out of date in the other.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx, nn

from fxpipe.errors import SplitError
from fxpipe.graph.cut.flow import Flow
from fxpipe.torch_inside import NormBase, buffers_of, parameters_of, transient_buffers

__all__ = ["check_state_writes"]


def check_state_writes(flow: Flow) -> None:
    """Check that no stage uses a buffer that another one changes.

    Raises:
        SplitError: lists every such buffer, and where it is changed and used.
    """
    module = flow.traced.module
    writers: dict[int, tuple[str, int, fx.Node]] = {}
    for node, stage in flow.stage_of.items():
        for name in _written(module, node, flow.facts[node].writes):
            writers.setdefault(id(_tensor(module, name)), (name, stage, node))
    if not writers:
        return
    faults: dict[str, None] = {}
    for stage in range(flow.num_stages):
        for node in flow.local(stage):
            for tensor in _tensors(module, node):
                name, home, writer = writers.get(id(tensor), ("", stage, node))
                if home != stage:
                    faults[
                        f"{name!r} is changed in stage {home} ({flow.facts[writer].where}) and "
                        f"used in stage {stage} ({flow.facts[node].where})"
                    ] = None
    if faults:
        raise SplitError(
            "a buffer or parameter that is changed in one stage cannot be used in another, which "
            "has its own copy:\n  "
            + "\n  ".join(faults)
            + "\nmove the split so that one stage has both"
        )


def _written(module: nn.Module, node: fx.Node, writes: frozenset[str]) -> set[str]:
    names = set(writes)
    if node.op == "call_module":
        for inner, part in module.get_submodule(str(node.target)).named_modules():
            prefix = ".".join(filter(None, (str(node.target), inner)))
            if isinstance(part, NormBase) and part.running_mean is not None:
                names |= {f"{prefix}.{key}" for key, _ in part.named_buffers()}
            # What is not saved is a cache that every stage fills for itself.
            names -= {f"{prefix}.{key}" for key in transient_buffers(part)}
    return names


def _tensors(module: nn.Module, node: fx.Node) -> Iterator[torch.Tensor]:
    if node.op == "call_module":
        yield from module.get_submodule(str(node.target)).buffers()
        yield from module.get_submodule(str(node.target)).parameters()
    elif node.op == "get_attr":
        found = _tensor(module, str(node.target))
        if found is not None:
            yield found


def _tensor(module: nn.Module, name: str) -> torch.Tensor | None:
    path, _, key = name.rpartition(".")
    owner = module.get_submodule(path)
    return {**parameters_of(owner), **buffers_of(owner)}.get(key)
