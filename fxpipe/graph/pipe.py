"""Split a model into pipeline stages: `pipeline()` and the `Pipe` it returns."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fxpipe.errors import FxpipeError, SplitError
from fxpipe.graph.capture.capture import TracedGraph, capture
from fxpipe.graph.capture.opening import ancestors, choose_opened
from fxpipe.graph.cut.cut import Assignment, by_markers, cut
from fxpipe.graph.cut.stage_module import StageModule, build_modules, find_tied
from fxpipe.graph.facts import Facts
from fxpipe.graph.flops import forward_flops
from fxpipe.graph.flow import UnknownSizeError
from fxpipe.graph.info import PipeInfo
from fxpipe.graph.interface import StageEdge, StageInterface, Tied, check_interfaces, edges_of
from fxpipe.graph.markers import SplitPoint, annotations_of, check_split_spec
from fxpipe.graph.pipe_text import readable, table

__all__ = ["Pipe", "PipeInfo", "Stage", "pipeline"]

Policy = Callable[[TracedGraph], Assignment]


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a Pipe."""

    index: int
    module: StageModule
    interface: StageInterface
    facts: Facts


class Pipe:
    """A model cut into stages; calling it runs them one after the other."""

    def __init__(self, traced: TracedGraph, assignment: Assignment) -> None:
        graphs = cut(traced, assignment)
        modules = build_modules(traced, graphs)
        self.stages: tuple[Stage, ...] = tuple(
            Stage(
                index,
                made,
                StageInterface(
                    index, graph.received, graph.model_inputs, graph.sent, _state_of(made)
                ),
                graph.facts,
            )
            for index, (graph, made) in enumerate(zip(graphs, modules, strict=True))
        )
        check_interfaces(self.interfaces)
        self._info = PipeInfo(
            self.interfaces,
            edges_of(self.interfaces),
            find_tied(traced.module, modules),
            traced.inputs,
            traced.symbols,
            traced.autocast,
            tuple(_float_dtypes(made) for made in modules),
            traced.opened,
            dict(assignment.stage_of),
            tuple(graph.repeated for graph in graphs),
            dict(traced.hints),
        )
        self._name = type(traced.module).__name__

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    @property
    def interfaces(self) -> tuple[StageInterface, ...]:
        return tuple(stage.interface for stage in self.stages)

    @property
    def edges(self) -> tuple[StageEdge, ...]:
        return self._info.edges

    @property
    def tied(self) -> tuple[Tied, ...]:
        return self._info.tied

    def info(self) -> PipeInfo:
        """Return everything about the split except the modules."""
        return self._info

    def get_stage_module(self, stage: int) -> StageModule:
        """Return the module of a stage."""
        if not 0 <= stage < self.num_stages:
            raise SplitError(
                f"there is no stage {stage}; the stages are 0 to {self.num_stages - 1}"
            )
        return self.stages[stage].module

    def bind_inputs(
        self, args: Iterable[Any], kwargs: Mapping[str, Any] | None = None
    ) -> dict[str, int]:
        """Return the value of each size symbol; see `PipeInfo.bind_inputs`."""
        return self._info.bind_inputs(args, kwargs)

    def build_stage(self, stage: int, device: torch.device, group: Any = None) -> Any:
        """Return the runtime stage for this rank."""
        from fxpipe.stage import build_stage

        return build_stage(self.get_stage_module(stage), stage, self.info(), device, group)

    def flops(self, sizes: Mapping[str, int] | None = None) -> tuple[int, ...]:
        """Count the FLOPs of one microbatch's forward on each stage.

        `sizes` are values of the size symbols, by default those of the traced call.
        """
        return forward_flops([stage.module for stage in self.stages], self._info, sizes)

    def print_readable(self) -> str:
        """Print the code of every stage with its interface; returns the text."""
        text = readable([(stage.module, stage.interface) for stage in self.stages])
        sys.stdout.write(text)
        return text

    def __str__(self) -> str:
        """A table: what each stage holds, receives and sends."""
        return table(self._name, [stage.module for stage in self.stages], self._info)

    def draw(self, path: str | PathLike[str], **options: Any) -> Path:
        """Write a picture of the stages; see `fxpipe.viz.draw_pipe`."""
        from fxpipe.viz.graph import draw_pipe

        return draw_pipe(self, path, **self._picture(options))

    def _repr_svg_(self) -> str:
        from fxpipe.viz.graph import pipe_svg

        return pipe_svg(self, **self._picture({}))

    def _picture(self, options: dict[str, Any]) -> dict[str, Any]:
        """Options for a picture, with the traced call's sizes and FLOPs unless given."""
        sizes = options.get("sizes") or dict(self._info.example_sizes)
        if "flops" not in options and "times" not in options:
            flops = self.flops(sizes)
            options = {**options, "flops": flops if any(flops) else None}
        return {**options, "sizes": sizes}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run all stages in series; the output is the model's."""
        named = self._info.name_inputs(args, kwargs)
        self._info.inputs.bind(named)
        values: dict[tuple[int, str], torch.Tensor] = {}
        result: Any = None
        for stage in self.stages:
            interface = stage.interface
            received = [values[r.source_stage, r.port.name] for r in interface.received]
            result = stage.module(
                *received, **{name: named[name] for name in interface.model_inputs}
            )
            if len(interface.sent) == 1:
                values[stage.index, interface.sent[0].port.name] = result
            else:
                for sent, tensor in zip(
                    interface.sent, result if interface.sent else (), strict=True
                ):
                    values[stage.index, sent.port.name] = tensor
        return result


def pipeline(
    module: nn.Module,
    mb_args: tuple[Any, ...] = (),
    mb_kwargs: Mapping[str, Any] | None = None,
    split_spec: Mapping[str, SplitPoint] | None = None,
    split_policy: Policy | None = None,
    *,
    num_stages: int | None = None,
    dynamic_shapes: Any = None,
    granularity: str = "module",
) -> Pipe:
    """Split a model into stages.

    `mb_args` and `mb_kwargs` are one microbatch of example inputs. The splits come
    from `pipe_split()` in any forward, from `split_spec` (`{"layers.2":
    SplitPoint.BEGINNING}`), from `num_stages` (balanced), or from a policy.

    `dynamic_shapes` says which input sizes may differ in later calls: None (whatever the
    model allows), "batch" (dimension 0 of every tensor), `{"batch": 0, "sequence": 1}`,
    or what `torch.export` takes; `info().input_sizes` tells what came of it.

    Raises:
        SplitError: the request does not fit the model.
        TraceError: code that had to be opened cannot be captured.
    """
    _check_one_way(split_spec, split_policy, num_stages)
    spec = dict(split_spec) if split_spec is not None else annotations_of(module)
    check_split_spec(module, spec)
    policy = _policy(split_policy, num_stages)
    opened = _opened(module, spec, policy, granularity)

    def split(follows_example: bool) -> Pipe:
        traced = capture(
            module, mb_args, mb_kwargs, opened=opened, splits=spec, dynamic_shapes=dynamic_shapes,
            follows_example=follows_example,
        )  # fmt: skip
        return Pipe(traced, policy(traced))

    try:
        return split(follows_example=False)
    except UnknownSizeError as error:
        unknown = error
    try:
        return split(follows_example=True)
    except FxpipeError:
        raise unknown from None


def _check_one_way(spec: Any, policy: Any, num_stages: int | None) -> None:
    given = {"split_spec": spec, "split_policy": policy, "num_stages": num_stages}
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise SplitError(
            f"{' and '.join(names)} are both given, but each alone says where to split; give one"
            + ("\na policy is told its number of stages itself: auto_split(4)" if policy else "")
        )
    if num_stages is not None and (not isinstance(num_stages, int) or num_stages < 1):
        raise SplitError(f"num_stages must be a whole number from 1 on, got {num_stages!r}")


def _policy(policy: Policy | None, num_stages: int | None) -> Policy:
    if policy is not None:
        return policy
    if num_stages is not None:
        from fxpipe.planner.search.auto_split import auto_split

        return auto_split(num_stages)
    return by_markers


def _opened(
    module: nn.Module, spec: Mapping[str, SplitPoint], policy: Policy, granularity: str
) -> set[str]:
    """The modules that cuts may fall into."""
    if granularity not in ("module", "op"):
        raise SplitError(f"granularity must be 'module' or 'op', got {granularity!r}")
    if granularity == "op":
        return {name for name, _ in module.named_modules(remove_duplicate=False)}
    opened = {""} | ancestors(spec)
    opened |= getattr(policy, "opened", frozenset())
    wanted = getattr(policy, "num_stages", None)
    return opened | choose_opened(module, wanted) if isinstance(wanted, int) else opened


def _state_of(module: nn.Module) -> tuple[str, ...]:
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    names += [name for name, _ in module.named_buffers(remove_duplicate=False)]
    return tuple(names)


def _float_dtypes(module: nn.Module) -> frozenset[torch.dtype]:
    return frozenset(
        tensor.dtype
        for tensor in (*module.parameters(), *module.buffers())
        if tensor.is_floating_point()
    )
