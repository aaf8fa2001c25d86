"""Compare the boxes of shards with torch's own ways of dividing tensors."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from rapidformer_templates.engines.boxes import boxes_of, local_boxes, local_shape, local_values

WHOLE = torch.arange(7 * 12 * 5.0).view(7, 12, 5)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_a_shard_is_what_chunk_gives(dim: int, size: int) -> None:
    chunks = WHOLE.chunk(size, dim)
    for rank in range(size):
        part = local_values(WHOLE, [Shard(dim)], [size], [rank])
        expected = chunks[rank] if rank < len(chunks) else WHOLE.narrow(dim, 0, 0)
        assert torch.equal(part, expected)
        assert local_shape(tuple(WHOLE.shape), [Shard(dim)], [size], [rank]) == tuple(expected.shape)


@pytest.mark.parametrize(("parts", "size"), [(3, 2), (3, 4), (2, 3)])
def test_of_fused_parts_a_rank_has_a_share_of_each(parts: int, size: int) -> None:
    placement = _StridedShard(1, split_factor=parts)
    for rank in range(size):
        expected = torch.cat([part.chunk(size, 1)[rank] for part in WHOLE.chunk(parts, 1)], 1)
        assert torch.equal(local_values(WHOLE, [placement], [size], [rank]), expected)
        assert len(boxes_of(tuple(WHOLE.shape), [placement], [size], [rank])) == parts


@pytest.mark.parametrize(
    "placements",
    [[Shard(0), Shard(1)], [Shard(1), Shard(1)], [Replicate(), Shard(2)], [_StridedShard(1, split_factor=3), Shard(1)]],
    ids=str,
)
def test_the_boxes_of_all_ranks_fill_the_whole_once(placements: list) -> None:
    copies = 2 if isinstance(placements[0], Replicate) else 1
    counts = torch.zeros_like(WHOLE)
    rebuilt = torch.zeros_like(WHOLE)
    for coordinate in itertools.product(range(2), range(3)):
        part = local_values(WHOLE, placements, [2, 3], coordinate)
        held = 0
        for box in boxes_of(tuple(WHOLE.shape), placements, [2, 3], coordinate):
            rebuilt[box.whole] = part[box.local]
            counts[box.whole] += 1
            held += part[box.local].numel()
        assert held == part.numel()
    assert torch.equal(counts, torch.full_like(counts, copies))
    assert torch.equal(rebuilt, WHOLE)


def test_a_plain_tensor_is_one_box_and_a_scalar_too() -> None:
    (box,) = local_boxes(WHOLE)
    assert (box.offset, box.shape) == ((0, 0, 0), tuple(WHOLE.shape))
    (box,) = local_boxes(torch.tensor(3.0))
    assert box.shape == ()


def test_an_empty_shard_has_no_box() -> None:
    assert boxes_of((3, 2), [Shard(0)], [4], [3]) == []
    assert local_values(torch.ones(3, 2), [Shard(0)], [4], [3]).shape == (0, 2)


def test_parts_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="7 cannot be divided into 3 parts"):
        boxes_of((7,), [_StridedShard(0, split_factor=3)], [2], [0])
