"""Values arrive as they were sent, however they are packed on the way."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fxpipe.runtime.wire.message import Half
from fxpipe.runtime.wire.transport import LocalChannels, LocalTransport, TensorShape

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Padded:
    """So many zeros stand behind the values."""

    zeros: int

    def shape(self, shape: TensorShape) -> TensorShape:
        (size,), dtype = shape
        return (size + self.zeros,), dtype

    def pack(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.cat([t, t.new_zeros(self.zeros)]) for t in tensors]

    def unpack(self, tensor: torch.Tensor, shape: TensorShape) -> torch.Tensor:
        assert tensor.shape == self.shape(shape)[0]
        return tensor[: shape[0][0]]


def test_what_was_packed_last_is_unpacked_first() -> None:
    channels, value = LocalChannels(), torch.arange(3.0)
    shapes = [((3,), torch.float32)]
    ends = [
        Half(
            LocalTransport(rank, channels),
            1 - rank,
            shapes,
            CPU,
            packings=[Padded(2), Padded(5)],
            is_send=rank == 0,
        )
        for rank in (0, 1)
    ]

    ends[0].post([value])
    (arrived,) = ends[1].post().wait()

    assert torch.equal(arrived, value)
