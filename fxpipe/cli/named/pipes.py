"""Split the model that a command names, and describe the result.

In:  a `NamedModel` and where to cut.
Out: a `Traced`: the pipe, the example it was traced with, and the values of its sizes;
     `stage_table` for people and `pipe_json` for programs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch import nn

from fxpipe.cli.named.models import Inputs, NamedModel
from fxpipe.cli.output import make_table
from fxpipe.errors import InputError
from fxpipe.graph.interface import TensorSpec
from fxpipe.graph.markers import SplitPoint
from fxpipe.graph.pipe import Pipe, pipeline
from fxpipe.text import count_text, flops_text
from fxpipe.viz.pipe_picture.outline import Figures, make_outline, tensor_bytes

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Traced", "pipe_json", "split_model", "split_pipe", "stage_table"]


@dataclass(frozen=True)
class Traced:
    """A model that was split, and how."""

    model: NamedModel
    pipe: Pipe
    example: Inputs
    sizes: dict[str, int]
    seconds: float

    @property
    def title(self) -> str:
        return f"{self.model.title}, {self.pipe.num_stages} stages"

    @cached_property
    def flops(self) -> tuple[int, ...] | None:
        """Of one microbatch's forward, per stage; None if the model has none to count."""
        found = self.pipe.flops(self.sizes)
        return found if any(found) else None

    @property
    def figures(self) -> Figures:
        """What pictures of the pipe show of its costs."""
        return {"flops": self.flops, "sizes": self.sizes}


def split_model(
    model: NamedModel,
    module: nn.Module,
    example: Inputs,
    *,
    num_stages: int | None,
    split: Sequence[str],
) -> Traced:
    """Split a model that was built."""
    start = time.perf_counter()
    pipe = split_pipe(module, example, num_stages=num_stages, split=split)
    seconds = time.perf_counter() - start
    return Traced(model, pipe, example, dict(pipe.bind_inputs(*example)), seconds)


def split_pipe(
    module: Any,
    example: Inputs,
    *,
    num_stages: int | None,
    split: Sequence[str],
    check: str | bool = "auto",
) -> Pipe:
    """Split at the named modules, else into equal stages, else at the model's own markers.

    Raises:
        InputError: the modules named make another number of stages than asked for.
    """
    args, kwargs = example
    if not split:
        return pipeline(module, args, kwargs, num_stages=num_stages, check=check)
    spec = dict.fromkeys(split, SplitPoint.BEGINNING)
    pipe = pipeline(module, args, kwargs, split_spec=spec, check=check)
    if num_stages is not None and pipe.num_stages != num_stages:
        raise InputError(
            f"--split {','.join(split)} makes {pipe.num_stages} stages, but {num_stages} are needed"
        )
    return pipe


def stage_table(traced: Traced) -> Table:
    """The stages: what is in them, how big they are, what they exchange."""
    from rich.text import Text

    pipe, sizes = traced.pipe, traced.sizes
    outline = make_outline(pipe, "stages", **traced.figures)
    rows = []
    for stage, interface in zip(outline.stages, pipe.interfaces, strict=True):
        takes = [f"{name} (model input)" for name in interface.model_inputs]
        takes += [f"{r.port.name} from {r.source_stage}" for r in interface.received]
        sends = [
            f"{sent.port.name} {sent.port.spec} ({tensor_bytes(sent.port.spec, sizes)})"
            f" to {', '.join(map(str, sent.target_stages))}"
            for sent in interface.sent
        ] or [f"{output.text} (model output)" for output in stage.outputs]
        rows.append(
            (
                stage.index,
                "\n".join(f"{part.title} ({part.kind_text})" for part in stage.parts) or "code",
                count_text(stage.parameters),
                "-" if stage.flops is None else flops_text(stage.flops),
                f"{stage.share:.1%}",
                "\n".join(takes),
                "\n".join(sends),
            )
        )
    columns = ("stage#", "modules", "parameters#", "forward#", "share#", "takes", "sends")
    table = make_table(traced.title, columns, rows)
    table.show_lines = len(rows) <= 16
    ties = [" = ".join(f"{name} ({stage})" for stage, name in t.locations) for t in pipe.tied]
    symbols = ", ".join(f"{name} = {value}" for name, value in sizes.items())
    notes = [f"tied: {tie}" for tie in ties] + ([f"example: {symbols}"] if symbols else [])
    table.caption = Text("\n".join(notes)) if notes else None
    table.caption_justify = "left"
    return table


def pipe_json(traced: Traced) -> dict[str, Any]:
    """What `stage_table` shows, and more, as JSON."""
    pipe, sizes = traced.pipe, traced.sizes
    outline = make_outline(pipe, "stages", **traced.figures)
    return {
        "model": traced.model.request.name,
        "num_stages": pipe.num_stages,
        "sizes": sizes,
        "guards": [str(guard) for guard in pipe.info().guards],
        "inputs": {
            name: str(spec) if isinstance(spec, TensorSpec) else None
            for name, spec in pipe.info().inputs.example.items()
        },
        "stages": [
            {
                "index": stage.index,
                "modules": [name for part in stage.parts for name in part.names],
                "parameters": stage.parameters,
                "flops": stage.flops,
                "share": stage.share,
                "model_inputs": list(interface.model_inputs),
                "received": [
                    {"name": r.port.name, "from": r.source_stage, **_spec_json(r.port.spec, sizes)}
                    for r in interface.received
                ],
                "sent": [
                    {
                        "name": sent.port.name,
                        "to": list(sent.target_stages),
                        **_spec_json(sent.port.spec, sizes),
                    }
                    for sent in interface.sent
                ],
            }
            for stage, interface in zip(outline.stages, pipe.interfaces, strict=True)
        ],
        "tied": [[list(location) for location in tied.locations] for tied in pipe.tied],
        "seconds": round(traced.seconds, 3),
    }


def _spec_json(spec: TensorSpec, sizes: dict[str, int]) -> dict[str, Any]:
    bound = [int(dim) for dim in spec.bind(sizes).shape]
    return {
        "shape": [str(dim) for dim in spec.shape],
        "example_shape": bound,
        "dtype": str(spec.dtype).removeprefix("torch."),
        "has_gradient": spec.requires_grad,
        "bytes": spec.dtype.itemsize * math.prod(bound),
    }
