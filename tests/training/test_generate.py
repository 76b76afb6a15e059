"""Pipelined generation gives the tokens of the plain model."""

from typing import Any

import pytest
import torch

from fxpipe import InputError, LocalGroup, Pipeline, SplitPoint, causal_lm_loss, generate, pipeline
from models import gpt
from tests.distributed.ranks import run_on_ranks


def llama() -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config).eval()


IDS = torch.arange(28).view(4, 7) * 5 % 63 + 1  # transformers takes 0 for padding here
EXAMPLE = {"input_ids": IDS[:2], "position_ids": torch.arange(7).expand(2, 7)}


def piped(model: Any, group: Any = None, **options: Any) -> Pipeline:
    cuts = {"split_spec": {"model.layers.2": SplitPoint.BEGINNING}, "check": False}
    how = {"loss_fn": causal_lm_loss, "n_microbatches": 2, "split": cuts, **options}
    return Pipeline.build(model, (), EXAMPLE, group=group, **how)


def wanted(model: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, **options}
    found: torch.Tensor = model.generate(ids, max_new_tokens=6, use_cache=True, **options)
    return found


def test_greedy_and_sampled_tokens_are_those_of_transformers() -> None:
    model = llama()
    pipe = piped(model, LocalGroup(2))

    found = generate(pipe, IDS, max_new_tokens=6)
    assert torch.equal(torch.stack(found), wanted(model, IDS))

    torch.manual_seed(3)
    drawn = generate(pipe, IDS, max_new_tokens=6, do_sample=True, temperature=2.0, top_k=20)
    torch.manual_seed(3)
    options = {"do_sample": True, "temperature": 2.0, "top_k": 20, "top_p": 1.0}
    assert torch.equal(torch.stack(drawn), wanted(model, IDS, **options))
    assert not torch.equal(torch.stack(drawn), torch.stack(found))

    # Training goes on as before: nothing of the caches is left.
    loss = pipe.step(**EXAMPLE, target=IDS[:2])
    torch.testing.assert_close(loss, model(IDS[:2], labels=IDS[:2]).loss.detach())


def test_prompts_of_different_lengths_and_ends() -> None:
    model = llama()
    pipe = piped(model, LocalGroup(2))
    prompts = [IDS[0], IDS[1, :3]]

    found = generate(pipe, prompts, max_new_tokens=6)

    for row, prompt in zip(found, prompts, strict=True):
        assert torch.equal(row, wanted(model, prompt[None])[0])
    end = int(found[0][9])
    short = generate(pipe, prompts, max_new_tokens=6, eos_token_id=end)
    assert short[0].tolist() == found[0][: found[0][7:].tolist().index(end) + 8].tolist()
    with pytest.raises(InputError, match="as many as the 2 microbatches, got 3"):
        generate(pipe, [IDS[0]] * 3, max_new_tokens=1)
    with pytest.raises(InputError, match="max_new_tokens must be at least 1"):
        generate(pipe, IDS, max_new_tokens=0)


def test_any_model_generates_without_caches() -> None:
    model = gpt.build()
    pipe = Pipeline.build(model, (IDS,), loss_fn=gpt.loss_fn, n_microbatches=2, group=LocalGroup(2))

    found = torch.stack(generate(pipe, IDS, max_new_tokens=4, input_name="ids"))

    plain = IDS
    for _ in range(4):
        plain = torch.cat([plain, model(plain)[:, -1:].argmax(-1)], 1)
    assert torch.equal(found, plain)


def test_a_cut_inside_attention_is_refused() -> None:
    model = llama()
    cuts = {"split_spec": {"model.layers.2.self_attn.o_proj": SplitPoint.BEGINNING}, "check": False}

    with pytest.raises(InputError, match=r"cut falls into .model.layers.2.self_attn"):
        generate(piped(model, LocalGroup(2), split=cuts), IDS, max_new_tokens=2)


def on_ranks(rank: int) -> list[list[int]]:
    model = llama()
    found = generate(piped(model), IDS, max_new_tokens=6)
    assert torch.equal(torch.stack(found), wanted(model, IDS))
    return [row.tolist() for row in found]


def test_every_rank_has_the_tokens() -> None:
    first, second = run_on_ranks(2, on_ranks)

    assert first == second


def test_the_plain_pipeline_function_is_enough() -> None:
    from fxpipe import Schedule1F1B

    model = llama()
    pipe = pipeline(
        model, (), EXAMPLE, split_spec={"model.layers.1": SplitPoint.BEGINNING}, check=False
    )
    stages = [pipe.build_stage(i, torch.device("cpu"), LocalGroup(2)) for i in range(2)]

    found = generate(Schedule1F1B(stages, 4), IDS, max_new_tokens=6)

    assert torch.equal(torch.stack(found), wanted(model, IDS))
