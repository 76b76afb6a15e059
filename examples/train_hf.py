"""Train a Llama from its configuration: bf16, accumulation, clipping, evaluation, export.

    torchrun --nproc-per-node 2 examples/train_hf.py --steps 20
    torchrun --nproc-per-node 4 examples/train_hf.py --steps 40      # goes on with four stages

With a real model: build it on the meta device and read its weights stage by stage,
`load_weights(folder, pipe, init=model._init_weights)`.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from fxpipe import (
    Pipeline,
    ProgressBar,
    causal_lm_loss,
    generate,
    load_checkpoint,
    save_checkpoint,
    save_weights,
)

TEXT = torch.tensor(list(Path(__file__).read_bytes()))
LENGTH = 16


def batch(number: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The inputs and the labels of a batch of eight sequences."""
    draws = torch.Generator().manual_seed(number)
    starts = torch.randint(len(TEXT) - LENGTH, (8,), generator=draws).tolist()
    ids = torch.stack([TEXT[i : i + LENGTH] for i in starts])
    return {"input_ids": ids, "position_ids": torch.arange(LENGTH).expand(ids.shape)}, ids


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--steps", type=int, default=20)
    options.add_argument("--folder", type=Path, default=Path("run-hf"))
    given = options.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    inputs, labels = batch(0)
    pipe = Pipeline.build(
        model,
        (),
        {name: value[:2] for name, value in inputs.items()},
        loss_fn=causal_lm_loss,
        n_microbatches=4,
        callbacks=[ProgressBar(given.steps)],
    )
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3)
    lr = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, given.steps)
    if given.folder.is_dir():
        pipe.num_steps = load_checkpoint(given.folder, pipe, optimizer, extra={"lr": lr}).step

    while pipe.num_steps < given.steps:
        first = 2 * pipe.num_steps
        with torch.autocast("cpu", torch.bfloat16):
            pipe.accumulate([batch(first), batch(first + 1)])
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        lr.step()

    inputs, labels = batch(-1)
    print(
        f"rank {dist.get_rank()}: loss on other text {pipe.evaluate(**inputs, target=labels):.3f}"
    )
    save_checkpoint(given.folder, pipe, optimizer, step=pipe.num_steps, extra={"lr": lr})
    save_weights(given.folder / "exported", pipe)
    tokens = generate(pipe, inputs["input_ids"][:4], max_new_tokens=8)
    if dist.get_rank() == 0:
        config.save_pretrained(given.folder / "exported")
        again = LlamaForCausalLM.from_pretrained(given.folder / "exported").eval()
        plain = again.generate(
            inputs["input_ids"][:4],
            max_new_tokens=8,
            eos_token_id=None,
            do_sample=False,
            use_cache=True,
            pad_token_id=0,
        )
        print("the exported model generates the same:", torch.equal(torch.stack(tokens), plain))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
