"""Costs against torch's flop counter and against what autograd really saves."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fxpipe.graph.capture.capture import capture
from fxpipe.graph.cut.cut import Assignment
from fxpipe.graph.cut.flow import work_nodes
from fxpipe.graph.markers import choose_opened
from fxpipe.graph.pipe import Pipe, pipeline
from fxpipe.planner.cost.graph_costs import GraphCosts
from fxpipe.planner.cost.observation import PHASES
from fxpipe.planner.cost.training import Training
from fxpipe.planner.cost.workload import workload_of
from fxpipe.planner.search.auto_split import DEFAULT_HARDWARE
from tests.parity import weighted_sum
from tests.planner.zoo import NAMES, example

_aten = torch.ops.aten


def traced(name, batch=4, num_stages=4):
    found = example(name, batch)
    opened = choose_opened(found.model, num_stages)
    return found, capture(found.model, found.args, found.kwargs, opened=opened)


def forward_of_attention(query, key, value, dropout=0.0, causal=False, **kwargs):
    batch, heads, length, width = query
    return 4 * batch * heads * length * key[-2] * width // (2 if causal else 1)


def backward_of_attention(grad, query, key, value, out, lse, dropout, causal, **kwargs):
    batch, heads, length, width = query
    return 10 * batch * heads * length * key[-2] * width // (2 if causal else 1)


# torch's counter does not know the CPU's fused attention; the formulas are those it has for
# the GPU's, but for causal attention, of which kernels leave out half; the rest is its own.
ATTENTION = {
    _aten._scaled_dot_product_flash_attention_for_cpu: forward_of_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: backward_of_attention,
}


def flops_counted_by_torch(found, batch=4):
    with FlopCounterMode(display=False, custom_mapping=ATTENTION) as counter:
        output = found.model(*found.args, **found.kwargs)
        forward = counter.get_total_flops()
        weighted_sum(output).backward()
    return forward, counter.get_total_flops()


def bytes_saved_by_autograd(found, graph):
    """Distinct storages that autograd packs, without parameters, buffers and model inputs.

    The captured model runs, as one stage: some models do a little more when captured (an
    explicit mask instead of a flag).
    """
    pipe = Pipe(graph, Assignment({node.name: 0 for node in work_nodes(graph)}))
    state = [*found.model.parameters(), *found.model.buffers()]
    given = [t for t in (*found.args, *found.kwargs.values()) if isinstance(t, torch.Tensor)]
    skip = {tensor.untyped_storage()._cdata for tensor in (*state, *given)}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in skip:
            saved[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = pipe(*found.args, **found.kwargs)
    del output
    return sum(storage.nbytes() for storage in saved.values())


def bytes_kept(costs, sizes, training=None):
    load = workload_of(costs, sizes, DEFAULT_HARDWARE, training)
    kept = {value for node in load.loads.values() for value in node.keeps}
    inside = sum(node.inside for node in load.loads.values())
    return inside + sum(costs.value_bytes(value, sizes) for value in kept)


@pytest.mark.parametrize("name", NAMES)
def test_flops_and_saved_bytes_agree_with_torch(name):
    found, graph = traced(name)

    costs = GraphCosts.of(graph, graph.hints, fused_attention=False)

    forward, whole = flops_counted_by_torch(found)
    priced = [costs.flops(phase, graph.hints) for phase in PHASES]
    assert priced[0] == forward
    assert sum(priced) == whole
    saved = bytes_saved_by_autograd(found, graph)
    assert bytes_kept(costs, graph.hints) == pytest.approx(saved, rel=0.02)
    assert costs.rough == ()


@pytest.mark.parametrize("name", ["gpt", "hf-llama", "resnet"])
def test_one_capture_prices_other_sizes(name):
    _, graph = traced(name)
    costs = GraphCosts.of(graph, graph.hints, fused_attention=False)
    other, other_graph = traced(name, batch=7)

    forward, whole = flops_counted_by_torch(other)
    sizes = {**graph.hints, "batch": 7}

    assert costs.flops("forward", sizes) == forward
    assert sum(costs.flops(phase, sizes) for phase in PHASES) == whole
    saved = bytes_saved_by_autograd(other, other_graph)
    assert bytes_kept(costs, sizes) == pytest.approx(saved, rel=0.02)


def test_attention_with_a_mask_from_outside_is_priced_whole():
    found = example("hf-llama", 4)
    opened = choose_opened(found.model, 4)
    padding = {"attention_mask": torch.ones(4, 12, dtype=torch.long)}

    def forward(**more):
        graph = capture(found.model, (), {**found.kwargs, **more}, opened=opened)
        return GraphCosts.of(graph, graph.hints, fused_attention=False).flops("forward", {})

    layers, heads, width = 4, 4, 8
    # Where some rows can be padded there is a mask, and kernels leave nothing out.
    assert forward(**padding) - forward() == layers * 2 * 4 * heads * 12 * 12 * width


def test_equal_blocks_are_analysed_once():
    def runs(layers):
        from models import gpt

        model = gpt.build(layers=layers)
        args, kwargs = gpt.example_inputs(2)
        graph = capture(model, args, kwargs, opened={"", "blocks"})
        costs = GraphCosts.of(graph, graph.hints)
        costs.at(graph.hints)
        return costs.bench.runs

    assert runs(12) == runs(3)


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.third = nn.Linear(8, 8)

    def forward(self, x):
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))


def test_frozen_parameters_cost_no_weight_gradient_and_no_gradient_before_them():
    model = Frozen()
    model.first.requires_grad_(False)
    model.third.requires_grad_(False)
    graph = capture(model, (torch.randn(4, 8),))

    costs = GraphCosts.of(graph, graph.hints)

    per_product = 2 * 4 * 8 * 8
    seen = costs.at(graph.hints)
    flops = {
        name: tuple(seen[name].flops(phase) // per_product for phase in PHASES)
        for name in ("first", "second", "third")
    }
    assert flops == {"first": (1, 0, 0), "second": (1, 0, 1), "third": (1, 1, 0)}


def test_checkpointing_keeps_less_and_computes_more():
    _, graph = traced("gpt")
    costs = GraphCosts.of(graph, graph.hints)

    kept, times = [], []
    for mode in ("none", "selective", "full"):
        training = Training(checkpointing=mode)
        load = workload_of(costs, graph.hints, DEFAULT_HARDWARE, training)
        kept.append(bytes_kept(costs, graph.hints, training))
        times.append(sum(item.time for item in load.work.items))

    assert kept[0] > kept[1] > kept[2]
    assert times[0] < times[1] < times[2]


def test_attention_dropout_keeps_no_matrix_of_weights_where_it_is_fused():
    from models import gpt

    model = gpt.build(dropout=0.1, length=64)
    graph = capture(model, *gpt.example_inputs(2, length=64), opened={"", "blocks"})

    fused = bytes_kept(GraphCosts.of(graph, graph.hints), graph.hints)
    plain = bytes_kept(GraphCosts.of(graph, graph.hints, fused_attention=False), graph.hints)

    weights = 2 * 4 * 64 * 64 * 4  # one matrix of weights of one layer
    assert plain - fused > 4 * weights


def test_pricing_leaves_the_model_alone():
    found, graph = traced("moe")
    before = {name: tensor.clone() for name, tensor in found.model.state_dict().items()}
    rng = torch.get_rng_state()

    GraphCosts.of(graph, graph.hints).at(graph.hints)

    assert torch.equal(rng, torch.get_rng_state())
    assert all(p.grad is None for p in found.model.parameters())
    for name, tensor in found.model.state_dict().items():
        assert torch.equal(tensor, before[name])


class Maps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mapped = torch.vmap(self.a)(x)
        return self.b(mapped)


def test_gradients_are_as_they_were() -> None:
    # The backward of a function that has a module in it left gradients without data there, and
    # the first training step added to them.
    model = Maps()
    model.b.weight.grad = before = torch.ones(8, 8)

    pipeline(model, (torch.randn(4, 6, 8),), num_stages=2)

    assert [parameter.grad for parameter in model.parameters()] == [None, None, before, None]
