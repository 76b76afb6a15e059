"""Every public name of torch's pipelining takes torch's arguments here, by name and by place."""

import inspect

import pytest
import torch
from torch.distributed import pipelining as peer
from torch.distributed.pipelining import microbatch as peer_microbatch
from torch.distributed.pipelining import schedules as peer_schedules
from torch.distributed.pipelining import stage as peer_stage

import fxpipe
from fxpipe import microbatch, schedules, stage

HOMES = (
    (peer, fxpipe),
    (peer_schedules, schedules),
    (peer_microbatch, microbatch),
    (peer_stage, stage),
)
# What drives torch's own engine and has no meaning without it; see docs/migration.md.
ENGINE = {
    *("backward_maybe_with_nosync", "forward_maybe_with_nosync", "release_fwd_send_outputs"),
    *("start_gradient_reduction", "wait_for_gradient_reduction"),
}
# A pipe is made by pipeline() or from_tracing(): what torch's constructor takes is its own split.
MADE_ELSEWHERE = {("Pipe", "__init__")}
# What torch 2.15 has and an older installed torch does not: (name, method) -> arguments.
LATER = {
    ("Schedule", "step"): ["arg_mbs", "kwarg_mbs", "target_mbs", "finalize_gradients"],
    ("Schedule", "eval"): ["arg_mbs", "kwarg_mbs", "target_mbs"],
    ("ScheduleInterleaved1F1B", "__init__"): [
        *("max_active_stages", "unshard_lookahead"),
        *("defer_reduce_grad_wait", "max_outstanding_sends"),
    ],
    ("PipelineStage", "register_forward_context"): ["context_factory"],
}
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def parameters(function):
    found = inspect.signature(function).parameters.values()
    return [p for p in found if p.kind not in VARIADIC and not p.name.startswith("_")]


def public_callables():
    """Name, torch's function and ours, for each public function and method."""
    for theirs, ours in HOMES:
        for name in theirs.__all__ if hasattr(theirs, "__all__") else ():
            them, us = getattr(theirs, name), getattr(ours, name)
            if not inspect.isclass(them):
                yield name, them, us
                continue
            inherited = {*dir(torch.nn.Module), *dir(object)}
            for method in sorted({*dir(them), "__init__"}):
                is_own = method == "__init__" or method not in inherited
                if not is_own or (method.startswith("_") and method != "__init__"):
                    continue
                if method in ENGINE or (name, method) in MADE_ELSEWHERE:
                    continue
                if inspect.isfunction(getattr(them, method)):
                    yield f"{name}.{method}", getattr(them, method), getattr(us, method, None)


@pytest.mark.parametrize(
    ("name", "theirs", "ours"), [pytest.param(*found, id=found[0]) for found in public_callables()]
)
def test_the_arguments_of_torch_come_first_and_in_its_order(name, theirs, ours):
    assert ours is not None, f"{name} is missing"
    wanted, found = parameters(theirs), parameters(ours)
    by_place = [p.name for p in wanted if p.kind is not inspect.Parameter.KEYWORD_ONLY]

    assert [p.name for p in found][: len(by_place)] == by_place
    assert {p.name for p in wanted} <= {p.name for p in found}
    for theirs_, ours_ in zip(wanted, found, strict=False):
        if theirs_.default is not inspect.Parameter.empty:
            assert ours_.default is not inspect.Parameter.empty, ours_.name


def test_our_own_arguments_are_by_keyword_alone():
    for name, theirs, ours in public_callables():
        names = {p.name for p in parameters(theirs)}
        later = {argument for found in LATER.values() for argument in found}
        for parameter in parameters(ours):
            if parameter.name not in names | later:
                assert parameter.kind is inspect.Parameter.KEYWORD_ONLY, (name, parameter.name)


@pytest.mark.parametrize("place", LATER, ids=".".join)
def test_what_later_versions_of_torch_take_is_taken(place):
    name, method = place
    found = [
        p.name
        for p in parameters(getattr(getattr(schedules, name, None) or stage.PipelineStage, method))
    ]

    assert [argument for argument in found if argument in LATER[place]] == LATER[place]
