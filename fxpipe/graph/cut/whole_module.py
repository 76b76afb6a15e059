"""Treat the stages of a pipe as one module: its state, and its graph.

In:  the stages' modules, which keep the model's own names, and their interfaces.
Out: one `state_dict` with these names, the way back, and an fx graph that calls the stages.

A parameter that several stages hold appears once in the state and is loaded into all of them.
"""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch.fx
from torch import nn

from fxpipe.graph.interface import StageInterface
from fxpipe.torch_inside import IncompatibleKeys

__all__ = ["graph_of_stages", "load_parts", "merged_state"]


def merged_state(
    parts: Iterable[nn.Module],
    destination: Any = None,
    prefix: str = "",
    keep_vars: bool = False,
) -> Any:
    """The state of all parts under their own names."""
    found: Any = OrderedDict() if destination is None else destination
    for part in parts:
        part.state_dict(destination=found, prefix=prefix, keep_vars=keep_vars)
    return found


def load_parts(
    parts: Iterable[nn.Module], state: Mapping[str, Any], *, strict: bool, assign: bool
) -> Any:
    """Load into each part what it has of the state.

    Raises:
        RuntimeError: as `nn.Module.load_state_dict`, if `strict`: names or shapes do not fit.
    """
    modules = list(parts)
    names = [set(part.state_dict()) for part in modules]
    missing = sorted(set().union(*names) - set(state))
    unexpected = [name for name in state if not any(name in known for known in names)]
    if strict and (missing or unexpected):
        raise RuntimeError(
            f"the state does not fit the pipe: it lacks {missing} and has unknown {unexpected}"
        )
    for part, known in zip(modules, names, strict=True):
        mine = {name: value for name, value in state.items() if name in known}
        part.load_state_dict(mine, strict=strict, assign=assign)
    return IncompatibleKeys(missing, unexpected)


def graph_of_stages(interfaces: Sequence[StageInterface]) -> torch.fx.Graph:
    """A graph of model inputs, one call of each stage (`submod_0`, ...), and the output."""
    graph = torch.fx.Graph()
    names = dict.fromkeys(name for interface in interfaces for name in interface.model_inputs)
    inputs = {name: graph.placeholder(name) for name in names}
    values: dict[tuple[int, str], torch.fx.Node] = {}
    made: Any = None
    for index, interface in enumerate(interfaces):
        received = tuple(values[one.source_stage, one.port.name] for one in interface.received)
        named: dict[str, Any] = {name: inputs[name] for name in interface.model_inputs}
        made = graph.call_module(f"submod_{index}", received, named)
        for place, sent in enumerate(interface.sent):
            is_one = len(interface.sent) == 1
            node = made if is_one else graph.call_function(operator.getitem, (made, place))
            values[index, sent.port.name] = node
    graph.output(made)
    return graph
