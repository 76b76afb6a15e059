"""Sizes that modules turn into other sizes are followed exactly."""

import itertools
import random

import pytest
import sympy
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._sympy.functions import Mod, PythonMod

from fxpipe import Pipe, PipeliningShapeError, SplitPoint, pipeline
from fxpipe.graph.sizes.symbols import _flat
from fxpipe.torch_inside import floor_div
from models import split_spec, unet
from tests.parity import assert_same, run


class Leaf(nn.Module):
    """A leaf in front of a split: what it sends has the size that is followed."""

    def __init__(self, leaf: nn.Module) -> None:
        super().__init__()
        self.leaf, self.end = leaf, nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.leaf(x))


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return functional.interpolate(functional.avg_pool1d(x, 3), scale_factor=2)


class Divisible(nn.Module):
    """Takes only lengths that are a multiple of four."""

    def forward(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (x.shape[-1] // 4, 4)).sum(-1)


LEAVES = {
    "stride": (nn.Conv1d(2, 2, 3, stride=2, padding=1), "((length - 1)//2) + 1"),
    "dilated": (nn.Conv1d(2, 2, 3, dilation=4), "length - 8"),
    "ceiling": (nn.MaxPool1d(3, stride=3, ceil_mode=True), "((length - 1)//3) + 1"),
    "transposed": (nn.ConvTranspose1d(2, 2, 4, stride=2), "2*length + 2"),
    "chain": (
        nn.Sequential(nn.Conv1d(2, 2, 10, stride=5), nn.Conv1d(2, 2, 3, stride=2)),
        "(length//10) - 1",
    ),
    "fixed": (nn.AdaptiveAvgPool1d(3), "3"),
    "enlarged": (Doubled(), "2*(length//3)"),
    "divisible": (Divisible(), "(length//4)"),
}


def split(leaf: nn.Module, length: int) -> Pipe:
    spec = {"end": SplitPoint.BEGINNING}
    sizes = {"batch": 0, "length": 2}
    return pipeline(Leaf(leaf), (torch.randn(2, 2, length),), split_spec=spec, dynamic_shapes=sizes)


@pytest.mark.parametrize("name", LEAVES)
@pytest.mark.parametrize("length", [24, 40])
def test_the_size_of_a_leaf_is_the_real_one(name: str, length: int) -> None:
    leaf, formula = LEAVES[name]

    pipe = split(leaf, length)

    spec = pipe.interfaces[0].sent[0].port.spec
    assert str(spec) == f"float32[batch, 2, {formula}]"
    for other in range(24, 200, 4 if name == "divisible" else 1):
        x = torch.randn(3, 2, other)
        found = spec.bind(pipe.bind_inputs((x,)))
        assert found.shape == tuple(leaf(x).shape)


def test_a_strided_chain_over_audio() -> None:
    kernels = [(10, 5), (3, 2), (3, 2), (3, 2), (3, 2), (2, 2), (2, 2)]
    leaf = nn.Sequential(*(nn.Conv1d(2, 2, kernel, stride) for kernel, stride in kernels))

    pipe = split(leaf, 1600)

    assert str(pipe.interfaces[0].sent[0].port.spec) == (
        "float32[batch, 2, ((length - 400)//320) + 1]"
    )


class Crop(nn.Module):
    def __init__(self, crop: slice) -> None:
        super().__init__()
        self.crop = crop

    def forward(self, x: Tensor) -> Tensor:
        return x[..., self.crop]


@pytest.mark.parametrize("crop", [slice(8), slice(-8, None), slice(2, 6), slice(1, -1)], ids=str)
@pytest.mark.parametrize("length", [6, 12])
def test_a_slice_ends_where_the_tensor_does(crop: slice, length: int) -> None:
    # Runs at the example's size and larger ones used to say that `x[:8]` always has 8.
    pipe = split(Crop(crop), length)

    spec = pipe.interfaces[0].sent[0].port.spec
    for other in range(2, 20):
        x = torch.randn(3, 2, other)
        assert spec.bind(pipe.bind_inputs((x,))).shape == tuple(x[..., crop].shape)


class Part(nn.Module):
    """Takes a part of its input that is computed as a float."""

    def __init__(self) -> None:
        super().__init__()
        self.end = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.end(x[..., : int(x.shape[-1] ** 0.5) + int(x.shape[-1] * (1 / 3))])


def test_the_example_fits_the_conditions_of_its_own_trace() -> None:
    # Fifteen digits of a float are not the float.
    x = torch.randn(2, 2, 6)

    pipe = pipeline(Part(), (x,), split_spec={"end": SplitPoint.BEGINNING})

    torch.testing.assert_close(pipe(x), Part()(x))


def test_the_skips_of_a_unet() -> None:
    # Six runs used to fit (height - 4)//6 as well as height//8, and the first won.
    args, kwargs = unet.example_inputs(2)

    pipe = pipeline(unet.build(), args, kwargs, split_spec=split_spec(unet, 2))

    assert [str(sent.port.spec) for sent in pipe.interfaces[0].sent] == [
        "float32[batch, 8, height, width]",
        "float32[batch, 16, (height//2), (width//2)]",
        "float32[batch, 32, (height//8), (width//8)]",
        "float32[batch, 32, (height//4), (width//4)]",
    ]


@pytest.mark.parametrize("seed", range(10))
def test_a_flat_size_is_the_same_number(seed: int) -> None:
    draw = random.Random(seed)
    size = sympy.Symbol("s", integer=True, positive=True)
    nested = size
    for _ in range(4):
        nested = floor_div(nested + draw.randint(-5, 5), draw.randint(1, 4)) + draw.randint(-2, 2)

    found = _flat(nested)

    assert all(found.subs(size, n) == nested.subs(size, n) for n in range(1, 60))
    assert found.count(type(floor_div(size, 2))) <= 1


@pytest.mark.parametrize("factor", [1, 24])
@pytest.mark.parametrize("window", [1, 4, sympy.Symbol("w", integer=True, positive=True)])
def test_a_flat_size_has_no_remainders(window: int | sympy.Symbol, factor: int) -> None:
    # Torch took minutes for sizes that were padded to whole windows again and again.
    size = sympy.Symbol("s", integer=True, positive=True)
    padded = [
        size + PythonMod(window - Mod(size, window), window),
        size + PythonMod(-size, window),
        size + window - Mod(size, window),
        size - Mod(size, window),
    ]

    for nested in (factor * (part + 1) for part in padded):
        found = _flat(sympy.expand(nested))
        assert not found.has(Mod, PythonMod)
        for n, w in itertools.product(range(1, 20), range(1, 8)):
            values = {size: n, window: w} if isinstance(window, sympy.Symbol) else {size: n}
            assert found.xreplace(values) == nested.xreplace(values)


class Scaled(nn.Module):
    """Scales by a fraction that is made of sizes, as attention does."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        scale = float((x.shape[1] * x.shape[2]) ** -0.5)
        return self.b(self.a(x) * scale)


def test_the_example_meets_its_own_conditions() -> None:
    # 8**0.5 * 8**0.5 is not 8 in floating point, so the traced sizes themselves were refused.
    model, x = Scaled(), torch.randn(2, 8, 8, 4)

    pipe = pipeline(model, (x,), split_spec={"b": SplitPoint.BEGINNING})

    torch.testing.assert_close(pipe(x[:1]), model(x[:1]))
    with pytest.raises(PipeliningShapeError):
        pipe(torch.randn(2, 8, 2, 4))


class Counted(nn.Module):
    """Asks for the number of rows by `len`."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        rows = torch.arange(len(x), dtype=x.dtype)
        return self.b((x * rows[:, None, None]).view(len(x), -1, 2)) / len(x)


def test_len_leaves_the_rows_open() -> None:
    # Python makes a number of what `len` returns: rt_detr was fixed to the rows of the example.
    torch.manual_seed(0)
    model = Counted().double()
    x = torch.randn(2, 3, 4).double()
    pipe = pipeline(model, (x,), split_spec={"b": SplitPoint.BEGINNING})

    for rows in (1, 2, 5):
        x = torch.randn(rows, 3, 4).double()
        assert_same(run(model, (x,), {}), run(pipe, (x,), {}))
    assert "len" not in globals()
