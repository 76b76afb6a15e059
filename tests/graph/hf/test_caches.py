"""Models that return key-value caches: those of the microbatches become one, with all layers."""

from typing import Any

import pytest
import torch

from fxpipe import LocalGroup, ScheduleGPipe, SplitPoint, pipeline

IDS = torch.arange(40).view(5, 8) * 5 % 63 + 1
TINY = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**TINY, **HEADS)), "model.layers.2"


def mistral() -> Any:
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(**TINY, **HEADS, sliding_window=4)
    return MistralForCausalLM(config), "model.layers.2"


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    ends = {"bos_token_id": 1, "eos_token_id": 2}
    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=4, n_head=4, n_positions=16, **ends)
    return GPT2LMHeadModel(config), "transformer.h.2"


def t5() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    return T5ForConditionalGeneration(config), "decoder.block.1"


def held(cache: Any) -> list[Any]:
    """The class of each part, its sizes and its tensors."""
    if hasattr(cache, "self_attention_cache"):
        parts = (cache.self_attention_cache, cache.cross_attention_cache)
        return [type(cache), *(one for part in parts for one in held(part))]
    made = [type(cache), cache.get_seq_length()]
    for layer in cache.layers:
        made += [type(layer), layer.device, layer.dtype, layer.keys, layer.values]
    return made


@pytest.mark.parametrize("make", [llama, mistral, gpt2, t5])
def test_the_cache_is_that_of_the_plain_model_on_the_whole_batch(make: Any) -> None:
    torch.manual_seed(0)
    model, cut = make()
    model.eval()
    inputs = {"input_ids": IDS} | ({"decoder_input_ids": IDS} if make is t5 else {})
    example = {name: value[:2] for name, value in inputs.items()}
    pipe = pipeline(model, (), example, split_spec={cut: SplitPoint.BEGINNING})
    stages = [pipe.build_stage(i, torch.device("cpu"), LocalGroup(2)) for i in range(2)]

    found = ScheduleGPipe(stages, 2).eval(**inputs)  # three rows and two

    wanted = model(**inputs)
    torch.testing.assert_close(found.logits, wanted.logits)
    pairs = zip(held(found.past_key_values), held(wanted.past_key_values), strict=True)
    for one, other in pairs:
        if isinstance(other, torch.Tensor):
            torch.testing.assert_close(one, other)
        else:
            assert one == other
    # The cache goes on where the plain model's does.
    if make is not t5:
        more = {"input_ids": IDS[:, :1]}
        after = model(**more, past_key_values=found.past_key_values).logits
        plain = model(**more, past_key_values=wanted.past_key_values).logits
        torch.testing.assert_close(after, plain)
