"""Pipelines of tensor-parallel stages: DTensors cross boundaries, and weights are DTensors."""

import copy
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fxpipe import InputError, PipelineStage, RemoteStageError, get_schedule_class, pipeline
from fxpipe.runtime.split.deferral import Deferral
from fxpipe.runtime.wire.message import Shares
from tests.backends import nccl_like
from tests.distributed.bodies import layout, mse, rand
from tests.distributed.ranks import run_on_ranks
from tests.runtime.training import SCHEDULE_NAMES, assert_close

WIDTH, ROWS, LENGTH = 8, 8, 6


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, dtype=torch.float64)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, dtype=torch.float64)
        self.down = nn.Linear(2 * WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Gather(nn.Module):
    """The last stage's end: whatever arrives becomes a whole plain tensor."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        made: Any = self.inner(x)
        return made.full_tensor() if hasattr(made, "full_tensor") else made


def parallelized(module: nn.Module, mesh: Any, style: str) -> nn.Module:
    """The usual plan: columns, then rows; between blocks replicated, or shards of the sequence."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    if style == "replicated":
        plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        return parallelize_module(module, mesh, plan)
    is_local = style == "local shards"
    plan = {
        "": PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Shard(1),), use_local_output=False
        ),
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    del Replicate
    made = parallelize_module(module, mesh, plan)
    if is_local:
        made.register_forward_hook(lambda _, __, output: output.to_local())
    return made


class Scatter(nn.Module):
    """The first stage's begin: this rank's shard of the sequence."""

    def __init__(self, inner: nn.Module, mesh: Any) -> None:
        super().__init__()
        self.inner, self.mesh = inner, mesh

    def forward(self, x: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor, Replicate, Shard

        spread = DTensor.from_local(x, self.mesh, [Replicate()], run_check=False)
        made: Tensor = self.inner(spread.redistribute(self.mesh, [Shard(1)]))
        return made


def on_streams(rank: int, schedule: str, style: str, is_traced: bool, streams: str) -> list[int]:
    """The same over communicators like NCCL's, with shares; the sizes of all that was sent."""
    nccl_like.register()
    train(rank, schedule, style, is_traced, f"nccl_{streams}")
    return [size for group in nccl_like.instances() for size in group.sent_bytes]


def train(rank: int, schedule: str, style: str, is_traced: bool, backend: str = "") -> int:
    """Two pipelines that share every stage; gradients are those of the plain model."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    tp, pp, shares = mesh["tp"], mesh["pp"].get_group(), None
    if backend:  # after the mesh: DTensors remember names of groups, and ranks are used again
        pipelines = [dist.new_group(ranks, backend=backend) for ranks in ((0, 2), (1, 3))]
        pp, shares = pipelines[rank % 2], tp.get_group()
    indices, num_stages = layout(schedule, rank // 2, 2)
    torch.manual_seed(0)
    model = nn.Sequential(*(Mlp() for _ in range(num_stages)))
    plain = copy.deepcopy(model)
    x, y = rand(ROWS, LENGTH, WIDTH), rand(ROWS, LENGTH, WIDTH, seed=2)
    stages = []
    held: dict[int, nn.Module] = {}
    pipe = pipeline(model, (x[:2],), num_stages=num_stages) if is_traced else None
    for i in indices:
        module = model[i] if pipe is None else pipe.get_stage_module(i)
        block: Any = module if pipe is None else next(m for m in module.modules() if type(m) is Mlp)
        parallelized(block, tp, style)
        held[i] = block
        if pipe is not None:
            stages.append(pipe.build_stage(i, "cpu", pp))
            continue
        if style != "replicated":
            module = Scatter(module, tp) if i == 0 else module
            module = Gather(module) if i == num_stages - 1 else module
        stages.append(PipelineStage(module, i, num_stages, "cpu", group=pp))
    deferred = []
    noted = Deferral._defer

    def note(self: Deferral, call: Any) -> Tensor:
        deferred.append(type(call.weight).__name__)
        return noted(self, call)

    Deferral._defer = note
    try:
        made = get_schedule_class(schedule)(stages, 4, loss_fn=mse, tp_group=shares)
        mse(plain(x), y).backward()
        for step in (1, 2):
            made.step(x, target=y)
            for i, block in held.items():
                for (name, p), q in zip(
                    block.named_parameters(), plain[i].parameters(), strict=True
                ):
                    grad: Any = p.grad
                    whole = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
                    assert_close(whole, step * q.grad, f"stage {i} {name}")
    finally:
        Deferral._defer = noted
    return deferred.count("DTensor")


@pytest.mark.parametrize("style", ["replicated", "shards"])
@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_dtensors_cross_boundaries(schedule: str, style: str) -> None:
    deferred = run_on_ranks(4, train, schedule, style, False)

    # Split backwards defer DTensor weights as others; without a split there is nothing to defer.
    assert all(deferred) if schedule == "ZBVZeroBubble" else not any(deferred)


@pytest.mark.parametrize("schedule", ["Interleaved1F1B"])
def test_traced_stages_hand_on_what_tensor_parallel_modules_return(schedule: str) -> None:
    run_on_ranks(4, train, schedule, "replicated", True)


WHOLE = (ROWS // 4) * LENGTH * WIDTH * 8  # bytes of a microbatch's activation


@pytest.mark.parametrize(
    ("schedule", "style", "is_traced", "streams"),
    [
        ("ZBVZeroBubble", "replicated", False, "rank"),
        ("Interleaved1F1B", "replicated", True, "pair"),
        ("1F1B", "shards", False, "rank"),
    ],
)
def test_over_streams_equal_values_are_sent_in_shares(
    schedule: str, style: str, is_traced: bool, streams: str
) -> None:
    sent = run_on_ranks(4, on_streams, schedule, style, is_traced, streams)

    # Shards of the sequence differ, and travel as they are: they too are half of the whole.
    assert all({size for size in sizes if size > 1} == {WHOLE // 2} for sizes in sent)


@pytest.mark.full
@pytest.mark.parametrize("streams", nccl_like.MODELS)
@pytest.mark.parametrize("style", ["replicated", "shards"])
@pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
def test_every_schedule_on_every_model_of_streams(schedule: str, style: str, streams: str) -> None:
    run_on_ranks(4, on_streams, schedule, style, False, streams)


class Faulty(nn.Module):
    """Fails between the collectives of a block."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.inner(x)
        if self.fails:
            raise ValueError("one part is bad")
        return made


def one_part_fails(rank: int, way: str, call: str) -> str:
    """A step of two pipelines that share their stages, in which something fails; the words."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(Faulty(Mlp()), Mlp()) for _ in range(2)))
    plain = copy.deepcopy(model)
    stage = model[rank // 2]
    for block in (stage[0].inner, stage[1]):
        parallelized(block, mesh["tp"], "replicated")
    group = mesh["pp"].get_group()
    made = get_schedule_class("1F1B")(
        PipelineStage(stage, rank // 2, 2, "cpu", group=group), 4, loss_fn=mse, timeout=60.0
    )
    x, y = rand(ROWS, LENGTH, WIDTH), rand(ROWS, LENGTH, WIDTH, seed=2)
    made.step(x, target=y)
    stage.zero_grad()
    is_odd = rank == 1 or way == "alike"
    rows = ROWS - 5 if way == "inputs" and rank % 2 else ROWS
    stage[0].fails = is_odd and way in ("one", "alike")
    if way == "late" or (is_odd and way == "hooks"):

        def late(action: Any) -> None:
            if is_odd and action.microbatch == 3:
                raise ValueError("one part is bad")

        made.after("B", late)

    start = time.monotonic()
    with pytest.raises(Exception, match=r"bad|microbatches|must make the same call") as caught:
        getattr(made, call)(x[:rows], target=y[:rows])
    assert time.monotonic() - start < 30.0
    assert not any(p.grad is not None and p.grad.to_local().any() for p in stage[1].parameters())

    stage[0].fails = False
    made._hooks.after.clear()
    made._hooks.version += 1  # for all: plans are made on all or on none
    if way == "one":  # collectives stay open: nobody may use the group again
        with pytest.raises(RemoteStageError, match="make"):
            made.step(x, target=y)
    else:
        made.step(x, target=y)
        mse(plain(x), y).backward()
        for (name, p), q in zip(
            stage.named_parameters(), plain[rank // 2].parameters(), strict=True
        ):
            grad: Any = p.grad
            whole = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
            assert_close(whole, q.grad, name)
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize(
    ("way", "call"),
    [
        *((way, "step") for way in ("one", "alike", "late", "inputs", "hooks")),
        *((way, "eval") for way in ("one", "alike", "inputs")),
    ],
)
def test_ranks_that_share_a_stage_fail_together(way: str, call: str) -> None:
    # Those that shared a stage with the one that failed stayed in a collective for half an hour.
    said = run_on_ranks(4, one_part_fails, way, call)

    if way == "one":
        assert said[1] == "ValueError: one part is bad"
        assert said[0].startswith(
            "RemoteStageError: a rank that shares this stage failed: ValueError"
        )


def shares(rank: int) -> None:
    packing = Shares(dist.group.WORLD)
    for sizes in ((7, 3), (), (4, 2), (0, 5)):
        for dtype in (torch.float64, torch.bfloat16, torch.bool, torch.int16):
            value = rand(*sizes or (1,)).reshape(sizes).to(dtype)
            (share,) = packing.pack([value])
            assert (tuple(share.shape), dtype) == packing.shape((sizes, dtype))
            assert torch.equal(packing.unpack(share, (sizes, dtype)), value)
    for size in (1.0, 1e-9):
        with pytest.raises(InputError, match="differs between the ranks of tp_group"):
            Shares(dist.group.WORLD).pack([rand(5, 2, seed=1), size * rand(5, 2, seed=rank)])
    packing.pack([torch.tensor([float("nan"), float("inf"), 1.0 + 1e-4 * rank])])
    stage = PipelineStage(Mlp(), rank, 2, "cpu")
    for wrong, said in ((2, "got int"), (dist.group.WORLD, "has the ranks .* of one pipeline")):
        with pytest.raises(InputError, match=said):
            get_schedule_class("1F1B")(stage, 4, loss_fn=mse, tp_group=wrong)


def test_shares_make_the_value_again_and_values_that_differ_are_not_mixed() -> None:
    run_on_ranks(2, shares)


class OwnColumns(nn.Module):
    """A block whose ranks each use some columns of the same input, and do not add up gradients."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH // 2, WIDTH, dtype=torch.float64)
        self.place = place

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.linear(x.chunk(2, -1)[self.place])
        return made


def gradients_that_differ(rank: int) -> None:
    groups = [
        [dist.new_group(ranks) for ranks in pair] for pair in (((0, 2), (1, 3)), ((0, 1), (2, 3)))
    ]
    pp, tp = groups[0][rank % 2], groups[1][rank // 2]
    modules: dict[int, nn.Module] = {rank // 2: Mlp(), rank // 2 + 2: Mlp()}
    if rank // 2:
        modules[3] = OwnColumns(rank % 2)
    stages = [PipelineStage(module, i, 4, "cpu", group=pp) for i, module in modules.items()]
    made = get_schedule_class("Interleaved1F1B")(stages, 4, loss_fn=mse, tp_group=tp, timeout=60.0)
    with pytest.raises((InputError, RemoteStageError), match="differs between the ranks of tp_gr"):
        made.step(rand(ROWS, WIDTH), target=rand(ROWS, WIDTH))


def test_gradients_that_differ_are_not_mixed_either() -> None:
    # The activations of the same shape were compared, and were the same: half of each rank's
    # gradient was taken, without a word.
    run_on_ranks(4, gradients_that_differ)


def without_mesh(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "tp"))

    class Spread(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            made = self.linear(x.to_local() if isinstance(x, DTensor) else x)
            return made if rank else DTensor.from_local(made, mesh["tp"], [Shard(0)])

    def stage(get_mesh: Any) -> PipelineStage:
        return PipelineStage(Spread(), rank, 2, "cpu", group=dist.group.WORLD, get_mesh=get_mesh)

    x = rand(ROWS, WIDTH)
    with pytest.raises(InputError, match=r"has no such mesh: give PipelineStage\(..., get_mesh="):
        get_schedule_class("1F1B")(stage(None), 4, loss_fn=mse).step(x, target=x)
    get_schedule_class("1F1B")(stage(lambda names, sizes: mesh[names]), 4, loss_fn=mse).step(
        x, target=x
    )


def test_a_mesh_that_the_receiver_does_not_know_is_asked_for() -> None:
    run_on_ranks(2, without_mesh)


class Last(nn.Module):
    """Ends with a collective: what it returns may still be on its way."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH, dtype=torch.float64)
        self.down = nn.Linear(2 * WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.down(torch.tanh(self.up(x)))
        return made


def end_with_collective(rank: int, schedule: str, is_local: bool) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    indices, num_stages = layout(schedule, rank // 2, 2)
    torch.manual_seed(0)
    model = nn.Sequential(*(Last() for _ in range(num_stages)))
    plain = copy.deepcopy(model)
    spread = PrepareModuleInput(
        input_layouts=(Replicate(),),
        desired_input_layouts=(Replicate(),),
        use_local_output=False,
    )
    plan = {"": spread, "up": ColwiseParallel(), "down": RowwiseParallel(use_local_output=is_local)}
    held = {i: parallelize_module(model[i], mesh["tp"], plan) for i in indices}
    pp = mesh["pp"].get_group()
    stages: list[PipelineStage] = []
    for i in indices:
        module = Gather(held[i]) if i == num_stages - 1 else held[i]
        stages.append(PipelineStage(module, i, num_stages, "cpu", group=pp))
    made = get_schedule_class(schedule)(stages, 4, loss_fn=mse, timeout=60.0)
    x, y = rand(ROWS, WIDTH), rand(ROWS, WIDTH, seed=2)
    made.step(x, target=y)
    mse(plain(x), y).backward()
    for i, block in held.items():
        for (name, p), q in zip(block.named_parameters(), plain[i].parameters(), strict=True):
            grad: Any = p.grad
            whole = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
            assert_close(whole, q.grad, f"stage {i} {name}")


@pytest.mark.parametrize("is_local", [True, False], ids=["local", "DTensor"])
@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_a_stage_may_end_with_a_collective(schedule: str, is_local: bool) -> None:
    # Such a tensor has no memory yet: sending it was "Bad address", and the peer seemed lost.
    run_on_ranks(4, end_with_collective, schedule, is_local)


def ddp_around_shards(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
    from torch.nn.parallel import DistributedDataParallel

    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    spread = parallelize_module(Mlp(), mesh["tp"], {"up": ColwiseParallel(use_local_output=False)})
    module = DistributedDataParallel(spread, device_mesh=mesh["dp"])
    stage = PipelineStage(module, 0, 1, "cpu", group=mesh["pp"].get_group())
    made = get_schedule_class("1F1B")([stage], 4, loss_fn=mse, timeout=60.0)
    with pytest.raises(InputError, match="has tensor-parallel parameters"):
        made.step(rand(ROWS, WIDTH), target=rand(ROWS, WIDTH))


def test_ddp_around_tensor_parallel_modules_is_refused() -> None:
    # Their parameters leave the module in its first forward: later steps did not average them.
    run_on_ranks(4, ddp_around_shards)
