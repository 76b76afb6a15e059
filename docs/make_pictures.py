"""Make the pictures in docs/pictures: python -m docs.make_pictures [name ...]

Pipes of the models in models/, a 70B Llama that exists as a configuration only, and the
timeline of every schedule with 4 ranks and 8 microbatches.
"""

import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path

import torch

from fxpipe.graph.markers import SplitPoint
from fxpipe.graph.pipe import pipeline
from fxpipe.program import simulate
from fxpipe.program.generators import SCHEDULES
from fxpipe.viz import draw_timeline
from fxpipe.viz.timeline import program_title

FOLDER = Path(__file__).parent / "pictures"
TITLES = {"gpt": "GPT", "unet": "U-Net", "encoder_decoder": "Encoder and decoder"}
NUM_RANKS, NUM_MICROBATCHES = 4, 8


def draw_model(name: str) -> Path:
    """A small model in four stages."""
    module = import_module(f"models.{name}")
    args, kwargs = module.example_inputs(2)
    splits = dict.fromkeys(module.SPLIT[4], SplitPoint.BEGINNING)
    pipe = pipeline(module.build(), args, kwargs, split_spec=splits)
    path = FOLDER / f"{name.replace('_', '-')}.svg"
    return pipe.draw(path, title=f"{TITLES[name]}, 4 stages")


def draw_llama() -> Path:
    """Llama 70B in 32 stages, without a byte of weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=8192,
        use_cache=False,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        ids = torch.zeros(2, 4096, dtype=torch.long)
    pipe = pipeline(model, (), {"input_ids": ids}, num_stages=32)
    return pipe.draw(FOLDER / "llama-70b.svg", title="Llama 70B, 32 stages")


def draw_schedule(name: str) -> Path:
    """A schedule's timeline, in the units of the literature."""
    info = SCHEDULES[name]
    per_rank = 1 if info.stages_per_rank == (1, 1) else 2
    program = info(NUM_RANKS, per_rank * NUM_RANKS, NUM_MICROBATCHES)
    path = FOLDER / f"schedule-{name.lower()}.svg"
    return draw_timeline(simulate(program), path, title=program_title(program))


PICTURES: dict[str, Callable[[], Path]] = {
    **{name: partial(draw_model, name) for name in TITLES},
    "llama": draw_llama,
    **{name: partial(draw_schedule, name) for name in SCHEDULES},
}


def main(names: list[str]) -> None:
    unknown = sorted(set(names) - set(PICTURES))
    if unknown:
        sys.exit(f"no picture is named {', '.join(unknown)}; known: {', '.join(PICTURES)}")
    FOLDER.mkdir(exist_ok=True)
    for name in names or PICTURES:
        path = PICTURES[name]()
        print(f"{path.relative_to(FOLDER.parent.parent)}  {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main(sys.argv[1:])
