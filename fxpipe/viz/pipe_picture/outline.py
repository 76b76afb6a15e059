"""Say what a picture of a pipe shows, as data that every drawing reads.

In:  a `Pipe`, how deep to look into its stages, and what is known of its costs.
Out: an `Outline`: for each stage its parts, what crosses between stages, what is tied.

A part is a module call, a run of alike module calls (layers.8 … layers.15), or at
depth "nodes" any node of the stage's graph. Code between modules is not a part: what
flows through it is drawn as flowing from module to module.

A value that goes to many stages (an attention mask) is shared: pictures list it once
instead of drawing a line to each reader.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypedDict, Unpack

from fxpipe.errors import FxpipeError
from fxpipe.graph.dims import Dim, evaluate, free_names, text
from fxpipe.graph.interface import TensorSpec
from fxpipe.graph.pipe import Pipe, Stage
from fxpipe.text import bytes_text, count_text, flops_text
from fxpipe.viz.pipe_picture.parts import Part, StageParts, find_parts

__all__ = [
    "Crossing",
    "Depth",
    "Figures",
    "ModelEnd",
    "Outline",
    "StageOutline",
    "Tie",
    "make_outline",
    "ranges_text",
]

Depth = Literal["stages", "blocks", "nodes"]

_MANY = 4


class Figures(TypedDict, total=False):
    """What is known of a pipe's costs.

    `flops` and `times` are of one microbatch, per stage; the load is measured by times, or else by
    FLOPs, or else by parameters. `sizes` are the values of the pipe's size symbols, such as
    `pipe.bind_inputs(args, kwargs)`; without them bytes are formulas.
    """

    flops: Sequence[float] | None
    times: Sequence[float] | None
    sizes: Mapping[str, int] | None


@dataclass(frozen=True, slots=True)
class ModelEnd:
    """An input or output of the model, and the parts that read or make it."""

    text: str
    parts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StageOutline:
    """One stage: its parts and what is known of its size.

    `share` is the stage's part of the whole load, from 0 to 1.
    """

    index: int
    parts: tuple[Part, ...]
    parameters: int
    flops: float | None
    share: float
    inputs: tuple[ModelEnd, ...]
    outputs: tuple[ModelEnd, ...]

    @property
    def facts(self) -> str:
        """Such as "1.71 B parameters, 12.3 TFLOPs"."""
        facts = [f"{count_text(self.parameters)} parameters"]
        if self.flops is not None:
            facts.append(flops_text(self.flops))
        return ", ".join(facts)


@dataclass(frozen=True, slots=True)
class Crossing:
    """A value that one stage sends to one other; parts are indices, None the stage itself."""

    source: int
    target: int
    name: str
    spec: str
    size: str
    source_part: int | None
    target_parts: tuple[int, ...]
    title: str = ""

    @property
    def is_skip(self) -> bool:
        return self.target != self.source + 1

    @property
    def lines(self) -> tuple[str, str]:
        """What people call it; dtype, shape and bytes."""
        return self.title or self.name, f"{self.spec} · {self.size}"

    def past_first(self) -> Crossing | None:
        """The same value as far as it enters the next stage below its first part."""
        others = tuple(part for part in self.target_parts if part > 0)
        again = "" if others == self.target_parts else ", sent once"
        return replace(self, target_parts=others, size=self.size + again) if others else None


@dataclass(frozen=True, slots=True)
class Tie:
    """Places that hold one parameter, as (stage, part, parameter name)."""

    places: tuple[tuple[int, int | None, str], ...]


@dataclass(frozen=True, slots=True)
class Outline:
    """All that a picture of a pipe shows; `shared` has the crossings of each shared value."""

    depth: Depth
    stages: tuple[StageOutline, ...]
    crossings: tuple[Crossing, ...]
    shared: tuple[tuple[Crossing, ...], ...]
    ties: tuple[Tie, ...]
    load: str
    sizes: tuple[tuple[str, int], ...]

    @property
    def summary(self) -> str:
        """Such as "59.1 k parameters, 4 stages; a microbatch has batch = 2"."""
        total = sum(stage.parameters for stage in self.stages)
        text = f"{count_text(total)} parameters, {len(self.stages)} stages"
        known = ", ".join(f"{name} = {value}" for name, value in self.sizes)
        return f"{text}; a microbatch has {known}" if known else text


def make_outline(pipe: Pipe, depth: Depth, **figures: Unpack[Figures]) -> Outline:
    """Describe a pipe.

    Raises:
        FxpipeError: the depth is unknown, or a figure is missing for some stage.
    """
    flops, times, sizes = figures.get("flops"), figures.get("times"), figures.get("sizes") or {}
    if depth not in ("stages", "blocks", "nodes"):
        raise FxpipeError(f"depth is one of stages, blocks, nodes; got {depth!r}")
    for name, given in (("flops", flops), ("times", times)):
        if given is not None and len(given) != pipe.num_stages:
            raise FxpipeError(
                f"{name} has {len(given)} entries, but the pipe has {pipe.num_stages} stages"
            )
    shortest = {"stages": 2, "blocks": 3, "nodes": None}[depth]
    found = [find_parts(s.module, s.facts, sizes, shortest_run=shortest) for s in pipe.stages]
    parameters = [sum(p.numel() for p in s.module.parameters()) for s in pipe.stages]
    known_loads = ((times, "time"), (flops, "FLOPs"), (parameters, "parameters"))
    load, name = next((load, name) for load, name in known_loads if load is not None)
    whole = sum(load) or 1.0
    stages = tuple(
        StageOutline(
            index=stage.index,
            parts=found[stage.index].parts,
            parameters=parameters[stage.index],
            flops=None if flops is None else flops[stage.index],
            share=load[stage.index] / whole,
            inputs=_inputs(pipe, stage, found[stage.index]),
            outputs=(
                _outputs(stage, found[stage.index]) if stage.index == pipe.num_stages - 1 else ()
            ),
        )
        for stage in pipe.stages
    )
    crossings, shared = _crossings(pipe, found, sizes)
    ties = tuple(
        Tie(tuple((stage, found[stage].holder_of(name), name) for stage, name in tied.locations))
        for tied in pipe.tied
    )
    sent = [sent for interface in pipe.interfaces for sent in interface.sent]
    used = {symbol for one in sent for symbol in one.port.spec.symbols}
    known = tuple((s, sizes[s]) for s in pipe.info().symbols if s in used and s in sizes)
    return Outline(depth, stages, crossings, shared, ties, name, known)


def _crossings(
    pipe: Pipe, found: Sequence[StageParts], sizes: Mapping[str, int]
) -> tuple[tuple[Crossing, ...], tuple[tuple[Crossing, ...], ...]]:
    crossings: list[Crossing] = []
    shared: list[tuple[Crossing, ...]] = []
    for interface in pipe.interfaces:
        for sent in interface.sent:
            spec, name = sent.port.spec, sent.port.name
            made = tuple(
                Crossing(
                    source=interface.stage,
                    target=target,
                    name=name,
                    spec=str(spec),
                    size=tensor_bytes(spec, sizes),
                    source_part=found[interface.stage].source_of(name),
                    target_parts=found[target].readers_of(name),
                    title=found[interface.stage].title_of(name),
                )
                for target in sorted(sent.target_stages)
            )
            if sum(crossing.is_skip for crossing in made) >= _MANY:
                shared.append(made)
            else:
                crossings += made
    crossings.sort(key=lambda c: (c.target - c.source, c.source))
    return tuple(crossings), tuple(shared)


def tensor_bytes(spec: TensorSpec, sizes: Mapping[str, int]) -> str:
    """The bytes of a tensor: a number if its sizes are known, else a formula."""
    num: Dim = spec.dtype.itemsize
    for dim in spec.shape:
        num = num * dim
    if free_names(num) <= set(sizes):
        return bytes_text(float(evaluate(num, sizes)))
    return f"{text(num)} B"


def _inputs(pipe: Pipe, stage: Stage, parts: StageParts) -> tuple[ModelEnd, ...]:
    """Model inputs with their specs; a nested one by its name alone."""
    example = pipe.info().inputs.example
    found = []
    for name in stage.interface.model_inputs:
        spec = example.get(name)
        text = f"{name}: {spec}" if isinstance(spec, TensorSpec) else name
        found.append(ModelEnd(text, parts.readers_of(name)))
    return tuple(found)


def _outputs(stage: Stage, parts: StageParts) -> tuple[ModelEnd, ...]:
    """The tensors that the model returns, as far as the graph says."""
    found: list[ModelEnd] = []
    for node in stage.module.graph.nodes:
        if node.op != "output":
            continue
        for source in node.all_input_nodes:
            maker = parts.source_of(source.name)
            makers = () if maker is None else (maker,)
            found += [ModelEnd(str(spec), makers) for spec in stage.facts.tensors(source)]
    return tuple(found)


def ranges_text(numbers: Sequence[int]) -> str:
    """Such as "stages 1–3, 5"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs]
    return f"stage{'s' if len(numbers) > 1 else ''} {', '.join(texts)}"
