"""Turn a traced graph and an assignment of its nodes into stage modules."""

from __future__ import annotations

from typing import Any

__all__ = ["Assignment"]


def __getattr__(name: str) -> Any:
    # Not imported above: `record` needs `cut.checkpoint_regions`, and `cut.cut` needs `record`.
    if name == "Assignment":
        from fxpipe.graph.cut.cut import Assignment

        return Assignment
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
