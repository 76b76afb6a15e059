"""Write the outline of a pipe as text that other tools draw: DOT for Graphviz, and Mermaid.

Both say the same nodes and edges. Stages are clusters (single nodes at depth "stages"), parts are
nodes in them. Skips are dashed, ties are dotted lines without a head, and a value that goes to
many stages is a node of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from fxpipe.viz.pipe_picture.outline import Outline, StageOutline, ranges_text

__all__ = ["write_dot", "write_mermaid"]

_Look = Literal["plain", "skip", "tie"]


@dataclass(frozen=True, slots=True)
class _Node:
    name: str
    lines: tuple[str, ...]
    is_end: bool = False  # an input or output of the model, or a value that many stages read


@dataclass(frozen=True, slots=True)
class _Edge:
    source: str
    target: str
    look: _Look = "plain"
    lines: tuple[str, ...] = ()


def write_dot(outline: Outline, *, title: str = "") -> str:
    """The pipe in the language of Graphviz."""

    def quoted(lines: tuple[str, ...]) -> str:
        signs = str.maketrans({'"': '\\"', "\\": "\\\\"})
        return '"' + "\\n".join(line.translate(signs) for line in lines) + '"'

    def node(found: _Node) -> str:
        return f"{found.name} [label={quoted(found.lines)}{' color=blue' * found.is_end}]"

    looks = {"plain": "", "skip": " style=dashed", "tie": " style=dotted dir=none constraint=false"}

    def edge(found: _Edge) -> str:
        return f"{found.source} -> {found.target} [label={quoted(found.lines)}{looks[found.look]}]"

    font = 'fontname="Helvetica"'
    return _written(
        outline,
        head=(
            "digraph pipe {",
            f"  graph [{font} label={quoted((title,))} labelloc=t labeljust=l fontsize=12]",
            f'  node [{font} fontsize=10 shape=box style="rounded"]',
            f"  edge [{font} fontsize=9]",
        ),
        cluster=lambda index, lines: f"subgraph cluster_{index} {{ label={quoted(lines)}",
        node=node,
        edge=edge,
        end="  }",
        foot=("}",),
    )


def write_mermaid(outline: Outline) -> str:
    """The pipe as Mermaid text, which many READMEs and wikis draw."""

    def text(lines: tuple[str, ...]) -> str:
        # Quotes and angle brackets would end or hide a label.
        signs = str.maketrans({'"': "#quot;", "<": "#lt;", ">": "#gt;"})
        return '"' + "<br/>".join(line.translate(signs) for line in lines) + '"'

    def edge(found: _Edge) -> str:
        arrow = {"plain": "-->", "skip": "-.->", "tie": "-.-"}[found.look]
        label = f"|{text(found.lines)}|" if found.lines else ""
        return f"{found.source} {arrow}{label} {found.target}"

    return _written(
        outline,
        head=("flowchart TD",),
        cluster=lambda index, lines: f"subgraph c{index}[{text(lines)}]",
        node=lambda n: f"{n.name}([{text(n.lines)}])" if n.is_end else f"{n.name}[{text(n.lines)}]",
        edge=edge,
        end="  end",
    )


def _written(
    outline: Outline,
    *,
    head: tuple[str, ...],
    cluster: Callable[[int, tuple[str, ...]], str],
    node: Callable[[_Node], str],
    edge: Callable[[_Edge], str],
    end: str,
    foot: tuple[str, ...] = (),
) -> str:
    lines = list(head)
    for stage in outline.stages:
        title = (f"stage {stage.index}, {stage.share:.1%} of {outline.load}", stage.facts)
        if outline.depth == "stages":
            parts = tuple(f"{part.title}: {part.note}" for part in stage.parts)
            lines.append("  " + node(_Node(f"s{stage.index}", title + parts)))
        else:
            lines.append("  " + cluster(stage.index, title))
            lines += ("    " + node(found) for found in _parts(outline, stage))
            lines.append(end)
    lines += ("  " + node(found) for found in _ends(outline))
    lines += ("  " + edge(found) for found in _edges(outline))
    return "\n".join([*lines, *foot]) + "\n"


def _parts(outline: Outline, stage: StageOutline) -> Iterator[_Node]:
    for index, part in enumerate(stage.parts):
        yield _Node(f"s{stage.index}p{index}", (part.title, part.note))
    code = _name(outline, stage.index, None)
    if any(code in (found.source, found.target) for found in _edges(outline)):
        yield _Node(code, ("code",))


def _ends(outline: Outline) -> Iterator[_Node]:
    for stage in outline.stages:
        for kind, ends in (("in", stage.inputs), ("out", stage.outputs)):
            for number, end in enumerate(ends):
                yield _Node(f"s{stage.index}{kind}{number}", (end.text,), is_end=True)
    for number, shared in enumerate(outline.shared):
        targets = ranges_text([crossing.target for crossing in shared])
        yield _Node(f"v{number}", (*shared[0].lines, f"to {targets}"), is_end=True)


def _edges(outline: Outline) -> Iterator[_Edge]:
    def names(stage: int, parts: tuple[int, ...]) -> tuple[str, ...]:
        """The first few parts of a stage, or the stage as a whole."""
        whole = outline.depth == "stages" or not parts
        return tuple(_name(outline, stage, part) for part in ((None,) if whole else parts[:3]))

    for stage in outline.stages:
        for number, end in enumerate(stage.inputs):
            for name in names(stage.index, end.parts):
                yield _Edge(f"s{stage.index}in{number}", name)
        if outline.depth != "stages":
            for index, part in enumerate(stage.parts):
                for read in part.reads:
                    yield _Edge(f"s{stage.index}p{read}", f"s{stage.index}p{index}")
        for number, end in enumerate(stage.outputs):
            for name in names(stage.index, end.parts):
                yield _Edge(name, f"s{stage.index}out{number}")
    for crossing in outline.crossings:
        source = _name(outline, crossing.source, crossing.source_part)
        lines: tuple[str, ...] = crossing.lines
        for name in names(crossing.target, crossing.target_parts):
            yield _Edge(source, name, "skip" if crossing.is_skip else "plain", lines)
            lines = ()
    for number, shared in enumerate(outline.shared):
        yield _Edge(_name(outline, shared[0].source, None), f"v{number}", "skip")
    for tie in outline.ties:
        (source, one), *others = ((_name(outline, s, p), name) for s, p, name in tie.places)
        for target, name in others:
            yield _Edge(source, target, "tie", ("tied", one, name))


def _name(outline: Outline, stage: int, part: int | None) -> str:
    if outline.depth == "stages":
        return f"s{stage}"
    return f"s{stage}code" if part is None else f"s{stage}p{part}"
