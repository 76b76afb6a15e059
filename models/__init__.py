"""Small models, one difficulty of pipelining each; examples and fixtures in one.

Every module here has the same five names:

    build(*, seed=0, **sizes) -> nn.Module          same seed, same weights
    example_inputs(batch_size=4, *, seed=0, dtype=torch.float32, **sizes) -> (args, kwargs)
    example_target(batch_size=4, *, seed=0, dtype=torch.float32, **sizes) -> Tensor
    loss_fn(output, target) -> Tensor               scalar, a mean over the rows
    SPLIT = {2: (...), 4: (...)}                    modules to cut in front of

`Sizes` in each module lists the sizes with their defaults, chosen so that a step
takes milliseconds. An empty tuple in `SPLIT` means that the model cuts itself
with `pipe_split()` markers (`mlp`). `split_spec` turns `SPLIT` into the argument
of `fxpipe.pipeline`:

    model = gpt.build()
    args, kwargs = gpt.example_inputs(2)
    pipe = fxpipe.pipeline(model, args, kwargs, split_spec=split_spec(gpt, 2))

`fxpipe` itself never imports this package.
"""

import importlib
from types import ModuleType
from typing import Any

__all__ = ["NAMES", "load", "split_spec"]

NAMES = ("gpt", "llama", "unet", "encoder_decoder", "moe", "resnet", "vit", "mlp")


def load(name: str) -> ModuleType:
    """The module `models.<name>`.

    Raises:
        ValueError: there is no such model.
    """
    if name not in NAMES:
        raise ValueError(f"unknown model {name!r}; there are {', '.join(NAMES)}")
    return importlib.import_module(f"models.{name}")


def split_spec(module: ModuleType, num_stages: int) -> dict[str, Any] | None:
    """The `split_spec` that cuts the module's model; None when its markers do it.

    Raises:
        ValueError: the module has no default split for this number of stages.
    """
    from fxpipe import SplitPoint

    if num_stages not in module.SPLIT:
        raise ValueError(
            f"{module.__name__} has default splits for {sorted(module.SPLIT)} stages, "
            f"not for {num_stages}; pass your own split_spec"
        )
    names = module.SPLIT[num_stages]
    return dict.fromkeys(names, SplitPoint.BEGINNING) or None
