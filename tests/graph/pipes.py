"""Pipes of the models in `models/`, for tests that look at a pipe."""

import models
from fxpipe.graph.pipe import Pipe, pipeline
from tests.parity import build_split

__all__ = ["pipe_of"]


def pipe_of(name: str, num_stages: int) -> Pipe:
    model, spec = build_split(name, num_stages)
    args, kwargs = models.load(name).example_inputs(2)
    return pipeline(model, args, kwargs, split_spec=spec)
