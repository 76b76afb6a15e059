"""Profiles: what is measured, what is cached, and what a plan makes of it."""

import pytest
import torch
from torch import nn

from fxpipe.errors import PlanError
from fxpipe.graph.capture.capture import capture
from fxpipe.planner.cost.graph_costs import GraphCosts
from fxpipe.planner.cost.measured import Measured, Profile
from fxpipe.planner.plan import plan
from fxpipe.planner.search.profile import profile
from fxpipe.program import Link
from models import gpt, resnet


def made(**options):
    args, kwargs = gpt.example_inputs(2)
    given = {"repeats": 1, "cache": False, **options}
    return profile(gpt.build(layers=4), args, example_kwargs=kwargs, **given)


def test_every_part_has_times_at_every_size():
    found = made(batch_sizes=(1, 4))

    for node, sizes in found.parts.items():
        assert set(sizes) == {1, 4}, node
    block = found.parts["blocks_1"][4]
    assert block.forward > 0 and block.backward_input > 0


def test_kept_bytes_are_measured_too():
    model = gpt.build(layers=4)
    args, kwargs = gpt.example_inputs(2)
    graph = capture(model, args, kwargs, opened={"", "blocks"})
    costs = GraphCosts.of(graph, graph.hints, fused_attention=False)

    found = made(batch_sizes=(2, 4))

    for node in costs.nodes:
        for batch in (2, 4):
            estimated = costs.at({**graph.hints, "batch": batch})[node.name].kept_inside
            assert found.parts[node.name][batch].kept == estimated, node.name


def test_equal_blocks_are_measured_once():
    class Counting(nn.Module):
        runs = 0

        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x):
            Counting.runs += 1
            return torch.tanh(self.inner(x))

    def runs(count):
        Counting.runs = 0
        model = nn.Sequential(*(Counting() for _ in range(count)))
        profile(model, (torch.randn(2, 4),), repeats=1, cache=False)
        return Counting.runs

    # The first one differs: its input has no gradient. Tracing runs all of them.
    assert runs(9) - runs(5) <= 2 * 4


def test_results_are_cached_by_what_they_depend_on(tmp_path):
    calls = []
    options = {"cache": tmp_path, "progress": lambda done, total: calls.append((done, total))}

    first = made(**options)
    count = len(calls)
    again = made(**options)
    other = made(**options, batch_sizes=(1,))

    assert calls[count - 1] == (count, count)
    assert again == first
    assert other.fingerprint != first.fingerprint
    assert len(calls) > count
    assert len(list(tmp_path.glob("profile-*.json"))) == 2


def test_broken_cache_is_measured_anew(tmp_path):
    first = made(cache=tmp_path)
    file = next(tmp_path.glob("*.json"))
    file.write_text("{", encoding="utf-8")

    again = made(cache=tmp_path)

    assert again.fingerprint == first.fingerprint
    assert Profile.load(file) == again


def test_the_model_is_left_alone():
    model = resnet.build()
    args, kwargs = resnet.example_inputs(2)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    rng = torch.get_rng_state()

    profile(model, args, example_kwargs=kwargs, repeats=1, cache=False)

    assert torch.equal(rng, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in model.parameters())
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_models_without_weights_are_measured_block_by_block():
    with torch.device("meta"):
        model = gpt.build(layers=4)
    ids = torch.zeros(2, 8, dtype=torch.long, device="meta")

    found = profile(model, (ids,), repeats=1, cache=False)

    assert found.parts["blocks_0"][2].forward > 0
    assert all(parameter.is_meta for parameter in model.parameters())


def test_other_sizes_follow_a_line():
    parts = {"a": {2: Measured(2.0, 4.0, 0.0, 10.0), 4: Measured(3.0, 8.0, 0.0, 20.0)}}
    found = Profile("", "cpu", ("",), parts)
    single = Profile("", "cpu", ("",), {"a": {2: Measured(2.0, 4.0, 6.0)}})

    assert found.times("a", 3) == Measured(2.5, 6.0, 0.0, 15.0)
    assert found.times("a", 6) == Measured(4.0, 12.0, 0.0, 30.0)
    assert found.times("a", 1) == Measured(1.5, 2.0, 0.0, 5.0)
    assert single.times("a", 3) == Measured(3.0, 6.0, 9.0)
    assert found.times("b", 3) is None


def test_json_and_links_survive():
    found = made().with_link(Link(1e-4, 1e9))

    again = Profile.from_json(found.to_json())

    assert again == found
    assert again.hardware("cpu core").intra == Link(1e-4, 1e9)
    with pytest.raises(PlanError, match="not a saved profile"):
        Profile.from_json("[]")


def test_plan_uses_measured_times():
    args, kwargs = gpt.example_inputs(2)
    found = made(batch_sizes=(2,))
    slow = Profile(
        found.fingerprint,
        found.device,
        found.opened,
        {name: {2: Measured(1.0, 1.0, 1.0)} for name in found.parts},
    )
    options = {"example_kwargs": kwargs, "microbatch_sizes": (2,), "schedules": ["1F1B"]}
    options |= {"data_parallel": 1, "checkpointing": ("none", "full")}

    planned = plan(gpt.build(layers=4), args, "cpu core", 2, 8, **options, profile=slow)

    stage = planned.best.stages[0]
    assert stage.forward == pytest.approx(len(planned.best.nodes[0]))
    full = next(o for o in planned.options if o.candidate.checkpointing == "full")
    blocks = sum(name.startswith("blocks") for name in full.nodes[0])
    assert full.stages[0].backward_input == pytest.approx(len(full.nodes[0]) + blocks)
    with pytest.raises(PlanError, match="the profile is of another model"):
        other = Profile("", "cpu", found.opened, {"nothing": {2: Measured(1.0, 1.0, 1.0)}})
        plan(gpt.build(layers=4), args, "cpu core", 2, 8, **options, profile=other)


def test_wrong_sizes_are_refused():
    with pytest.raises(PlanError, match="batch_sizes must be whole numbers from 1 up"):
        made(batch_sizes=(0,))
