"""Pipelined generation gives the tokens of the plain model."""

from typing import Any

import pytest
import torch

from fxpipe import InputError, LocalGroup, Pipeline, SplitPoint, causal_lm_loss, generate, pipeline
from fxpipe.runtime.control.group_control import GroupControl
from models import gpt
from tests.distributed.ranks import run_on_ranks


def llama(use_cache: bool = False) -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=use_cache,
    )
    return transformers.LlamaForCausalLM(config).eval()


IDS = torch.arange(28).view(4, 7) * 5 % 63 + 1  # transformers takes 0 for padding here
EXAMPLE = {"input_ids": IDS[:2], "position_ids": torch.arange(7).expand(2, 7)}


def piped(model: Any, group: Any = None, **options: Any) -> Pipeline:
    cuts = {"split_spec": {"model.layers.2": SplitPoint.BEGINNING}, "check": False}
    how = {"loss_fn": causal_lm_loss, "n_microbatches": 2, "split": cuts, **options}
    return Pipeline.build(model, (), EXAMPLE, group=group, **how)


def wanted(model: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    plain: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    plain |= {"max_new_tokens": 6, "use_cache": True, "top_p": 1.0, **options}
    found: torch.Tensor = model.generate(ids, **plain)
    return found


def test_greedy_and_sampled_tokens_are_those_of_transformers() -> None:
    model = llama()
    pipe = piped(model, LocalGroup(2))

    found = generate(pipe, IDS, max_new_tokens=6)
    assert torch.equal(torch.stack(found), wanted(model, IDS))

    torch.manual_seed(3)
    drawn = generate(pipe, IDS, max_new_tokens=6, do_sample=True, temperature=2.0, top_k=20)
    torch.manual_seed(3)
    options: dict[str, Any] = {"do_sample": True, "temperature": 2.0, "top_k": 20}
    assert torch.equal(torch.stack(drawn), wanted(model, IDS, **options))
    options |= {"top_p": 0.5}
    torch.manual_seed(3)
    fewer = torch.stack(generate(pipe, IDS, max_new_tokens=6, **options))
    torch.manual_seed(3)
    assert torch.equal(fewer, wanted(model, IDS, **options))
    assert not torch.equal(fewer, torch.stack(drawn))
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
    several = generate(pipe, prompts, max_new_tokens=6, eos_token_id=[int(found[0][8]), end])
    assert len(several[0]) <= 9
    with pytest.raises(InputError, match="as many as the 2 microbatches, got 3"):
        generate(pipe, [IDS[0]] * 3, max_new_tokens=1)


WRONG: dict[str, dict[str, Any]] = {
    "max_new_tokens must be a whole number of at least 1, got 0": {"max_new_tokens": 0},
    "max_new_tokens must be a whole number of at least 1, got None": {"max_new_tokens": None},
    # They were once put together to one row.
    r"each prompt of a list must be one row of tokens, got \[2, 7\]": {"input_ids": [IDS[:2]] * 2},
    r"prompts must be rows of at least one token, .* got \[4, 0\]": {"input_ids": IDS[:, :0]},
    r"got \[0\]": {"input_ids": [[3, 4], []]},
    "'top_k': 3} has no effect without do_sample=True": {"top_k": 3},
    "top_k must be a whole number of at least 1, .* got 0": {"do_sample": True, "top_k": 0},
    "top_p must be above 0 and at most 1, got 1.5": {"do_sample": True, "top_p": 1.5},
    "temperature must be above 0, got 0": {"do_sample": True, "temperature": 0},
    "eos_token_id must be whole numbers, got": {"eos_token_id": "a"},
}


def test_wrong_arguments_are_named() -> None:
    model = llama()
    pipe = piped(model, LocalGroup(2))

    for message, given in WRONG.items():
        with pytest.raises(InputError, match=message):
            generate(pipe, **{"input_ids": IDS, "max_new_tokens": 2, **given})
    with pytest.raises(InputError, match="needs a Pipeline or a schedule, got LlamaForCausalLM"):
        generate(model, IDS, max_new_tokens=2)


def test_any_model_generates_without_caches() -> None:
    model = gpt.build()
    pipe = Pipeline.build(model, (IDS,), loss_fn=gpt.loss_fn, n_microbatches=2, group=LocalGroup(2))

    found = torch.stack(generate(pipe, IDS, max_new_tokens=4, input_name="ids"))

    plain = IDS
    for _ in range(4):
        plain = torch.cat([plain, model(plain)[:, -1:].argmax(-1)], 1)
    assert torch.equal(found, plain)


def test_a_cut_inside_attention_takes_whole_sequences(caplog: pytest.LogCaptureFixture) -> None:
    model = llama()
    cuts = {"split_spec": {"model.layers.2.self_attn.o_proj": SplitPoint.BEGINNING}, "check": False}

    found = generate(piped(model, LocalGroup(2), split=cuts), IDS, max_new_tokens=6)

    assert torch.equal(torch.stack(found), wanted(model, IDS))
    assert "a cut falls into model.layers.2.self_attn" in caplog.text


def on_ranks(rank: int) -> tuple[list[list[int]], list[int]]:
    """The tokens, and how often the ranks met for 6 and for 12 of them."""
    met = []
    exchange = GroupControl.exchange

    def counted(*args: Any, **kwargs: Any) -> Any:
        met[-1] += 1
        return exchange(*args, **kwargs)

    GroupControl.exchange = counted  # type: ignore[method-assign]
    model = llama()
    at = {f"model.layers.{i}": SplitPoint.BEGINNING for i in (1, 2, 3)}
    pipe = piped(model, n_microbatches=4, split={"split_spec": at, "check": False})
    options = {"do_sample": True, "temperature": 2.0, "top_k": 20}
    for count in (6, 12):
        for how in ({}, options):
            met.append(0)
            torch.manual_seed(3)
            found = torch.stack(generate(pipe, IDS, max_new_tokens=count, **how))
            torch.manual_seed(3)
            assert torch.equal(found, wanted(model, IDS, max_new_tokens=count, **how))
    GroupControl.exchange = exchange  # type: ignore[method-assign]
    # Each rank once put the tokens of rank 0's prompts behind its own.
    with pytest.raises(InputError, match=r"what generate.. is asked for must be the same on all"):
        generate(pipe, (IDS + rank) % 64, max_new_tokens=2)
    with pytest.raises(InputError, match=r"whole number of at least 1, got 0"):
        generate(pipe, IDS, max_new_tokens=2 * (rank > 0))  # the others waited for the deadline
    return found.tolist(), met


def test_every_rank_has_the_tokens_and_none_waits_between_them() -> None:
    answers = run_on_ranks(4, on_ranks)

    assert all(answer == answers[0] for answer in answers)
    _, (_, six_more, _, twelve) = answers[0]
    assert six_more == twelve


@pytest.mark.parametrize("schedule", ["Interleaved1F1B", "ZBVZeroBubble"])
def test_several_calls_and_several_stages_per_rank(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fxpipe.training.generate.ROUNDS", 3)
    model = llama()
    at = {f"model.layers.{i}": SplitPoint.BEGINNING for i in (1, 2, 3)}
    pipe = piped(model, LocalGroup(2), schedule=schedule, split={"split_spec": at, "check": False})

    found = generate(pipe, IDS, max_new_tokens=9)

    assert torch.equal(torch.stack(found), wanted(model, IDS, max_new_tokens=9))


def test_a_model_that_is_cast_after_its_trace() -> None:
    # Shapes are then found by runs on made-up tensors, which used to go into the caches.
    model = llama()
    pipe = piped(model, LocalGroup(2))
    model.bfloat16()

    found = generate(pipe, IDS, max_new_tokens=6)

    assert torch.equal(torch.stack(found), wanted(model, IDS))
    with torch.autocast("cpu", torch.bfloat16):
        model = llama()
        found = generate(piped(model, LocalGroup(2)), IDS, max_new_tokens=6)
        assert torch.equal(torch.stack(found), wanted(model, IDS))


def test_a_model_that_makes_caches_of_its_own_takes_whole_sequences(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = llama(use_cache=True)

    found = generate(piped(model, LocalGroup(2)), IDS, max_new_tokens=6)

    assert torch.equal(torch.stack(found), wanted(model, IDS))
    assert "the model was traced for more than one token" in caplog.text


def test_a_schedule_with_hooks_sees_every_forward() -> None:
    model = llama()
    pipe = piped(model, LocalGroup(2))
    seen: list[Any] = []
    pipe.schedule.before("F", seen.append)

    found = generate(pipe, IDS, max_new_tokens=6)

    assert torch.equal(torch.stack(found), wanted(model, IDS))
    assert len(seen) == 6 * 2 * 2  # tokens, stages, microbatches


def test_a_stage_that_fails_in_a_round_leaves_nothing_behind() -> None:
    model = llama()
    pipe = piped(model, LocalGroup(2))
    count = iter(range(1000))

    def fail(*args: Any) -> None:
        if next(count) == 5:
            raise ValueError("in the third round")

    handle = model.model.layers[3].register_forward_pre_hook(fail)
    with pytest.raises(ValueError, match="in the third round"):
        generate(pipe, IDS, max_new_tokens=6)
    handle.remove()

    found = generate(pipe, IDS, max_new_tokens=6)
    assert torch.equal(torch.stack(found), wanted(model, IDS))


def test_the_plain_pipeline_function_is_enough() -> None:
    from fxpipe import Schedule1F1B

    model = llama()
    pipe = pipeline(
        model, (), EXAMPLE, split_spec={"model.layers.1": SplitPoint.BEGINNING}, check=False
    )
    stages = [pipe.build_stage(i, torch.device("cpu"), LocalGroup(2)) for i in range(2)]

    found = generate(Schedule1F1B(stages, 4), IDS, max_new_tokens=6)

    assert torch.equal(torch.stack(found), wanted(model, IDS))


def with_replicas(rank: int, kind: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))

    def wrap(module: Any) -> Any:
        if kind == "ddp":
            return DistributedDataParallel(module, process_group=mesh.get_group("dp"))
        return fully_shard(module, mesh=mesh["dp"])

    plain = llama()
    pipe = piped(llama(), mesh.get_group("pp"), wrap=wrap)
    assert torch.equal(torch.stack(generate(pipe, IDS, max_new_tokens=6)), wanted(plain, IDS))
    batch = {"input_ids": IDS, "position_ids": torch.arange(7).expand(4, 7)}
    for output in pipe.schedule.eval_stream([batch] * 3):
        if output is not None:
            torch.testing.assert_close(output.logits, plain(IDS).logits)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_stages_with_replicas_generate_and_stream(kind: str) -> None:
    run_on_ranks(4, with_replicas, kind)
