"""Give letters to what a picture of a pipe cannot draw as a line.

A value that goes to many stages, or from one column of the picture to another, gets a
letter: boxes say "reads A" and "sends A", and a list says what A is. So do tied
parameters in different columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fxpipe.viz.pipe_picture.outline import Crossing, Outline, Tie, ranges_text

__all__ = ["Letters", "give_letters"]


@dataclass(frozen=True, slots=True)
class Letters:
    """Which crossings and ties have letters, and the lines that say so.

    `reads` and `sends` have lines for the boxes of stages, `lines` is the list.
    """

    crossings: frozenset[Crossing]
    ties: frozenset[Tie]
    reads: Mapping[int, tuple[str, ...]]
    sends: Mapping[int, tuple[str, ...]]
    lines: tuple[str, ...]

    @staticmethod
    def none() -> Letters:
        return Letters(frozenset(), frozenset(), {}, {}, ())


def give_letters(outline: Outline, column_of: Mapping[int, int]) -> Letters:
    """Give letters to all that is shared or changes column, except from a stage to the next."""
    lines: list[str] = []
    reads: dict[int, list[str]] = {}
    sends: dict[int, list[str]] = {}
    tied: dict[int, list[str]] = {}
    far = [
        crossing
        for crossing in outline.crossings
        if crossing.is_skip and column_of[crossing.source] != column_of[crossing.target]
    ]
    values: dict[tuple[int, str], tuple[str, list[int]]] = {}
    for shared in outline.shared:
        text = f"{shared.name}  {shared.spec} · {shared.size}"
        values[shared.source, shared.name] = (text, list(shared.targets))
    for crossing in far:
        text = "  ".join(crossing.lines)
        values.setdefault((crossing.source, crossing.name), (text, []))[1].append(crossing.target)
    for (source, _), (text, targets) in values.items():
        letter = _letter(len(lines))
        lines.append(f"{letter}   {text}, from stage {source} to {ranges_text(targets)}")
        sends.setdefault(source, []).append(letter)
        for target in targets:
            reads.setdefault(target, []).append(letter)
    ties = [tie for tie in outline.ties if len({column_of[s] for s, _, _ in tie.places}) > 1]
    for tie in ties:
        letter = _letter(len(lines))
        places = " = ".join(f"{name} (stage {stage})" for stage, _, name in tie.places)
        lines.append(f"{letter}   tied: {places}")
        for stage, _, _ in tie.places:
            tied.setdefault(stage, []).append(letter)
    return Letters(
        frozenset(far),
        frozenset(ties),
        {stage: (f"reads {', '.join(found)}",) for stage, found in reads.items()},
        {
            stage: tuple(
                f"{verb} {', '.join(found[stage])}"
                for verb, found in (("sends", sends), ("tied", tied))
                if stage in found
            )
            for stage in {*sends, *tied}
        },
        tuple(lines),
    )


def _letter(index: int) -> str:
    """A, B, ..., Z, AA, AB, ..."""
    text = ""
    index += 1
    while index:
        index, rest = divmod(index - 1, 26)
        text = chr(ord("A") + rest) + text
    return text
