"""Look at it: pictures of pipes and timelines, and the report."""

from fxpipe.viz.graph import draw_pipe, pipe_dot, pipe_svg
from fxpipe.viz.report import Candidate, report_html, write_report
from fxpipe.viz.timeline import draw_program, draw_timeline, stretch, timeline_svg
from fxpipe.viz.timeline_picture.terminal import TimelineView, timeline_text

__all__ = [
    "Candidate",
    "TimelineView",
    "draw_pipe",
    "draw_program",
    "draw_timeline",
    "pipe_dot",
    "pipe_svg",
    "report_html",
    "stretch",
    "timeline_svg",
    "timeline_text",
    "write_report",
]
