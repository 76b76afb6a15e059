"""How even are stages: by cost, by equal layers, by parameter count.

    python -m benchmarks.auto_split [--quick]

For each model and number of stages the slowest stage's cost (compute and the transfers at its
boundaries) over the mean compute of a stage; 1 is perfect. Large models are on the meta
device. All three splits are priced alike, on one H100 per stage.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch import nn

import models
from fxpipe.graph.capture.capture import capture
from fxpipe.graph.capture.traced_graph import TracedGraph
from fxpipe.graph.markers import choose_opened
from fxpipe.planner.cost.graph_costs import GraphCosts
from fxpipe.planner.cost.stage_numbers import numbers_of
from fxpipe.planner.cost.training import Training
from fxpipe.planner.cost.workload import Workload, workload_of
from fxpipe.planner.partition.partition import partition
from fxpipe.planner.partition.work import Work
from fxpipe.planner.search.auto_split import DEFAULT_HARDWARE, auto_split

__all__ = ["LARGE", "balance", "equal_layers", "equal_parameters", "main"]

Example = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


def equal_parameters(costs: GraphCosts, num_stages: int) -> dict[str, int]:
    """The heaviest stage has as few parameters as possible."""
    heavy = [node for node in costs.nodes if node.parameters]
    weights = [sum(costs.parameters[name].numel for name in node.parameters) for node in heavy]
    found = partition(Work.chain(weights), num_stages).stage_of
    stage, stage_of = 0, {}
    begins = {node.name: found[index] for index, node in enumerate(heavy)}
    for node in costs.nodes:
        stage = begins.get(node.name, stage)
        stage_of[node.name] = stage
    return stage_of


def equal_layers(costs: GraphCosts, num_stages: int) -> dict[str, int]:
    """As many blocks in each stage as in any other; what is between goes with the block before."""
    blocks = [node.name for node in costs.nodes if node.is_block and node.parameters]
    if len(blocks) < num_stages:
        blocks = [node.name for node in costs.nodes if node.parameters]
    starts = {
        blocks[math.ceil(stage * len(blocks) / num_stages)]: stage for stage in range(1, num_stages)
    }
    stage, stage_of = 0, {}
    for node in costs.nodes:
        stage = starts.get(node.name, stage)
        stage_of[node.name] = stage
    return stage_of


def balance(traced: TracedGraph, num_stages: int) -> dict[str, float]:
    """The slowest stage over the mean for each way to split."""
    sizes = dict(traced.hints)
    costs = GraphCosts.of(traced, sizes)
    load = workload_of(costs, sizes, DEFAULT_HARDWARE, Training())
    ways: dict[str, Mapping[str, int]] = {
        "cost": auto_split(num_stages)(traced).stage_of,
        "layers": equal_layers(costs, num_stages),
        "parameters": equal_parameters(costs, num_stages),
    }
    return {name: _slowest(load, found, num_stages) for name, found in ways.items()}


def _slowest(load: Workload, stage_of: Mapping[str, int], num_stages: int) -> float:
    nodes: list[list[str]] = [[] for _ in range(num_stages)]
    for node in load.costs.nodes:
        nodes[stage_of[node.name]].append(node.name)
    stages, edges = numbers_of(replace(load, nodes=tuple(map(tuple, nodes))), range(num_stages))
    loads = [stage.time for stage in stages]
    mean = math.fsum(loads) / num_stages
    for (source, target), (there, back) in edges.items():
        time = DEFAULT_HARDWARE.intra.time(there)
        time += DEFAULT_HARDWARE.intra.time(back) if back else 0.0
        loads[source] += time
        loads[target] += time
    return max(loads) / mean if mean else 1.0


def _causal(kind: str, length: int = 2048, **fields: Any) -> Callable[[], Example]:
    def build() -> Example:
        config = transformers.AutoConfig.for_model(kind, **fields)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        ids = torch.zeros(1, length, dtype=torch.long, device="meta")
        return model, (), {"input_ids": ids, "use_cache": False}

    return build


def _bert() -> Example:
    config = transformers.BertConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    )
    with torch.device("meta"):
        model = transformers.BertForMaskedLM(config).eval()
    return model, (), {"input_ids": torch.zeros(4, 512, dtype=torch.long, device="meta")}


def _vit() -> Example:
    config = transformers.ViTConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    )
    with torch.device("meta"):
        model = transformers.ViTForImageClassification(config)
    return model, (torch.zeros(4, 3, 224, 224, device="meta"),), {}


LARGE: Mapping[str, Callable[[], Example]] = {
    "Llama 3 8B": _causal(
        "llama", vocab_size=128256, hidden_size=4096, intermediate_size=14336,
        num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
    ),
    "Llama 3 70B": _causal(
        "llama", vocab_size=128256, hidden_size=8192, intermediate_size=28672,
        num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8,
    ),
    "Qwen3 0.6B": _causal(
        "qwen3", vocab_size=151936, hidden_size=1024, intermediate_size=3072,
        num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8, head_dim=128,
    ),
    "GPT-2 XL": _causal("gpt2", length=1024, n_embd=1600, n_layer=48, n_head=25),
    "BERT large": _bert,
    "ViT large": _vit,
}  # fmt: skip


def _small(name: str) -> Example:
    module = models.load(name)
    args, kwargs = module.example_inputs(8)
    return module.build(), args, kwargs


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small models alone")
    options = parser.parse_args(argv)
    cases: list[tuple[str, Callable[[], Example], tuple[int, ...]]] = [
        (f"models/{name}", lambda name=name: _small(name), (2, 4)) for name in models.NAMES
    ]
    if not options.quick:
        cases += [(name, make, (4, 8)) for name, make in LARGE.items()]
    print("| model | stages | by cost | equal layers | parameters |")
    print("|---|---:|---:|---:|---:|")
    worse = 0
    for name, make, counts in cases:
        model, args, kwargs = make()
        for count in counts:
            traced = capture(model, args, kwargs, opened=choose_opened(model, count))
            try:
                found = balance(traced, count)
            except Exception as error:
                print(f"| {name} | {count} | {type(error).__name__} | | |")
                continue
            worse += found["cost"] > min(found.values()) * 1.0001
            row = " | ".join(f"{found[key]:.3f}" for key in ("cost", "layers", "parameters"))
            print(f"| {name} | {count} | {row} |", flush=True)
    print(f"\nby cost is less even than another way in {worse} cases")
    return 1 if worse else 0


if __name__ == "__main__":
    raise SystemExit(main())
