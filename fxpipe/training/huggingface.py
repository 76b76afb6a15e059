"""Hugging Face's Trainer and Accelerate around a pipeline, under torchrun or in one process.

    trainer = PipelineTrainer(pipe, model=model, args=arguments, train_dataset=rows)
    trainer.train()

All ranks of a pipeline see the same batches. Accelerate would give each rank other rows, wrap the
model in DDP and clip by the norm of one rank's parameters: `adopt` makes it leave these to us.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from accelerate.data_loader import prepare_data_loader
from transformers import Trainer

from fxpipe.errors import InputError
from fxpipe.training.pipeline import Pipeline
from fxpipe.training.weights import save_weights

__all__ = ["PipelineTrainer", "adopt"]


def adopt(accelerator: Any, pipe: Pipeline, *, data_seed: int = 0) -> Any:
    """An `Accelerator` whose model, data and gradient norm are those of a pipeline.

    Shuffled data has one order on all ranks, from `data_seed`: random numbers of the ranks differ
    as soon as one of them has dropout.
    """

    def as_it_is(found: Any, *args: Any, **options: Any) -> Any:
        return found

    def same_rows(loader: Any, device_placement: bool | None = None, **options: Any) -> Any:
        return prepare_data_loader(
            loader,
            accelerator.device,
            num_processes=1,
            process_index=0,
            put_on_device=accelerator.device_placement and device_placement is not False,
            use_seedable_sampler=True,
            data_seed=data_seed,
        )

    def clip(parameters: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        return pipe.clip_grad_norm_(float(max_norm), float(norm_type))

    accelerator.prepare_model = as_it_is
    accelerator.prepare_data_loader = same_rows
    accelerator.clip_grad_norm_ = clip
    return accelerator


class PipelineTrainer(Trainer):  # type: ignore[misc]
    """A Trainer whose steps are the pipeline's; `labels` of a batch are the target.

    Checkpoints are fxpipe's: pass `save_strategy="no"`, and call `save_checkpoint` from a callback.
    `save_model` writes the weights of all ranks.
    """

    def __init__(self, pipe: Pipeline, **options: Any) -> None:
        self.pipe = pipe
        super().__init__(**options)
        if self.args.save_strategy != "no":
            raise InputError(
                f"save_strategy is {self.args.save_strategy.value!r}: the Trainer would save one "
                'rank\'s stages as the whole model; pass save_strategy="no" and use save_checkpoint'
            )

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        adopt(self.accelerator, self.pipe, data_seed=seed)

    optimizer: Any

    def create_optimizer(self, model: Any = None) -> Any:
        """The optimizer that the arguments name, for the parameters of this rank."""
        if self.optimizer is None:
            kind, options = self.get_optimizer_cls_and_kwargs(self.args, self.model)
            mine = [p for p in self.pipe.parameters() if p.requires_grad]
            self.optimizer = kind(mine, weight_decay=self.args.weight_decay, **options)
        return self.optimizer

    def training_step(
        self, model: Any, inputs: Mapping[str, Any], num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """One step of the pipeline: gradients are added, the loss is on every rank."""
        self.pipe.train()
        share = 1.0 / self.current_gradient_accumulation_steps
        schedule = self.pipe.schedule
        before, schedule.grad_scale = schedule.grad_scale, schedule.grad_scale * share
        try:
            with self.compute_loss_context_manager():
                loss: torch.Tensor = self._run(self.pipe.step, inputs) * share
                return loss
        finally:
            schedule.grad_scale = before

    def prediction_step(
        self,
        model: Any,
        inputs: Mapping[str, Any],
        prediction_loss_only: bool,
        ignore_keys: Any = None,
    ) -> tuple[torch.Tensor, None, None]:
        """The loss alone: outputs are on the rank of the last stage only."""
        with self.compute_loss_context_manager():
            return self._run(self.pipe.evaluate, inputs), None, None

    def _run(self, call: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
        given = dict(self._prepare_inputs(inputs))
        loss: torch.Tensor = call(target=given.pop("labels"), **given)
        return loss

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write what `from_pretrained` reads. Call it on every rank."""
        folder = output_dir or self.args.output_dir
        save_weights(folder, self.pipe)
        if self.args.should_save:
            self.model.config.save_pretrained(folder)
