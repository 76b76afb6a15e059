"""Hugging Face models from a configuration alone; nothing is downloaded.

    hf:llama?num_hidden_layers=80&hidden_size=8192     a model type and what differs
    hf:config.json?num_hidden_layers=4                 a configuration file and what differs
    hf:t5?class=T5EncoderModel                         another class than the usual one

Weights are random, or absent (meta), so that a model of any size can be looked at.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fxpipe.cli.named.models import ModelRequest, NamedModel
from fxpipe.cli.named.references import parse_options
from fxpipe.errors import InputError

__all__ = ["HuggingFaceModel"]

_LENGTH = 128


@dataclass(frozen=True, slots=True)
class _Task:
    """A kind of model: which mapping of transformers lists it, and how its loss is made."""

    name: str
    mapping: str
    loss: Callable[[Any, Tensor], Tensor]


def _next_token_loss(output: Any, target: Tensor) -> Tensor:
    """Each position predicts the token after it."""
    logits = _logits(output)[:, :-1].flatten(0, 1)
    return F.cross_entropy(logits.float(), target[:, 1:].flatten())


def _class_loss(output: Any, target: Tensor) -> Tensor:
    """Each position, or each row, predicts its own class."""
    logits = _logits(output)
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]).float(), target.flatten())


# The first task that lists a model type decides its class.
_TASKS = (
    _Task("seq2seq", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", _next_token_loss),
    _Task("masked", "MODEL_FOR_MASKED_LM_MAPPING_NAMES", _class_loss),
    _Task("causal", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", _next_token_loss),
    _Task("image", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES", _class_loss),
    _Task("plain", "MODEL_MAPPING_NAMES", _class_loss),
)


class HuggingFaceModel(NamedModel):
    """A model of transformers, from its configuration."""

    is_built_on_meta_by_default = True

    def __init__(self, request: ModelRequest) -> None:
        super().__init__(request)
        self._transformers = _import_transformers()
        place, question, query = request.name.removeprefix("hf:").partition("?")
        options = dict(parse_options(query, request.name)) if question else {}
        self._class_name = options.pop("class", None)
        self._place = place
        self.config = self._make_config(place, options)

    @property
    def title(self) -> str:
        return f"hf:{self._place}"

    @cached_property
    def _task(self) -> _Task:
        from transformers.models.auto import modeling_auto

        model_type = self.config.model_type
        for task in _TASKS:
            if model_type in getattr(modeling_auto, task.mapping):
                return task
        raise InputError(
            f"transformers has no model class for the type {model_type!r}; add ?class=Name"
        )

    def _make(self) -> Any:
        if hasattr(self.config, "use_cache"):
            self.config.use_cache = False
        return self._model_class()(self.config)

    def _model_class(self) -> Any:
        from transformers.models.auto import modeling_auto

        architectures = getattr(self.config, "architectures", None) or ()
        name = self._class_name or next(iter(architectures), None)
        if name is None:
            name = getattr(modeling_auto, self._task.mapping)[self.config.model_type]
            name = name if isinstance(name, str) else name[0]
        if not hasattr(self._transformers, name):
            raise InputError(
                f"transformers {self._transformers.__version__} has no model class {name!r}; "
                "name another with ?class=Name"
            )
        return getattr(self._transformers, name)

    def _make_config(self, place: str, options: dict[str, Any]) -> Any:
        mapping = self._transformers.CONFIG_MAPPING
        fields: dict[str, Any] = {}
        model_type = place
        if place.endswith(".json") or Path(place).exists():
            fields = _read_config(Path(place))
            model_type = fields.pop("model_type", "")
        if model_type not in mapping:
            close = difflib.get_close_matches(model_type, list(mapping.keys()), n=3)
            hint = f"; did you mean {' or '.join(close)}?" if close else ""
            raise InputError(
                f"{self.request.name!r}: transformers knows no model type {model_type!r}{hint}"
            )
        config_class = mapping[model_type]
        self._check_fields(config_class, options)
        try:
            return config_class(**{**fields, **options})
        except Exception as error:
            raise InputError(f"{config_class.__name__} refuses these values: {error}") from error

    def _check_fields(self, config_class: Any, options: Mapping[str, Any]) -> None:
        """Refuse unknown fields, which transformers would keep and never look at."""
        known = {*config_class().to_dict(), *getattr(config_class, "attribute_map", {})}
        faults = []
        for name in options:
            if name not in known:
                close = difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.5)
                faults.append(f"{name!r}" + (f" (closest: {', '.join(close)})" if close else ""))
        if faults:
            raise InputError(f"{config_class.__name__} has no field {', '.join(faults)}")

    def _own_inputs(self, batch: int, seed: int) -> dict[str, Any]:
        main = self._model_class().main_input_name
        generator = torch.Generator().manual_seed(seed)
        if main == "input_ids":
            found = {"input_ids": self._ids(batch, generator)}
            if self._task.name == "seq2seq":
                found["decoder_input_ids"] = self._ids(batch, generator)
            return found
        if main == "pixel_values":
            size = getattr(self.config, "image_size", None) or 224
            height, width = (size, size) if isinstance(size, int) else size
            channels = getattr(self.config, "num_channels", 3)
            image = torch.randn(batch, channels, height, width, generator=generator)
            return {main: image.to(self.request.torch_dtype)}
        raise InputError(
            f"{self.title} takes {main!r}, for which there is no example; "
            "name a function that makes one with --inputs file.py:function"
        )

    def _ids(self, batch: int, generator: torch.Generator) -> Tensor:
        text = self.config.get_text_config()
        longest = getattr(text, "max_position_embeddings", None) or _LENGTH
        length = self.request.seq or min(_LENGTH, longest)
        if length > longest:
            raise InputError(f"--seq {length} is longer than {self.title} allows, {longest}")
        return torch.randint(text.vocab_size, (batch, length), generator=generator)

    def _own_target(self, batch: int, seed: int) -> Tensor:
        inputs = self._own_inputs(batch, seed)
        if self._task.name == "seq2seq":
            target: Tensor = inputs["decoder_input_ids"]
            return target
        if self._task.name in ("causal", "masked"):
            ids: Tensor = inputs["input_ids"]
            return ids
        if self._task.name == "image":
            generator = torch.Generator().manual_seed(seed)
            return torch.randint(self.config.num_labels, (batch,), generator=generator)
        raise InputError(f"{self.title} has no usual target; name one with --target and --loss")

    def _own_loss(self) -> Callable[..., Any]:
        return self._task.loss


def _logits(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    found: Tensor = output["logits"] if isinstance(output, Mapping) else output[0]
    return found


def _read_config(path: Path) -> dict[str, Any]:
    path = path / "config.json" if path.is_dir() else path
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read the configuration {path}: {error.strerror}") from None
    except json.JSONDecodeError as error:
        raise InputError(f"{path} is not JSON: {error}") from None
    if not isinstance(fields, dict) or "model_type" not in fields:
        raise InputError(f"{path} is no Hugging Face configuration: it has no 'model_type'")
    return fields


def _import_transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise InputError(
            "models named hf:... need the package transformers: pip install 'fxpipe[hf]'"
        ) from None
    if "TRANSFORMERS_VERBOSITY" not in os.environ:
        transformers.logging.set_verbosity_error()
    return transformers
