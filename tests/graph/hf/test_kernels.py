"""The stages of every decoder call the attention kernels that the plain model calls.

Each decoder of the coverage table is traced with one mask and one number of rows, and then
gets microbatches as a step makes them of 5 rows in 4: two rows, then one. Padding comes and
goes. Outputs and gradients are equal, and so is each call of the kernel: sizes, mask, flags.
"""

import pytest
import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from fxpipe import SplitPoint, pipeline
from tests.graph.hf.cuts import cuts
from tests.graph.hf.inputs import Shape
from tests.graph.hf.kernels import KernelCalls
from tests.graph.hf.known import FULL, IN_FOUR, IN_TWO
from tests.graph.hf.registry import case
from tests.parity import assert_same, run

DECODERS = sorted(
    name
    for name in {*FULL, *IN_FOUR, *IN_TWO}
    if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and case(name).kind == "text"
)
SAMPLE = ["llama", "gpt2", "opt", "qwen3_moe", "gpt_oss", "xglm", "gemma3n_text"]


def built(name, attention):
    found = case(name)
    torch.manual_seed(0)
    kind = getattr(transformers, found.class_name)
    model = kind._from_config(found.config(), attn_implementation=attention)
    return found, model.eval()


def masked(kwargs, padding):
    mask = kwargs.get("attention_mask")
    if mask is None or padding == "padded":
        return kwargs
    if padding == "bare":
        return {name: value for name, value in kwargs.items() if name != "attention_mask"}
    return {**kwargs, "attention_mask": torch.ones_like(mask)}


def check_decoder(name, attention, *, rows, padding):
    found, model = built(name, attention)
    example = masked(found.inputs(model, Shape(batch=rows)), padding)
    names = cuts(model, example, 2)
    spec = dict.fromkeys(names, SplitPoint.BEGINNING)
    # This test is the check: it compares kernel calls for more inputs than pipeline() does.
    pipe = pipeline(model, (), example, split_spec=spec, check=False)
    later = ["bare"] if padding == "bare" else ["full", "padded"]
    for seed, count in enumerate((2, 1, 1, 1)[:2]):
        for other in later:
            kwargs = masked(found.inputs(model, Shape(batch=count, seed=seed + 1)), other)
            with KernelCalls() as plain:
                expected = run(model, (), kwargs)
            with KernelCalls() as ours:
                got = run(pipe, (), kwargs)

            assert_same(expected, got, tolerance=1e-4)
            assert ours.calls == plain.calls, (count, other)


def supports(name, attention):
    kind = getattr(transformers, case(name).class_name)
    return attention == "eager" or bool(getattr(kind, "_supports_sdpa", False))


@pytest.mark.parametrize("padding", ["bare", "padded"])
@pytest.mark.parametrize("name", SAMPLE)
def test_one_row_and_the_same_kernels(name, padding):
    check_decoder(name, "sdpa" if supports(name, "sdpa") else "eager", rows=1, padding=padding)


@pytest.mark.full
@pytest.mark.parametrize("padding", ["bare", "full", "padded"])
@pytest.mark.parametrize(
    ("name", "attention"),
    [(name, kind) for name in DECODERS for kind in ("sdpa", "eager") if supports(name, kind)],
)
def test_every_decoder_calls_the_same_kernels(name, attention, padding):
    check_decoder(name, attention, rows=2, padding=padding)
