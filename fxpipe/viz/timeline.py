"""Draw timelines: SVG, PNG, PDF, trace events and text, by the ending of the file.

A `Timeline` may be simulated or measured; with `measured` the two are drawn one above
the other. Times and bytes are shown in the unit that the caller names, since a
timeline itself has none.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path

from fxpipe.errors import FxpipeError, ScheduleError
from fxpipe.program import Edges, Program, Span, StageCosts, Timeline, simulate
from fxpipe.viz.svg import PICTURES, picture_path, write_scene, write_svg
from fxpipe.viz.timeline_picture.gantt import lay_out_timeline
from fxpipe.viz.timeline_picture.spans import Words
from fxpipe.viz.timeline_picture.terminal import timeline_text
from fxpipe.viz.timeline_picture.trace_events import write_trace_events

__all__ = [
    "draw_program",
    "draw_timeline",
    "program_svg",
    "program_title",
    "stretch",
    "timeline_svg",
]

_FORMATS = (*PICTURES, ".json", ".txt")


def draw_timeline(
    timeline: Timeline,
    path: str | os.PathLike[str],
    *,
    title: str = "",
    measured: Timeline | None = None,
    time_unit: str = "",
    memory_unit: str = "",
    edges: Edges | None = None,
) -> Path:
    """Write a picture of the timeline and return its path.

    The ending of `path` says what is written: `.svg`, `.png`, `.pdf`, `.json` (trace events
    for Perfetto and chrome://tracing) or `.txt`.

    Args:
        measured: a second timeline of the same program, drawn below each rank's row in
            the same unit of time; see `stretch` for one in another unit.
        time_unit: "s", "ms" or "us" to show times so, any other word to append it.
        memory_unit: "bytes" to show kB, MB, GB; any other word to append it.
        edges: between stages, for the arrows in trace events; a chain if not given.

    Raises:
        FxpipeError: the ending is unknown, `measured` has another number of ranks, or a PNG
            or PDF is asked for and vl-convert is not installed.
    """
    path, ending = picture_path(path, "a timeline", _FORMATS)
    if measured is not None and measured.num_ranks != timeline.num_ranks:
        raise FxpipeError(
            f"the measured timeline has {measured.num_ranks} ranks, the simulated one "
            f"{timeline.num_ranks}; draw timelines of the same program"
        )
    if ending in PICTURES:
        words = Words(title, time_unit, memory_unit)
        write_scene(lay_out_timeline(timeline, words, measured=measured), path)
        return path
    if ending == ".json":
        text = write_trace_events(
            timeline, title=title, time_unit=time_unit, edges=edges, measured=measured
        )
    else:
        draw = partial(timeline_text, time_unit=time_unit, memory_unit=memory_unit)
        text = draw(timeline, title=title)
        if measured is not None:
            text += "\n" + draw(measured, title="measured")
    path.write_text(text, encoding="utf-8")
    return path


def draw_program(
    program: Program,
    path: str | os.PathLike[str],
    *,
    costs: StageCosts | None = None,
    edges: Edges | None = None,
    title: str = "",
) -> Path:
    """Simulate a program and draw its timeline; see `simulate` and `draw_timeline`."""
    timeline = simulate(program, costs, edges)
    return draw_timeline(timeline, path, title=title or program_title(program), edges=edges)


def timeline_svg(
    timeline: Timeline, *, title: str = "", time_unit: str = "", memory_unit: str = ""
) -> str:
    """The picture as SVG text for a place inside a page, such as a notebook."""
    words = Words(title, time_unit, memory_unit)
    return write_svg(lay_out_timeline(timeline, words), inline=True)


def program_svg(program: Program) -> str | None:
    """The timeline of a program for a notebook; None if it cannot run, so that its text shows."""
    try:
        timeline = simulate(program)
    except ScheduleError:
        return None
    return timeline_svg(timeline, title=program_title(program))


def stretch(timeline: Timeline, factor: float) -> Timeline:
    """The timeline with all times multiplied, for a comparison in one unit.

    A simulation in units of one forward is laid over a measured step in seconds by
    `stretch(simulated, sum(measured.busy) / sum(simulated.busy))`.
    """
    if not factor > 0:
        raise FxpipeError(f"a timeline is stretched by a factor above 0, got {factor}")

    def scaled(span: Span) -> Span:
        return span._replace(start=span.start * factor, end=span.end * factor)

    return replace(
        timeline,
        spans=tuple(map(scaled, timeline.spans)),
        memory=tuple(tuple((t * factor, held) for t, held in curve) for curve in timeline.memory),
        critical_path=tuple(map(scaled, timeline.critical_path)),
    )


def program_title(program: Program) -> str:
    """Such as "1F1B, 4 ranks, 8 stages, 16 microbatches"."""
    stages = "" if program.num_stages == program.num_ranks else f", {program.num_stages} stages"
    return (
        f"{program.name or 'program'}, {program.num_ranks} ranks{stages}, "
        f"{program.num_microbatches} microbatches"
    )
