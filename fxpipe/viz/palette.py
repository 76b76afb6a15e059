"""One look for each kind of action and each stage, in every picture.

The colours are those of Okabe and Ito, which people with any colour vision can tell
apart. Colour never stands alone: each kind also has its letter and its hatch, and
transfers have a shape of their own. A rank's stages differ in shade, first the light one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fxpipe.program import Kind, Span
from fxpipe.viz.scene import Hatch

__all__ = [
    "DARK",
    "LIGHT",
    "LOOKS",
    "ON_COLOUR",
    "TRANSFERS",
    "Look",
    "Theme",
    "lighten",
    "shade",
    "shades",
    "tone",
]


@dataclass(frozen=True, slots=True)
class Look:
    """How one kind of action is drawn."""

    letter: str
    name: str
    colour: str
    hatch: Hatch


_FORWARD, _BACKWARD, _INPUT, _WEIGHT = "#56b4e9", "#d55e00", "#e69f00", "#009e73"
_TRANSFER, _PARAMETERS, _HOST = "#cc79a7", "#d6c72b", "#8f9aa6"

LOOKS: dict[Kind, Look] = {
    Kind.FORWARD: Look("F", "forward", _FORWARD, ""),
    Kind.BACKWARD: Look("B", "backward", _BACKWARD, "rising"),
    Kind.BACKWARD_INPUT: Look("I", "backward, input half", _INPUT, "falling"),
    Kind.BACKWARD_WEIGHT: Look("W", "backward, weight half", _WEIGHT, "dots"),
    Kind.SEND_ACTIVATION: Look(">", "send activation", _TRANSFER, ""),
    Kind.RECV_ACTIVATION: Look(">", "receive activation", _TRANSFER, ""),
    Kind.SEND_GRADIENT: Look("<", "send gradient", _TRANSFER, ""),
    Kind.RECV_GRADIENT: Look("<", "receive gradient", _TRANSFER, ""),
    Kind.UNSHARD: Look("U", "unshard", _PARAMETERS, ""),
    Kind.RESHARD: Look("R", "reshard", _PARAMETERS, ""),
    Kind.REDUCE_GRAD: Look("G", "reduce gradients", _PARAMETERS, "cross"),
    Kind.OVERLAP: Look("P", "pair", _FORWARD, ""),
    Kind.OFFLOAD: Look("O", "offload to the host", _HOST, ""),
    Kind.RELOAD: Look("L", "reload from the host", _HOST, "cross"),
}
TRANSFERS = {
    Kind.SEND_ACTIVATION: "activation, dark where sent, light where received",
    Kind.SEND_GRADIENT: "gradient",
}
"""What a legend says of transfers, both ends in one line."""


@dataclass(frozen=True, slots=True)
class Theme:
    """The colours that are not about kinds of actions.

    Pictures are drawn with `LIGHT`; an SVG and the report say by which colour of `DARK` each
    is replaced in dark mode, so no colour stands here twice.
    """

    paper: str
    ink: str
    muted: str
    rule: str
    idle: str
    fill: str
    accent: str
    skip: str
    tied: str
    bar: str
    area: str


LIGHT = Theme(
    paper="#ffffff", ink="#1b1f24", muted="#59636e", rule="#d5dae0", idle="#eef0f3", fill="#f6f8fa",
    accent="#0072b2", skip="#a3476f", tied="#00734f", bar="#56b4e9", area="#bfdcef",
)  # fmt: skip
DARK = Theme(
    paper="#14181d", ink="#e8ebee", muted="#a0a9b3", rule="#363d46", idle="#222830", fill="#1b2027",
    accent="#6bbcf0", skip="#e093b6", tied="#4fc49c", bar="#3d8fc2", area="#24455c",
)  # fmt: skip
ON_COLOUR = "#1b1f25"
"""Labels on the colours of actions, which stay as they are in dark mode."""


def lighten(colour: str, share: float) -> str:
    """A colour with `share` of white in it."""
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in parts)


def tone(index: int, count: int) -> float:
    """The share of white for the stage with this index among a rank's stages."""
    return 0.3 if count <= 1 else 0.58 - 0.5 * index / (count - 1)


def shade(kind: Kind, index: int, count: int) -> str:
    """The colour of a kind for the stage with this index among a rank's stages."""
    return lighten(LOOKS[kind].colour, tone(index, count))


def shades(spans: Iterable[Span]) -> dict[int, tuple[int, int]]:
    """For each stage its index among the stages of its rank, and their number."""
    held: dict[int, set[int]] = {}
    for span in spans:
        for part in span.action.each:
            held.setdefault(span.rank, set()).add(part.stage)
    return {
        stage: (index, len(stages))
        for stages in held.values()
        for index, stage in enumerate(sorted(stages))
    }
