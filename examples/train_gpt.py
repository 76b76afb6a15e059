"""Train a small GPT on the bytes of a file, and go on after a crash.

    torchrun --nproc-per-node 4 examples/train_gpt.py --steps 200
    torchrun --nproc-per-node 2 examples/train_gpt.py --steps 400    # goes on with two stages

`--crash-at 120` kills the process there, once, to show that nothing is lost:

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # a restart must not find addresses of the dead
    torchrun --standalone --max-restarts 1 --nproc-per-node 2 examples/train_gpt.py --crash-at 120
"""

import argparse
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist

from fxpipe import Pipeline, ProgressBar, load_checkpoint, save_checkpoint
from fxpipe.example_models import gpt

HERE = Path(__file__)


class Bytes:
    """Pieces of a text, in an order that only the position decides."""

    def __init__(self, path: Path, rows: int, length: int) -> None:
        self.text = torch.tensor(list(path.read_bytes()))
        self.rows, self.length, self.position = rows, length, 0

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        draws = torch.Generator().manual_seed(self.position)
        self.position += 1
        starts = torch.randint(len(self.text) - self.length, (self.rows,), generator=draws)
        pieces = torch.stack([self.text[i : i + self.length + 1] for i in starts.tolist()])
        return pieces[:, :-1], pieces[:, 1:]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--text", type=Path, default=HERE)
    options.add_argument("--steps", type=int, default=200)
    options.add_argument("--save-every", type=int, default=20)
    options.add_argument("--folder", type=Path, default=Path("run"))
    options.add_argument("--schedule", default="1F1B")
    options.add_argument("--crash-at", type=int, default=-1)
    options.add_argument("--losses", type=Path, help="append each step's loss to this file")
    given = options.parse_args()

    dist.init_process_group("gloo")
    model = gpt.build(seed=0, vocab=256, width=64, layers=8, length=32)
    data = Bytes(given.text, rows=8, length=32)
    example, _ = next(data)
    data.position = 0
    pipe = Pipeline.build(
        model,
        (example[:2],),
        loss_fn=gpt.loss_fn,
        n_microbatches=4,
        schedule=given.schedule,
        callbacks=[ProgressBar(given.steps)],
    )
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)
    lr = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, given.steps)
    extra = {"lr": lr, "data": data}
    if given.folder.is_dir() and any(given.folder.glob("*/.metadata")):
        pipe.num_steps = load_checkpoint(given.folder, pipe, optimizer, extra=extra).step

    while pipe.num_steps < given.steps:
        if pipe.num_steps == given.crash_at and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        ids, target = next(data)
        loss = pipe.step(ids, target=target)
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        lr.step()
        if given.losses and dist.get_rank() == 0:
            with given.losses.open("a") as file:
                file.write(f"{pipe.num_steps} {float(loss).hex()}\n")
        if (step := pipe.num_steps) % given.save_every == 0 or step == given.steps:
            is_last = step == given.steps
            save_checkpoint(
                given.folder, pipe, optimizer, step=step, extra=extra, keep=2, wait=is_last
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
