"""A split model without its modules: what ranks compare, and what is saved.

`PipeInfo` holds where the model is cut, the interface of every stage and the inputs of the
traced call. It saves as JSON (see `planfile`), so that ranks can agree on one plan and a
later run cuts the same way without looking for the best cut again:

    pipe.info().save("plan.json")
    saved = PipeInfo.load("plan.json")
    pipe = pipeline(model, args, split_policy=saved.policy)
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from fxpipe.errors import InputError, SplitError
from fxpipe.graph.capture.traced_graph import TracedGraph
from fxpipe.graph.check.report import CheckReport
from fxpipe.graph.cut.cut import Assignment
from fxpipe.graph.flow import work_nodes
from fxpipe.graph.inputs import InputSignature, InputSize
from fxpipe.graph.interface import StageEdge, StageInterface, Tied

__all__ = ["PipeInfo", "SavedSplit"]


@dataclass(frozen=True, slots=True)
class PipeInfo:
    """Everything about a split model except its modules."""

    interfaces: tuple[StageInterface, ...]
    edges: tuple[StageEdge, ...]
    tied: tuple[Tied, ...]
    inputs: InputSignature
    symbols: tuple[str, ...]
    trace_autocast: bool
    state_dtypes: tuple[frozenset[torch.dtype], ...]
    opened: frozenset[str] = field(default=frozenset())
    stage_of: Mapping[str, int] = field(default_factory=dict)
    """The stage of each node of the captured graph."""
    repeated: tuple[tuple[str, ...], ...] = ()
    """For each stage the values that it computes again instead of receiving them."""
    example_sizes: Mapping[str, int] = field(default_factory=dict)
    """What the size symbols were in the traced call."""
    check: CheckReport = field(default=CheckReport(), compare=False)
    """What was compared with the plain model, and what was not."""

    @property
    def num_stages(self) -> int:
        return len(self.interfaces)

    @property
    def input_names(self) -> tuple[str, ...]:
        """Names of the model inputs that carry tensors."""
        return self.inputs.names

    @property
    def input_sizes(self) -> tuple[InputSize, ...]:
        """Each dimension of each input: dynamic, or static and why."""
        return self.inputs.sizes

    @property
    def guards(self) -> tuple[Any, ...]:
        """Conditions that the sizes of the inputs must satisfy."""
        return self.inputs.conditions

    @property
    def hash(self) -> str:
        """A hash that is equal on all ranks if and only if the plans are."""
        from fxpipe.graph.saved_split import written

        return hashlib.sha256(written(self, strict=False).encode()).hexdigest()[:16]

    @property
    def policy(self) -> SavedSplit:
        """A policy for `pipeline(..., split_policy=...)` that cuts as this plan does."""
        return SavedSplit(self.opened, dict(self.stage_of))

    def name_inputs(
        self, args: Iterable[Any], kwargs: Mapping[str, Any] | None = None, *, partial: bool = False
    ) -> dict[str, Any]:
        """Return the inputs of a call by the names of the model's forward."""
        return self.inputs.name_inputs(args, kwargs, partial=partial)

    def bind_inputs(
        self, args: Iterable[Any], kwargs: Mapping[str, Any] | None = None
    ) -> dict[str, int]:
        """Return the value of each size symbol for the given inputs.

        Raises:
            PipeliningShapeError: the inputs do not fit what was traced.
        """
        return self.inputs.bind(self.name_inputs(args, kwargs))

    def to_json(self) -> str:
        """Write the plan as JSON.

        Raises:
            InputError: the traced call had an input with no JSON form.
        """
        from fxpipe.graph.saved_split import written

        return written(self)

    @classmethod
    def from_json(cls, text: str) -> PipeInfo:
        """Read what `to_json` wrote.

        Raises:
            InputError: the text is not such a plan.
        """
        from fxpipe.graph.saved_split import read

        return read(text)

    def save(self, path: str | PathLike[str]) -> Path:
        """Write the plan to a JSON file."""
        where = Path(path)
        where.write_text(self.to_json() + "\n", encoding="utf-8")
        return where

    @classmethod
    def load(cls, path: str | PathLike[str]) -> PipeInfo:
        """Read a plan from a JSON file; see `from_json`."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise InputError(f"cannot read the plan {str(path)!r}: {error}") from error
        return cls.from_json(text)


@dataclass(frozen=True)
class SavedSplit:
    """A split policy that repeats a cut; `opened` tells `pipeline` what to open."""

    opened: frozenset[str]
    stage_of: Mapping[str, int]

    def __call__(self, traced: TracedGraph) -> Assignment:
        """Assign the nodes of a graph to the stages they had.

        Raises:
            SplitError: the graph is not that of the plan.
        """
        names = {node.name for node in traced.graph.nodes}
        gone = sorted(set(self.stage_of) - names)
        needed = [n.name for n in work_nodes(traced) if not traced.facts[n].is_part]
        new = [name for name in needed if name not in self.stage_of]
        if new or gone:
            lines = [f"  not in the plan: {_some(new)}"] if new else []
            lines += [f"  only in the plan: {_some(gone)}"] if gone else []
            raise SplitError(
                "the saved plan was made for another model, or for other inputs:\n"
                + "\n".join(lines)
                + "\nsplit the model anew and save that plan"
            )
        return Assignment(dict(self.stage_of))


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
