"""What differs between traced and hand-written stages, behind one interface.

A traced stage takes received tensors and model inputs by name, and its boundary follows from the
sizes of the model's inputs. A hand-written one takes whatever the stage before it returned, and its
boundary is found by running it on made-up tensors. Everything else about stages is the same: the
runtime asks the stage's `front` and never which kind it is.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from fxpipe.errors import InputError
from fxpipe.runtime.stage.boundary import Boundary, PortShape, Skeleton, bind_traced
from fxpipe.torch_inside import WRAPPED, pytree

if TYPE_CHECKING:
    from fxpipe.graph.pipe import PipeInfo

__all__ = ["Front", "PipelineStageInfo", "Stage", "TracedFront", "as_arguments", "forward_context"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineStageInfo:
    """Which forward runs: of which stage and microbatch, or a trial that finds shapes."""

    stage_index: int
    microbatch_index: int
    is_metadata_inference: bool = False


class Stage(Protocol):
    """What the runtime needs to know of a stage; `fxpipe.stage.PipelineStage` is one."""

    submod: nn.Module
    stage_index: int
    num_stages: int
    device: torch.device
    dw_builder: Callable[[], Callable[..., None]] | None
    get_mesh: Callable[..., Any] | None
    output_grads: tuple[Any, ...] | None
    front: Front

    @property
    def forward_contexts(self) -> Mapping[int, Callable[[PipelineStageInfo], Any]]: ...

    @property
    def is_first(self) -> bool: ...

    @property
    def is_last(self) -> bool: ...


def forward_context(
    stage: Stage, microbatch: int, *, is_trial: bool = False
) -> AbstractContextManager[None]:
    """The context that a user wants around a forward of this stage."""
    if not stage.forward_contexts:
        return nullcontext()
    info = PipelineStageInfo(
        stage_index=stage.stage_index, microbatch_index=microbatch, is_metadata_inference=is_trial
    )
    return _users_context(stage, info)


@contextmanager
def _users_context(stage: Stage, info: PipelineStageInfo) -> Iterator[None]:
    make = next(iter(stage.forward_contexts.values()))
    is_done = False
    with make(info):
        yield
        is_done = True
    if not is_done:
        raise InputError(
            f"the forward context of stage {stage.stage_index} suppressed an exception of the "
            "module, so there is no output; let the exception through"
        )


class Front:
    """How to call a stage's module, and where its interface comes from.

    This one is for a module that a user wrote as a stage; such stages form a chain.
    """

    kind = "hand-written"
    model_parts: Sequence[tuple[weakref.ref[nn.Module], str, int]] = ()
    """The modules of the whole model with their names and stages, where they are known."""

    def __init__(
        self,
        input_args: tuple[Any, ...] | None = None,
        output_args: tuple[Any, ...] | None = None,
    ) -> None:
        self.input_args = input_args
        self.output_args = output_args

    def facts(self) -> dict[str, str]:
        """What must be the same on all ranks."""
        return {}

    def edges(self, num_stages: int) -> list[tuple[int, int]]:
        """The pairs of stages that exchange tensors."""
        return list(zip(range(num_stages - 1), range(1, num_stages), strict=True))

    @property
    def tied(self) -> Sequence[Any]:
        """Parameters that several stages share."""
        return ()

    def name_inputs(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What a rank was passed, as the stages take it: by position, and by name."""
        return args, dict(kwargs)

    def takes(self, stage: Stage) -> frozenset[str] | None:
        """Names of keyword inputs that the stage is handed; None: any."""
        return _keyword_names(stage.submod)

    def known(self, stage: Stage, given: Sequence[str]) -> frozenset[str] | None:
        """Names of keyword inputs that a user may pass because of this stage; None: any.

        `given` are the names that `name_inputs` found in what this rank was passed.
        """
        return self.takes(stage)

    def needs(self, stage: int) -> Sequence[str]:
        """Names of inputs that a stage cannot do without, and that another rank may hold."""
        return ()

    def sizes(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What tells microbatches of different shape apart; None: not all inputs are here."""
        leaves = pytree.tree_leaves((args, kwargs))
        return tuple((tuple(x.shape), x.dtype) for x in leaves if isinstance(x, torch.Tensor))

    def agree_sizes(self, found: Sequence[Sequence[Any]]) -> Sequence[Any]:
        """The sizes of every microbatch, out of what each rank knows of them.

        Raises:
            InputError: the ranks contradict each other, or no rank knows enough.
        """
        return list(zip(*found, strict=True))

    def boundaries(
        self, sizes: Sequence[Any], wants_gradient: Sequence[bool]
    ) -> tuple[Boundary, ...] | None:
        """What crosses every boundary, for each distinct shape; None: only a run can tell."""
        return None

    def was_traced_with(self, dtypes: Sequence[frozenset[torch.dtype]], autocast: bool) -> bool:
        """Whether the dtypes in `boundaries` are those of today."""
        return False

    def received(
        self, stage: int, sources: Sequence[int], into: Sequence[Sequence[PortShape]]
    ) -> list[tuple[int, int]]:
        """For each tensor that the module takes: the edge it arrives by, and its place there."""
        return [(edge, i) for edge, ports in enumerate(into) for i in range(len(ports))]

    def sent(self, stage: int, out_of: Sequence[Sequence[PortShape]]) -> tuple[PortShape, ...]:
        """The tensors that the module returns, in its order."""
        return tuple(port for ports in out_of for port in ports)

    def tensors(self, output: Any, skeleton: Skeleton | None, stage: int) -> list[torch.Tensor]:
        """The tensors to send, out of what the module returned."""
        assert skeleton is not None
        return skeleton.tensors(output, stage)

    def call(
        self,
        module: nn.Module,
        received: Sequence[torch.Tensor],
        skeleton: Skeleton | None,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Run the module."""
        if skeleton is not None:
            args = as_arguments(skeleton.build(received))
        return module(*args, **kwargs)


def as_arguments(value: Any) -> tuple[Any, ...]:
    """What a hand-written stage returned, as the next one takes it.

    A plain tuple is an argument list; any other value, a named tuple included, is one argument.
    """
    return value if type(value) is tuple else (value,)


class TracedFront(Front):
    """A stage that was cut out of a captured model."""

    kind = "traced"

    def __init__(self, info: PipeInfo) -> None:
        super().__init__()
        self.info = info

    def facts(self) -> dict[str, str]:
        return {"split of the traced model": self.info.hash[:12]}

    def edges(self, num_stages: int) -> list[tuple[int, int]]:
        return [(edge.source, edge.target) for edge in self.info.edges]

    @property
    def tied(self) -> Sequence[Any]:
        return self.info.tied

    def name_inputs(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (), self.info.inputs.name_inputs(args, kwargs, partial=True)

    def takes(self, stage: Stage) -> frozenset[str] | None:
        return frozenset(self.info.interfaces[stage.stage_index].model_inputs)

    def known(self, stage: Stage, given: Sequence[str]) -> frozenset[str] | None:
        return frozenset((*self.info.input_names, *given))

    def needs(self, stage: int) -> Sequence[str]:
        return self.info.interfaces[stage].model_inputs

    def sizes(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        needed = {name for interface in self.info.interfaces for name in interface.model_inputs}
        if not needed <= set(kwargs):
            return None
        return tuple(sorted(self.info.bind_inputs((), kwargs).items()))

    def agree_sizes(self, found: Sequence[Sequence[Any]]) -> Sequence[Any]:
        known = [(rank, sizes) for rank, sizes in enumerate(found) if None not in sizes]
        if not known:
            raise InputError(
                "no rank was given the model's inputs; pass them on the rank of the first stage, "
                "or make the same call on every rank"
            )
        first, values = known[0]
        for rank, sizes in known[1:]:
            if list(sizes) != list(values):
                shown = [[dict(one) for one in some] for some in (values, sizes)]
                raise InputError(
                    f"rank {first} passes inputs of sizes {shown[0]}, rank {rank} of {shown[1]}"
                )
        return values

    def boundaries(
        self, sizes: Sequence[Any], wants_gradient: Sequence[bool]
    ) -> tuple[Boundary, ...] | None:
        interfaces = self.info.interfaces
        return tuple(bind_traced(interfaces, dict(values), wants_gradient) for values in sizes)

    def was_traced_with(self, dtypes: Sequence[frozenset[torch.dtype]], autocast: bool) -> bool:
        return autocast == self.info.trace_autocast and list(dtypes) == list(self.info.state_dtypes)

    def received(
        self, stage: int, sources: Sequence[int], into: Sequence[Sequence[PortShape]]
    ) -> list[tuple[int, int]]:
        names = [[port.name for port in ports] for ports in into]
        return [
            (edge, names[edge].index(one.port.name))
            for one in self.info.interfaces[stage].received
            for edge in (sources.index(one.source_stage),)
        ]

    def sent(self, stage: int, out_of: Sequence[Sequence[PortShape]]) -> tuple[PortShape, ...]:
        by_name = {port.name: port for ports in out_of for port in ports}
        return tuple(by_name[one.port.name] for one in self.info.interfaces[stage].sent)

    def tensors(self, output: Any, skeleton: Skeleton | None, stage: int) -> list[torch.Tensor]:
        return list(output) if isinstance(output, tuple | list) else [output]

    def call(
        self,
        module: nn.Module,
        received: Sequence[torch.Tensor],
        skeleton: Skeleton | None,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        return module(*received, **kwargs)


def _keyword_names(module: nn.Module) -> frozenset[str] | None:
    forward = module.forward
    for inner in ("module", WRAPPED[0]):  # DistributedDataParallel, torch.compile
        wrapped = getattr(module, inner, None)
        if isinstance(wrapped, nn.Module) and _takes_anything(forward):
            forward = wrapped.forward
    if _takes_anything(forward):
        return None
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(forward).parameters.values()
    return frozenset(p.name for p in parameters if p.kind in kinds)


def _takes_anything(forward: Callable[..., Any]) -> bool:
    parameters = inspect.signature(forward).parameters.values()
    return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
