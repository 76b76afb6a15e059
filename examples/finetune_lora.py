"""Fine-tune a Llama with LoRA (peft): frozen weights, small adapters, any schedule.

    torchrun --nproc-per-node 2 examples/finetune_lora.py --schedule ZBVZeroBubble

Only adapters have gradients and optimizer state, so a checkpoint without the frozen weights is
small: `peft` writes them, from the plain model that any process can load.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from fxpipe import Pipeline, ProgressBar, causal_lm_loss, load_checkpoint, save_checkpoint

TEXT = torch.tensor(list(Path(__file__).read_bytes()))


def build() -> torch.nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        use_cache=False,
    )
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return get_peft_model(LlamaForCausalLM(config), lora)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--steps", type=int, default=20)
    options.add_argument("--schedule", default="1F1B")
    options.add_argument("--folder", type=Path, default=Path("run-lora"))
    given = options.parse_args()

    dist.init_process_group("gloo")
    ids = torch.stack([TEXT[16 * i : 16 * i + 16] for i in range(8)])
    pipe = Pipeline.build(
        build(),
        (),
        {"input_ids": ids[:2]},
        loss_fn=causal_lm_loss,
        n_microbatches=4,
        schedule=given.schedule,
        callbacks=[ProgressBar(given.steps)],
    )
    adapters = [p for p in pipe.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=1e-2)
    losses = []
    for _ in range(given.steps):
        losses.append(float(pipe.step(input_ids=ids, target=ids)))
        optimizer.step()
        optimizer.zero_grad()
    save_checkpoint(given.folder, pipe, optimizer, step=pipe.num_steps)
    if dist.get_rank() == 0:
        model = build()
        load_checkpoint(given.folder, model)
        model.save_pretrained(given.folder / "adapter")
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
