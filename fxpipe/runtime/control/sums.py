"""Add up a few numbers over all ranks where they are: on the device, without a look at them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fxpipe.runtime.control.control import Control
from fxpipe.runtime.wire.stream_transport import StreamTransport
from fxpipe.runtime.wire.transport import Transport

__all__ = ["sum_over_ranks"]


def sum_over_ranks(
    mine: torch.Tensor, control: Control, transports: Mapping[int, Transport]
) -> torch.Tensor:
    """The sum of all ranks' tensors of one shape, the same bits on every rank.

    All ranks of the pipeline call this together.

    Raises:
        TransportError: a rank is gone or silent.
    """
    if control.size == 1:
        return mine
    ((rank, transport),) = transports.items()
    others = range(1, control.size)
    if isinstance(transport, StreamTransport):
        transport.connect([(0, peer) for peer in others], rank, mine.device)
    shapes = [(tuple(mine.shape), mine.dtype)]
    if rank == 0:
        total = mine
        for incoming in [transport.recv(peer, shapes, mine.device) for peer in others]:
            total = total + incoming.wait()[0]
        for peer in others:
            transport.send(peer, [total])
    else:
        transport.send(0, [mine])
        (total,) = transport.recv(0, shapes, mine.device).wait()
    transport.finish()
    return total
