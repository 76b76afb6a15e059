"""Hugging Face's Trainer and Accelerate around a pipeline, under torchrun or in one process.

    trainer = PipelineTrainer(pipe, model=model, args=arguments, train_dataset=rows)
    trainer.train()

All ranks of a pipeline see the same batches. Accelerate would give each rank other rows, wrap the
model in DDP and clip by the norm of one rank's parameters: `adopt` makes it leave these to us.
What the Trainer would do to the model or its outputs, and a pipeline does not, is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from accelerate.data_loader import prepare_data_loader
from transformers import Trainer

from fxpipe.errors import InputError
from fxpipe.training.pipeline import Pipeline, causal_lm_loss
from fxpipe.training.weights import save_weights

__all__ = ["PipelineTrainer", "adopt"]


def adopt(accelerator: Any, pipe: Pipeline, *, data_seed: int = 0) -> Any:
    """An `Accelerator` whose model, data and gradient norm are those of a pipeline.

    Shuffled data has one order on all ranks, from `data_seed`: random numbers of the ranks differ
    as soon as one of them has dropout. The pipeline's steps run under the accelerator's autocast.

    Raises:
        InputError: mixed precision other than bf16.
    """
    if accelerator.mixed_precision not in ("no", "bf16"):
        raise InputError(
            f"mixed_precision is {accelerator.mixed_precision!r}: its scaler would divide "
            "gradients that the pipeline has not scaled; take bf16, or fxpipe.GradScaler in a loop "
            "of your own"
        )

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

    pipe.context = accelerator.autocast
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
        ignored = {
            "label_smoothing_factor": self.label_smoother,
            "compute_loss_func": self.compute_loss_func,
            "compute_metrics": self.compute_metrics,
        }
        if given := [name for name, value in ignored.items() if value is not None]:
            raise InputError(
                f"{', '.join(given)} would have no effect: the loss is the pipeline's loss_fn, and "
                "outputs are on the rank of the last stage only"
            )
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
            found = self.optimizer_cls_and_kwargs
            kind, options = found or self.get_optimizer_cls_and_kwargs(self.args, self.model)
            decayed = set(self.get_decay_parameter_names(self.model))
            groups: list[dict[str, Any]] = [
                {"params": [], "weight_decay": self.args.weight_decay},
                {"params": [], "weight_decay": 0.0},
            ]
            mine = {id(p): (name, p) for name, p in self.pipe.named_parameters()}
            for name, p in mine.values():
                if p.requires_grad:
                    groups[name not in decayed]["params"].append(p)
            self.optimizer = kind(groups, **options)
        return self.optimizer

    def training_step(
        self, model: Any, inputs: Mapping[str, Any], num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """One step of the pipeline: gradients are added, the loss is on every rank."""
        self.pipe.train()
        share = self._share(inputs, num_items_in_batch)
        if not share:  # no token counts
            return torch.zeros(())
        schedule = self.pipe.schedule
        before, schedule.grad_scale = schedule.grad_scale, schedule.grad_scale * share
        try:
            with self.compute_loss_context_manager():
                loss: torch.Tensor = self._run(self.pipe.step, inputs) * share
                return loss
        finally:
            schedule.grad_scale = before

    def _share(self, inputs: Mapping[str, Any], num_items: Any) -> float:
        """A batch's weight in its optimizer step: its share of the tokens, or of the batches."""
        if num_items is None or self.pipe.schedule._loss_fn is not causal_lm_loss:
            return 1.0 / int(self.current_gradient_accumulation_steps)
        counted = int((inputs["labels"][..., 1:] != -100).sum())
        # The Trainer adds up over ranks, which all have the same rows.
        copies = self.args.world_size if self.args.average_tokens_across_devices else 1
        return counted * int(copies) / float(num_items)

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
