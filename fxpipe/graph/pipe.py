"""Split a model into pipeline stages: `pipeline()` and the `Pipe` it returns."""

from __future__ import annotations

import dataclasses
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fxpipe.errors import InputError, SplitError, TraceError
from fxpipe.graph.capture.capture import capture, capture_for
from fxpipe.graph.capture.traced_graph import TracedGraph
from fxpipe.graph.check.check import (
    Budget,
    Checkable,
    CheckReport,
    check_runs,
    check_same_decisions,
    read_budget,
)
from fxpipe.graph.check.variants import all_variants, few_variants
from fxpipe.graph.cut.cut import Assignment, by_markers, cut
from fxpipe.graph.cut.stage_module import (
    StageModule,
    build_modules,
    find_tied,
    graph_of_stages,
    load_parts,
    merged_state,
)
from fxpipe.graph.facts import Facts
from fxpipe.graph.flops import forward_flops
from fxpipe.graph.info import PipeInfo
from fxpipe.graph.interface import StageEdge, StageInterface, Tied, check_interfaces, edges_of
from fxpipe.graph.markers import (
    SplitPoint,
    ancestors,
    annotations_of,
    check_split_spec,
    choose_opened,
)
from fxpipe.graph.nested import Args, Kwargs
from fxpipe.graph.pipe_text import readable, table

__all__ = ["Pipe", "PipeInfo", "Stage", "check_pipe", "pipeline"]

Policy = Callable[[TracedGraph], Assignment]


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a Pipe."""

    index: int
    module: StageModule
    interface: StageInterface
    facts: Facts


class Pipe(nn.Module):
    """A model cut into stages; calling it runs them one after the other.

    It is a module that holds the stages' modules; its `state_dict` has the model's own names.
    """

    has_loss_and_backward = False
    loss_spec = None

    def __init__(self, traced: TracedGraph, assignment: Assignment) -> None:
        super().__init__()
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
        for stage in self.stages:
            self.add_module(f"submod_{stage.index}", stage.module)
        check_interfaces(self.interfaces)
        self._info = PipeInfo(
            self.interfaces,
            edges_of(self.interfaces),
            find_tied(modules),
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

    @staticmethod
    def from_tracing(
        mod: nn.Module,
        example_args: tuple[object, ...],
        example_kwargs: dict[str, object] | None = None,
        split_policy: Policy | None = None,
    ) -> Pipe:
        """Split a model at its `pipe_split()` calls, or by a policy; see `pipeline`."""
        return pipeline(mod, example_args, example_kwargs, split_policy=split_policy)

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

    def _checked(self, report: CheckReport) -> None:
        self._info = dataclasses.replace(self._info, check=report)

    def info(self) -> PipeInfo:
        """Return everything about the split except the modules."""
        return self._info

    def get_stage_module(self, stage_idx: int) -> StageModule:
        """Return the module of a stage."""
        if not 0 <= stage_idx < self.num_stages:
            raise SplitError(
                f"there is no stage {stage_idx}; the stages are 0 to {self.num_stages - 1}"
            )
        return self.stages[stage_idx].module

    @property
    def split_gm(self) -> torch.fx.GraphModule:
        """The stages as one graph: model inputs, a call of each stage, the output."""
        modules = {f"submod_{stage.index}": stage.module for stage in self.stages}
        return torch.fx.GraphModule(modules, graph_of_stages(self.interfaces))

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The state of the whole model under the model's own names."""
        return merged_state(self.children(), *args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load the state of the whole model, as `state_dict` gives it."""
        return load_parts(self.children(), state_dict, strict=strict, assign=assign)

    def bind_inputs(
        self, args: Iterable[object], kwargs: Mapping[str, object] | None = None
    ) -> dict[str, int]:
        """Return the value of each size symbol; see `PipeInfo.bind_inputs`."""
        return self._info.bind_inputs(args, kwargs)

    def build_stage(self, stage_index: int, device: torch.device, group: Any = None) -> Any:
        """Return the runtime stage for this rank."""
        from fxpipe.stage import build_stage

        module = self.get_stage_module(stage_index)
        stage = build_stage(module, stage_index, self.info(), device, group)
        # Of modules: parameters with references to them could not be moved by `module.to()`.
        stage.front.model_parts = [
            (weakref.ref(part), name, i)
            for i, other in enumerate(self.stages)
            for name, part in other.module.named_modules()
        ]
        return stage

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

    def draw(self, path: str | PathLike[str], **options: object) -> Path:
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

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run all stages in series; the output is the model's."""
        return self._run([stage.module for stage in self.stages], args, kwargs)

    def _run(self, stages: Sequence[Callable[..., object]], args: Args, kwargs: Kwargs) -> object:
        named = self._info.inputs.name_inputs(args, kwargs)
        self._info.inputs.bind(named)
        values: dict[tuple[int, str], torch.Tensor] = {}
        result: Any = None
        for stage, run in zip(self.stages, stages, strict=True):
            interface = stage.interface
            received = [values[r.source_stage, r.port.name] for r in interface.received]
            result = run(*received, **{name: named[name] for name in interface.model_inputs})
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
    mb_args: tuple[object, ...] = (),
    mb_kwargs: Mapping[str, object] | None = None,
    split_spec: Mapping[str, SplitPoint] | None = None,
    split_policy: Policy | None = None,
    *,
    num_stages: int | None = None,
    dynamic_shapes: object = None,
    granularity: str = "module",
    check: str | bool | Budget = "auto",
    check_with: tuple[object, ...] | None = None,
) -> Pipe:
    """Split a model into stages.

    `mb_args` and `mb_kwargs` are one microbatch of example inputs. The splits come
    from `pipe_split()` in any forward, from `split_spec` (`{"layers.2":
    SplitPoint.BEGINNING}`), from `num_stages` (balanced), or from a policy.

    `dynamic_shapes` says which input sizes may differ in later calls: None (whatever the
    model allows), "batch" (dimension 0 of every tensor), `{"batch": 0, "sequence": 1}`,
    or what `torch.export` takes; `info().input_sizes` tells what came of it.

    `check` compares the stages with the model on real tensors, in both modes and at other
    sizes: "auto" as far as a `Budget` of 2 s and 1 GB goes, True without a limit, False not
    at all; `info().check` tells what was compared. `check_with=(small_model, args)`, or with
    keyword inputs as third, lets a small model of the same code run instead.

    Raises:
        SplitError: the request does not fit the model.
        TraceError: code that had to be opened cannot be captured, or the stages do not do
            what the model does.
    """
    _check_one_way(split_spec, split_policy, num_stages)
    budget = read_budget(check)
    spec = dict(split_spec) if split_spec is not None else annotations_of(module)
    check_split_spec(module, spec)
    _check_initialized(module)
    policy = _policy(split_policy, num_stages)
    needed, chosen = _opened(module, spec, policy, granularity)
    call = (tuple(mb_args), dict(mb_kwargs or {}))

    pipe, traced = capture_for(
        lambda traced: (Pipe(traced, _assign(policy, traced)), traced), module, *call,
        opened=needed | chosen, splits=spec, may_close=chosen - needed,
        dynamic_shapes=dynamic_shapes,
    )  # fmt: skip
    if check_with is not None:
        pipe._checked(_check_by(check_with, pipe, traced, spec, budget))
    elif budget is not None:
        pipe._checked(check_pipe(pipe, module, *call, budget=budget))
    if check is True and not pipe.info().check.is_checked:
        raise TraceError(f"check=True, but {pipe.info().check}")
    return pipe


def check_pipe(
    pipe: Pipe,
    module: nn.Module,
    args: Args,
    kwargs: Kwargs,
    *,
    budget: Budget,
    at_length: bool = False,
    progress: Callable[[str], None] | None = None,
) -> CheckReport:
    """Compare a pipe with the model it was made of; `at_length` in every combination.

    Raises:
        TraceError: they differ.
    """
    info = pipe.info()
    stages = tuple(stage.module for stage in pipe.stages)
    choose = all_variants if at_length else few_variants
    variants = choose((args, kwargs), info.inputs, info.example_sizes, module.training)
    subject = Checkable(module, stages, pipe._run, tuple(s.facts for s in pipe.stages))
    return check_runs(subject, (args, kwargs), variants, budget, progress)


def _check_by(
    given: tuple[Any, ...],
    pipe: Pipe,
    traced: TracedGraph,
    spec: Mapping[str, SplitPoint],
    budget: Budget | None,
) -> CheckReport:
    """Check a small model of the same code in place of the traced one."""
    if len(given) not in (2, 3) or not isinstance(given[0], nn.Module):
        raise InputError("check_with must be (small_model, args) or (small_model, args, kwargs)")
    small, args, kwargs = given[0], tuple(given[1]), dict(given[2] if len(given) == 3 else {})
    names = {name for name, _ in small.named_modules()}
    here = {name: point for name, point in spec.items() if name in names}
    policy = by_markers if spec and here == dict(spec) else _policy(None, pipe.num_stages)
    opened = {name for name in traced.opened if name in names}
    found = capture(small, args, kwargs, opened=opened, splits=here)
    check_same_decisions(traced, found)
    report = check_pipe(Pipe(found, policy(found)), small, args, kwargs, budget=budget or Budget())
    return dataclasses.replace(
        report, equal=tuple(f"{name} (of the small model)" for name in report.equal)
    )


def _check_one_way(spec: object, policy: object, num_stages: int | None) -> None:
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


def _assign(policy: Policy, traced: TracedGraph) -> Assignment:
    ours = "a split_policy is given fxpipe's TracedGraph, not an exported GraphModule as torch's"
    try:
        found = policy(traced)
    except AttributeError as error:
        error.add_note(f"{ours}; split_spec, pipe_split() and num_stages need no policy")
        raise
    if not isinstance(found, Assignment):
        raise SplitError(
            f"split_policy returned a {type(found).__name__}, needed an Assignment of nodes to "
            f"stages: {ours}; or say where to split by split_spec, pipe_split() or num_stages"
        )
    return found


def _check_initialized(module: nn.Module) -> None:
    lazy = [name for name, value in module.named_parameters() if nn.parameter.is_lazy(value)]
    if lazy:
        raise TraceError(
            f"the parameters {', '.join(lazy[:4])} have no size before the model first runs; "
            "run it once with these inputs, then call pipeline()"
        )


def _opened(
    module: nn.Module, spec: Mapping[str, SplitPoint], policy: Policy, granularity: str
) -> tuple[set[str], set[str]]:
    """The modules that cuts fall into, and more that they may fall into."""
    if granularity not in ("module", "op"):
        raise SplitError(f"granularity must be 'module' or 'op', got {granularity!r}")
    if granularity == "op":
        return {""}, {name for name, _ in module.named_modules(remove_duplicate=False)}
    opened = {""} | ancestors(spec)
    opened |= getattr(policy, "opened", frozenset())
    wanted = getattr(policy, "num_stages", None)
    return opened, choose_opened(module, wanted) if isinstance(wanted, int) else set()


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
