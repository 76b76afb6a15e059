"""Hugging Face's Trainer, then Accelerate, over a pipeline of two ranks and with the plain model.

Three processes print losses. They are forked from one that has imported transformers, which takes
longer than the training.
"""

import json
import multiprocessing
import os
import socket
import sys
import tempfile
import warnings
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from fxpipe import Pipeline, causal_lm_loss
from fxpipe.training.huggingface import PipelineTrainer, adopt


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def rows() -> list[dict[str, torch.Tensor]]:
    draws = torch.Generator().manual_seed(1)
    made = [torch.randint(64, (8,), generator=draws) for _ in range(24)]
    counted = [torch.arange(8) >= number % 7 for number in range(24)]  # other numbers of tokens
    return [
        {"input_ids": row, "labels": row.where(counts, -100)}
        for row, counts in zip(made, counted, strict=True)
    ]


class Losses(list[float]):
    """Keeps what the Trainer logs."""

    def __call__(self, trainer: Any) -> None:
        log = trainer.log

        def keep(logs: dict[str, float], *args: Any, **options: Any) -> None:
            self.extend(logs[key] for key in ("loss", "eval_loss", "grad_norm") if key in logs)
            log(logs, *args, **options)

        trainer.log = keep


def train(make: Any, **more: Any) -> tuple[list[float], Any]:
    arguments = TrainingArguments(
        tempfile.mkdtemp(), max_steps=3, per_device_train_batch_size=4, max_grad_norm=0.5,
        gradient_accumulation_steps=2, learning_rate=1e-2, weight_decay=0.5, use_cpu=True,
        report_to=[],
        disable_tqdm=True, save_strategy="no", logging_steps=1, eval_strategy="steps",
        eval_steps=3, **more,
    )  # fmt: skip
    trainer = make(args=arguments, train_dataset=rows(), eval_dataset=rows()[:8])
    losses = Losses()
    losses(trainer)
    trainer.train()
    return list(losses), trainer


def pipe_of(net: LlamaForCausalLM) -> Pipeline:
    ids = torch.stack([row["input_ids"] for row in rows()[:2]])
    return Pipeline.build(net, (), {"input_ids": ids}, loss_fn=causal_lm_loss, n_microbatches=2)


def accelerated(step: Any, parameters: Any, accelerator: Any) -> list[float]:
    optimizer = accelerator.prepare(torch.optim.AdamW(parameters, lr=1e-2))
    losses = []
    for number in range(3):
        ids = torch.stack([row["input_ids"] for row in rows()[4 * number : 4 * number + 4]])
        losses.append(step(ids).item())
        losses.append(accelerator.clip_grad_norm_(list(parameters), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def plain_step(net: LlamaForCausalLM) -> Any:
    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = net(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss.detach()

    return step


def say(name: str, found: list[list[float]]) -> None:
    sys.stdout.write(f"LOSSES {json.dumps({name: found})}\n")
    sys.stdout.flush()


def plain_model() -> None:
    found, _ = train(lambda **options: Trainer(model=model(), **options))
    also = model()
    second = accelerated(plain_step(also), list(also.parameters()), Accelerator(cpu=True))
    say("plain", [found, second])


def rank_of_two(rank: int, port: int) -> None:
    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in environment.items()})
    net = model()
    dist.init_process_group("gloo")
    found, trainer = train(lambda **options: PipelineTrainer(pipe_of(net), model=net, **options))
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    trainer.save_model(folder[0])
    dist.barrier()
    if rank == 0:
        exported = LlamaForCausalLM.from_pretrained(folder[0])
        some = {key: torch.stack([row[key] for row in rows()[:8]]) for key in rows()[0]}
        found.append(exported(**some).loss.item())
    pipe = pipe_of(model())
    accelerator = adopt(Accelerator(cpu=True), pipe)
    second = accelerated(
        lambda ids: pipe.step(input_ids=ids, target=ids), pipe.parameters(), accelerator
    )
    if rank == 0:
        say("pipeline", [found, second])
    dist.destroy_process_group()


def main() -> None:
    warnings.simplefilter("ignore")
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=rank_of_two, args=(rank, port)) for rank in range(2)]
    processes.append(fork.Process(target=plain_model))
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    sys.exit(any(process.exitcode for process in processes))


if __name__ == "__main__":
    main()
