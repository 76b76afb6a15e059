"""Time `fxpipe.pipeline` beside `torch.distributed.pipelining.pipeline`.

    python -m benchmarks.tracing                        48 layers, 4 stages
    python -m benchmarks.tracing --layers 12 24 48      growth with the number of layers

GPT-2 and Llama of transformers, equal blocks of width 64, a batch of 2 x 16 tokens.
The peer traces with fixed shapes, which costs it less; here the batch dimension is
dynamic, as it is by default. Each time is the least of `--repeats` calls, measured
in turns in one process, with a fresh model each time.

Both are timed without the check that `pipeline()` makes by default; its share, the runs of
the plain model and of the stages, is the column "check s". Also printed: how the time
grows with the layers.
"""

import argparse
import contextlib
import gc
import io
import logging
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn
from torch.distributed import pipelining

import fxpipe

STAGES = 4
MODELS = {"gpt2": "transformer.h", "llama": "model.layers"}


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 24, 48])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=list(MODELS))
    parser.add_argument("--without-peer", action="store_true", help="time fxpipe alone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    print(
        f"{'model':8} {'layers':>6} {'fxpipe s':>9} {'torch s':>9} {'ratio':>7} {'check s':>8}"
        "   batch"
    )
    for name in options.models:
        times = {layers: _row(name, layers, options) for layers in options.layers}
        first, last = min(times), max(times)
        if first != last:
            growth = times[last] / times[first]
            print(f"{name}: {last / first:.1f} times the layers take {growth:.2f} times the time")


def _row(name: str, layers: int, options: argparse.Namespace) -> float:
    """Print one line; return the time of fxpipe."""
    ours: list[float] = []
    peers: list[float] = []
    dynamic = ""
    for _ in range(options.repeats):
        seconds, pipe = _time(_with_fxpipe, name, layers)
        ours.append(seconds)
        dynamic = _batch_dimension(pipe)
        if not options.without_peer:
            peers.append(_time(_with_torch, name, layers)[0])
    best = min(ours)
    peer = f"{min(peers):9.3f} {best / min(peers):7.3f}" if peers else f"{'-':>9} {'-':>7}"
    checked = _check_seconds(name, layers)
    print(f"{name:8} {layers:6} {best:9.3f} {peer} {checked:8.3f}   {dynamic}")
    return best


def _time(split: Callable[..., Any], name: str, layers: int) -> tuple[float, Any]:
    model, kwargs = _build(name, layers)
    cuts = [f"{MODELS[name]}.{layers * stage // STAGES}" for stage in range(1, STAGES)]
    gc.collect()
    start = time.perf_counter()
    with contextlib.redirect_stderr(io.StringIO()):
        pipe = split(model, kwargs, cuts)
    return time.perf_counter() - start, pipe


def _with_fxpipe(model: nn.Module, kwargs: dict[str, Any], cuts: list[str]) -> Any:
    spec = dict.fromkeys(cuts, fxpipe.SplitPoint.BEGINNING)
    return fxpipe.pipeline(model, (), kwargs, split_spec=spec, check=False)


def _check_seconds(name: str, layers: int) -> float:
    """The time that comparing the stages with the plain model adds."""
    model, kwargs = _build(name, layers)
    spec = dict.fromkeys([f"{MODELS[name]}.{layers // 2}"], fxpipe.SplitPoint.BEGINNING)
    pipe = fxpipe.pipeline(model, (), kwargs, split_spec=spec)
    return float(pipe.info().check.seconds)


def _with_torch(model: nn.Module, kwargs: dict[str, Any], cuts: list[str]) -> Any:
    spec = dict.fromkeys(cuts, pipelining.SplitPoint.BEGINNING)
    return pipelining.pipeline(model, (), kwargs, split_spec=spec)


def _build(name: str, layers: int) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    model: nn.Module
    if name == "gpt2":
        model = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=128, n_embd=64, n_head=4, n_layer=layers, n_positions=64, use_cache=False
            )
        )
    else:
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=128,
                hidden_size=64,
                intermediate_size=128,
                num_hidden_layers=layers,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=64,
                use_cache=False,
            )
        )
    return model.eval(), {"input_ids": torch.randint(0, 128, (2, 16))}


def _batch_dimension(pipe: Any) -> str:
    """The first size on the first boundary: a symbol when the batch is dynamic."""
    shape = pipe.interfaces[0].sent[0].port.spec.shape
    return f"dynamic ({shape[0]})" if not isinstance(shape[0], int) else "fixed"


if __name__ == "__main__":
    main()
