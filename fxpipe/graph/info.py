"""A split model without its modules: what ranks compare before they run.

`PipeInfo` holds where the model is cut, the interface of every stage and the inputs of the
traced call. Where it is cut can be saved, so that a later run cuts the same way without
looking for the best cut again:

    pipe.info().save("split.json")
    pipe = pipeline(model, args, split_policy=PipeInfo.load("split.json"))

Which modules are open and which stage each node is in is all that a later run needs;
interfaces follow from the model, and the hash says whether they became the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from os import PathLike
from pathlib import Path

import sympy
import torch

from fxpipe.errors import InputError, SplitError
from fxpipe.graph.capture.traced_graph import TracedGraph
from fxpipe.graph.check.check import CheckReport
from fxpipe.graph.cut.cut import Assignment
from fxpipe.graph.cut.flow import work_nodes
from fxpipe.graph.dims import text
from fxpipe.graph.inputs import InputSignature, InputSize
from fxpipe.graph.interface import StageEdge, StageInterface, Tied

__all__ = [
    "PipeInfo",
    "SavedSplit",
]


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
    def guards(self) -> tuple[object, ...]:
        """Conditions that the sizes of the inputs must satisfy."""
        return self.inputs.conditions

    @property
    def hash(self) -> str:
        """A hash that is equal on all ranks if and only if their splits are."""
        return hashlib.sha256(_canonical(self).encode()).hexdigest()[:16]

    @property
    def policy(self) -> SavedSplit:
        """A policy for `pipeline(..., split_policy=...)` that cuts as this split does."""
        return SavedSplit(self.opened, dict(self.stage_of), self.hash)

    def name_inputs(
        self,
        args: Iterable[object],
        kwargs: Mapping[str, object] | None = None,
        *,
        partial: bool = False,
    ) -> dict[str, object]:
        """Return the inputs of a call by the names of the model's forward."""
        return self.inputs.name_inputs(args, kwargs, partial=partial)

    def bind_inputs(
        self, args: Iterable[object], kwargs: Mapping[str, object] | None = None
    ) -> dict[str, int]:
        """Return the value of each size symbol for the given inputs.

        Raises:
            PipeliningShapeError: the inputs do not fit what was traced.
        """
        return self.inputs.bind(self.name_inputs(args, kwargs))

    def save(self, path: str | PathLike[str]) -> Path:
        """Write where the model is cut to a JSON file."""
        return self.policy.save(path)

    @staticmethod
    def load(path: str | PathLike[str]) -> SavedSplit:
        """Read what `save` wrote: a policy for `pipeline(..., split_policy=...)`.

        Raises:
            InputError: there is no such file, or it holds something else.
        """
        return SavedSplit.load(path)


def _canonical(value: object) -> str:
    """Write a value so that equal ones are equal texts in every process."""
    if isinstance(value, sympy.Basic):
        return text(value)
    if isinstance(value, InputSize):  # its reason names a place in a file
        value = (value.input, value.dim, value.size)
    if is_dataclass(value) and not isinstance(value, type):
        compared = [getattr(value, f.name) for f in fields(value) if f.compare]
        return f"{type(value).__name__}{_canonical(compared)}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(sorted(f'{k!r}: {_canonical(v)}' for k, v in value.items()))}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_canonical, value))}]"
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(map(_canonical, value)))}}}"
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device)):
        return repr(value)
    return f"<{type(value).__module__}.{type(value).__qualname__}>"  # as much as ranks can compare
