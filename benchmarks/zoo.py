"""Measure which models of other packages split, and with the right gradients.

    make zoo                                          everything, into docs/coverage.md
    python -m benchmarks.zoo timm/resnet18 --stages 2
    python -m benchmarks.zoo --log out/zoo.jsonl

timm, torchvision, diffusers, x-transformers, open_clip, peft and others, with random weights
and small sizes; nothing is downloaded. They live in a virtualenv of their own, see the Makefile.
"""

from collections.abc import Sequence
from typing import Any

from benchmarks.coverage import Collection, measure

PACKAGES = (
    "timm", "torchvision", "diffusers", "x-transformers", "open_clip_torch", "peft", "monai",
    "segmentation-models-pytorch", "vit-pytorch", "transformers",
)  # fmt: skip


def _names() -> Sequence[str]:
    from benchmarks.zoo_models import ZOO

    return list(ZOO)


def _case(name: str, variant: str) -> Any:
    from benchmarks.zoo_models import ZOO

    return ZOO[name]


if __name__ == "__main__":
    measure(
        Collection("benchmarks.zoo", _names, _case, PACKAGES),
        "Measure which models of other packages split, and with the right gradients.",
    )
