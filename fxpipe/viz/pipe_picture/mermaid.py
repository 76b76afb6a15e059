"""Write the outline of a pipe as Mermaid text, which many READMEs and wikis draw.

Stages are subgraphs (single nodes at depth "stages"). Skips are dotted arrows, ties are
dotted lines without a head, and a value that goes to many stages is a node of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

from fxpipe.text import count_text
from fxpipe.viz.pipe_picture.outline import Crossing, Outline, StageOutline
from fxpipe.viz.pipe_picture.parts import Part

__all__ = ["write_mermaid"]


def write_mermaid(outline: Outline) -> str:
    """The Mermaid text of a pipe."""
    return "\n".join(_lines(outline)) + "\n"


def _lines(outline: Outline) -> Iterator[str]:
    yield "flowchart TD"
    for stage in outline.stages:
        yield from _stage(outline, stage)
    for crossing in outline.crossings:
        yield from _crossing(outline, crossing)
    for number, shared in enumerate(outline.shared):
        text = _text(shared.name, f"{shared.spec} · {shared.size}", f"to {shared.targets_text}")
        yield f'  v{number}[/"{text}"/]'
        yield f"  {_node(outline, shared.source, None)} -.-> v{number}"
    for tie in outline.ties:
        (first, part, name), *others = tie.places
        for other_stage, other_part, other in others:
            ends = _node(outline, first, part), _node(outline, other_stage, other_part)
            yield f'  {ends[0]} -. "{_text("tied", name, other)}" .- {ends[1]}'


def _stage(outline: Outline, stage: StageOutline) -> Iterator[str]:
    title = f"stage {stage.index}, {stage.share:.1%} of {outline.load}"
    if outline.depth == "stages":
        parts = [f"{part.title}: {_note(part)}" for part in stage.parts]
        yield f'  s{stage.index}["{_text(title, stage.facts, *parts)}"]'
    else:
        yield f'  subgraph c{stage.index}["{_text(f"{title}, {stage.facts}")}"]'
        for index, part in enumerate(stage.parts):
            yield f'    s{stage.index}p{index}["{_text(part.title, _note(part))}"]'
        if not stage.parts:
            yield f'    s{stage.index}code["code"]'
        for index, part in enumerate(stage.parts):
            for read in part.reads:
                yield f"    s{stage.index}p{read} --> s{stage.index}p{index}"
        yield "  end"
    for number, terminal in enumerate(stage.inputs):
        for end in _ends(outline, terminal.parts):
            node = _node(outline, stage.index, end)
            yield f'  s{stage.index}in{number}(["{_text(terminal.text)}"]) --> {node}'
    for number, terminal in enumerate(stage.outputs):
        for end in _ends(outline, terminal.parts):
            node = _node(outline, stage.index, end)
            yield f'  {node} --> s{stage.index}out{number}(["{_text(terminal.text)}"])'


def _crossing(outline: Outline, crossing: Crossing) -> Iterator[str]:
    source = _node(outline, crossing.source, crossing.source_part)
    arrow = "-.->" if crossing.is_skip else "-->"
    label = f'|"{_text(*crossing.lines)}"|'
    for part in _ends(outline, crossing.target_parts):
        yield f"  {source} {arrow}{label} {_node(outline, crossing.target, part)}"
        label = ""


def _ends(outline: Outline, parts: tuple[int, ...]) -> tuple[int | None, ...]:
    """The parts that an edge is drawn to: the first few, or the stage as a whole."""
    return (None,) if outline.depth == "stages" or not parts else parts[:3]


def _node(outline: Outline, stage: int, part: int | None) -> str:
    """A part; where it is not one part, the whole stage."""
    if outline.depth == "stages":
        return f"s{stage}"
    if part is not None:
        return f"s{stage}p{part}"
    return f"c{stage}" if outline.stages[stage].parts else f"s{stage}code"


def _note(part: Part) -> str:
    count = count_text(part.parameters) if part.parameters else ""
    return " · ".join(text for text in (part.kind_text, part.spec, count) if text)


def _text(*lines: str) -> str:
    """Lines of a label; quotes and angle brackets would end or hide it."""
    signs = str.maketrans({'"': "#quot;", "<": "#lt;", ">": "#gt;"})
    return "<br/>".join(line.translate(signs) for line in lines)
