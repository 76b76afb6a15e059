"""Hugging Face safetensors: what transformers writes, stages read, and the other way round."""

from pathlib import Path
from typing import Any

import pytest
import torch

from fxpipe import (
    InputError,
    LocalGroup,
    Schedule1F1B,
    SplitPoint,
    load_weights,
    materialize,
    pipeline,
    save_weights,
)


def llama(tied: bool = False, seed: int = 0) -> Any:
    import transformers

    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
        tie_word_embeddings=tied,
    )
    return transformers.LlamaForCausalLM(config)


IDS = torch.arange(12).view(2, 6) % 64
CUTS = {f"model.layers.{i}": SplitPoint.BEGINNING for i in (1, 2, 3)}


def stages_of(model: Any, ids: torch.Tensor) -> list[Any]:
    pipe = pipeline(model, (), {"input_ids": ids}, split_spec=CUTS, check=False)
    return [pipe.build_stage(i, torch.device("cpu"), LocalGroup(4)) for i in range(4)]


@pytest.mark.parametrize("tied", [False, True])
def test_stages_on_the_meta_device_read_what_transformers_wrote(tied: bool, tmp_path: Path) -> None:
    model = llama(tied)
    model.save_pretrained(tmp_path / "in", max_shard_size="40kB")
    with torch.device("meta"):
        empty = llama(tied, seed=1)
    stages = stages_of(empty, IDS.to("meta"))

    with pytest.raises(InputError, match=r"'model.rotary_emb.inv_freq'.*_init_weights"):
        load_weights(tmp_path / "in", stages)
    for stage in stages:  # each as on a rank of its own
        load_weights(tmp_path / "in", stage, init=empty._init_weights)
    schedule = Schedule1F1B(stages, 2)
    output = schedule.eval(input_ids=IDS)

    torch.testing.assert_close(output.logits, model(input_ids=IDS).logits)
    save_weights(tmp_path / "out", schedule)
    assert len(list((tmp_path / "out").glob("model-*-of-00004.safetensors"))) == 4
    model.config.save_pretrained(tmp_path / "out")
    again = type(model).from_pretrained(tmp_path / "out")
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True)
    )


def test_names_that_no_file_holds_change_nothing(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model = torch.nn.Linear(2, 2)
    save_file({"weight": torch.zeros(2, 2)}, tmp_path / "a.safetensors")
    before = model.weight.clone()

    with pytest.raises(InputError, match=r"lack 1 names: \['bias'\]"):
        load_weights(tmp_path, model)

    assert torch.equal(model.weight, before)
    save_file({"bias": torch.zeros(3)}, tmp_path / "b.safetensors")
    with pytest.raises(InputError, match=r"bias has the size \[3\] in its file and \[2\] here"):
        load_weights(tmp_path, model)


def test_what_was_written_last_is_read(tmp_path: Path) -> None:
    # Files of an earlier export with another number of stages, of save_pretrained, and others in
    # the folder were read instead of the model's.
    from safetensors.torch import save_file

    old, new, found = (llama(seed=seed) for seed in (0, 1, 2))
    old.save_pretrained(tmp_path)
    save_weights(tmp_path, stages_of(old, IDS))
    save_file(old.state_dict(), tmp_path / "zz.safetensors")
    save_weights(tmp_path, new)

    load_weights(tmp_path, found)

    again = type(new).from_pretrained(tmp_path)
    for name, value in new.state_dict().items():
        assert torch.equal(value, found.state_dict()[name])
        assert torch.equal(value, again.state_dict()[name])
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(InputError, match=r"model-00001-of-00001.safetensors and in zz.safetensors"):
        load_weights(tmp_path, found)


def test_broken_files_are_named(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(InputError, match=r"lack 2 names: \['bias', 'weight'\]"):
        load_weights(tmp_path / "nothing", model)
    save_weights(tmp_path, model)

    (tmp_path / "model-00001-of-00001.safetensors").rename(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").write_bytes(b"no such thing")
    with pytest.raises(InputError, match=r"model.safetensors cannot be read: .*header"):
        load_weights(tmp_path, model)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"names model-00001-of-00001.safetensors, which is not"):
        load_weights(tmp_path, model)
    with pytest.raises(InputError, match="'weight' is on the meta device and has no values"):
        save_weights(tmp_path, torch.nn.Linear(2, 2, device="meta"))


def test_memory_is_given_to_meta_tensors_only_and_ties_stay() -> None:
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[1].weight = model[0].weight
    model[1].bias = torch.nn.Parameter(torch.ones(2))

    materialize(model)

    assert model[0].weight is model[1].weight and not model[0].weight.is_meta
    assert model[1].bias.tolist() == [1.0, 1.0]


def test_loading_a_stage_takes_the_memory_of_a_stage(tmp_path: Path) -> None:
    # Measured in a process of its own: the peak of resident memory, without what was before.
    import subprocess
    import sys

    from safetensors.torch import save_file

    layers = [torch.nn.Linear(768, 768, bias=False) for _ in range(64)]
    model = torch.nn.Sequential(*layers)
    for half in range(2):
        names = {f"{i}.weight": layers[i].weight.detach() for i in range(32 * half, 32 * half + 32)}
        save_file(names, tmp_path / f"model-0000{half + 1}.safetensors")
    del model
    code = f"""
import torch
from pathlib import Path
from fxpipe import load_weights, pipeline
def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))
with torch.device("meta"):
    model = torch.nn.Sequential(*(torch.nn.Linear(768, 768, bias=False) for _ in range(64)))
pipe = pipeline(model, (torch.zeros(2, 768, device="meta"),), num_stages=2, check=False)
stage = pipe.build_stage(1, torch.device("cpu"))
load_weights
size = sum(p.nbytes for p in stage.submod.parameters())
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
before = status("VmRSS")
load_weights({str(tmp_path)!r}, stage)
print((status("VmHWM") - before) / size)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=250, check=False
    )

    assert done.returncode == 0, done.stderr
    assert 0.9 < float(done.stdout) <= 1.1
