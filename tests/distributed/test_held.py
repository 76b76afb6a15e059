"""What was sent is let go of as soon as it has been read, and no rank keeps its outputs."""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxpipe import get_schedule_class
from tests.distributed.bodies import by_group_alone, mse, rand, stages_of
from tests.distributed.ranks import run_on_ranks

NUM_MICROBATCHES = 8
LARGE = 2**15  # numbers of a message: too many for the sockets


def _modules(num_ranks: int, width: int) -> list[nn.Module]:
    # A linear layer's backward needs its input, but not its output.
    torch.manual_seed(0)
    return [nn.Linear(width, width).double() for _ in range(num_ranks)]


def most_outputs(rank: int, num_ranks: int) -> int:
    """How many outputs of this rank are alive at most when one of its backwards begins."""
    modules = _modules(num_ranks, 8)
    made = get_schedule_class("GPipe")(stages_of(modules, [rank]), NUM_MICROBATCHES, loss_fn=mse)
    outputs: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def keep(module: nn.Module, args: Any, output: Tensor) -> None:
        outputs.append(weakref.ref(output))

    modules[rank].register_forward_hook(keep)
    made.before("B", lambda _: alive.append(sum(one() is not None for one in outputs)))
    made.step(rand(16, 8), target=rand(16, 8))
    outputs.clear()
    alive.clear()
    made.step(rand(16, 8), target=rand(16, 8))
    return max(alive)


def test_outputs_go_when_they_are_sent() -> None:
    first, middle, _ = run_on_ranks(3, most_outputs, 3)

    # All eight were kept until their backward; the gradient now starts from an edge of the graph.
    assert (first, middle) == (0, 0)


def most_sends(rank: int, schedule: str, num_ranks: int, rows: int) -> int:
    """How many sent messages this rank keeps at most, looked at when an action begins."""
    modules = _modules(num_ranks, 8)
    made = get_schedule_class(schedule)(stages_of(modules, [rank]), NUM_MICROBATCHES, loss_fn=mse)
    shape = (NUM_MICROBATCHES * rows, 8)
    made.step(rand(*shape), target=rand(*shape))
    (transport,) = made._session._transports.values()
    held: list[int] = []
    for kind in ("F", "B"):
        made.before(kind, lambda _: held.append(transport.held()))
    made.step(rand(*shape), target=rand(*shape))
    return max(held)


@pytest.mark.parametrize("backend", ["gloo", "nccl_rank"])
def test_a_sent_tensor_is_kept_only_until_it_was_read(backend: str) -> None:
    body: tuple[Any, ...] = (most_sends, "1F1B", 3, 2)
    if backend == "gloo":
        body = (by_group_alone, most_sends, "1F1B", 3, LARGE // 8)

    _, middle, last = run_on_ranks(3, *body, backend=backend)

    # Gradients used to be kept until the end of the step: eight of them.
    assert last <= 2
    assert middle <= 5
