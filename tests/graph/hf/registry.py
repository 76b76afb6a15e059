"""Which Hugging Face architectures are measured, and what is special about each.

Every model type that transformers lists is a case: the class with a head where
there is one, a tiny configuration from `shrink`, inputs of a kind that follows from
the task. `exceptions` holds what a small model of that type needs beyond the rules.

Each case can be varied: `labels` (the model computes its loss), `bare` (no attention
mask), `cache` (the model returns its key-value cache), `base` (the class without a
head).
"""

import inspect
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.graph.hf.exceptions import (
    CLASSES,
    EXCEPTIONS,
    IMAGE_TOKENS,
    KINDS,
    MADE_AT_FIRST_USE,
)
from tests.graph.hf.inputs import Shape, add_labels, make_inputs
from tests.graph.hf.shrink import shrink

__all__ = ["VARIANTS", "Case", "all_cases", "case"]

VARIANTS = ("", "labels", "bare", "cache", "base")

# The first task that lists a model type gives its class and the kind of inputs.
TASKS = (
    ("SEQ_TO_SEQ_CAUSAL_LM", "seq2seq"),
    ("MASKED_LM", "text"),
    ("CAUSAL_LM", "text"),
    ("IMAGE_CLASSIFICATION", "image"),
    ("ZERO_SHOT_IMAGE_CLASSIFICATION", "image_text"),
    ("SPEECH_SEQ_2_SEQ", "speech2seq"),
    ("CTC", "audio"),
    ("AUDIO_CLASSIFICATION", "audio"),
    ("IMAGE_TEXT_TO_TEXT", "image_tokens"),
    ("MULTIMODAL_LM", "image_tokens"),
    ("VIDEO_CLASSIFICATION", "video"),
    ("DEPTH_ESTIMATION", "image"),
    ("SEMANTIC_SEGMENTATION", "image"),
    ("UNIVERSAL_SEGMENTATION", "image"),
    ("OBJECT_DETECTION", "image"),
    ("IMAGE_TO_IMAGE", "image"),
    ("ZERO_SHOT_OBJECT_DETECTION", "image_text"),
    ("MASK_GENERATION", "segments"),
    ("VISUAL_QUESTION_ANSWERING", "image_text"),
)
MAIN_INPUT = {
    "input_ids": "text",
    "pixel_values": "image",
    "input_values": "audio",
    "input_features": "audio",
    "pixel_values_videos": "video",
}


@dataclass(frozen=True, slots=True)
class Case:
    """One architecture: how to build it and what to feed it."""

    model_type: str
    class_name: str
    kind: str | None
    exceptions: dict[str, Any] = field(default_factory=dict)
    image_tokens: int = 0
    variant: str = ""

    def config(self) -> Any:
        """The tiny configuration."""
        config = shrink(CONFIG_MAPPING[self.model_type], self.exceptions)
        if self.variant == "cache":
            for part in (config, getattr(config, "text_config", None)):
                if hasattr(part, "use_cache"):
                    part.use_cache = True
        return config

    def build(self, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
        """The tiny model, in training mode."""
        torch.manual_seed(seed)
        model: nn.Module = getattr(transformers, self.class_name)(self.config())
        model = model.to(dtype).eval()
        if self.model_type in MADE_AT_FIRST_USE:  # as the error of `pipeline()` says
            with torch.no_grad():
                model(**self.inputs(model, Shape(dtype=dtype)))
        return model.train()

    def inputs(self, model: nn.Module, shape: Shape) -> dict[str, Any]:
        """Keyword inputs for one forward."""
        kind = self.kind or _kind(model)
        found = make_inputs(model, kind, shape, image_tokens=self.image_tokens)
        if self.variant == "labels":
            add_labels(model, found, shape)
        if self.variant == "bare":
            found.pop("attention_mask", None)
        return found


@cache
def all_cases() -> dict[str, Case]:
    """Every model type that transformers lists, by name."""
    found: dict[str, tuple[str, str | None]] = {}
    for task, kind in TASKS:
        names = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES")
        for model_type, class_name in names.items():
            found.setdefault(model_type, (class_name, kind))
    for model_type, class_name in modeling_auto.MODEL_MAPPING_NAMES.items():
        found.setdefault(model_type, (class_name, None))
    return {
        model_type: Case(
            model_type,
            CLASSES.get(model_type, _first(class_name)),
            KINDS.get(model_type, kind),
            EXCEPTIONS.get(model_type, {}),
            IMAGE_TOKENS.get(model_type, 0),
        )
        for model_type, (class_name, kind) in found.items()
    }


def case(model_type: str, variant: str = "") -> Case:
    """The case of one model type, in one of `VARIANTS`."""
    found = replace(all_cases()[model_type], variant=variant)
    if variant == "base":
        found = replace(found, class_name=_first(modeling_auto.MODEL_MAPPING_NAMES[model_type]))
    return found


def _first(name: str | tuple[str, ...] | list[str]) -> str:
    return name if isinstance(name, str) else name[0]


def _kind(model: Any) -> str:
    """The kind of a model without a task, from its main input."""
    accepts = inspect.signature(model.forward).parameters
    if "grid_thw" in accepts:
        return "grid"
    kind = MAIN_INPUT.get(model.main_input_name, model.main_input_name)
    is_pair = "decoder_input_ids" in accepts
    return {"text": "seq2seq", "audio": "speech2seq"}.get(kind, kind) if is_pair else kind
