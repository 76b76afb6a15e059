"""A Lightning strategy: every process is a rank of one pipeline.

    class Module(L.LightningModule):
        automatic_optimization = False

        def configure_model(self):
            self.pipe = Pipeline.build(model, (x[:2],), loss_fn=loss, n_microbatches=4)

        def training_step(self, batch, index):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            loss = self.pipe.step(batch[0], target=batch[1])
            self.pipe.clip_grad_norm_(1.0)
            optimizer.step()
            self.log("loss", loss)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.pipe.parameters())

    L.Trainer(strategy=PipelineStrategy(), devices=2, accelerator="cpu").fit(Module(), data)

All ranks get the same batches. Checkpoints are folders: fxpipe's, with Lightning's own state beside
them; they load on any number of ranks. Lightning's automatic optimization calls backward after
`training_step`, where a pipeline has done it: it is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy

from fxpipe.errors import InputError
from fxpipe.training.checkpoint import load_checkpoint, save_checkpoint
from fxpipe.training.pipeline import Pipeline

__all__ = ["PipelineStrategy"]

_LIGHTNING = "lightning.pt"


class PipelineStrategy(DDPStrategy):  # type: ignore[misc]
    """Lightning's launcher and process group; the module's `pipe` does the rest."""

    strategy_name = "fxpipe"

    @property
    def pipe(self) -> Pipeline:
        """The pipeline of the module."""
        found = getattr(self.lightning_module, "pipe", None)
        if not isinstance(found, Pipeline):
            raise InputError(
                "PipelineStrategy needs a module with an attribute `pipe`, made by "
                f"Pipeline.build in configure_model(); found {type(found).__name__}"
            )
        return found

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """All ranks of a pipeline work on the same rows."""
        return {"num_replicas": 1, "rank": 0}

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    def setup(self, trainer: Any) -> None:
        if self.lightning_module.automatic_optimization:
            raise InputError(
                "a pipeline computes its gradients in training_step: set "
                "automatic_optimization = False in the module and call optimizer.step() there"
            )
        assert self.pipe
        super().setup(trainer)

    def configure_ddp(self) -> None:
        """Stages that have replicas are wrapped by `Pipeline.build(wrap=...)`."""

    def model_to_device(self) -> None:
        """Stages are on their devices."""

    @contextlib.contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """A model is traced in `configure_model`: under no default device that a step has not."""
        yield

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return {}

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        """Save the stages and optimizers of all ranks, and what Lightning knows."""
        step = self.lightning_module.global_step
        save_checkpoint(filepath, self.pipe.schedule, self.optimizers, step=step)
        if self.is_global_zero:
            torch.save(checkpoint, Path(filepath, _LIGHTNING))

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load stages and optimizers; returns what Lightning knew."""
        load_checkpoint(checkpoint_path, self.pipe.schedule, self.optimizers or None)
        path = Path(checkpoint_path, _LIGHTNING)
        found: dict[str, Any] = torch.load(
            path, map_location="cpu", weights_only=bool(weights_only)
        )
        return found

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        """Done by `load_checkpoint`."""

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Done by `load_checkpoint`."""
