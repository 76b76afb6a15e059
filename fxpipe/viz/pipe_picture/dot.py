"""Write the outline of a pipe as DOT, the language of Graphviz.

Stages are clusters (single nodes at depth "stages"), parts are nodes in them. A long
chain of stages is broken into columns, since Graphviz would make it one long line: the
edge to the next column does not shape the layout. A value that goes to many stages is
a note beside its source.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape

from fxpipe.text import count_text
from fxpipe.viz.drawing.palette import Theme
from fxpipe.viz.pipe_picture.outline import Crossing, Outline, StageOutline
from fxpipe.viz.pipe_picture.parts import Part

__all__ = ["write_dot"]

_THEME = Theme()
_LONGEST_COLUMN = 10


def write_dot(outline: Outline, *, title: str = "") -> str:
    """The DOT text of a pipe."""
    return "\n".join(_lines(outline, title)) + "\n"


def _lines(outline: Outline, title: str) -> Iterator[str]:
    yield "digraph pipe {"
    heading = f"label=<<b>{escape(title)}</b>> labelloc=t labeljust=l fontsize=15 " if title else ""
    yield (
        f'  graph [{heading}fontname="Helvetica" fontcolor="{_THEME.ink}" rankdir=TB newrank=true '
        f'compound=true nodesep=0.3 ranksep=0.35 pad=0.2 bgcolor="{_THEME.paper}"]'
    )
    yield (
        f'  node [fontname="Helvetica" fontsize=10 fontcolor="{_THEME.ink}" shape=box '
        f'style="rounded,filled" color="{_THEME.rule}" fillcolor="{_THEME.paper}" '
        'margin="0.12,0.06" height=0.3]'
    )
    yield (
        f'  edge [fontname="Helvetica" fontsize=9 fontcolor="{_THEME.muted}" '
        f'color="{_THEME.muted}" arrowsize=0.6]'
    )
    for stage in outline.stages:
        yield from _stage(outline, stage)
    yield from _columns(outline)
    for crossing in outline.crossings:
        yield from _crossing(outline, crossing)
    yield from _shared(outline)
    yield from _ties(outline)
    yield "}"


def _stage(outline: Outline, stage: StageOutline) -> Iterator[str]:
    if outline.depth == "stages":
        yield f'  s{stage.index} [shape=plain style="" label=<{_stage_table(outline, stage)}>]'
    else:
        yield f"  subgraph cluster_{stage.index} {{"
        yield (
            f'    graph [style="rounded,filled" fillcolor="{_THEME.fill}" color="{_THEME.rule}" '
            'margin=12 label=""]'
        )
        # A heading that is a node beside the first part, since edges run across labels.
        heading = _heading_table(outline, stage)
        yield f'    s{stage.index}head [shape=plain style="" label=<{heading}>]'
        yield f"    {{ rank=same; s{stage.index}head; {_entry(outline, stage)} }}"
        if _needs_code(outline, stage):
            yield (
                f'    s{stage.index}code [label="code" shape=ellipse style=dashed '
                f'fontcolor="{_THEME.muted}"]'
            )
        for index, part in enumerate(stage.parts):
            yield f"    s{stage.index}p{index} [label=<{_part_label(part)}>]"
        for index, part in enumerate(stage.parts):
            for read in part.reads:
                yield f"    s{stage.index}p{read} -> s{stage.index}p{index}"
        yield "  }"
    for number, terminal in enumerate(stage.inputs):
        name = f"s{stage.index}in{number}"
        yield f"  {name} [{_terminal(terminal.text)}]"
        for end in _ends(outline, terminal.parts):
            yield f"  {name} -> {_node(outline, stage.index, end)}"
    for number, terminal in enumerate(stage.outputs):
        name = f"s{stage.index}out{number}"
        yield f"  {name} [{_terminal(terminal.text)}]"
        for end in _ends(outline, terminal.parts):
            yield f"  {_node(outline, stage.index, end)} -> {name}"


def _node(outline: Outline, stage: int, part: int | None) -> str:
    if outline.depth == "stages":
        return f"s{stage}"
    return f"s{stage}code" if part is None else f"s{stage}p{part}"


def _ends(outline: Outline, parts: tuple[int, ...]) -> tuple[int | None, ...]:
    """The parts that an edge is drawn to: the first few, or the stage as a whole."""
    return (None,) if outline.depth == "stages" or not parts else parts[:3]


def _terminal(text: str) -> str:
    """An input or output of the model."""
    style = f'shape=box style="rounded" color="{_THEME.accent}" fontcolor="{_THEME.accent}"'
    return f"{style} fontsize=9 label=<{escape(text)}>"


def _heading_table(outline: Outline, stage: StageOutline) -> str:
    rows = "".join(f'<tr><td align="left">{line}</td></tr>' for line in _heading(outline, stage))
    return f'<table border="0" cellborder="0" cellspacing="0" cellpadding="1">{rows}</table>'


def _heading(outline: Outline, stage: StageOutline) -> Iterator[str]:
    share = f"{stage.share:.1%} of the {outline.load}"
    yield (
        f'<font point-size="12"><b>stage {stage.index}</b></font>  '
        f'<font point-size="9" color="{_THEME.muted}">{escape(share)}</font>'
    )
    yield f'<font point-size="9" color="{_THEME.muted}">{escape(stage.facts)}</font>'


def _stage_table(outline: Outline, stage: StageOutline) -> str:
    rows = [f'<tr><td align="left">{line}</td></tr>' for line in _heading(outline, stage)]
    rows += [f'<tr><td align="left">{_part_label(part, "  ")}</td></tr>' for part in stage.parts]
    return (
        f'<table border="1" cellborder="0" cellspacing="0" cellpadding="3" color="{_THEME.rule}" '
        f'bgcolor="{_THEME.fill}" style="rounded">{"".join(rows)}</table>'
    )


def _part_label(part: Part, between: str = "<br/>") -> str:
    notes = [part.kind_text, part.spec]
    if part.parameters:
        notes.append(count_text(part.parameters))
    note = escape(" · ".join(text for text in notes if text))
    return f'{escape(part.title)}{between}<font point-size="8" color="{_THEME.muted}">{note}</font>'


def _needs_code(outline: Outline, stage: StageOutline) -> bool:
    """Whether something crosses the boundary without touching a part."""
    return (
        not stage.parts
        or any(c.source == stage.index and c.source_part is None for c in outline.crossings)
        or any(c.target == stage.index and not c.target_parts for c in outline.crossings)
        or any(shared.source == stage.index for shared in outline.shared)
        or any(not terminal.parts for terminal in (*stage.inputs, *stage.outputs))
    )


def _entry(outline: Outline, stage: StageOutline) -> str:
    return _node(outline, stage.index, 0 if stage.parts else None)


def _column_length(outline: Outline) -> int:
    count = len(outline.stages)
    if count <= _LONGEST_COLUMN:
        return count
    return max(math.ceil(math.sqrt(count) * 1.2), math.ceil(count / 12))


def _columns(outline: Outline) -> Iterator[str]:
    """Keep the first stages of all columns side by side, in order."""
    length = _column_length(outline)
    firsts = [_entry(outline, stage) for stage in outline.stages[::length]]
    if len(firsts) > 1:
        yield f"  {{ rank=same; {'; '.join(firsts)} }}"
        yield f"  {' -> '.join(firsts)} [style=invis]"


def _crossing(outline: Outline, crossing: Crossing) -> Iterator[str]:
    length = _column_length(outline)
    label = '<br align="left"/>'.join(f"&#160;{escape(line)}" for line in crossing.lines)
    style = [f'label=<{label}<br align="left"/>>']
    if crossing.is_skip:
        style.append(f'style=dashed color="{_THEME.skip}" fontcolor="{_THEME.skip}" weight=0')
    if crossing.source // length != crossing.target // length:
        style.append("constraint=false")
    if not crossing.has_gradient:
        style.append("arrowhead=empty")
    source = _node(outline, crossing.source, crossing.source_part)
    for part in _ends(outline, crossing.target_parts):
        yield f"  {source} -> {_node(outline, crossing.target, part)} [{' '.join(style)}]"
        style[0] = 'label=""'


def _shared(outline: Outline) -> Iterator[str]:
    for source in sorted({shared.source for shared in outline.shared}):
        rows = [
            f'<tr><td align="left"><b>{escape(shared.name)}</b></td>'
            f'<td align="left">{escape(f"{shared.spec} · {shared.size}")}</td>'
            f'<td align="left">to {escape(shared.targets_text)}</td></tr>'
            for shared in outline.shared
            if shared.source == source
        ]
        table = (
            '<table border="0" cellborder="0" cellspacing="0" cellpadding="2">'
            f"{''.join(rows)}</table>"
        )
        note = f'shape=note style="" color="{_THEME.skip}" fontcolor="{_THEME.skip}" fontsize=9'
        origin = _node(outline, source, None)
        yield f"  shared{source} [{note} label=<{table}>]"
        yield f'  {origin} -> shared{source} [style=dashed color="{_THEME.skip}"]'


def _ties(outline: Outline) -> Iterator[str]:
    style = f'color="{_THEME.tied}" fontcolor="{_THEME.tied}" style=dotted penwidth=1.6'
    for tie in outline.ties:
        (stage, part, name), *others = tie.places
        for other_stage, other_part, other_name in others:
            ends = [_node(outline, stage, part), _node(outline, other_stage, other_part)]
            label = f"tied<br/>{escape(name)}<br/>{escape(other_name)}"
            yield (f"  {' -> '.join(ends)} [dir=none constraint=false {style} label=<{label}>]")
