"""Training over real gloo processes equals the plain model on every rank."""

import itertools
import threading
import time

import pytest
import torch
from torch import Tensor, nn

from fxpipe import Schedule1F1B, ScheduleDualPipeV
from fxpipe.runtime.stage.executor import ActionContext
from tests.distributed import bodies
from tests.distributed.bodies import blocks, mse, rand, stages_of
from tests.distributed.ranks import run_on_ranks
from tests.runtime.training import SCHEDULE_NAMES


@pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
def test_hand_written_stages_on_two_ranks(schedule: str) -> None:
    run_on_ranks(2, bodies.train_blocks, schedule, 2, 4)


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"])
def test_hand_written_stages_on_four_ranks(schedule: str) -> None:
    run_on_ranks(4, bodies.train_blocks, schedule, 4, 3)


@pytest.mark.parametrize(
    ("model", "schedule", "ranks", "style"),
    [
        ("gpt", "1F1B", 2, "same"),
        ("gpt", "ZBVZeroBubble", 2, "ranks"),
        ("gpt", "1F1B", 4, "same"),
        ("llama", "InterleavedZeroBubble", 2, "ranks"),
        ("unet", "Interleaved1F1B", 2, "same"),
        ("encoder_decoder", "1F1B", 2, "ranks"),
        ("encoder_decoder", "DualPipeV", 2, "same"),
        ("moe", "ZBH1", 2, "same"),
        ("vit", "VHalf", 2, "same"),
        ("mlp", "Wave", 2, "same"),
    ],
)
def test_models_on_real_ranks(model: str, schedule: str, ranks: int, style: str) -> None:
    run_on_ranks(ranks, bodies.train_model, model, schedule, ranks, style)


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble"])
def test_every_message_on_the_process_group(schedule: str) -> None:
    run_on_ranks(2, bodies.by_group_alone, bodies.train_blocks, schedule, 2, 4)


def test_every_message_of_a_model_on_the_process_group() -> None:
    run_on_ranks(4, bodies.by_group_alone, bodies.train_model, "gpt", "1F1B", 4, "same")


class Slow(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.1)
        return x * 2


def waiting_is_not_computing(rank: int) -> None:
    modules = [Slow(), blocks(1)[0]]
    made = Schedule1F1B(stages_of(modules, [rank]), 4, loss_fn=mse)
    made.step(rand(8, 8), target=rand(8, 8))
    made.record_timeline()

    made.step(rand(8, 8), target=rand(8, 8))

    slow, quick = made.timeline.busy
    assert slow >= 0.4
    assert quick < slow / 2  # it used to be as long: each forward began when the one before ended
    assert made.timeline.idle_per_rank[1] > 0.5
    for earlier, later in itertools.pairwise(s for s in made.timeline.of_rank(1) if s.is_compute):
        assert earlier.end <= later.start


def test_a_measured_span_begins_when_its_inputs_are_there() -> None:
    run_on_ranks(2, waiting_is_not_computing)


def both_halves_on_threads(rank: int) -> None:
    indices, num_stages = bodies.layout("DualPipeV", rank, 2)
    modules = blocks(num_stages)
    made = ScheduleDualPipeV(stages_of(modules, indices), 8, loss_fn=mse)

    def on_threads(context: ActionContext) -> None:
        halves = [threading.Thread(target=run) for _, run in context.parts]
        for half in halves:
            half.start()
        for half in halves:
            half.join()

    made.replace("OVERLAP_F_B", on_threads)
    for seed in range(20):
        x, y = rand(8, 8, seed=seed), rand(8, 8, seed=seed + 100)
        reference, _ = bodies.plain_gradients(modules, x, y)
        made.step(x, target=y)
        for i in indices:
            for found, wanted in zip(
                modules[i].parameters(), reference[i].parameters(), strict=True
            ):
                torch.testing.assert_close(found.grad, wanted.grad)
                found.grad = None


def test_a_pair_may_run_on_two_threads() -> None:
    # Both waited for their inputs on one connection, whose queue then lost a message.
    run_on_ranks(2, both_halves_on_threads)


def count_exchanges(rank: int) -> tuple[int, int]:
    made = Schedule1F1B(stages_of(blocks(2), [rank]), 4, loss_fn=mse)
    made.step(rand(8, 8), target=rand(8, 8, seed=2))
    first = made._session._control._sequence  # type: ignore[union-attr]
    made.step(rand(8, 8), target=rand(8, 8, seed=2))
    return first, made._session._control._sequence - first  # type: ignore[union-attr]


def test_a_first_step_exchanges_words_five_times_and_a_later_one_twice() -> None:
    assert run_on_ranks(2, count_exchanges) == [(5, 2), (5, 2)]
