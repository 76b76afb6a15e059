"""Draw pipes: stages, the modules in them, and what travels between them.

`columns` lays stages out, without any other program. Every single node
(depth "nodes") is laid out by Graphviz, which can also be asked for at any depth. DOT
and Mermaid are text for other tools.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from fxpipe.errors import FxpipeError
from fxpipe.graph.pipe import Pipe
from fxpipe.viz.drawing.files import PICTURES, write_scene
from fxpipe.viz.drawing.palette import Theme
from fxpipe.viz.drawing.svg import write_svg
from fxpipe.viz.pipe_picture.columns import lay_out_pipe
from fxpipe.viz.pipe_picture.dot import write_dot
from fxpipe.viz.pipe_picture.mermaid import write_mermaid
from fxpipe.viz.pipe_picture.outline import Depth, make_outline

__all__ = ["Engine", "draw_pipe", "pipe_dot", "pipe_svg"]

Engine = Literal["columns", "dot"]

_TEXTS = (".dot", ".gv", ".mmd", ".md")
_MOST_STAGES_WITH_BLOCKS = 8


def draw_pipe(
    pipe: Pipe,
    path: str | os.PathLike[str],
    *,
    depth: Depth | None = None,
    title: str = "",
    flops: Sequence[float] | None = None,
    times: Sequence[float] | None = None,
    sizes: Mapping[str, int] | None = None,
    engine: Engine | None = None,
    scale: float = 2.0,
) -> Path:
    """Write a picture of the pipe and return its path.

    The ending of `path` says what is written: `.svg`, `.png`, `.pdf`, `.dot` or `.gv`, `.mmd`
    (Mermaid) or `.md` (Mermaid in a fence).

    Args:
        depth: "stages", "blocks" (the modules of each stage) or "nodes" (everything). By
            default blocks, or stages if there are many.
        flops: of one microbatch, per stage.
        times: of one microbatch, per stage; the load is measured by them, or else by
            FLOPs, or else by parameters.
        sizes: values of the size symbols, such as `pipe.bind_inputs(args, kwargs)`; without
            them bytes are formulas.
        engine: who lays the picture out: "columns", fxpipe itself, or "dot", Graphviz. By
            default columns, except for nodes.
        scale: pixels of a PNG for each unit of width.

    Raises:
        FxpipeError: an argument is unknown or does not fit the pipe, or Graphviz is needed and
            not installed.
    """
    path = Path(path)
    ending = path.suffix.lower()
    if ending not in _TEXTS + PICTURES:
        raise FxpipeError(
            f"cannot draw a pipe as {path.name!r}: the name must end with one of "
            f"{', '.join(PICTURES + _TEXTS)}"
        )
    depth = _depth(pipe, depth)
    outline = make_outline(pipe, depth, flops=flops, times=times, sizes=sizes)
    engine = _engine(depth, engine)
    if ending in (".dot", ".gv"):
        path.write_text(write_dot(outline, title=title), encoding="utf-8")
    elif ending in (".mmd", ".md"):
        text = write_mermaid(outline)
        path.write_text(text if ending == ".mmd" else f"```mermaid\n{text}```\n", encoding="utf-8")
    elif engine == "dot":
        path.write_bytes(render_dot(write_dot(outline, title=title), ending[1:], scale=scale))
    else:
        write_scene(lay_out_pipe(outline, title=title), path, scale=scale)
    return path


def pipe_svg(
    pipe: Pipe,
    *,
    depth: Depth | None = None,
    title: str = "",
    flops: Sequence[float] | None = None,
    times: Sequence[float] | None = None,
    sizes: Mapping[str, int] | None = None,
    theme: Theme | None = None,
) -> str:
    """The picture as SVG text for a place inside a page, such as a notebook.

    Raises:
        FxpipeError: depth is "nodes", which needs Graphviz: use `draw_pipe`.
    """
    depth = _depth(pipe, depth)
    if depth == "nodes":
        raise FxpipeError('depth "nodes" is laid out by Graphviz: use draw_pipe(pipe, "pipe.svg")')
    outline = make_outline(pipe, depth, flops=flops, times=times, sizes=sizes)
    return write_svg(lay_out_pipe(outline, title=title, theme=theme), inline=True)


def pipe_dot(
    pipe: Pipe,
    *,
    depth: Depth | None = None,
    title: str = "",
    flops: Sequence[float] | None = None,
    times: Sequence[float] | None = None,
    sizes: Mapping[str, int] | None = None,
) -> str:
    """The pipe as DOT text; see `draw_pipe`."""
    outline = make_outline(pipe, _depth(pipe, depth), flops=flops, times=times, sizes=sizes)
    return write_dot(outline, title=title)


def render_dot(text: str, ending: str, *, scale: float = 2.0) -> bytes:
    """Let Graphviz draw DOT text as svg, png or pdf.

    Raises:
        FxpipeError: the `graphviz` package or the `dot` program is missing.
    """
    try:
        import graphviz
    except ImportError as error:
        raise FxpipeError(
            "drawing with Graphviz needs the graphviz package: pip install 'fxpipe[viz]'; "
            "the depths stages and blocks are drawn without it"
        ) from error
    if ending == "png":
        text = text.replace("graph [", f"graph [dpi={round(72 * scale)} ", 1)
    try:
        data: bytes = graphviz.Source(text).pipe(format=ending)
    except graphviz.ExecutableNotFound as error:
        raise FxpipeError(
            "drawing with Graphviz needs its program dot, which was not found: install graphviz "
            "(apt install graphviz, brew install graphviz, or conda install graphviz); "
            "the depths stages and blocks are drawn without it, and .dot files need nothing"
        ) from error
    return data


def _depth(pipe: Pipe, depth: Depth | None) -> Depth:
    if depth is None:
        return "blocks" if pipe.num_stages <= _MOST_STAGES_WITH_BLOCKS else "stages"
    return depth


def _engine(depth: Depth, engine: Engine | None) -> Engine:
    if engine not in (None, "columns", "dot"):
        raise FxpipeError(f"engine is columns or dot, got {engine!r}")
    if engine == "columns" and depth == "nodes":
        raise FxpipeError('the engine columns draws stages and blocks; for nodes use engine="dot"')
    return engine or ("dot" if depth == "nodes" else "columns")
