"""Look at it: pictures of pipes and timelines, and the report."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fxpipe.viz.timeline import draw_program, draw_timeline, stretch, timeline_svg
from fxpipe.viz.timeline_picture.terminal import TimelineView, timeline_text

if TYPE_CHECKING:
    from fxpipe.viz.graph import draw_pipe, pipe_svg
    from fxpipe.viz.report import Candidate, report_html, write_report
else:
    # What draws pipes needs torch; timelines do without it.
    _HOMES = {
        "graph": "draw_pipe pipe_svg",
        "report": "Candidate report_html write_report",
    }
    _HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

    def __getattr__(name: str) -> Any:
        if name not in _HOME_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"fxpipe.viz.{_HOME_OF[name]}"), name)


__all__ = [
    "Candidate",
    "TimelineView",
    "draw_pipe",
    "draw_program",
    "draw_timeline",
    "pipe_svg",
    "report_html",
    "stretch",
    "timeline_svg",
    "timeline_text",
    "write_report",
]
