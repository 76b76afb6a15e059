"""Nested values that cross a cut: functions with tensors inside, dict-like objects."""

import copy
import dataclasses
from collections import UserDict
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe import pipe_split, pipeline
from fxpipe.graph.nested import branch, has_tensor, map_leaves, walk
from tests.parity import assert_parity

IDS = torch.randint(8, (2, 5), generator=torch.Generator().manual_seed(0))


class MappedMask(nn.Module):
    """A mask made by nested `torch.vmap` of a function that closes over the input."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(8, 4)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, ids: Tensor) -> Tensor:
        def allowed(row: Tensor, left: Tensor, right: Tensor) -> Tensor:
            return (ids[row, left] == ids[row, right]) | (left >= right)

        for dims in ((None, None, 0), (None, 0, None), (0, None, None)):
            allowed = torch.vmap(allowed, in_dims=dims)
        positions = torch.arange(ids.shape[1])
        mask = allowed(torch.arange(ids.shape[0]), positions, positions)
        x = self.first(self.embed(ids))
        pipe_split()
        scores = (x @ x.transpose(1, 2)).masked_fill(~mask, -1e9)
        return self.last(scores.softmax(-1) @ x)


def test_vmap_in_opened_code_is_one_call() -> None:
    model = MappedMask()
    plain = copy.deepcopy(model)

    pipe = pipeline(model, (IDS,))

    assert_parity(plain, pipe, (IDS,))
    assert_parity(plain, pipe, (torch.randint(8, (3, 7)),))


class KeyValue(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, shared: Any) -> Tensor:
        x = self.linear(x)
        if self.index == 0:
            shared["first"] = x
        return x + shared["first"]


class SharedState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([KeyValue(index) for index in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        shared: UserDict[str, Tensor] = UserDict()
        for index, layer in enumerate(self.layers):
            if index:
                pipe_split()
            x = layer(x, shared)
        return x


def test_user_dict_that_layers_fill_travels() -> None:
    # Rebuilding it went through UserDict.__copy__, which wants its data at once.
    model = SharedState()
    plain = copy.deepcopy(model)
    x = torch.randn(2, 4)

    pipe = pipeline(model, (x,))

    assert_parity(plain, pipe, (x,))
    assert pipe.num_stages == 3


def test_function_is_taken_apart_only_if_it_closes_over_tensors() -> None:
    tensor, number = torch.ones(2), 3

    def scaled(x: Tensor) -> Tensor:
        return x * tensor * number

    doubled = map_leaves(lambda leaf: leaf * 2, scaled)

    assert [leaf for _, leaf in walk(scaled) if not isinstance(leaf, Tensor)] == [3]
    assert doubled(torch.ones(2)).tolist() == [12.0, 12.0]
    assert scaled(torch.ones(2)).tolist() == [3.0, 3.0]
    assert branch(lambda x: x * number) is None


def test_function_that_calls_itself_is_a_constant() -> None:
    tensor = torch.ones(2)

    def again(depth: int) -> Tensor:
        return tensor if depth == 0 else again(depth - 1)

    assert branch(again) is None


def test_a_slice_that_ends_at_a_tensor_is_taken_apart():
    end = torch.tensor(3)

    assert [leaf for _, leaf in walk((..., slice(None, end)))] == [..., None, end, None]
    assert map_leaves(lambda leaf: 3 if leaf is end else leaf, slice(None, end)) == slice(None, 3)
    assert has_tensor(slice(end)) and not has_tensor(slice(3))


@dataclasses.dataclass
class PerLayer:
    """A configuration that tells no value where each layer has its own."""

    width: int
    heads: int = 2

    def __getattribute__(self, name: str) -> object:
        if name == "heads":
            raise ValueError("heads differ from layer to layer")
        return super().__getattribute__(name)


def test_a_field_that_cannot_be_read_stays() -> None:
    found = map_leaves(lambda leaf: leaf + 1 if isinstance(leaf, int) else leaf, PerLayer(3))

    assert vars(found) == {"width": 4, "heads": 2}
