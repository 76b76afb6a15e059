"""What one split saves, any other split loads, bit for bit."""

import copy
import os
import pickle
import random
from collections.abc import Sequence
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from fxpipe import (
    InputError,
    LocalGroup,
    PipelineStage,
    SplitPoint,
    get_schedule_class,
    load_checkpoint,
    pipeline,
    save_checkpoint,
)
from fxpipe.schedules import Schedule
from fxpipe.training.storage import Writer
from models import gpt


def trainer(
    num_stages: int, seed: int, schedule: str = "1F1B", ranks: int | None = None, dropout: float = 0
) -> tuple[nn.Module, Schedule, torch.optim.Optimizer]:
    model = gpt.build(seed=seed, layers=8, dropout=dropout).double()
    args, kwargs = gpt.example_inputs(2)
    cuts = {f"blocks.{8 * i // num_stages}": SplitPoint.BEGINNING for i in range(1, num_stages)}
    pipe = pipeline(model, args, kwargs, split_spec=cuts, check=False)
    group = LocalGroup(ranks or num_stages)
    stages = [pipe.build_stage(i, torch.device("cpu"), group) for i in range(num_stages)]
    made = get_schedule_class(schedule)(stages, 2, loss_fn=gpt.loss_fn)
    return model, made, torch.optim.AdamW(model.parameters(), lr=0.01)


def step(schedule: Schedule, optimizer: torch.optim.Optimizer, seed: int = 0) -> torch.Tensor:
    args, kwargs = gpt.example_inputs(4, seed=seed)
    optimizer.zero_grad()
    schedule.step(*args, target=gpt.example_target(4, seed=seed), **kwargs)
    optimizer.step()
    assert schedule.loss is not None
    return schedule.loss


def assert_equal_state(
    found: tuple[nn.Module, torch.optim.Optimizer], wanted: tuple[nn.Module, torch.optim.Optimizer]
) -> None:
    """Modules and optimizers hold the same bits."""
    theirs = dict(wanted[0].named_parameters())
    for name, p in found[0].named_parameters():
        assert torch.equal(p, theirs[name]), name
        mine, other = found[1].state[p], wanted[1].state[theirs[name]]
        assert set(mine) == set(other)
        assert all(torch.equal(mine[key], other[key]) for key in mine), name
    for a, b in zip(found[1].param_groups, wanted[1].param_groups, strict=True):
        assert {k: v for k, v in a.items() if k != "params"} == {
            k: v for k, v in b.items() if k != "params"
        }


OTHERS = [
    (2, "GPipe", None),
    (4, "ZBVZeroBubble", 2),
    (8, "Interleaved1F1B", 4),
    (1, "plain", None),
]


@pytest.mark.parametrize(("num_stages", "schedule", "ranks"), OTHERS)
def test_any_split_and_schedule_loads_what_four_stages_saved(
    num_stages: int, schedule: str, ranks: int | None, tmp_path: Path
) -> None:
    model, made, optimizer = trainer(4, seed=0)
    for group in optimizer.param_groups:
        group["lr"] = 0.003
    step(made, optimizer)
    save_checkpoint(tmp_path, made, optimizer, step=7)

    if schedule == "plain":
        other: nn.Module = gpt.build(seed=1, layers=8).double()
        other_optimizer: torch.optim.Optimizer = torch.optim.AdamW(other.parameters(), lr=0.01)
        source: Any = other
    else:
        other, source, other_optimizer = trainer(num_stages, 1, schedule, ranks)
        step(source, other_optimizer)
    restored = load_checkpoint(tmp_path, source, other_optimizer)

    assert restored.step == 7
    assert_equal_state((other, other_optimizer), (model, optimizer))
    if schedule != "plain":
        save_checkpoint(tmp_path / "back", source, other_optimizer)
        model, made, optimizer = trainer(4, seed=2)
        load_checkpoint(tmp_path / "back", made.stages, optimizer)
        assert_equal_state((model, optimizer), (other, other_optimizer))


class Reads:
    """Data with a position."""

    def __init__(self) -> None:
        self.position = 0

    def __next__(self) -> int:
        self.position += 1
        return self.position + random.randrange(100) + int(numpy.random.randint(100))

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def test_a_run_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    # Dropout, a learning rate schedule and a data position: the losses are equal bit for bit.
    losses: dict[str, list[float]] = {"whole": [], "second half": []}
    for run in losses:
        torch.manual_seed(len(run))
        random.seed(len(run))
        numpy.random.seed(len(run))
        _, made, optimizer = trainer(2, seed=len(run), dropout=0.1)
        lr = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        data = Reads()
        extra = {"lr": lr, "data": data, "epoch": 3}
        first = 0
        if run == "second half":
            restored = load_checkpoint(tmp_path, made, optimizer, extra=extra)
            first = restored.step
            assert restored.extra["epoch"] == 3
        for at in range(first, 6):
            if run == "whole" and at == 3:
                save_checkpoint(tmp_path, made, optimizer, step=at, extra=extra)
            losses[run].append(float(step(made, optimizer, seed=next(data))))
            lr.step()

    assert losses["second half"] == losses["whole"][3:]


def test_saving_in_the_background_keeps_the_moment_of_the_call(tmp_path: Path) -> None:
    model, made, optimizer = trainer(2, seed=0)
    step(made, optimizer)
    before = copy.deepcopy(model.state_dict())

    saving = save_checkpoint(tmp_path, made, optimizer, wait=False)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    saving.result(timeout=120)
    load_checkpoint(tmp_path, made, optimizer)

    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_save_that_was_cut_off_does_not_count(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    for number in range(3):
        nn.init.constant_(model.weight, number)
        save_checkpoint(tmp_path, model, step=number, keep=2)
    assert [folder.name for folder in sorted(tmp_path.iterdir())] == [
        "000002-step1",
        "000003-step2",
    ]

    os.remove(tmp_path / "000003-step2" / ".metadata")  # killed just before the end
    restored = load_checkpoint(tmp_path, model)
    assert (restored.step, model.weight[0, 0].item()) == (1, 1.0)
    with pytest.raises(InputError, match=r"no complete checkpoint of step 2.*000002-step1"):
        load_checkpoint(tmp_path, model, step=2)

    save_checkpoint(tmp_path, model, step=5, keep=2)
    assert [folder.name for folder in sorted(tmp_path.iterdir())] == [
        "000002-step1",
        "000004-step5",
    ]
    with pytest.raises(InputError, match="keep must be at least 1"):
        save_checkpoint(tmp_path, model, keep=0)


class Bomb:
    def __reduce__(self) -> Any:
        return os.system, ("true",)


def test_opening_a_checkpoint_runs_no_code(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    save_checkpoint(tmp_path, model)
    (tmp_path / "000001-step0" / ".metadata").write_bytes(pickle.dumps(Bomb()))

    with pytest.raises(InputError, match=r"names posix\.system, which is no part"):
        load_checkpoint(tmp_path, model)


def test_what_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    _, made, optimizer = trainer(2, seed=0)
    step(made, optimizer)
    save_checkpoint(tmp_path / "half", made.stages[:1])
    save_checkpoint(tmp_path / "whole", made, optimizer)
    plain = gpt.build(seed=1, layers=8).double()
    before = copy.deepcopy(plain.state_dict())

    with pytest.raises(InputError, match=r"lacks \d+ names: \['blocks"):
        load_checkpoint(tmp_path / "half", plain)
    with pytest.raises(InputError, match=r"tokens.weight: saved \[64, 32\], here \[64, 16\]"):
        load_checkpoint(tmp_path / "whole", gpt.build(layers=8, width=16).double())
    with pytest.raises(InputError, match="no optimizer state of "):
        load_checkpoint(tmp_path / "half", made.stages[0], optimizer)
    with pytest.raises(InputError, match="has no extra \\['lr'\\]"):
        load_checkpoint(tmp_path / "whole", plain, extra={"lr": Reads()})
    names = [*plain.named_parameters()]
    groups = [{"params": [p for _, p in names[:4]]}, {"params": [p for _, p in names[4:]]}]
    save_checkpoint(tmp_path / "groups", plain, torch.optim.SGD(groups[::-1], lr=1.0))
    groups[0]["lr"] = 0.5
    save_checkpoint(tmp_path / "other", plain, torch.optim.SGD(groups, lr=1.0))
    with pytest.raises(InputError, match="are in one parameter group of the optimizer, but were"):
        load_checkpoint(tmp_path / "other", plain, torch.optim.SGD(plain.parameters(), lr=1.0))
    assert all(torch.equal(before[name], value) for name, value in plain.state_dict().items())
    with pytest.raises(InputError, match="no complete checkpoint below"):
        load_checkpoint(tmp_path / "nothing", plain)
    one = next((tmp_path / "whole").iterdir())
    with pytest.raises(
        InputError, match=f"is one checkpoint: pass the folder of all, {one.parent}"
    ):
        load_checkpoint(one, plain)
    # All of the following were taken in silence.
    with pytest.raises(InputError, match=r"holds \d+ names that the model lacks: \['blocks.4"):
        load_checkpoint(tmp_path / "whole", gpt.build(layers=4).double())
    with pytest.raises(InputError, match="AdamW holds none of the 100 parameters of these stages"):
        load_checkpoint(tmp_path / "whole", plain, optimizer)
    with pytest.raises(InputError, match=r"another kind of optimizer, .* needs .'dampening'"):
        load_checkpoint(tmp_path / "whole", plain, torch.optim.SGD(plain.parameters(), lr=1.0))
    assert all(torch.equal(before[name], value) for name, value in plain.state_dict().items())


def test_what_would_be_lost_is_not_saved_in_silence(tmp_path: Path) -> None:
    model, made, optimizer = trainer(2, seed=0)
    loss = nn.Linear(1, 1)

    with pytest.raises(InputError, match="step must be a whole number of at least 0, got 'a/b'"):
        save_checkpoint(tmp_path, made, step="a/b")  # type: ignore[arg-type]
    other = torch.optim.SGD(loss.parameters(), lr=1.0)
    with pytest.raises(InputError, match="SGD holds none of the 100 parameters of these stages"):
        save_checkpoint(tmp_path, made, other)
    optimizer.add_param_group({"params": list(loss.parameters())})
    loss(torch.ones(1, 1)).backward()
    optimizer.step()
    with pytest.raises(
        InputError, match=r"2 parameters that are in no stage .*\[\[1, 1\], \[1\]\]"
    ):
        save_checkpoint(tmp_path, made, optimizer)
    with pytest.raises(InputError, match="'weight' is on the meta device and has no values"):
        save_checkpoint(tmp_path, nn.Linear(2, 2, device="meta"))
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    for wait_for_it in (True, False):
        with pytest.raises(InputError, match=r"could not be written: .*Error: .*file"):
            save_checkpoint(tmp_path / "file", model, wait=wait_for_it).result()


@pytest.mark.parametrize(
    ("file", "size", "message"),
    [
        (".metadata", 0, r"\.metadata is damaged \(EOFError"),
        (".metadata", 50, r"\.metadata is damaged \(UnpicklingError"),
        ("*.distcp", 50, r"distcp has 50 bytes of \d+: the checkpoint was not copied as a whole"),
        ("*.distcp", None, "has 0 bytes of"),
    ],
)
def test_damaged_files_are_named(file: str, size: int | None, message: str, tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    save_checkpoint(tmp_path, model)
    (path,) = tmp_path.glob(f"*/{file}")
    content = path.read_bytes()
    path.unlink() if size is None else path.write_bytes(content[:size])

    with pytest.raises(InputError, match=message):
        load_checkpoint(tmp_path, model)


def hand_written(num_stages: int, seed: int) -> Sequence[PipelineStage]:
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
    with pytest.raises(InputError, match="'bias' has different values in the 3 hand-written"):
        load_checkpoint(tmp_path, hand_written(2, seed=2))


def test_equal_values_of_hand_written_stages_are_one(tmp_path: Path) -> None:
    saved = hand_written(3, seed=0)
    for stage in saved[1:]:
        stage.submod.load_state_dict(saved[0].submod.state_dict())
    save_checkpoint(tmp_path, saved)
    loaded = hand_written(2, seed=1)

    load_checkpoint(tmp_path, loaded)

    assert torch.equal(loaded[1].submod.weight, saved[0].submod.weight)


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


def test_a_failed_save_in_the_background_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next save raised it again, though the disk was well and the user had been told."""
    model = nn.Linear(2, 2)

    def fails(*_: object, **__: object) -> None:
        raise OSError("no space left")

    for asks in (True, False):
        with monkeypatch.context() as patch:
            patch.setattr(Writer, "write_data", fails)
            saving = save_checkpoint(tmp_path, model, wait=False)
            if asks:
                with pytest.raises(InputError, match="no space left"):
                    saving.result()
            wait([saving])
        if not asks:
            with pytest.raises(BaseException, match="no space left"):
                save_checkpoint(tmp_path, model)
        save_checkpoint(tmp_path, model)


def test_an_optimizer_of_frozen_stages_may_hold_anything(tmp_path: Path) -> None:
    # It cannot be empty, so people give it a number that nobody trains.
    model = gpt.build(layers=2).double().requires_grad_(False)
    idle = torch.optim.SGD([torch.zeros(1)], lr=1.0)

    save_checkpoint(tmp_path, model, idle, step=3)

    assert load_checkpoint(tmp_path, model, idle).step == 3
