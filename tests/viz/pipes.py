"""Pipes that several tests draw, each made once."""

from dataclasses import replace
from functools import cache
from importlib import import_module
from typing import Any

from fxpipe.graph.markers import SplitPoint
from fxpipe.graph.pipe import Pipe, pipeline
from fxpipe.viz.pipe_picture.outline import Crossing, Depth, Outline, make_outline

__all__ = ["example_of", "long_outline", "outline_of", "pipe_of", "shared_outline", "sizes_of"]


def example_of(name: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    inputs: tuple[tuple[Any, ...], dict[str, Any]] = import_module(f"models.{name}").example_inputs(
        2
    )
    return inputs


@cache
def pipe_of(name: str, num_stages: int = 4) -> Pipe:
    module = import_module(f"models.{name}")
    if num_stages in module.SPLIT:
        model, splits = module.build(), module.SPLIT[num_stages]
    else:
        model = module.build(layers=num_stages)
        stem = {"gpt": "blocks", "llama": "layers"}[name]
        splits = [f"{stem}.{index}" for index in range(1, num_stages)]
    args, kwargs = example_of(name)
    spec = dict.fromkeys(splits, SplitPoint.BEGINNING)
    return pipeline(model, args, kwargs, split_spec=spec)


def sizes_of(name: str) -> dict[str, int]:
    return pipe_of(name).bind_inputs(*example_of(name))


@cache
def outline_of(name: str, depth: Depth = "blocks", num_stages: int = 4) -> Outline:
    return make_outline(pipe_of(name, num_stages), depth, sizes=sizes_of(name))


def long_outline(depth: Depth, num_stages: int) -> Outline:
    """A GPT of many stages, made from one of four: tracing so many takes long."""
    short = outline_of("gpt", depth)
    first, second, _, last = short.stages
    share = 1 / num_stages
    middle = [replace(second, index=index, share=share) for index in range(1, num_stages - 1)]
    chain = [
        replace(short.crossings[1], source=index, target=index + 1, name=f"blocks_{index}")
        for index in range(num_stages - 1)
    ]
    (tie,) = short.ties
    (stage, part, name), (_, other_part, other_name) = tie.places
    places = ((stage, part, name), (num_stages - 1, other_part, other_name))
    return replace(
        short,
        stages=(first, *middle, replace(last, index=num_stages - 1)),
        crossings=tuple(chain),
        ties=(replace(tie, places=places),),
    )


def shared_outline(num_stages: int = 8) -> Outline:
    """A long one whose first stage sends a mask and a table to all others."""
    values = (
        ("mask", "bool[batch, 1, sequence, sequence]", "128 B"),
        ("table", "float32[sequence, 8]", "256 B"),
    )
    shared = tuple(
        tuple(Crossing(0, target, *value, None, ()) for target in range(1, num_stages))
        for value in values
    )
    return replace(long_outline("stages", num_stages), shared=shared)
