"""Watch one call and its backward: every operation, every byte that is kept.

In:  a function, its tensor inputs (fake or real), its parameters.
Out: an `Observation`: operations of the forward and of both halves of the backward, with
     FLOPs and bytes moved; what autograd keeps alive in between; the highest tides.

What is kept is not guessed from formulas: after the forward all references but the output
are dropped, and the storages that are still alive are what the backward holds. That
covers saved tensors, attributes of custom functions, and checkpointed regions alike, and counts a
storage once however many tensors show it. FLOPs come from torch's own table of formulas.

An operation of the whole backward that does not also appear when only the inputs want
gradients belongs to the weights. The runtime puts off products (and lookups) only, so
the rest of those, such as the sum for a norm's scale, counts with the input half.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import flop_registry

from fxpipe.graph.nested import walk
from fxpipe.planner.cost.hardware import OpClass
from fxpipe.planner.cost.observation import Observation, Op
from fxpipe.torch_inside import (
    CPU_ATTENTION,
    CPU_ATTENTION_BACKWARD,
    TorchDispatchMode,
    memory_of,
    overload_packet,
    schema_of,
)

__all__ = ["entry", "observe", "tensors_in"]

_aten = torch.ops.aten


def observe(
    call: Callable[..., Any],
    build: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]],
    parameters_of: Callable[[], Sequence[torch.Tensor]],
) -> Observation:
    """Run a call and its backward once, and tell what happened.

    `build` makes the arguments, which nobody else may hold; `parameters_of` is asked after
    that. Tensors in the arguments that require a gradient get one (see `entry`); so do
    parameters that do, and their `.grad` is made beforehand, as in all microbatches but
    the first.
    """
    watch = _Watch()
    args, kwargs = build()
    parameters = parameters_of()
    state_keys = {memory_of(parameter) for parameter in parameters}
    given = [t for t in tensors_in((args, kwargs)) if memory_of(t) not in state_keys]
    inputs = [_Held(tensor) for tensor in given]
    edges = [torch.autograd.graph.get_gradient_edge(t) for t in given if t.requires_grad]
    for parameter in parameters:
        if parameter.requires_grad:
            parameter.grad = torch.empty_like(parameter)
    state = [*parameters, *(p.grad for p in parameters if p.grad is not None)]
    watch.leave_out(given)
    watch.leave_out(state, is_state=True)
    with watch:
        output = call(*args, **kwargs)
        outputs = tensors_in(output)
        made = [_Held(tensor) for tensor in outputs]
        roots = [torch.autograd.graph.get_gradient_edge(t) for t in outputs if t.requires_grad]
        forward = watch.take()
        del args, kwargs, given, output
        inside = watch.alive(without={held.key for held in made})
        seeds = [torch.empty_like(tensor) for tensor in outputs if tensor.requires_grad]
        watch.leave_out(seeds)
        del outputs
        if not roots:
            return Observation(
                forward.ops, forward_peak=forward.peak, alias=_aliases(made, inputs),
                keeps_input=(False,) * len(inputs), keeps_output=(False,) * len(made),
            )  # fmt: skip
        keeps_input = tuple(held.is_alive() for held in inputs)
        keeps_output = tuple(held.is_alive() for held in made)
        has_weights = any(parameter.requires_grad for parameter in parameters)
        halves = _run_backward(watch, roots, seeds, edges, has_weights)
    return Observation(
        forward.ops,
        halves.input_ops,
        halves.weight_ops,
        sum(inside.values()),
        keeps_input,
        keeps_output,
        _aliases(made, inputs),
        forward.peak,
        halves.peak,
        halves.deferred,
        False,
        *_kept_by_products(forward, inside, watch.makers),
    )


def _kept_by_products(
    forward: _Phase, inside: Mapping[int, int], makers: Mapping[int, OpClass]
) -> tuple[float, float]:
    read: set[int] = set()
    operands: set[int] = set()
    for op, storages in zip(forward.ops, forward.operands, strict=True):
        if op.op_class in ("matmul", "convolution"):
            operands |= storages.keys()
        elif op.op_class == "attention" or "norm" in op.name:
            read |= storages.keys()
    made = {key for key in inside if makers.get(key, "memory") != "memory"}
    kept = made | read | operands
    return (
        sum(size for key, size in inside.items() if key in kept),
        sum(size for key, size in inside.items() if key in operands - made - read),
    )


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors of a nested value, each once."""
    found: dict[int, torch.Tensor] = {}
    for _, leaf in walk(value):
        if isinstance(leaf, torch.Tensor):
            found.setdefault(id(leaf), leaf)
    return list(found.values())


@dataclass(frozen=True, slots=True)
class _Halves:
    input_ops: tuple[Op, ...]
    weight_ops: tuple[Op, ...]
    peak: int
    deferred: int


def _run_backward(
    watch: _Watch,
    roots: Sequence[Any],
    seeds: Sequence[torch.Tensor],
    edges: Sequence[Any],
    has_weights: bool,
) -> _Halves:
    """Run the backward for the inputs alone, then all of it, and tell the halves apart."""
    expected: Counter[tuple[Any, ...]] = Counter()
    if not has_weights:
        torch.autograd.backward(roots, seeds)
        whole = watch.take()
        return _Halves(whole.ops, (), whole.peak, 0)
    if edges:
        torch.autograd.grad(roots, edges, seeds, retain_graph=True, allow_unused=True)
        expected.update(watch.take().signatures)
    torch.autograd.backward(roots, seeds)
    whole = watch.take()
    input_ops: list[Op] = []
    weight_ops: list[Op] = []
    operands: dict[int, int] = {}
    for op, signature, storages in zip(whole.ops, whole.signatures, whole.operands, strict=True):
        if expected[signature] > 0:
            expected[signature] -= 1
            input_ops.append(op)
        elif edges and op.op_class == "memory" and op.name not in _PUT_OFF:
            input_ops.append(op)
        else:
            # The gradient of a stack of weights is a stack of products.
            _, _, shapes = signature
            is_stack = op.op_class == "matmul" and len(shapes[0][0]) == 3
            experts = shapes[0][0][0] if is_stack else op.experts
            is_product = op.op_class != "memory"
            weight_ops.append(replace(op, makes_gradient=is_product, experts=experts))
            if op.op_class != "memory" or op.name in _LOOKUPS:
                operands |= storages
    return _Halves(tuple(input_ops), tuple(weight_ops), whole.peak, sum(operands.values()))


def _aliases(made: Sequence[_Held], inputs: Sequence[_Held]) -> tuple[int | None, ...]:
    return tuple(
        next((i for i, held in enumerate(inputs) if held.key == out.key), None) for out in made
    )


class _Held:
    """A storage by its number, without keeping it alive."""

    __slots__ = ("_ref", "key")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._ref = _weak(tensor)
        self.key: int = self._ref.cdata

    def is_alive(self) -> bool:
        return not _is_gone(self._ref)


@dataclass(frozen=True, slots=True)
class _Phase:
    """What ran since the last look: operations, how to recognise them, what they read."""

    ops: tuple[Op, ...]
    signatures: tuple[tuple[Any, ...], ...]
    operands: tuple[dict[int, int], ...]
    peak: int


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation and knows which storages are alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._left_out: dict[int, StorageWeakRef] = {}
        self._state: set[int] = set()
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        # Kept so that the numbers of dead storages are not given to new ones.
        self._gone: list[StorageWeakRef] = []
        self._ops: list[Op] = []
        self._signatures: list[tuple[Any, ...]] = []
        self._operands: list[dict[int, int]] = []
        self.makers: dict[int, OpClass] = {}  # of storages
        self._base = 0
        self._peak = 0

    def leave_out(self, tensors: Sequence[torch.Tensor], *, is_state: bool = False) -> None:
        """Never count the storages of these tensors."""
        for tensor in tensors:
            ref = _weak(tensor)
            self._left_out[ref.cdata] = ref
            self._alive.pop(ref.cdata, None)
            if is_state:
                self._state.add(ref.cdata)

    def alive(self, without: Collection[int] = ()) -> dict[int, int]:
        """Bytes of the storages made so far that are still alive."""
        for key in [key for key, (ref, _) in self._alive.items() if _is_gone(ref)]:
            self._gone.append(self._alive.pop(key)[0])
        return {key: size for key, (_, size) in self._alive.items() if key not in without}

    def take(self) -> _Phase:
        """End a phase; the next one counts its peak from what is alive then."""
        phase = _Phase(
            tuple(self._ops),
            tuple(self._signatures),
            tuple(self._operands),
            max(self._peak - self._base, 0),
        )
        self._ops, self._signatures, self._operands = [], [], []
        self._base = self._peak = sum(self.alive().values())
        return phase

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _QUESTIONS:
            return NotImplemented
        packet = overload_packet(func)
        if packet in _COMPOSITE:
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        output = func(*args, **kwargs)
        self._note(func, packet, args, kwargs, output)
        return output

    def _note(self, func: Any, packet: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        read = tensors_in((args, kwargs))
        made = tensors_in(output)
        storages = {memory_of(tensor): tensor for tensor in read}
        made_bytes, fresh = 0, []
        for tensor in made:
            key = memory_of(tensor)
            if key not in storages and key not in self._left_out and key not in self._alive:
                size = tensor.untyped_storage().nbytes()
                self._alive[key] = (_weak(tensor), size)
                made_bytes += size
                fresh.append(key)
        is_view = bool(made) and not made_bytes and not _changes_input(func)
        if not is_view and (read or made):
            formula = _FORMULAS.get(packet)
            flops = int(formula(*args, **kwargs, out_val=output)) if formula is not None else 0
            moved = sum(t.numel() * t.element_size() for t in (*read, *made))
            dtype = next((t.dtype for t in (*read, *made) if t.is_floating_point()), torch.int64)
            name = str(packet)
            op_class = _class_of(name) if formula is not None else "memory"
            self.makers.update(dict.fromkeys(fresh, op_class))
            state = [t for t in (*read, *made) if memory_of(t) in self._state]
            state_bytes = sum(t.numel() * t.element_size() for t in state)
            keys = args[1:3] if op_class == "attention" and "backward" not in name else ()
            self._ops.append(
                Op(
                    name,
                    op_class,
                    _dtype_name(dtype),
                    flops,
                    moved,
                    made_bytes,
                    state_bytes,
                    sum(t.numel() * t.element_size() for t in keys),
                    _routed(op_class, read, state),
                    experts=max((t.shape[0] for t in state if t.dim() == 3), default=0),
                )
            )
            shapes = tuple((tuple(t.shape), memory_of(t) in self._state) for t in read)
            self._signatures.append((name, flops, shapes))
            self._operands.append(
                {
                    key: tensor.untyped_storage().nbytes()
                    for key, tensor in storages.items()
                    if key not in self._state
                }
            )
        self._peak = max(self._peak, sum(self.alive().values()))


def entry(tensor: torch.Tensor, stash: list[torch.Tensor]) -> torch.Tensor:
    """The same tensor as if another stage had sent it: its gradient goes to `stash`.

    A leaf would not do: autograd keeps leaves alive, and nobody could tell whether the
    call's own backward needs the value.
    """
    anchor = torch.zeros((), requires_grad=True)
    apply: Any = _Entry.apply  # has types in some versions of torch only
    made: torch.Tensor = apply(anchor, [tensor], stash)
    return made


class _Entry(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, tensors: list[torch.Tensor], stash: list[torch.Tensor]
    ) -> torch.Tensor:
        ctx.stash = stash
        return tensors[0].detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None, None]:
        ctx.stash.append(grad)
        return None, None, None


def _weak(tensor: torch.Tensor) -> StorageWeakRef:
    # While such a reference exists, no other storage gets the same number.
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _is_gone(ref: StorageWeakRef) -> bool:
    return bool(ref.expired())  # type: ignore[no-untyped-call]


def _routed(op_class: OpClass, read: Sequence[torch.Tensor], state: Sequence[torch.Tensor]) -> int:
    """What a product with a stack of experts, a weight of three dimensions, reads besides it."""
    if op_class != "matmul" or not any(tensor.dim() == 3 for tensor in state):
        return 0
    keys = {memory_of(tensor) for tensor in state}
    return sum(t.numel() * t.element_size() for t in read if memory_of(t) not in keys)


def _changes_input(func: Any) -> bool:
    schema = schema_of(func)
    return schema is not None and bool(schema.is_mutable)


def _dtype_name(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    return "float8" if name.startswith("float8") else name


def _class_of(name: str) -> OpClass:
    if "attention" in name:
        return "attention"
    return "convolution" if "conv" in name else "matmul"


def _cpu_attention(
    query: Any, key: Any, value: Any, dropout: Any = 0.0, causal: Any = False, **kwargs: Any
) -> int:
    batch, heads, length, width = query.shape
    # A causal kernel leaves out what nobody sees: half of it.
    return 4 * int(batch * heads * length * key.shape[-2] * width) // (2 if causal else 1)


def _cpu_attention_backward(
    grad: Any, query: Any, key: Any, value: Any, out: Any, lse: Any, dropout: Any, causal: Any,
    *args: Any, **kwargs: Any,
) -> int:  # fmt: skip
    batch, heads, length, width = query.shape
    return 10 * int(batch * heads * length * key.shape[-2] * width) // (2 if causal else 1)


# torch's counter leaves out the fused attention of the CPU; it is counted like that of a GPU.
_FORMULAS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    CPU_ATTENTION: _cpu_attention,
    CPU_ATTENTION_BACKWARD: _cpu_attention_backward,
}

_LOOKUPS = frozenset({"aten.embedding_dense_backward", "aten.embedding_backward"})
# What the runtime leaves for the weight half besides products: lookups, the sum for a
# bias, and adding to `.grad`.
_PUT_OFF = _LOOKUPS | {"aten.sum", "aten.add_"}

# What is made of products and may arrive whole where no gradient is recorded. Others that
# could be taken apart have kernels of their own, which is what would run.
_COMPOSITE = frozenset(
    {
        _aten.linear,
        _aten.matmul,
        _aten.einsum,
        _aten.tensordot,
        _aten.conv1d,
        _aten.conv2d,
        _aten.conv3d,
        _aten.conv_transpose1d,
        _aten.conv_transpose2d,
        _aten.scaled_dot_product_attention,
    }
)

_QUESTIONS = frozenset(
    {
        _aten.sym_is_contiguous.default,
        _aten.is_contiguous.default,
        _aten.is_contiguous.memory_format,
        _aten.is_strides_like_format.default,
        _aten.is_non_overlapping_and_dense.default,
        _aten.size.default,
        _aten.sym_size.default,
        _aten.stride.default,
        _aten.sym_stride.default,
        _aten.storage_offset.default,
        _aten.sym_storage_offset.default,
        _aten.numel.default,
        _aten.sym_numel.default,
        _aten.dim.default,
        torch.ops.prim.layout.default,
        torch.ops.prim.device.default,
    }
)
