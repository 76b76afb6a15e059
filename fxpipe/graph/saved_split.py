"""A split as a file: which modules are open and which stage each node is in.

That is all a later run needs to cut the same way; interfaces follow from the model. The hash
says whether they became the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path

from fxpipe.errors import InputError, SplitError
from fxpipe.graph.capture.traced_graph import TracedGraph
from fxpipe.graph.cut.cut import Assignment
from fxpipe.graph.flow import work_nodes

__all__ = ["SavedSplit"]

FORMAT = "fxpipe split"
VERSION = 2


@dataclass(frozen=True)
class SavedSplit:
    """A split policy that repeats a cut; `opened` tells `pipeline` what to open."""

    opened: frozenset[str]
    stage_of: Mapping[str, int]
    hash: str = field(default="", compare=False)
    """The hash of the `PipeInfo` that this split gave."""

    @property
    def policy(self) -> SavedSplit:
        """This split, by the name that `PipeInfo` has for it."""
        return self

    def __call__(self, traced: TracedGraph) -> Assignment:
        """Assign the nodes of a graph to the stages they had.

        Raises:
            SplitError: the graph is not that of the split.
        """
        names = {node.name for node in traced.graph.nodes}
        gone = sorted(set(self.stage_of) - names)
        needed = [n.name for n in work_nodes(traced) if not traced.facts[n].is_part]
        new = [name for name in needed if name not in self.stage_of]
        if new or gone:
            lines = [f"  not in the split: {_some(new)}"] if new else []
            lines += [f"  only in the split: {_some(gone)}"] if gone else []
            raise SplitError(
                "the saved split was made for another model, or for other inputs:\n"
                + "\n".join(lines)
                + "\nsplit the model anew and save that split"
            )
        return Assignment(dict(self.stage_of))

    def save(self, path: str | PathLike[str]) -> Path:
        """Write the split to a JSON file."""
        where = Path(path)
        data = {
            "format": FORMAT,
            "version": VERSION,
            "hash": self.hash,
            "opened": sorted(self.opened),
            "stage_of": dict(self.stage_of),
        }
        where.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        return where

    @classmethod
    def load(cls, path: str | PathLike[str]) -> SavedSplit:
        """Read what `save` wrote.

        Raises:
            InputError: there is no such file, or it holds something else.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InputError(f"cannot read the split {str(path)!r}: {error}") from error
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise InputError(f'{str(path)!r} is not a split: it lacks "format": "{FORMAT}"')
        if data.get("version") != VERSION:
            raise InputError(
                f"the split {str(path)!r} has version {data.get('version')!r}, this fxpipe reads "
                f"{VERSION}; split the model anew"
            )
        opened, stage_of = data.get("opened"), data.get("stage_of")
        if not (
            isinstance(opened, list)
            and all(isinstance(name, str) for name in opened)
            and isinstance(stage_of, dict)
            and all(type(stage) is int and stage >= 0 for stage in stage_of.values())
        ):
            raise InputError(
                f'the split {str(path)!r} is damaged: it needs a list of names as "opened" and a '
                'stage for each name in "stage_of"; split the model anew'
            )
        return cls(frozenset(opened), stage_of, str(data.get("hash", "")))


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
