"""Example inputs for any Hugging Face model, from its task and its signature.

In:  a built model, what kind of data it takes, batch size and length.
Out: keyword arguments for one forward; same seed, same values.

Attention masks end in padding for all rows but the first, so that a mask matters
and no row is empty. Token ids keep clear of the special ones.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["KINDS", "Shape", "make_inputs"]

FIRST_TOKEN = 8


@dataclass(frozen=True, slots=True)
class Shape:
    """How big the example is."""

    batch: int = 2
    length: int = 8
    seed: int = 0
    dtype: torch.dtype = torch.float32


class _Maker:
    """Draws the tensors of one example in a fixed order."""

    def __init__(self, model: Any, shape: Shape) -> None:
        self.config = model.config
        self.shape = shape
        self.generator = torch.Generator().manual_seed(shape.seed)
        self.accepts = set(inspect.signature(model.forward).parameters)

    def find(self, *names: str, default: Any = None) -> Any:
        """A field of the configuration, looked up in its parts as well."""
        for name in names:
            for config in _parts(self.config):
                value = getattr(config, name, None)
                if value is not None:
                    return value
        return default

    def ids(self, length: int) -> Tensor:
        vocab = self.find("vocab_size", "text_vocab_size", default=90)
        size = (self.shape.batch, length)
        return torch.randint(FIRST_TOKEN, min(vocab, 90), size, generator=self.generator)

    def mask(self, length: int) -> Tensor:
        mask = torch.ones(self.shape.batch, length, dtype=torch.long)
        mask[1:, -2:] = 0
        return mask

    def noise(self, *size: int) -> Tensor:
        values = torch.randn(self.shape.batch, *size, generator=self.generator)
        return values.to(self.shape.dtype)

    def image(self) -> Tensor:
        size = self.find("image_size", "input_size", "image_resolution", default=32)
        height, width = size if isinstance(size, list | tuple) else (size, size)
        channels = self.find("num_channels", "in_channels", "in_chans", default=3)
        return self.noise(channels, height, width)

    def text(self) -> dict[str, Tensor]:
        length = self.shape.length
        found = {"input_ids": self.ids(length)}
        if "attention_mask" in self.accepts:
            found["attention_mask"] = self.mask(length)
        return found


def _parts(config: Any) -> list[Any]:
    found = [config]
    for name in getattr(config, "sub_configs", {}):
        part = getattr(config, name, None)
        if hasattr(part, "to_dict"):
            found += _parts(part)
    for name in ("text_config", "vision_config"):
        part = getattr(config, name, None)
        if hasattr(part, "to_dict") and all(part is not other for other in found):
            found += _parts(part)
    return found


def _text(maker: _Maker) -> dict[str, Any]:
    return maker.text()


def _seq2seq(maker: _Maker) -> dict[str, Any]:
    found = maker.text()
    found["decoder_input_ids"] = maker.ids(maker.shape.length - 2)
    return found


def _image(maker: _Maker) -> dict[str, Any]:
    return {"pixel_values": maker.image()}


def _image_text(maker: _Maker) -> dict[str, Any]:
    return {**maker.text(), **_image(maker)}


def _image_tokens(maker: _Maker) -> dict[str, Any]:
    """Text with places for the image's features; `registry` knows how many."""
    return _image_text(maker)


def _video(maker: _Maker) -> dict[str, Any]:
    frames = maker.find("num_frames", "frames_per_clip", default=4)
    size = maker.find("image_size", "crop_size", default=32)
    channels = maker.find("num_channels", "in_chans", default=3)
    return {"pixel_values": maker.noise(frames, channels, size, size)}


def _audio(maker: _Maker) -> dict[str, Any]:
    if "input_values" in maker.accepts:
        return {"input_values": maker.noise(1600 + 160 * maker.shape.length)}
    bins = maker.find("num_mel_bins", "feature_projection_input_dim", "input_dim", default=16)
    frames = 8 * maker.shape.length
    return {"input_features": maker.noise(frames, bins)}


def _speech2seq(maker: _Maker) -> dict[str, Any]:
    return {**_audio(maker), "decoder_input_ids": maker.ids(maker.shape.length - 2)}


def _segments(maker: _Maker) -> dict[str, Any]:
    found = _image(maker)
    points = torch.rand(maker.shape.batch, 1, 2, 2, generator=maker.generator)
    found["input_points"] = (points * 30).to(maker.shape.dtype)
    found["multimask_output"] = False
    return found


Make = Callable[[_Maker], dict[str, Any]]
KINDS: Mapping[str, Make] = {
    "text": _text,
    "seq2seq": _seq2seq,
    "image": _image,
    "image_text": _image_text,
    "image_tokens": _image_tokens,
    "video": _video,
    "audio": _audio,
    "speech2seq": _speech2seq,
    "segments": _segments,
}


def make_inputs(model: Any, kind: str, shape: Shape) -> dict[str, Any]:
    """Keyword arguments for one forward of the model."""
    return KINDS[kind](_Maker(model, shape))
