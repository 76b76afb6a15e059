"""One rank of Lightning over a pipeline: `lightning_rank.py FOLDER`; torchrun starts it."""

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fxpipe import Pipeline
from fxpipe.training.lightning import PipelineStrategy


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)
    )


def data() -> TensorDataset:
    draws = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(24, 8, generator=draws), torch.randn(24, 4, generator=draws))


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if not hasattr(self, "pipe"):
            self.pipe = Pipeline.build(
                net(), (data()[:2][0],), loss_fn=F.mse_loss, n_microbatches=2
            )

    def training_step(self, batch: Any, index: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.pipe.step(batch[0], target=batch[1])
        self.pipe.clip_grad_norm_(0.5)
        optimizer.step()
        self.losses.append(loss.item())
        self.log("loss", loss)

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", self.pipe.evaluate(batch[0], target=batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.pipe.parameters(), lr=1e-2)


def fit(steps: int, folder: Path, resume: Path | None = None) -> tuple[list[float], Any]:
    module = Module()
    trainer = L.Trainer(
        strategy=PipelineStrategy(), accelerator="cpu", devices=2, max_steps=steps,
        logger=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False,  # it would shuffle
        callbacks=[ModelCheckpoint(folder, every_n_train_steps=6, filename="{step}")],
    )  # fmt: skip
    loader = DataLoader(data(), batch_size=4)
    trainer.fit(module, loader, DataLoader(data(), batch_size=8), ckpt_path=resume)
    return module.losses, trainer


def plain(steps: int) -> list[float]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        x, y = data()[4 * (step % 6) : 4 * (step % 6) + 4]
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    return losses


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    whole, trainer = fit(12, folder / "whole")
    begun, _ = fit(6, folder / "begun")
    rest, _ = fit(12, folder / "rest", folder / "begun" / "step=6.ckpt")
    if trainer.is_global_zero:
        values = {
            "whole": whole,
            "resumed": begun + rest,
            "plain": plain(12),
            "validation": trainer.callback_metrics["val_loss"].item(),
        }
        sys.stdout.write("RESULT " + json.dumps(values) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
