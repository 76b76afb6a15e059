"""Models of packages that are not Hugging Face transformers, small, with random weights.

Each entry of `ZOO` is built like a case of the Hugging Face table: `build` makes the model,
`inputs` its keyword inputs for a batch. Packages are imported when a model of theirs is built.
"""

import functools
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.graph.hf.inputs import Shape

__all__ = ["ZOO", "ZooCase"]

Inputs = Callable[["Draw"], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class ZooCase:
    """One model: how to build it and what to feed it."""

    model_type: str
    make: Callable[[], nn.Module]
    feed: Inputs
    kind: str = "image"
    variant: str = ""

    def build(self, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
        """The model, in training mode."""
        _torchvision_without_kernels()
        torch.manual_seed(seed)
        return self.make().to(dtype).train()

    def inputs(self, model: nn.Module, shape: Shape) -> dict[str, Any]:
        """Keyword inputs for one forward."""
        return self.feed(Draw(shape))


class Draw:
    """Draws the tensors of one example in a fixed order."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self._generator = torch.Generator().manual_seed(shape.seed)

    def noise(self, *size: int) -> Tensor:
        """Normal numbers for each row."""
        made = torch.randn(self.shape.batch, *size, generator=self._generator)
        return made.to(self.shape.dtype)

    def ids(self, length: int | None = None, vocabulary: int = 64) -> Tensor:
        """Tokens."""
        size = (self.shape.batch, length or self.shape.length)
        return torch.randint(3, vocabulary, size, generator=self._generator)


def _image(name: str, size: int, channels: int = 3) -> Inputs:
    return lambda draw: {name: draw.noise(channels, size, size)}


def _made(path: str, *args: Any, **options: Any) -> Callable[[], nn.Module]:
    """A function that makes a model by its import path."""

    def make() -> nn.Module:
        home, _, name = path.rpartition(".")
        model: nn.Module = getattr(importlib.import_module(home), name)(*args, **options)
        return model

    return make


@functools.cache
def _torchvision_without_kernels() -> None:
    """Name the operators that torchvision's CUDA build cannot load beside a CPU build of torch.

    Most packages import torchvision. Only detection models use them, and those are not here.
    """
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None or "torchvision" in sys.modules:
        return
    try:
        for library in Path(spec.origin).parent.glob("_C*.so"):
            torch.ops.load_library(library)
    except OSError:
        for name in ("nms", "qnms"):
            schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            torch.library.define(f"torchvision::{name}", schema)


def _timm() -> dict[str, ZooCase]:
    sizes = {
        "resnet18": 64, "convnext_atto": 64, "efficientnet_b0": 64, "mobilenetv3_small_100": 64,
        "regnety_002": 64, "densenet121": 64, "levit_128s": 224, "ghostnet_100": 64,
        "dpn48b": 64, "hardcorenas_a": 64, "repvgg_a0": 64, "edgenext_xx_small": 64,
        "poolformer_s12": 64,
    }  # fmt: skip
    patches = {
        "vit_tiny_patch16_224": 64, "deit_tiny_patch16_224": 64, "beit_base_patch16_224": 64,
        "mixer_s32_224": 64, "swin_tiny_patch4_window7_224": 112, "cait_xxs24_224": 64,
        "eva02_tiny_patch14_224": 56, "xcit_nano_12_p16_224": 64,
    }  # fmt: skip
    small = {"beit_base_patch16_224": {"embed_dim": 48, "num_heads": 4, "depth": 4}}
    found = {}
    for name, size in sizes.items():
        make = _made("timm.create_model", name, num_classes=10)
        found[f"timm/{name}"] = ZooCase(name, make, _image("x", size))
    for name, size in patches.items():
        options = {"num_classes": 10, "img_size": size, **small.get(name, {})}
        make = _made("timm.create_model", name, **options)
        found[f"timm/{name}"] = ZooCase(name, make, _image("x", size))
    return found


def _torchvision() -> dict[str, ZooCase]:
    sizes = {
        "resnet18": 64, "densenet121": 64, "mobilenet_v3_small": 64, "mobilenet_v2": 64,
        "efficientnet_b0": 64, "squeezenet1_1": 64, "shufflenet_v2_x0_5": 64,
        "regnet_x_400mf": 64, "mnasnet0_5": 64, "googlenet": 64, "convnext_tiny": 32,
        "swin_t": 64,
    }  # fmt: skip
    found = {}
    for name, size in sizes.items():
        extra = {"init_weights": False} if name == "googlenet" else {}
        make = _made(f"torchvision.models.{name}", num_classes=10, **extra)
        found[f"torchvision/{name}"] = ZooCase(name, make, _image("x", size))
    found["torchvision/vit"] = ZooCase(
        "vit",
        _made(
            "torchvision.models.VisionTransformer", image_size=32, patch_size=8, num_layers=4,
            num_heads=2, hidden_dim=16, mlp_dim=32, num_classes=10,
        ),
        _image("x", 32),
    )  # fmt: skip
    found["torchvision/lraspp"] = ZooCase(
        "lraspp",
        _made(
            "torchvision.models.segmentation.lraspp_mobilenet_v3_large", weights=None,
            weights_backbone=None, num_classes=4,
        ),
        _image("input", 64),
    )  # fmt: skip
    return found


def _diffusers() -> dict[str, ZooCase]:
    def timed(name: str, channels: int, size: int, **others: tuple[int, ...]) -> Inputs:
        return lambda draw: {
            name: draw.noise(channels, size, size),
            "timestep": torch.arange(draw.shape.batch) + 3,
            **{key: draw.noise(*shape) for key, shape in others.items()},
        }

    blocks = {
        "block_out_channels": (8, 16), "norm_num_groups": 4, "layers_per_block": 1,
    }  # fmt: skip
    text = (5, 16)
    unet = _made(
        "diffusers.UNet2DModel", sample_size=16, attention_head_dim=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"), **blocks,
    )  # fmt: skip
    conditioned = _made(
        "diffusers.UNet2DConditionModel", sample_size=16, attention_head_dim=4,
        cross_attention_dim=16, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), **blocks,
    )  # fmt: skip
    autoencoder = _made(
        "diffusers.AutoencoderKL", down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2, **blocks,
    )  # fmt: skip
    pixart = _made(
        "diffusers.PixArtTransformer2DModel", num_attention_heads=2, attention_head_dim=8,
        in_channels=4, out_channels=8, num_layers=4, cross_attention_dim=16, sample_size=16,
        caption_channels=16, use_additional_conditions=False,
    )  # fmt: skip
    sd3 = _made(
        "diffusers.SD3Transformer2DModel", sample_size=16, num_layers=4, attention_head_dim=8,
        num_attention_heads=2, joint_attention_dim=16, caption_projection_dim=16,
        pooled_projection_dim=8, in_channels=4, out_channels=4,
    )  # fmt: skip
    return {
        "diffusers/UNet2DModel": ZooCase("unet", unet, timed("sample", 3, 16)),
        "diffusers/UNet2DConditionModel": ZooCase(
            "unet", conditioned, timed("sample", 4, 16, encoder_hidden_states=text)
        ),
        "diffusers/AutoencoderKL": ZooCase("vae", autoencoder, _image("sample", 16)),
        "diffusers/PixArt": ZooCase(
            "pixart", pixart, timed("hidden_states", 4, 16, encoder_hidden_states=text)
        ),
        "diffusers/SD3": ZooCase(
            "sd3",
            sd3,
            timed("hidden_states", 4, 16, encoder_hidden_states=text, pooled_projections=(8,)),
        ),
    }


def _x_transformers() -> dict[str, ZooCase]:
    def wrapped(kind: str, **options: Any) -> Callable[[], nn.Module]:
        def make() -> nn.Module:
            package = importlib.import_module("x_transformers")
            layers = getattr(package, kind)(dim=16, depth=4, heads=2, attn_dim_head=8, **options)
            model: nn.Module = package.TransformerWrapper(
                num_tokens=64, max_seq_len=32, attn_layers=layers
            )
            return model

        return make

    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "decoder": ("Decoder", {}),
        "encoder": ("Encoder", {}),
        "rotary": ("Decoder", {"rotary_pos_emb": True}),
        "alibi": ("Decoder", {"alibi_pos_bias": True}),
        "flash": ("Decoder", {"attn_flash": True}),
        "swiglu": ("Decoder", {"ff_swish": True, "ff_glu": True, "use_rmsnorm": True}),
    }
    return {
        f"x-transformers/{name}": ZooCase(
            name, wrapped(kind, **options), lambda draw: {"x": draw.ids()}, "text"
        )
        for name, (kind, options) in kinds.items()
    }


def _open_clip() -> dict[str, ZooCase]:
    vision = {"layers": 4, "width": 16, "head_width": 8, "patch_size": 8, "image_size": 32}
    text = {"context_length": 8, "vocab_size": 64, "width": 16, "heads": 2, "layers": 4}

    def feed(draw: Draw) -> dict[str, Any]:
        return {"image": draw.noise(3, 32, 32), "text": draw.ids(8)}

    clip = _made("open_clip.model.CLIP", embed_dim=16, vision_cfg=vision, text_cfg=text)
    coca = _made(
        "open_clip.coca_model.CoCa", embed_dim=16,
        multimodal_cfg={
            "context_length": 8, "width": 16, "heads": 2, "layers": 2, "vocab_size": 64,
        },
        text_cfg={**text, "embed_cls": True, "output_tokens": True},
        vision_cfg={**vision, "attentional_pool": True, "output_tokens": True},
    )  # fmt: skip
    return {
        "open_clip/CLIP": ZooCase("clip", clip, feed),
        "open_clip/CoCa": ZooCase("coca", coca, feed),
    }


def _peft() -> dict[str, ZooCase]:
    def tuned(base: str, kind: str, **options: Any) -> Callable[[], nn.Module]:
        def make() -> nn.Module:
            from tests.graph.hf.registry import case

            package = importlib.import_module("peft")
            model = case(base).build()
            made: nn.Module = package.get_peft_model(model, getattr(package, kind)(**options))
            return made

        return make

    linear = {"target_modules": "all-linear"}
    cases = {
        "lora-llama": tuned("llama", "LoraConfig", r=2, **linear),
        "lora-gpt2": tuned(
            "gpt2", "LoraConfig", r=2, target_modules=["c_attn"], fan_in_fan_out=True
        ),
        "lora-bert": tuned("bert", "LoraConfig", r=2, target_modules=["query", "value"]),
        "dora-llama": tuned("llama", "LoraConfig", r=2, use_dora=True, **linear),
        "ia3-llama": tuned(
            "llama", "IA3Config", target_modules=["k_proj", "down_proj"],
            feedforward_modules=["down_proj"],
        ),
        "oft-llama": tuned("llama", "OFTConfig", oft_block_size=4, r=0, target_modules=["q_proj"]),
    }  # fmt: skip

    def feed(draw: Draw) -> dict[str, Any]:
        ids = draw.ids()
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    return {f"peft/{name}": ZooCase(name, make, feed, "text") for name, make in cases.items()}


def _others() -> dict[str, ZooCase]:
    volume: Inputs = lambda draw: {"x": draw.noise(1, 16, 16, 16)}  # noqa: E731
    unet = _made(
        "monai.networks.nets.UNet", spatial_dims=3, in_channels=1, out_channels=2,
        channels=(4, 8, 16), strides=(2, 2), num_res_units=1,
    )  # fmt: skip
    segres = _made("monai.networks.nets.SegResNet", init_filters=8, in_channels=1)
    vnet = _made("monai.networks.nets.VNet", in_channels=1, out_channels=2)
    unetr = _made(
        "monai.networks.nets.UNETR", in_channels=1, out_channels=2, img_size=(16, 16, 16),
        feature_size=4, hidden_size=24, mlp_dim=32, num_heads=2,
    )  # fmt: skip
    smp = _made("segmentation_models_pytorch.Unet", "resnet18", encoder_weights=None, classes=2)
    sizes = {"image_size": 32, "patch_size": 8, "num_classes": 10, "dim": 16, "heads": 2}
    vit = _made("vit_pytorch.ViT", **sizes, depth=4, mlp_dim=32)
    simple = _made("vit_pytorch.SimpleViT", **sizes, depth=4, mlp_dim=32)
    cait = _made("vit_pytorch.cait.CaiT", **sizes, depth=4, cls_depth=2, mlp_dim=32)
    return {
        "monai/UNet": ZooCase("unet", unet, volume),
        "monai/SegResNet": ZooCase("segresnet", segres, volume),
        "monai/VNet": ZooCase("vnet", vnet, volume),
        "monai/UNETR": ZooCase("unetr", unetr, lambda draw: {"x_in": draw.noise(1, 16, 16, 16)}),
        "segmentation-models/Unet": ZooCase("unet", smp, _image("x", 64)),
        "vit-pytorch/ViT": ZooCase("vit", vit, _image("img", 32)),
        "vit-pytorch/SimpleViT": ZooCase("vit", simple, _image("img", 32)),
        "vit-pytorch/CaiT": ZooCase("cait", cait, _image("img", 32)),
    }


ZOO: dict[str, ZooCase] = {
    **_timm(),
    **_torchvision(),
    **_diffusers(),
    **_x_transformers(),
    **_open_clip(),
    **_peft(),
    **_others(),
}
