"""Cheap values are computed where they are needed, if that moves less data."""

import pytest
import torch
from torch import Tensor, nn

from fxpipe import Pipe, pipe_split, pipeline

IDS = torch.arange(24).view(2, 12) % 7


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(7, 4)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.table = nn.Parameter(torch.randn(12, 12))

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        bias = self.bias(ids, mask)
        x = self.a(self.embed(ids)) + 0 * bias.sum()
        pipe_split()
        weights = (x @ x.transpose(1, 2) + bias).softmax(-1)
        return self.b(weights @ x)


class Mask(Net):
    """Grows from [2, 12] to [2, 12, 12]: cheaper made again than sent."""

    def bias(self, ids: Tensor, mask: Tensor) -> Tensor:
        full = mask[:, None, :] * mask[:, :, None]
        return torch.zeros(full.shape).masked_fill(full == 0, -1e4)


class Random(Net):
    def bias(self, ids: Tensor, mask: Tensor) -> Tensor:
        return torch.rand(2, 12, 12) * mask[:, None, :]


class Learnt(Net):
    def bias(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.table * mask[:, None, :]


class Changed(Net):
    def bias(self, ids: Tensor, mask: Tensor) -> Tensor:
        full = (mask[:, None, :] * mask[:, :, None]).float()
        full.mul_(2)
        return full


class Small(Net):
    """A single number: sending it costs nothing."""

    def bias(self, ids: Tensor, mask: Tensor) -> Tensor:
        return (mask[:, None, :] * mask[:, :, None]).float().mean()


def split(kind: type[Net]) -> tuple[Pipe, Net, Tensor]:
    model, mask = kind(), torch.ones(2, 12, dtype=torch.long)
    mask[0, 8:] = 0
    return pipeline(model, (IDS, mask)), model, mask


def test_a_large_mask_is_made_again() -> None:
    pipe, model, mask = split(Mask)

    assert [str(s.port) for s in pipe.interfaces[0].sent] == [
        "mask_sent: int64[batch, sequence]",
        "add: float32[batch, sequence, 4]",
    ]
    torch.testing.assert_close(pipe(IDS, mask), model(IDS, mask))


@pytest.mark.parametrize("kind", [Random, Learnt, Changed])
def test_what_is_random_learnt_or_changed_is_sent(kind: type[Net]) -> None:
    pipe, model, mask = split(kind)

    specs = [s.port.spec for s in pipe.interfaces[0].sent]
    assert any(len(spec.shape) == 3 and spec.shape[-1] != 4 for spec in specs)
    torch.manual_seed(5)
    found = pipe(IDS, mask)
    torch.manual_seed(5)
    torch.testing.assert_close(found, model(IDS, mask))


def test_a_number_is_sent() -> None:
    pipe, model, mask = split(Small)

    assert "float32[]" in [str(s.port.spec) for s in pipe.interfaces[0].sent]
    torch.testing.assert_close(pipe(IDS, mask), model(IDS, mask))
