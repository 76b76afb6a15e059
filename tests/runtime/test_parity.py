"""Every model under every schedule trains as the plain model does."""

import pytest
import torch

import models
from tests.runtime.training import SCHEDULE_NAMES, Pair


@pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
@pytest.mark.parametrize("model", models.NAMES)
def test_training_matches_the_plain_model(model: str, schedule: str) -> None:
    pair = Pair(model, schedule)

    pair.check_step(rows=8, seed=1)
    pair.check_step(rows=10, seed=2)  # uneven microbatches, added to the gradients of step 1
    pair.check_eval(rows=6, seed=3)

    mine = torch.optim.SGD(pair.parameters(), lr=0.1, momentum=0.9)
    theirs = torch.optim.SGD(pair.plain.parameters(), lr=0.1, momentum=0.9)
    for seed in (4, 5):
        mine.zero_grad()
        theirs.zero_grad()
        pair.check_step(rows=8, seed=seed)
        mine.step()
        theirs.step()
    pair.check_values()


@pytest.mark.parametrize("num_microbatches", [1, 3, 7])
@pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
def test_any_number_of_microbatches(schedule: str, num_microbatches: int) -> None:
    pair = Pair("unet", schedule, num_microbatches=num_microbatches)

    pair.check_step(rows=8, seed=1)
