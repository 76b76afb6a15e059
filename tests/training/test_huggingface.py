"""Hugging Face's Trainer and Accelerate train a pipeline on two processes as the plain model."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fxpipe.errors import InputError

RANK = Path(__file__).with_name("trainer_rank.py")


@pytest.mark.timeout(900)  # four processes on a busy machine
def test_losses_norms_evaluation_and_export_are_the_plain_models() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    with subprocess.Popen(
        [sys.executable, str(RANK)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=environment, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            said, errors = process.communicate(timeout=400)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, errors[-3000:]
    found: dict[str, list[list[float]]] = {}
    for line in said.splitlines():
        if line.startswith("LOSSES "):
            found |= json.loads(line.removeprefix("LOSSES "))

    trained, accelerated = found["pipeline"]
    plain, also_plain = found["plain"]
    # Three steps with a loss and a norm, the loss of an evaluation, that of the exported model.
    assert trained[:-1] == pytest.approx(plain, abs=2e-4)
    assert trained[-1] == pytest.approx(plain[-1], abs=2e-4)
    assert accelerated == pytest.approx(also_plain, abs=1e-4)


def trainer(tmp_path: Path, more: Any, **options: Any) -> Any:
    from transformers import TrainingArguments

    from fxpipe import LocalGroup, Pipeline, causal_lm_loss
    from fxpipe.training.huggingface import PipelineTrainer
    from tests.training.trainer_rank import model, rows

    net = model()
    ids = rows()[0]["input_ids"][None]
    pipe = Pipeline.build(
        net, (), {"input_ids": ids.expand(2, -1)}, loss_fn=causal_lm_loss, n_microbatches=1,
        group=LocalGroup(1), split={"num_stages": 1, "check": False},
    )  # fmt: skip
    given = {"use_cpu": True, "report_to": [], "save_strategy": "no", "max_steps": 1, **options}
    arguments = TrainingArguments(str(tmp_path), disable_tqdm=True, **given)
    return PipelineTrainer(pipe, model=net, args=arguments, train_dataset=rows(), **more)


# Each of the last four was ignored in silence, or worse.
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "save_strategy is 'steps': the Trainer would save one": ({}, {"save_strategy": "steps"}),
    "label_smoothing_factor would have no effect": ({}, {"label_smoothing_factor": 0.1}),
    "compute_metrics would have no effect": ({"compute_metrics": len}, {}),
    "compute_loss_func would have no effect": ({"compute_loss_func": len}, {}),
    "mixed_precision is 'fp16': its scaler would": ({}, {"fp16": True}),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_a_pipeline_does_not_do_is_refused(message: str, tmp_path: Path) -> None:
    more, options = REFUSED[message]

    with pytest.raises(InputError, match=message):
        trainer(tmp_path, more, **options)


def test_steps_and_evaluations_run_under_the_autocast_that_was_asked_for(tmp_path: Path) -> None:
    made = trainer(tmp_path, {}, bf16=True)
    seen = []
    made.model.lm_head.register_forward_hook(lambda *args: seen.append(args[-1].dtype))

    made.train()
    made.evaluate(made.train_dataset)

    assert set(seen) == {torch.bfloat16}
