"""Schedules as data: which rank does what, and when. Standard library only."""

from fxpipe.program.action import Action, Edge, Edges, Kind, Value, ValueKind, reads, writes
from fxpipe.program.check.faults import Fault, FaultKind
from fxpipe.program.check.validate import find_faults, validate
from fxpipe.program.compare import Compared, Comparison, compare
from fxpipe.program.costs import Link, StageCost, StageCosts
from fxpipe.program.formats.text import parse_action
from fxpipe.program.lower import fuse_backward, lower
from fxpipe.program.play.walk import walk
from fxpipe.program.program import Placement, Program, Step
from fxpipe.program.simulate import simulate
from fxpipe.program.timeline import Span, Timeline

__all__ = [
    "Action",
    "Compared",
    "Comparison",
    "Edge",
    "Edges",
    "Fault",
    "FaultKind",
    "Kind",
    "Link",
    "Placement",
    "Program",
    "Span",
    "StageCost",
    "StageCosts",
    "Step",
    "Timeline",
    "Value",
    "ValueKind",
    "compare",
    "find_faults",
    "fuse_backward",
    "lower",
    "parse_action",
    "reads",
    "simulate",
    "validate",
    "walk",
    "writes",
]
