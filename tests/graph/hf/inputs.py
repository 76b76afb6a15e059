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

__all__ = ["KINDS", "Shape", "add_labels", "make_inputs"]

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

    def __init__(self, model: Any, shape: Shape, image_tokens: int) -> None:
        self.image_tokens = image_tokens
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

    def text_around(self, places: int, what: str) -> dict[str, Tensor]:
        """Text in which `places` tokens in a row stand for something else."""
        token = self.find(f"{what}_token_id", f"{what}_token_index")
        ids = self.ids(self.shape.length + places)
        if token is not None:
            ids[:, 1 : 1 + places] = token
        found = {"input_ids": ids, "attention_mask": self.mask(ids.shape[1])}
        if "mm_token_type_ids" in self.accepts:
            found["mm_token_type_ids"] = (ids == token).long()
        if "token_type_ids" in self.accepts:
            found["token_type_ids"] = (ids == token).long()
        return found

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
    """Text with a place for each of the image's features."""
    return {**maker.text_around(maker.image_tokens, "image"), **_image(maker)}


def _sized_images(maker: _Maker) -> dict[str, Any]:
    """As `image_tokens`, with the true size of each image beside it."""
    found = _image_tokens(maker)
    height, width = found["pixel_values"].shape[-2:]
    return {**found, "image_sizes": torch.tensor([[height, width]] * maker.shape.batch)}


def _image_grid(maker: _Maker) -> dict[str, Any]:
    """Flat patches of all images, with the grid of each, and a place per merged patch."""
    flat, grid, places = _patches(maker)
    return {**maker.text_around(places, "image"), "pixel_values": flat, "image_grid_thw": grid}


def _grid(maker: _Maker) -> dict[str, Any]:
    """Flat patches of all images, with the grid of each, for the vision part alone."""
    flat, grid, _ = _patches(maker)
    return {
        "hidden_states" if "hidden_states" in maker.accepts else "pixel_values": flat,
        "grid_thw": grid,
    }


def _patches(maker: _Maker) -> tuple[Tensor, Tensor, int]:
    """Return the patches of all images, their grids, and the merged patches of one image."""
    patch = maker.find("patch_size")
    time = maker.find("temporal_patch_size", default=1)
    merge = maker.find("spatial_merge_size", "merge_size", default=2)
    channels = maker.find("num_channels", "in_channels", "in_chans", default=3)
    rows = maker.shape.batch
    grid = torch.tensor([[1, 2 * merge, merge]] * rows)
    patches = int(grid[0].prod())
    flat = maker.noise(patches, channels * time * patch * patch).flatten(0, 1)
    return flat, grid, patches // merge**2


def _image_patches(maker: _Maker) -> dict[str, Any]:
    """Images of any form, cut into patches beforehand."""
    patch = maker.find("patch_size")
    patches = maker.find("num_patches")
    side = int(patches**0.5)
    rows = maker.shape.batch
    found = {
        "pixel_values": maker.noise(patches, 3 * patch * patch),
        "pixel_attention_mask": torch.ones(rows, patches, dtype=torch.long),
        "spatial_shapes": torch.tensor([[side, side]] * rows),
    }
    return {**maker.text(), **found} if "input_ids" in maker.accepts else found


def _many_images(maker: _Maker) -> dict[str, Any]:
    """One image per row, with a dimension for more."""
    image = maker.image()[:, None]
    return {**maker.text_around(maker.image_tokens, "image"), "pixel_values": image}


def _masked_image_text(maker: _Maker) -> dict[str, Any]:
    """As `image_text`, with a mask that says which pixels are real."""
    found = _image_text(maker)
    rows, _, height, width = found["pixel_values"].shape
    return {**found, "pixel_mask": torch.ones(rows, height, width, dtype=torch.long)}


def _video_text(maker: _Maker) -> dict[str, Any]:
    is_named = "pixel_values_videos" in maker.accepts
    return {**maker.text(), **(_video_named(maker) if is_named else _video(maker))}


def _video_named(maker: _Maker) -> dict[str, Any]:
    return {"pixel_values_videos": _video(maker)["pixel_values"]}


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


def _spectrogram(maker: _Maker) -> dict[str, Any]:
    return {"input_values": maker.noise(maker.find("max_length"), maker.find("num_mel_bins"))}


def _whisper(maker: _Maker) -> dict[str, Any]:
    """The encoder takes one length only: twice its positions."""
    frames = 2 * maker.find("max_source_positions")
    found = {"input_features": maker.noise(maker.find("num_mel_bins"), frames)}
    found["decoder_input_ids"] = maker.ids(maker.shape.length - 2)
    return found


def _sound_tokens(maker: _Maker) -> dict[str, Any]:
    """Text with a place for each of the sound's features."""
    bins = maker.find("num_mel_bins", default=16)
    frames = 2 * maker.find("max_source_positions", default=32)
    found = {"input_features": maker.noise(bins, frames)}
    for name in ("feature_attention_mask", "input_features_mask"):
        if name in maker.accepts:
            found[name] = torch.ones(maker.shape.batch, frames, dtype=torch.long)
    return {**maker.text_around(maker.image_tokens, "audio"), **found}


def _sound_text(maker: _Maker) -> dict[str, Any]:
    """Text beside a mel picture of a sound."""
    bins = maker.find("num_mel_bins")
    frames = maker.find("spec_size") ** 2 // bins
    found = {"input_features": maker.noise(1, frames, bins)}
    found["is_longer"] = torch.zeros(maker.shape.batch, 1, dtype=torch.bool)
    return {**maker.text(), **found}


def _document(maker: _Maker) -> dict[str, Any]:
    """Text on a page with an answer to write."""
    found = _boxes(maker)
    found["bbox"] = found["bbox"].to(maker.shape.dtype) / 1000
    return {**found, **_image(maker), "decoder_input_ids": maker.ids(maker.shape.length - 2)}


def _flat_patches(maker: _Maker) -> dict[str, Any]:
    """Patches with their row and column in front."""
    patches, size = 12, maker.find("patch_embed_hidden_size")
    rows = maker.shape.batch
    place = torch.arange(1, patches + 1).repeat(rows, 1)[..., None].to(maker.shape.dtype)
    flat = torch.cat((place, place, maker.noise(patches, size)), dim=-1)
    return {
        "flattened_patches": flat,
        "attention_mask": torch.ones(rows, patches, dtype=maker.shape.dtype),
        "decoder_input_ids": maker.ids(maker.shape.length - 2),
    }


def _image_places(maker: _Maker) -> dict[str, Any]:
    """Text with a mask of the places where the image's features go."""
    places = maker.image_tokens
    ids = maker.ids(maker.shape.length + places)
    mask = torch.zeros_like(ids)
    mask[:, 1 : 1 + places] = 1
    found = {"input_ids": ids, "attention_mask": maker.mask(ids.shape[1])}
    return {**found, "image_embeds_position_mask": mask, **_image(maker)}


def _query_tokens(maker: _Maker) -> dict[str, Any]:
    found = _image_tokens(maker)
    if "qformer_input_ids" in maker.accepts:
        found["qformer_input_ids"] = maker.ids(maker.shape.length)
    return found


def _image_parts(maker: _Maker) -> dict[str, Any]:
    """Each image as a whole and in parts, with its true size."""
    image = maker.image()
    height, width = image.shape[-2:]
    return {
        **maker.text_around(maker.image_tokens, "image"),
        "pixel_values": torch.stack((image, image.flip(-1)), dim=1),
        "image_sizes": torch.tensor([[height, width]] * maker.shape.batch),
    }


def _codec(maker: _Maker) -> dict[str, Any]:
    return {"input_values": maker.noise(1, 320 * 8)}


def _boxes(maker: _Maker) -> dict[str, Any]:
    """Text with a place on the page for each token."""
    corners = torch.randint(
        0, 400, (maker.shape.batch, maker.shape.length, 2), generator=maker.generator
    )
    return {**maker.text(), "bbox": torch.cat((corners, corners + 50), dim=-1)}


def _series(maker: _Maker) -> dict[str, Any]:
    """A number of channels over time."""
    steps = maker.find("context_length", default=32)
    return {"past_values": maker.noise(steps, maker.find("num_input_channels", default=1))}


def _lagged_series(maker: _Maker) -> dict[str, Any]:
    """Past and future of one series, with time features."""
    past = maker.find("context_length") + max(maker.find("lags_sequence"))
    future = maker.find("prediction_length")
    features = maker.find("num_time_features")
    return {
        "past_values": maker.noise(past),
        "past_time_features": maker.noise(past, features),
        "past_observed_mask": torch.ones(maker.shape.batch, past, dtype=maker.shape.dtype),
        "future_values": maker.noise(future),
        "future_time_features": maker.noise(future, features),
        "static_categorical_features": torch.zeros(maker.shape.batch, 1, dtype=torch.long),
    }


def _regions(maker: _Maker) -> dict[str, Any]:
    """Text beside the features of regions of an image."""
    regions = 4
    found = {
        "visual_feats": maker.noise(regions, maker.find("visual_feat_dim")),
        "visual_pos": maker.noise(regions, maker.find("visual_pos_dim")).abs(),
    }
    return {**maker.text(), **found}


def _trajectory(maker: _Maker) -> dict[str, Any]:
    """States, actions and rewards."""
    rows, steps = maker.shape.batch, maker.shape.length
    return {
        "states": maker.noise(steps, maker.find("state_dim")),
        "actions": maker.noise(steps, maker.find("act_dim")),
        "rewards": maker.noise(steps, 1),
        "returns_to_go": maker.noise(steps, 1),
        "timesteps": torch.arange(steps).repeat(rows, 1),
        "attention_mask": torch.ones(rows, steps, dtype=torch.long),
    }


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
    "sized_images": _sized_images,
    "image_grid": _image_grid,
    "grid": _grid,
    "image_patches": _image_patches,
    "many_images": _many_images,
    "masked_image_text": _masked_image_text,
    "video_text": _video_text,
    "video": _video,
    "video_named": _video_named,
    "spectrogram": _spectrogram,
    "whisper": _whisper,
    "sound_tokens": _sound_tokens,
    "sound_text": _sound_text,
    "document": _document,
    "flat_patches": _flat_patches,
    "image_places": _image_places,
    "query_tokens": _query_tokens,
    "image_parts": _image_parts,
    "codec": _codec,
    "boxes": _boxes,
    "past_values": _series,
    "lagged_series": _lagged_series,
    "regions": _regions,
    "states": _trajectory,
    "audio": _audio,
    "speech2seq": _speech2seq,
    "segments": _segments,
}


def make_inputs(model: Any, kind: str, shape: Shape, *, image_tokens: int = 0) -> dict[str, Any]:
    """Keyword arguments for one forward of the model.

    `image_tokens` says how many features one image becomes, for kinds that put
    them among the tokens.
    """
    return KINDS[kind](_Maker(model, shape, image_tokens))


def add_labels(model: Any, inputs: dict[str, Any], shape: Shape) -> None:
    """Put labels of the right form beside the inputs.

    Raises:
        ValueError: the model takes no labels.
    """
    if "labels" not in inspect.signature(model.forward).parameters:
        raise ValueError(f"{type(model).__name__} takes no labels")
    ids = inputs.get("decoder_input_ids", inputs.get("input_ids"))
    if ids is None:
        generator = torch.Generator().manual_seed(shape.seed + 1)
        classes = getattr(model.config, "num_labels", 2)
        inputs["labels"] = torch.randint(classes, (shape.batch,), generator=generator)
        return
    labels = ids.clone()
    if ids is inputs.get("input_ids") and "attention_mask" in inputs:
        labels[inputs["attention_mask"] == 0] = -100
    inputs["labels"] = labels
