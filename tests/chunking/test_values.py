from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask
from torch.testing._internal.distributed.fake_pg import FakeStore

from fxpipe.chunking.values import even_parts
from fxpipe.errors import InputError
from fxpipe.microbatch import (
    TensorChunkSpec,
    merge_chunks,
    split_args_kwargs_into_chunks,
    split_batch,
    split_target,
)


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", range(12))
@pytest.mark.parametrize("parts", range(1, 12))
def test_even_parts_are_those_of_tensor_split(size, parts):
    want = [len(part) for part in torch.empty(size).tensor_split(parts)]

    assert list(even_parts(size, parts)) == want


# ---------------------------------------------------------------------------------- BlockMask

LENGTH = 256
DOCUMENTS = torch.arange(5 * LENGTH).view(5, LENGTH) % 7 // 2


def same_document(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (DOCUMENTS[b, q_idx] == DOCUMENTS[b, kv_idx]) & (q_idx >= kv_idx)


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def block_mask(mod: Callable[..., Any], rows: int | None, **options: Any) -> BlockMask:
    return create_block_mask(mod, rows, None, LENGTH, LENGTH, device="cpu", **options)


def dense(mask: BlockMask, rows: int) -> torch.Tensor:
    """What the mask lets through, row by row, from its function."""
    return create_mask(mask.mask_mod, rows, 1, LENGTH, LENGTH, device="cpu")


def tensors(mask: BlockMask) -> dict[str, torch.Tensor]:
    return {name: value for name, value in vars(mask).items() if isinstance(value, torch.Tensor)}


@pytest.fixture
def attention(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    # Uncompiled attention warns once that it is slow; here it is wanted.
    monkeypatch.setattr(flex, "_WARNINGS_SHOWN", {"flex_attention_performance"}, raising=True)
    return flex.flex_attention


@pytest.mark.parametrize("chunks", [2, 3, 5])
@pytest.mark.parametrize("has_full_blocks", [True, False])
def test_block_mask_is_split_with_its_function(chunks, has_full_blocks):
    mask = block_mask(same_document, 5, separate_full_blocks=has_full_blocks)

    _, kwargs = split_args_kwargs_into_chunks((rand(5, 2),), {"mask": mask, "no": None}, chunks)

    rows = [chunk["mask"].kv_num_blocks.size(0) for chunk in kwargs]
    assert rows == list(even_parts(5, chunks))
    assert [chunk["no"] for chunk in kwargs] == [None] * chunks
    got = torch.cat([dense(c["mask"], size) for c, size in zip(kwargs, rows, strict=True)])
    assert torch.equal(got, dense(mask, 5))
    for name, value in tensors(mask).items():
        assert torch.equal(torch.cat([getattr(c["mask"], name) for c in kwargs]), value)


def test_attention_with_split_masks_is_that_of_the_batch(attention):
    mask = block_mask(same_document, 5)
    query, key, value = (rand(5, 2, LENGTH, 16, seed=i) for i in range(3))
    want = attention(query, key, value, block_mask=mask)

    args, kwargs = split_args_kwargs_into_chunks((query, key, value), {"block_mask": mask}, 3)
    got = [attention(*a, **k) for a, k in zip(args, kwargs, strict=True)]

    assert torch.equal(torch.cat(got), want)


def test_block_mask_of_one_row_stands_for_all_rows():
    mask = block_mask(causal, None)

    for spec in (None, {"mask": TensorChunkSpec(0)}):
        _, kwargs = split_args_kwargs_into_chunks((rand(8, 2),), {"mask": mask}, 4, None, spec)
        assert all(chunk["mask"] is mask for chunk in kwargs)
    assert merge_chunks([chunk["mask"] for chunk in kwargs]) is mask


def test_batch_of_one_row_keeps_its_block_mask():
    mask = block_mask(causal, 1)

    _, [kwargs] = split_args_kwargs_into_chunks((rand(1, 2),), {"mask": mask}, 1)

    assert kwargs["mask"] is mask


def test_block_mask_of_other_rows_is_refused():
    mask = block_mask(same_document, 5)

    with pytest.raises(
        InputError, match=r"kwargs\['mask'\]: BlockMask\[5, 1, 256, 256\] has 5 rows"
    ):
        split_args_kwargs_into_chunks((rand(8, 2),), {"mask": mask}, 4)
    with pytest.raises(InputError, match=r"can only be split by TensorChunkSpec\(0\)"):
        split_args_kwargs_into_chunks((), {"mask": mask}, 2, None, {"mask": TensorChunkSpec(1)})


def test_block_masks_of_outputs_are_not_merged_but_compared():
    mask = block_mask(causal, 2)

    assert merge_chunks([mask, mask]) is mask
    with pytest.raises(InputError, match=r"(?s)gave different values .*say how in the merge spec"):
        merge_chunks([mask, block_mask(same_document, 2)])


def test_part_of_a_block_mask_that_stands_for_all_rows_is_kept_whole():
    mask = block_mask(same_document, 5)
    mask.full_kv_num_blocks, mask.full_kv_indices = (
        mask.full_kv_num_blocks[:1],
        mask.full_kv_indices[:1],
    )

    _, kwargs = split_args_kwargs_into_chunks((), {"mask": mask}, 2)

    assert kwargs[1]["mask"].full_kv_indices is mask.full_kv_indices
    assert kwargs[1]["mask"].kv_indices.size(0) == 2


def test_split_of_a_split_block_mask_is_right():
    mask = block_mask(same_document, 5)

    _, [_, second] = split_args_kwargs_into_chunks((), {"mask": mask}, 2)
    _, kwargs = split_args_kwargs_into_chunks((), second, 2)

    got = torch.cat([dense(chunk["mask"], 1) for chunk in kwargs])
    assert torch.equal(got, dense(mask, 5)[3:])


# ------------------------------------------------------------------------------------ DTensor


@pytest.fixture
def as_rank() -> Iterator[Callable[..., Any]]:
    """Pretend to be one rank of a mesh; any communication would be seen, none is done."""

    def start(rank: int, *sizes: int) -> Any:
        stop()
        count = torch.Size(sizes).numel()
        dist.init_process_group("fake", rank=rank, world_size=count, store=FakeStore())
        return init_device_mesh("cpu", sizes)

    def stop() -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    yield start
    stop()


def shard_of(whole: torch.Tensor, rank: int, count: int, dim: int = 0) -> torch.Tensor:
    pieces = whole.chunk(count, dim)
    return pieces[rank] if rank < len(pieces) else whole.narrow(dim, 0, 0)


def distribute(whole: torch.Tensor, mesh: Any, rank: int, placement: Any) -> DTensor:
    local = whole
    if isinstance(placement, Shard):
        local = shard_of(whole, rank, mesh.size(), placement.dim)
    return DTensor.from_local(
        local.clone(), mesh, [placement], run_check=False, shape=whole.shape, stride=whole.stride()
    )


@pytest.mark.parametrize("placement", [Replicate(), Shard(1), Partial()], ids=str)
def test_dtensor_is_split_by_rows_without_communication(as_rank, placement):
    whole = rand(10, 4)
    for rank in range(2):
        value = distribute(whole, as_rank(rank, 2), rank, placement)

        with CommDebugMode() as communication:
            split = split_batch((value, whole), {}, 4)
            merged = merge_chunks([args[0] for args in split.args], None, rows=split.rows)

        assert communication.get_total_counts() == 0
        assert split.rows == (3, 3, 2, 2)
        for (got, plain), rows in zip(split.args, split.rows, strict=True):
            assert (got.shape, got.placements) == ((rows, 4), (placement,))
            want = shard_of(plain, rank, 2, 1) if placement == Shard(1) else plain
            assert torch.equal(got.to_local(), want)
        assert (merged.shape, merged.stride()) == (value.shape, value.stride())
        assert torch.equal(merged.to_local(), value.to_local())


@pytest.mark.parametrize("rows", [8, 10, 7, 12])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_dtensor_sharded_along_the_batch_is_split_shard_by_shard(as_rank, rows, count):
    # Every rank deals its own rows. The whole size of a microbatch is the sum over the
    # shards, which is not what an even split of the whole gives: 10 rows on 2 ranks make
    # microbatches of 4, 2, 2 and 2 rows, not of 3, 3, 2 and 2.
    whole = torch.arange(rows * 2.0).view(rows, 2)
    chunks = -(-rows // count)
    locals_of: list[list[torch.Tensor]] = [[] for _ in range(chunks)]
    for rank in range(count):
        value = distribute(whole, as_rank(rank, count), rank, Shard(0))

        with CommDebugMode() as communication:
            split = split_batch((value, {"twice": value}), {}, chunks)
            merged = merge_chunks([args[0] for args in split.args], None)

        assert communication.get_total_counts() == 0
        assert sum(split.rows) == rows
        for index, args in enumerate(split.args):
            assert args[0].shape == (split.rows[index], 2)
            locals_of[index].append(args[0].to_local())
        assert merged.shape == value.shape
        assert torch.equal(merged.to_local(), value.to_local())
    for index, shards in enumerate(locals_of):
        dealt = torch.cat(shards)
        assert len(dealt) == split.rows[index]
        want = dealt.chunk(count)
        assert [len(shard) for shard in shards if len(shard)] == [len(shard) for shard in want]


def test_dtensor_sharded_by_two_mesh_dimensions(as_rank):
    whole = rand(8, 2)
    mesh = as_rank(3, 2, 2)
    value = DTensor.from_local(
        whole[6:], mesh, [Shard(0), Shard(0)], run_check=False, shape=(8, 2), stride=(2, 1)
    )

    split = split_batch((value,), {}, 2)

    assert split.rows == (4, 4)
    assert torch.equal(split.args[1][0].to_local(), whole[7:])


def test_shards_that_cannot_be_dealt_alike_are_refused(as_rank):
    # 7 rows on a 2 x 3 mesh: shards of 2, 2, 0, 1, 1 and 1 rows. Of these, microbatch 0
    # would get 1, 1, 0, 1, 1 and 1 rows, but a DTensor of 5 rows has 1, 1, 1, 1, 1 and 0.
    mesh = as_rank(0, 2, 3)
    value = DTensor.from_local(
        rand(2, 2), mesh, [Shard(0), Shard(0)], run_check=False, shape=(7, 2), stride=(2, 1)
    )

    with pytest.raises(
        InputError, match=r"args\[0\].*shards of 2, 2, 0, 1, 1, 1 rows cannot be spl"
    ):
        split_batch((value,), {}, 2)


def test_rows_of_a_shard_are_not_mixed_with_rows_of_the_whole(as_rank):
    # Microbatch 0 of the sharded input has rows 0, 1, 4 and 5; of the other, rows 0 to 3.
    value = distribute(rand(8, 2), as_rank(0, 2), 0, Shard(0))

    with pytest.raises(InputError) as found:
        split_batch((value,), {}, 2, target=rand(8))

    assert str(found.value).splitlines()[1:] == [
        "  args[0]: float32[8, 2], shards of 4, 4 rows",
        "  target: float32[8], shards of 8 rows",
    ]


def test_sharded_target_takes_only_the_rows_it_can_have(as_rank):
    target = distribute(rand(10), as_rank(0, 2), 0, Shard(0))

    _, rows = split_target(target, 4)

    assert rows == (4, 2, 2, 2)
    with pytest.raises(InputError, match="is split into 4, 2, 2, 2 rows, not into 3, 3, 2, 2"):
        split_target(target, 4, (3, 3, 2, 2))


def test_dtensor_gradients_flow_back(as_rank):
    value = distribute(rand(6, 2), as_rank(0, 2), 0, Shard(0)).requires_grad_()

    split = split_batch((value,), {}, 3)
    (split.args[1][0].to_local() * 2).sum().backward()

    assert value.grad.to_local().tolist() == [[0, 0], [2, 2], [0, 0]]


def test_too_few_rows_in_a_sharded_batch_are_an_error(as_rank):
    value = distribute(rand(8, 2), as_rank(0, 4), 0, Shard(0))

    with pytest.raises(InputError, match=r"8 rows in shards of 2, 2, 2, 2 .* 3 microbatches"):
        split_batch((value,), {}, 3)


def test_dtensors_that_do_not_fit_are_not_joined(as_rank):
    mesh = as_rank(0, 2)
    rows, columns = (distribute(rand(4, 4), mesh, 0, Shard(dim)) for dim in (0, 1))
    odd = distribute(rand(5, 4), mesh, 0, Shard(0))

    with pytest.raises(InputError, match=r"output: DTensors with placements .*redistribute"):
        merge_chunks([rows, columns], None)
    with pytest.raises(InputError, match=r"DTensors of 5, 5 rows, .* cannot be joined shard by"):
        merge_chunks([odd, odd], None)
    with pytest.raises(InputError, match=r"output: microbatch"):
        merge_chunks([rows, rand(4, 4)], None)
