"""What one split saves, any other split loads."""

import copy
from pathlib import Path

import pytest
import torch

import models
from fxpipe import (
    InputError,
    LocalGroup,
    PipelineStage,
    Schedule1F1B,
    load_checkpoint,
    pipeline,
    save_checkpoint,
)
from models import gpt


def trainer(num_stages: int, seed: int):  # type: ignore[no-untyped-def]
    model = gpt.build(seed=seed).double()
    args, kwargs = gpt.example_inputs(2)
    pipe = pipeline(model, args, kwargs, split_spec=models.split_spec(gpt, num_stages))
    group = LocalGroup(num_stages)
    stages = [pipe.build_stage(i, torch.device("cpu"), group) for i in range(num_stages)]
    schedule = Schedule1F1B(stages, 2, loss_fn=gpt.loss_fn)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, schedule, optimizer


def step(schedule, optimizer) -> None:  # type: ignore[no-untyped-def]
    args, kwargs = gpt.example_inputs(4)
    optimizer.zero_grad()
    schedule.step(*args, target=gpt.example_target(4), **kwargs)
    optimizer.step()


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2)])
def test_another_split_goes_on_as_if_nothing_had_happened(
    before: int, after: int, tmp_path: Path
) -> None:
    model, schedule, optimizer = trainer(before, seed=0)
    step(schedule, optimizer)
    save_checkpoint(tmp_path, schedule.stages, optimizer)
    other, other_schedule, other_optimizer = trainer(after, seed=1)

    load_checkpoint(tmp_path, other_schedule.stages, other_optimizer)

    for _ in range(2):
        step(schedule, optimizer)
        step(other_schedule, other_optimizer)
    for (name, a), b in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, msg=name)


def test_the_plain_model_loads_what_stages_saved(tmp_path: Path) -> None:
    model, schedule, _ = trainer(4, seed=0)
    save_checkpoint(tmp_path, schedule.stages)
    plain = gpt.build(seed=1).double()

    load_checkpoint(tmp_path, plain)

    for a, b in zip(model.state_dict().values(), plain.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_missing_names_change_nothing(tmp_path: Path) -> None:
    _, schedule, _ = trainer(2, seed=0)
    save_checkpoint(tmp_path, schedule.stages[:1])
    plain = gpt.build(seed=1).double()
    before = copy.deepcopy(plain.state_dict())

    with pytest.raises(InputError, match="lacks"):
        load_checkpoint(tmp_path, plain)

    assert all(
        torch.equal(a, b) for a, b in zip(plain.state_dict().values(), before.values(), strict=True)
    )
    with pytest.raises(InputError, match="no checkpoint"):
        load_checkpoint(tmp_path / "nothing", plain)


def hand_written(num_stages: int, seed: int) -> list[PipelineStage]:
    torch.manual_seed(seed)
    group = LocalGroup(num_stages)
    return [
        PipelineStage(torch.nn.Linear(4, 4), i, num_stages, "cpu", group=group)
        for i in range(num_stages)
    ]


def test_equal_names_of_hand_written_stages_are_not_mixed_up(tmp_path: Path) -> None:
    # Each stage has a "weight": every stage used to be given that of the last one, in silence.
    saved, loaded = hand_written(3, seed=0), hand_written(3, seed=1)
    save_checkpoint(tmp_path, saved)

    load_checkpoint(tmp_path, loaded)

    for one, other in zip(saved, loaded, strict=True):
        assert torch.equal(one.submod.weight, other.submod.weight)
    with pytest.raises(InputError, match="'bias' has different values in stage0000, stage0001"):
        load_checkpoint(tmp_path, hand_written(2, seed=2))


class Remembers(torch.nn.Linear):
    def get_extra_state(self) -> object:
        return self.note

    def set_extra_state(self, state: object) -> None:
        self.note = state


def test_a_checkpoint_holds_plain_data_only(tmp_path: Path) -> None:
    model = Remembers(2, 2)
    model.note = {"epoch": 3, "names": ["a", "b"]}
    save_checkpoint(tmp_path, model)
    other = Remembers(2, 2)
    other.note = None
    load_checkpoint(tmp_path, other)
    assert other.note == model.note

    model.note = Path("x")
    with pytest.raises(InputError, match=r"'_extra_state' holds a PosixPath"):
        save_checkpoint(tmp_path, model)
