"""Which values a stage computes again instead of receiving them.

Position ids, masks and the like need no gradient, follow from the model's inputs
alone and take a moment to compute, while a mask can be larger than the
activations. A stage repeats such a value if that moves less data. What it needs
for it, it reads off what it has; a model input it would have to be given first
counts with its bytes, like any other value that is sent.

A value is never repeated if it is random, needs a parameter or persistent state, or
is changed in place by anything.
"""

from __future__ import annotations

import dataclasses

from torch import fx, nn

from fxpipe.graph.calls.attention_masks import MaskCall, mask_call
from fxpipe.graph.capture.dtype_following import HEAVY, function_name, keeps_parameter_dtype
from fxpipe.graph.cut.flow import Flow, is_free
from fxpipe.graph.interface import TensorSpec

__all__ = ["choose_repeated"]

# Computing a byte costs this much less than sending it.
_CHEAPER = 32
_LARGEST_CHAIN = 200


def choose_repeated(flow: Flow) -> list[list[str]]:
    """Decide for every stage; tells the flow, and returns the names of the values."""
    chosen: list[list[str]] = []
    for stage in range(flow.num_stages):
        names: list[str] = []
        needed = sorted(flow.needs(stage), key=lambda n: -_bytes(flow, n))
        for node in needed:
            chain = _chain(flow, node, stage, needed) or _mask_chain(flow, node, stage, needed)
            if chain is not None and _is_worth_it(flow, node, stage, chain):
                extra = chain.reads - flow.inputs(stage) - flow.lent[stage].keys()
                for placeholder in sorted(extra):
                    flow.lend(placeholder, stage)
                flow.repeat(stage, chain.nodes, chain.stand_ins)
                names.append(node.name)
        chosen.append(names)
    return chosen


@dataclasses.dataclass(slots=True)
class _Chain:
    """What repeating a value takes."""

    nodes: set[fx.Node]
    reads: set[fx.Node]
    stand_ins: dict[fx.Node, fx.Node | None]


def _is_worth_it(flow: Flow, node: fx.Node, stage: int, chain: _Chain) -> bool:
    extra = chain.reads - flow.inputs(stage) - flow.lent[stage].keys()
    if any(not isinstance(flow.facts[read].spec, TensorSpec) for read in extra):
        return False
    if any(not _is_read_earlier(flow, read, stage) for read in extra):
        return False
    if mask_call(node) is not None:
        return True  # its own mask, or none, lets a stage call the plain model's kernel
    work = sum(_bytes(flow, n) for n in chain.nodes) / _CHEAPER
    return work + sum(_bytes(flow, read) for read in extra) <= _bytes(flow, node)


def _is_read_earlier(flow: Flow, read: fx.Node, stage: int) -> bool:
    return any(read in flow.inputs(earlier) for earlier in range(stage))


def _chain(flow: Flow, node: fx.Node, stage: int, received: list[fx.Node]) -> _Chain | None:
    """Return the nodes to repeat for one value, and the model inputs they read."""
    chain = _Chain(set(), set(), {})
    stack = [node]
    while stack:
        current = stack.pop()
        if current in chain.nodes or current in flow.repeated[stage]:
            continue
        if current.op == "placeholder":
            chain.reads.add(current)
        elif current.op == "get_attr":
            return None
        elif is_free(current, flow.facts):
            stack.extend(current.all_input_nodes)
        elif not _is_repeatable(flow, current) or len(chain.nodes) > _LARGEST_CHAIN:
            return None
        else:
            chain.nodes.add(current)
            for source in flow.sources(current):
                if source in flow.facts[current].untouched:
                    stand_in = _stand_in(flow, current, source, received)
                    if stand_in:
                        chain.stand_ins.update(stand_in)
                        continue
                stack.append(source)
    return chain


def _mask_chain(flow: Flow, node: fx.Node, stage: int, received: list[fx.Node]) -> _Chain | None:
    """Return what it takes to make a mask again from values that are received for it.

    Sending it would fix whether there is one; see `attention_masks`.
    """
    mask = mask_call(node)
    if mask is None or not _is_repeatable(flow, mask):
        return None
    chain = _Chain({node, mask}, set(), {})
    stack = flow.sources(mask)
    while stack:
        source = stack.pop()
        if source.op == "placeholder":
            chain.reads.add(source)
        elif source in flow.facts[mask].untouched:
            stand_in = _stand_in(flow, mask, source, received)
            if not stand_in:
                return None
            chain.stand_ins.update(stand_in)
        elif is_free(source, flow.facts):
            stack.extend(source.all_input_nodes)
        elif not isinstance(flow.facts[source].spec, TensorSpec):
            return None
    return chain


def _stand_in(
    flow: Flow, reader: fx.Node, node: fx.Node, received: list[fx.Node]
) -> dict[fx.Node, fx.Node | None]:
    """Return what to show a call that only looks at dtype, device and size, under the node.

    A received value, where the node's dtype is that of the parameters whatever autocast does, so
    that the stand-in can be given the right dtype when the stage runs. To a mask of
    true and false the dtype is nothing: None stands for a blank tensor of the node's size.
    """
    spec: TensorSpec = flow.facts[node].spec
    is_mask = isinstance(reader.target, MaskCall) and not any(
        spec.dtype.is_floating_point for spec in flow.facts.tensors(reader)
    )
    if is_mask or keeps_parameter_dtype(flow.traced.module, flow.facts, node):
        for other in received:
            found = flow.facts[other].spec
            if found.requires_grad and (found.shape, found.dtype) == (spec.shape, spec.dtype):
                return {node: other}
    return {node: None} if is_mask and spec.symbols <= flow.traced.hints.keys() else {}


def _is_repeatable(flow: Flow, node: fx.Node) -> bool:
    known = flow.facts[node]
    is_changed = bool(known.changes) or known.storage is not None or known.draws
    if flow.facts.has_gradient(node) or known.mode is not None or is_changed or known.regions:
        return False
    if node.op == "call_module":
        return _is_table(flow.traced.module.get_submodule(str(node.target)))
    return not function_name(node).startswith(HEAVY)


def _is_table(module: nn.Module) -> bool:
    """Say whether a module only turns its inputs and fixed tables into other tables."""
    if any(True for _ in module.parameters()) or module.state_dict():
        return False
    return any(True for _ in module.buffers())


def _bytes(flow: Flow, node: fx.Node) -> float:
    total = 0
    for spec in flow.facts.tensors(node):
        if spec.symbols <= flow.traced.hints.keys():
            count = 1
            for size in spec.bind(flow.traced.hints).shape:
                count *= int(size)
            total += count * spec.dtype.itemsize
    return total
