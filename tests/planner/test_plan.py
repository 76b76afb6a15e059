"""Plans: what is chosen and why, saving, building, and what happens if nothing fits."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

from fxpipe.errors import PlanError
from fxpipe.graph.pipe import pipeline
from fxpipe.planner.cost.presets import HARDWARE
from fxpipe.planner.plan import Plan, plan
from fxpipe.program import validate
from fxpipe.program.generators import SCHEDULES
from fxpipe.runtime.wire.local_group import LocalGroup
from models import gpt, load
from tests.distributed.ranks import run_on_ranks

# What driver and channels hold would outweigh models as small as these.
BARE = replace(HARDWARE["H100"], context=0.0, channels=0.0)
TRAINING = sorted(set(SCHEDULES) - {"ForwardOnly"})


def make(**options):
    model = gpt.build(layers=4)
    args, kwargs = gpt.example_inputs(2)
    given = {"num_ranks": 2, "batch_size": 8, **options}
    hardware = given.pop("hardware", "cpu core")
    return plan(model, args, hardware, example_kwargs=kwargs, **given)


@pytest.fixture(scope="module")
def found():
    return make(microbatch_sizes=(2,), data_parallel=1)


def loss_fn(output, target):
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def test_options_are_ranked_and_say_why_they_lost(found):
    rows = found.rows()

    times = [row["step_time"] for row in rows if row["fits"]]
    assert times == sorted(times)
    assert rows[0]["why"] == "chosen"
    assert all(row["why"] for row in rows)
    assert rows[0]["throughput"] == pytest.approx(8 / rows[0]["step_time"])
    parts = rows[0]["memory"][0]
    names = ("weights", "gradients", "optimizer", "activations", "buffers", "system", "reserve")
    assert parts["total"] == pytest.approx(sum(parts[name] for name in names))


def test_text_explains_choice_cut_memory_and_others(found):
    text = str(found)

    assert f"chosen of {found.num_candidates}: {found.best.candidate}" in text
    assert "times the mean" in text
    assert "tokens .. " in text and "head" in text
    assert "holds" in text and "optimizer" in text
    assert "% slower: " in text
    assert "<table>" in found._repr_html_()


def test_all_schedules_get_a_chance(found):
    tried = {option.candidate.schedule for option in found.options}

    assert tried == set(TRAINING)


def test_json_keeps_everything_but_the_model(found, tmp_path):
    again = Plan.load(found.save(tmp_path / "plan.json"))

    assert again == found
    assert str(again) == str(found)
    broken = found.to_json()
    for text in ("{}", "[]", broken.replace('"1F1B"', '"1F2B"'), broken.replace(": 2,", ': "2",')):
        with pytest.raises(PlanError, match=r"not a saved plan|num_ranks is '2'"):
            Plan.from_json(text)
    with pytest.raises(PlanError, match="cannot read the plan"):
        Plan.load(tmp_path / "none.json")


def gradients(model):
    return [p.grad.clone() for p in model.parameters()]


def assert_trains_like(model, built):
    reference = copy.deepcopy(model)
    for part in reference.modules():
        part.__dict__.pop("forward", None)
    args, _ = gpt.example_inputs(built.rows)
    model.zero_grad(), reference.zero_grad()

    built.schedule.step(args[0], target=args[0])
    loss_fn(reference(args[0]), args[0]).backward()

    for mine, its in zip(gradients(model), gradients(reference), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_built_plans_have_the_plain_gradients(found, mode):
    model = found.subject.traced.module
    options = [
        index
        for index, option in enumerate(found.options)
        if option.candidate.checkpointing == mode
    ]

    assert options
    for choice in options:
        built = found.build(choice=choice, loss_fn=loss_fn)
        expected = () if mode == "none" else tuple(f"blocks.{i}" for i in range(4))
        assert tuple(sorted(built.checkpointed)) == expected
        assert_trains_like(model, built)


def saved_bytes(built):
    """What autograd packs in a step; a checkpointed block packs its inputs, not its inside."""
    total = 0

    def pack(tensor):
        nonlocal total
        total += tensor.untyped_storage().nbytes()
        return tensor

    args, _ = gpt.example_inputs(built.rows)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        built.schedule.step(args[0], target=args[0])
    return total


def test_checkpointing_is_really_applied_and_can_be_taken_back(found):
    def first(mode):
        return next(
            i
            for i, option in enumerate(found.options)
            if option.candidate.checkpointing == mode and option.candidate.schedule == "1F1B"
        )

    plain = found.build(choice=first("none"), loss_fn=loss_fn)
    kept = saved_bytes(plain)
    forwards = []
    block = found.subject.traced.module.blocks[0]
    handle = next(block.children()).register_forward_hook(lambda *_: forwards.append(1))
    full = found.build(choice=first("full"), loss_fn=loss_fn)
    args, _ = gpt.example_inputs(full.rows)
    full.schedule.step(args[0], target=args[0])
    handle.remove()
    again = found.build(choice=first("none"), loss_fn=loss_fn)

    assert len(forwards) == 2 * full.option.candidate.num_microbatches
    assert saved_bytes(again) == kept


def test_a_loaded_plan_builds_with_the_same_model_only(found):
    again = Plan.from_json(found.to_json())
    args, kwargs = gpt.example_inputs(2)
    model = gpt.build(layers=4)

    built = again.build(model, args, kwargs, loss_fn=loss_fn)

    assert_trains_like(model, built)
    with pytest.raises(PlanError, match="does not hold the model"):
        again.build()
    with pytest.raises(PlanError, match="not the model that was planned"):
        again.build(gpt.build(layers=3), args, kwargs)
    with pytest.raises(PlanError, match="the plan's pipeline has 2 ranks, the group 3"):
        again.build(gpt.build(layers=4), args, kwargs, group=LocalGroup(3))
    with pytest.raises(PlanError, match="choice is one of"):
        again.build(gpt.build(layers=4), args, kwargs, choice=400)


def test_memory_limit_changes_the_choice_and_is_kept():
    free = make(hardware=BARE, num_ranks=2, microbatch_sizes=(2,), data_parallel=1)
    limit = 0.9 * free.best.peak

    tight = make(
        hardware=BARE, num_ranks=2, microbatch_sizes=(2,), data_parallel=1, memory_limit=limit
    )

    assert tight.best.candidate != free.best.candidate
    assert tight.best.peak <= limit
    assert tight.best.step_time >= free.best.step_time


def test_nothing_fits_says_how_much_is_missing_where():
    with pytest.raises(PlanError) as caught:
        make(memory_limit=1e5, microbatch_sizes=(2,))

    message = str(caught.value)
    assert "nothing fits 2 ranks with 100 kB each" in message
    assert "rank 0 (" in message and ", missing " in message
    assert "weights" in message and "what would help: more ranks" in message


@pytest.mark.parametrize("name", ["vit", "moe"])
def test_what_fits_with_cuts_inside_blocks_is_found(name):
    # Memory was looked at before blocks were opened: "nothing fits", where a plan had just fitted.
    # Plans of `moe` failed: its experts were taken for blocks, and opened for 12 stages, though
    # their code looks at values.
    model, (args, kwargs) = load(name).build(), load(name).example_inputs(2)
    asked = {"example_kwargs": kwargs, "data_parallel": 1, "schedules": "1F1B", "offload": 0}
    asked |= {"microbatch_sizes": 2, "checkpointing": "none"}
    free = plan(model, args, BARE, 3, 24, **asked)

    tight = plan(model, args, BARE, 3, 24, 1.001 * free.best.peak, **asked)

    assert tight.best.peak <= 1.001 * free.best.peak
    assert "experts" not in " ".join(free.blocks)


def test_wishes_are_followed():
    wishes = {"schedules": ["zbv"], "data_parallel": 1, "checkpointing": "full"}
    found = make(**wishes, microbatch_sizes=(2,), pin={"blocks.0": 1}, stages_per_rank=(2,))

    candidate = found.best.candidate
    assert candidate.schedule == "ZBVZeroBubble"
    assert (candidate.data_parallel, candidate.checkpointing) == (1, "full")
    pinned = [
        stage
        for stage, names in enumerate(found.best.modules)
        if any(f"{name}.".startswith("blocks.0.") for name in names)
    ]
    assert pinned == [1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_ranks": 0}, "num_ranks is 0; it must be a whole number from 1 up"),
        ({"schedules": ["1F2B"]}, "there is no schedule '1F2B'"),
        ({"hardware": "H1000"}, "there is no hardware preset 'H1000'; did you mean"),
        ({"optimizer": "lion"}, "unknown optimizer 'lion'"),
        ({"checkpointing": "some"}, "checkpointing is \\['some'\\]; known: none"),
        ({"sizes": {"width": 4}}, "sizes names width; this model has batch, sequence"),
        ({"data_parallel": 3}, "data_parallel must divide the 2 ranks"),
        ({"microbatch_sizes": (3,)}, "microbatch sizes \\[3\\] must divide the batch"),
        ({"stages_per_rank": ()}, "stages_per_rank is \\[\\]"),
        # These were taken in silence, for something else, or failed inside.
        ({"memory_limit": "40GB"}, "memory_limit is '40GB'; it must be a number of bytes above 0"),
        ({"memory_limit": float("nan")}, "memory_limit is nan"),
        ({"memory_limit": -1}, "memory_limit is -1"),
        ({"schedules": []}, "schedules is \\[\\]; name at least one"),
        ({"schedules": ["ForwardOnly"]}, "ForwardOnly has no backward, and a plan is for training"),
        ({"microbatch_sizes": "2"}, "microbatch_sizes is \\['2'\\]; give whole numbers"),
        ({"microbatch_sizes": (2.0,)}, "microbatch_sizes is \\[2.0\\]; give whole numbers"),
        ({"checkpointing": None}, "checkpointing is None"),
        ({"tensor_parallel": 3}, "tensor times context ranks must divide the 2 ranks"),
        ({"expert_parallel": 2}, "expert_parallel is \\[2\\], but no parameter is in 'experts'"),
        ({"sharding": True}, "sharding is \\[True\\]; give stages of ZeRO"),
        ({"expert_groups": (9, 8)}, "expert_groups is \\(9, 8\\); give so many of so many"),
        ({"pin": {"blocks.0": "1"}}, "pin is {'blocks.0': '1'}; give the stage of modules"),
        ({"together": "blocks.0"}, "together is 'blocks.0'; give groups of names"),
        (
            {"sizes": {"sequence": 0}},
            "sizes\\['sequence'\\] is 0; it must be a whole number from 1",
        ),
        ({"sizes": {"batch": 4}}, "sizes names batch, which follows from microbatches"),
        ({"objective": "x"}, "objective is 'x'; known: step, period"),
        ({"effort": 0}, "effort is 0; it must be a whole number from 1 up"),
        ({"offload": None}, "offload is None; it must be a whole number from 0 up"),
        ({"hardware": {"name": "mine"}}, "hardware is a preset's name, a .json or .toml file"),
        ({"profile": "measured.json"}, "profile is what fxpipe.profile\\(\\) returns"),
    ],
)
def test_wrong_requests_are_explained(options, message):
    with pytest.raises(PlanError, match=message):
        make(**options)


def test_model_and_arguments_are_checked():
    with pytest.raises(PlanError, match="got a tensor: write"):
        plan(nn.Linear(2, 2), torch.zeros(1, 2), "H100", 1, 2)
    with pytest.raises(PlanError, match=r"takes a torch.nn.Module or a Pipe, got str"):
        plan("gpt", (), "H100", 1, 2)


def test_a_model_without_parameters_is_planned():
    # A guess of no memory at all was divided by.
    model = nn.Sequential(nn.ReLU(), nn.Tanh())

    assert plan(model, (torch.zeros(2, 4),), BARE, 2, 4).best.candidate.num_ranks == 2


def test_sizes_change_the_price():
    short = make(hardware=BARE, microbatch_sizes=(2,))
    long = make(hardware=BARE, microbatch_sizes=(2,), sizes={"sequence": 64})

    assert long.best.peak > 1.5 * short.best.peak


def test_improved_order_is_valid_and_not_slower():
    options = {"microbatch_sizes": (1,), "data_parallel": 1, "schedules": ["1F1B"]}
    plain = make(**options)
    better = make(**options, improve=True)

    assert better.step_time <= plain.step_time
    program = better.best.make_program()
    validate(program, better.best.edges)
    built = better.build(loss_fn=loss_fn)
    assert_trains_like(better.subject.traced.module, built)
    assert Plan.from_json(better.to_json()) == better


def test_report_is_one_html_file(found, tmp_path):
    path = found.report(tmp_path / "plan.html")

    text = path.read_text()
    assert "Plan for 2 ranks of" in text
    assert str(found.best.candidate) in text
    assert "Stage graph" in text
    loaded = Plan.from_json(found.to_json()).report(tmp_path / "loaded.html")
    assert "Plan for 2 ranks of" in loaded.read_text()


def test_a_plan_is_built_again_after_a_report_or_another_build(tmp_path):
    # A cut writes sizes that travel into the captured graph, and the next one refused it: "this is
    # not the model that was planned".
    model, (args, kwargs) = load("unet").build(), load("unet").example_inputs(2)
    asked = {"schedules": ["1F1B", "ZBH1"], "microbatch_sizes": 2, "checkpointing": "none"}
    found = plan(model, args, BARE, 4, 16, example_kwargs=kwargs, data_parallel=1, **asked)

    for choice in range(2):
        found.report(tmp_path / "plan.html")
        built = found.build(choice=choice)
        batch, more = load("unet").example_inputs(built.rows)
        torch.testing.assert_close(built.schedule.eval(*batch, **more), model(*batch, **more))


def test_large_models_are_planned_without_weights():
    with torch.device("meta"):
        model = gpt.build(layers=24, width=1024, heads=16, vocab=32000, length=1024).bfloat16()
    ids = torch.zeros(1, 1024, dtype=torch.long, device="meta")

    found = plan(model, (ids,), "A100", 1024, 2048, schedules=["1F1B", "ZBH1"])

    candidate = found.best.candidate
    assert candidate.data_parallel * candidate.pipeline == 1024
    assert found.best.peak < HARDWARE["A100"].memory


def replicated(rank, schedule, sharding, mode):
    wishes = {"schedules": [schedule], "sharding": sharding, "checkpointing": mode}
    found = make(num_ranks=4, data_parallel=2, microbatch_sizes=(2,), **wishes)
    built = found.build(loss_fn=loss_fn)
    assert (built.replica, built.num_replicas, built.rows) == (rank % 2, 2, 4)
    args, _ = gpt.example_inputs(8)
    rows = args[0][4 * built.replica : 4 * built.replica + 4]
    reference = gpt.build(layers=4)
    mine = torch.optim.SGD(built.parameters(), lr=0.1)
    its = torch.optim.SGD(reference.parameters(), lr=0.1)
    wanted = dict(reference.named_parameters(remove_duplicate=False))
    for _ in range(2):
        mine.zero_grad(), its.zero_grad()
        loss_fn(reference(args[0]), args[0]).backward()
        built.schedule.step(rows, target=rows)
        for stage in built.stages:
            for name, parameter in stage.submod.named_parameters():
                grad = parameter.grad.full_tensor() if sharding else parameter.grad
                plain = wanted[name.removeprefix("module.")].grad
                torch.testing.assert_close(grad, plain, rtol=1e-4, atol=1e-6)
        mine.step(), its.step()
    messages = []
    for again in (found, make(num_ranks=2, microbatch_sizes=(2,), schedules=["1F1B"])):
        try:
            again.build()
        except PlanError as error:
            messages.append(str(error))
    if sharding:
        held = [p.to_local().numel() for p in built.parameters() if p.dim() == 2]
        assert sum(held) == sum(p.numel() for p in built.parameters() if p.dim() == 2) // 2
        parts = [m for stage in built.stages for m in stage.submod.modules()]
        assert sum(hasattr(part, "unshard") for part in parts) > len(built.stages)  # blocks, too
    return messages


@pytest.mark.parametrize(
    ("schedule", "sharding", "mode"),
    [
        ("1F1B", 0, "none"),
        ("1F1B", 1, "full"),
        ("Interleaved1F1B", 1, "none"),
        ("ZBH1", 1, "selective"),
    ],
)
def test_plan_runs_on_processes_with_data_parallelism(schedule, sharding, mode):
    messages = run_on_ranks(4, replicated, schedule, sharding, mode)

    assert all("but the group has 4; plan again for 4" in found[-1] for found in messages)
    if sharding:  # shards replace the parameters of the user's own model
        assert all("the model is sharded already" in found[0] for found in messages)


@pytest.mark.parametrize("sharding", [2, 3])
def test_what_needs_more_memory_here_than_planned_is_not_built(sharding):
    # A sharded stage stays gathered for a whole step: that is ZeRO 1, and no less memory.
    found = make(num_ranks=4, data_parallel=2, schedules=["1F1B"], sharding=sharding)

    assert "build() makes pipelines with replicas or ZeRO 1" in str(found)
    with pytest.raises(PlanError, match="ZeRO 2 and 3 would need more memory than planned"):
        found.build()


@pytest.mark.parametrize("mode", ["none", "full"])
def test_stages_of_a_pipe_are_kept(mode):
    args, kwargs = gpt.example_inputs(2)
    model = gpt.build(layers=4)
    pipe = pipeline(model, args, kwargs, num_stages=2)
    options = {"microbatch_sizes": (2,), "checkpointing": mode, "schedules": ["1F1B", "ZBH1"]}

    found = plan(pipe, args, "cpu core", 2, 8, **options)

    with pytest.raises(PlanError, match="a Pipe keeps its stages: pin and together"):
        plan(pipe, args, "cpu core", 2, 8, pin={"head": 1}, **options)
    with pytest.raises(PlanError, match="a pipe of 2 stages needs as many ranks"):
        plan(pipe, args, "cpu core", 3, 9, **(options | {"microbatch_sizes": (1,)}))
    assert all(option.candidate.num_stages == 2 for option in found.options)
    for choice in range(len(found.options)):
        built = found.build(choice=choice, loss_fn=loss_fn)
        assert built.pipe is pipe
        assert built.checkpointed == (() if mode == "none" else ("", ""))
        assert_trains_like(model, built)


def test_the_text_counts_options_that_the_error_does_not_tell_apart():
    asked = {"num_ranks": 4, "batch_size": 16, "optimizer": "sgd"}
    sure = make(hardware=replace(BARE, error=0.0), **asked)
    unsure = make(hardware=replace(BARE, error=10.0), **asked)

    others = sum(option.missing(unsure.memory_limit) <= 0 for option in unsure.options[1:])
    assert "within that error" not in str(sure)
    assert f"{others} more of the options below are within that error" in str(unsure)


def test_host_memory_is_offered_where_it_beats_computing_again():
    asked = {"num_ranks": 4, "batch_size": 16, "microbatch_sizes": (2,), "data_parallel": 1}
    # So that times weigh more than what any operation takes at least.
    machine = replace(BARE, overhead=0.0, reserve=0.0, flops={"float32": 1e9}, jitter=0.0)
    asked |= {"schedules": ("1F1B",), "hardware": machine, "optimizer": "sgd"}
    free = make(checkpointing="none", offload=0, **asked)
    within = {"memory_limit": 0.8 * free.best.peak, "checkpointing": ("none", "full")}

    again = make(offload=0, **within, **asked)
    found = make(**within, **asked)

    assert again.best.candidate.checkpointing == "full"
    assert (found.best.candidate.checkpointing, found.best.candidate.offload) == ("none", 2)
    assert free.best.step_time <= found.best.step_time < again.best.step_time
    assert found.best.peak <= 0.8 * free.best.peak
    assert "offload 2" in str(found)
    assert "into host memory" in str(found) and "into host memory" not in str(free)
    # The error of published runs stood beside a step of a kind that none of them was.
    assert "no published run that was compared did so; the best without it, " in str(found)
    kinds = {a.kind.name for row in found.best.timeline(machine)[0].ranks for a in row}
    assert {"OFFLOAD", "RELOAD"} <= kinds
    assert Plan.from_json(found.to_json()).best == found.best

    built = found.build(loss_fn=loss_fn)
    assert_trains_like(found.subject.traced.module, built)
    ran = {a.kind.name for row in built.schedule.lowered().ranks for a in row}
    assert {"OFFLOAD", "RELOAD"} <= ran
    with pytest.raises(PlanError, match="offload is at least 2 compute actions, or 0 for never"):
        make(offload=1)
