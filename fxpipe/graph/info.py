"""A split model without its modules: what ranks compare before they run.

`PipeInfo` holds where the model is cut, the interface of every stage and the inputs of the
traced call. Where it is cut can be saved, so that a later run cuts the same way without
looking for the best cut again:

    pipe.info().save("split.json")
    pipe = pipeline(model, args, split_policy=PipeInfo.load("split.json"))
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import sympy
import torch

from fxpipe.graph.check.report import CheckReport
from fxpipe.graph.dims import text
from fxpipe.graph.inputs import InputSignature, InputSize
from fxpipe.graph.interface import StageEdge, StageInterface, Tied
from fxpipe.graph.saved_split import SavedSplit

__all__ = ["PipeInfo"]


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
        """A hash that is equal on all ranks if and only if their splits are."""
        return hashlib.sha256(_canonical(self).encode()).hexdigest()[:16]

    @property
    def policy(self) -> SavedSplit:
        """A policy for `pipeline(..., split_policy=...)` that cuts as this split does."""
        return SavedSplit(self.opened, dict(self.stage_of), self.hash)

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
