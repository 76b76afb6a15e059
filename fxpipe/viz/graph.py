"""Draw pipes: stages, the modules in them, and what travels between them.

Pictures are laid out by `columns`, without any other program. DOT and Mermaid are text for
other tools.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Unpack

from fxpipe.graph.pipe import Pipe
from fxpipe.viz.pipe_picture.columns import lay_out_pipe
from fxpipe.viz.pipe_picture.outline import Depth, Figures, Outline, make_outline
from fxpipe.viz.pipe_picture.text_graph import write_dot, write_mermaid
from fxpipe.viz.svg import PICTURES, picture_path, write_scene, write_svg

__all__ = ["draw_pipe", "pipe_svg"]

_FORMATS = (*PICTURES, ".dot", ".mmd", ".md")
_MOST_STAGES_WITH_BLOCKS = 8


def draw_pipe(
    pipe: Pipe,
    path: str | os.PathLike[str],
    *,
    depth: Depth | None = None,
    title: str = "",
    **figures: Unpack[Figures],
) -> Path:
    """Write a picture of the pipe and return its path.

    The ending of `path` says what is written: `.svg`, `.png`, `.pdf`, `.dot`, `.mmd` (Mermaid) or
    `.md` (Mermaid in a fence).

    Args:
        depth: "stages", "blocks" (the modules of each stage) or "nodes" (everything). By
            default blocks, or stages if there are many.
        figures: `flops`, `times` and `sizes`, see `Figures`.

    Raises:
        FxpipeError: an argument is unknown or does not fit the pipe, or a PNG or PDF is asked for
            and vl-convert is not installed.
    """
    path, ending = picture_path(path, "a pipe", _FORMATS)
    outline = _outline(pipe, depth, figures)
    if ending in PICTURES:
        write_scene(lay_out_pipe(outline, title=title), path)
        return path
    text = write_dot(outline, title=title) if ending == ".dot" else write_mermaid(outline)
    path.write_text(f"```mermaid\n{text}```\n" if ending == ".md" else text, encoding="utf-8")
    return path


def pipe_svg(
    pipe: Pipe, *, depth: Depth | None = None, title: str = "", **figures: Unpack[Figures]
) -> str:
    """The picture as SVG text for a place inside a page, such as a notebook; see `draw_pipe`."""
    return write_svg(lay_out_pipe(_outline(pipe, depth, figures), title=title), inline=True)


def _outline(pipe: Pipe, depth: Depth | None, figures: Figures) -> Outline:
    if depth is None:
        depth = "blocks" if pipe.num_stages <= _MOST_STAGES_WITH_BLOCKS else "stages"
    return make_outline(pipe, depth, **figures)
