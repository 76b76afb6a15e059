"""Find places to cut a model that nobody has described: between its blocks.

In:  any model and inputs it runs on.
Out: names of modules to cut in front of, evenly spread over the blocks.

A block is a direct child of a ModuleList or Sequential that runs exactly once, in
training and in evaluation. The outermost blocks are used as long as there are enough
of them, otherwise those inside.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

__all__ = ["blocks", "cuts"]


def cuts(model: nn.Module, kwargs: Mapping[str, Any], num_stages: int) -> list[str]:
    """Names of `num_stages - 1` blocks, in the order in which they run.

    Fewer, if the model has fewer blocks than stages; none if it has no blocks.
    """
    found = blocks(model, kwargs, num_stages)
    parts = min(num_stages, len(found))
    return [found[len(found) * part // parts] for part in range(1, parts)]


def blocks(model: nn.Module, kwargs: Mapping[str, Any], wanted: int) -> list[str]:
    """All blocks at the outermost level that has `wanted` of them, in running order."""
    order = _calls(model, kwargs)
    level = [name for name in order if _is_outermost(name, order)]
    while len(level) < wanted:
        inner = [name for name in order if any(name.startswith(f"{top}.") for top in level)]
        deeper = [name for name in inner if _is_outermost(name, inner)]
        if not deeper:
            break
        opened = {top for top in level if any(name.startswith(f"{top}.") for name in deeper)}
        level = [name for name in order if name in deeper or (name in level and name not in opened)]
    return level


def _is_outermost(name: str, names: list[str]) -> bool:
    return not any(name.startswith(f"{other}.") for other in names)


def _calls(model: nn.Module, kwargs: Mapping[str, Any]) -> list[str]:
    """Blocks that run exactly once, in training and in evaluation, in running order.

    A copy of the model runs: some make buffers when they first run.
    """
    model = copy.deepcopy(model)
    candidates = {
        f"{parent}.{child}" if parent else child: block
        for parent, holder in model.named_modules()
        if isinstance(holder, nn.ModuleList | nn.Sequential)
        for child, block in holder.named_children()
    }
    counts: dict[str, list[bool]] = {}
    for name, block in candidates.items():

        def count(*_: Any, name: str = name) -> None:
            counts.setdefault(name, []).append(model.training)

        block.register_forward_pre_hook(count)
    for training in (True, False):
        model.train(training)
        with torch.no_grad(), torch.random.fork_rng():
            model(**copy.deepcopy(dict(kwargs)))
    return [name for name, modes in counts.items() if modes == [True, False]]
