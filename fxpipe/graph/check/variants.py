"""Which runs show that a pipe does what its model does.

In:  the example call and the signature that the trace made of it.
Out: `Variant`s: inputs, train or eval, with or without gradients. Sizes that the
     signature leaves open take other values; so do the tensors.

A few runs vary several things at once; `alternatives` are tried in turn where the
plain model does not run (a longer sequence than it has positions for).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from fxpipe.graph.dims import evaluate, free_names, holds
from fxpipe.graph.inputs import InputSignature
from fxpipe.graph.interface import TensorSpec
from fxpipe.graph.nested import Args, Kwargs, map_leaves, walk

__all__ = ["Call", "Variant", "all_variants", "few_variants"]

Call = tuple[Args, Kwargs]
Sizes = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Variant:
    """One run: `call` makes its inputs, `training` None leaves the flags as they are.

    `must_fail` is set where the plain model decides whether the inputs are valid: if it
    fails, so must the pipe. Made-up values may be nonsense, on which either may fail.
    """

    name: str
    call: Callable[[], Call]
    training: bool | None
    gradients: bool
    must_fail: bool = False
    watches_kernels: bool = False
    is_second: bool = False  # what the run before it left behind is there


def few_variants(
    call: Call, signature: InputSignature, hints: Sizes, training: bool
) -> Iterator[list[Variant]]:
    """Runs in which everything is varied at least once, as lists of alternatives."""
    make = _Inputs(call, signature)
    modes = {True: "train()", False: "eval()"}
    yield [Variant("the example", lambda: call, None, False, watches_kernels=True)]
    yield [Variant("with gradients", lambda: call, None, True)]
    larger = make.sizes(hints, _larger)
    shorter = make.sizes(hints, _shorter)
    batch = {name: size for name, size in larger.items() if name == "batch"}
    sized = [larger, *([batch] if batch and batch != larger else [])] if larger else []
    yield [
        *(make.variant(sizes, hints, None, True, values=True) for sizes in sized),
        *(make.variant(sizes, hints, None, True) for sizes in sized),
        make.variant({}, hints, None, True, values=True),
    ]
    other = not training
    rows = {name: size for name, size in shorter.items() if name == "batch"}
    small = [shorter, *([rows] if rows and rows != shorter else [])] if shorter else []
    yield [
        *(make.variant(sizes, hints, other, True, modes[other]) for sizes in small),
        make.variant({}, hints, other, True, modes[other]),
    ]
    yield [_second(make.variant(sizes, hints, None, False)) for sizes in (*small, *sized, {})]


def _second(variant: Variant) -> Variant:
    name = variant.name.removesuffix(", no gradients")
    return replace(variant, name=f"a second call, {name}", is_second=True)


def all_variants(
    call: Call, signature: InputSignature, hints: Sizes, training: bool
) -> Iterator[list[Variant]]:
    """Every combination of sizes, values, modes and gradients, one alternative each."""
    make = _Inputs(call, signature)
    sizes: list[Sizes] = [{}]
    for change in (_larger, _shorter, _double, _one):
        found = make.sizes(hints, change)
        sizes += [found] if found else []
        sizes += [{name: size} for name, size in found.items() if len(found) > 1]
    unique = [size for place, size in enumerate(sizes) if size not in sizes[:place]]
    yield [Variant("calls of attention kernels", lambda: call, None, False, watches_kernels=True)]
    for mode, name in ((None, ""), (True, "train()"), (False, "eval()")):
        for size in unique:
            for values in (False, True):
                for gradients in (True, False):
                    yield [make.variant(size, hints, mode, gradients, name, values=values)]
    yield [make.variant({}, hints, None, True, "gradients of all inputs", all_inputs=True)]
    for size in unique:
        yield [_second(make.variant(size, hints, None, False))]


Change = Callable[[int, bool], list[int]]


def _larger(size: int, is_batch: bool) -> list[int]:
    if is_batch:
        return [size + 1, 2 * size, 3 * size]
    return [2 * size + 1 if size < 16 else size + 3, 2 * size, size + 1]


def _shorter(size: int, is_batch: bool) -> list[int]:
    return [1] if is_batch else [size // 2, size - 1]


def _one(size: int, is_batch: bool) -> list[int]:
    return [] if is_batch else [1]


def _double(size: int, is_batch: bool) -> list[int]:
    return [2 * size]


def _holds(signature: InputSignature, sizes: Sizes) -> bool:
    return all(
        holds(condition, sizes)
        for condition in signature.conditions
        if free_names(condition) <= sizes.keys()
    )


class _Inputs:
    """Makes inputs like those of the example, of other sizes and with other values."""

    def __init__(self, call: Call, signature: InputSignature) -> None:
        self._call = call
        leaves = [leaf for _, leaf in walk(call)]
        specs = [leaf for _, leaf in walk(dict(signature.example))]
        fits = len(leaves) == len(specs) and all(
            isinstance(leaf, torch.Tensor) == isinstance(spec, TensorSpec)
            for leaf, spec in zip(leaves, specs, strict=True)
        )
        self._specs = specs if fits else [None] * len(leaves)
        self._signature = signature

    def sizes(self, hints: Sizes, change: Change) -> dict[str, int]:
        """Other values for the sizes that inputs leave open; all conditions hold for them."""
        open_names = [
            s for spec in self._specs if isinstance(spec, TensorSpec) for s in spec.symbols
        ]
        found = dict(hints)
        for name in dict.fromkeys(sorted(open_names)):
            for other in change(hints[name], name == "batch"):
                trial = {**found, name: other}
                if other > 0 and other != hints[name] and _holds(self._signature, trial):
                    found = trial
                    break
        return {name: size for name, size in found.items() if size != hints[name]}

    def variant(
        self,
        sizes: Sizes,
        hints: Sizes,
        training: bool | None,
        gradients: bool,
        mode: str = "",
        *,
        values: bool = False,
        all_inputs: bool = False,
    ) -> Variant:
        words = [f"{name} {size}" for name, size in sizes.items()]
        words += ["other values"] if values else []
        words += [mode] if mode else []
        name = ", ".join(words or ["the example"])
        name += "" if gradients or all_inputs else ", no gradients"

        def make() -> Call:
            return self._make({**hints, **sizes}, values, all_inputs)

        return Variant(name, make, training, gradients, bool(sizes) and not values)

    def _make(self, sizes: Sizes, values: bool, all_inputs: bool) -> Call:
        specs = iter(self._specs)
        generator = torch.Generator().manual_seed(0)

        def change(leaf: object) -> object:
            spec = next(specs)
            if not isinstance(leaf, torch.Tensor):
                return leaf
            made = leaf.detach()
            if isinstance(spec, TensorSpec):
                made = _resized(made, [int(evaluate(dim, sizes)) for dim in spec.shape])
            if values:
                made = _other_values(made, generator)
            wanted = leaf.requires_grad or (all_inputs and made.is_floating_point())
            return made.clone().requires_grad_(wanted)

        args, kwargs = map_leaves(change, self._call)
        return args, kwargs


def _resized(tensor: torch.Tensor, shape: list[int]) -> torch.Tensor:
    """The tensor's own values in another shape, repeated where it is larger."""
    for dim, size in enumerate(shape):
        if size != tensor.shape[dim]:
            index = torch.arange(size, device=tensor.device) % max(tensor.shape[dim], 1)
            tensor = tensor.index_select(dim, index)
    return tensor


def _other_values(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Numbers anywhere in the tensor's range; for whole numbers the same ones elsewhere."""
    if tensor.numel() == 0:
        return tensor
    if tensor.is_floating_point() or tensor.is_complex():
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        low, high = (float(edge) for edge in real.aminmax())
        if not -1e30 < low <= high < 1e30:
            return tensor
        high = high if high > low else low + 1
        made = torch.rand(real.shape, generator=generator, dtype=torch.float64)
        made = made.mul_(high - low).add_(low).to(device=real.device, dtype=real.dtype)
        return torch.view_as_complex(made) if tensor.is_complex() else made
    order = torch.randperm(tensor.numel(), generator=generator).to(tensor.device)
    return tensor.reshape(-1)[order].reshape(tensor.shape)
