"""Runs of a flattened tensor equal the boxes that describe them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from hypothesis import given
from hypothesis import strategies as st

from rapidformer_templates.engines.boxes import Index, boxes_of_run
from rapidformer_templates.engines.shards import Shard


@given(shape=st.lists(st.integers(1, 5), max_size=4), run=st.data())
def test_a_run_is_its_boxes(shape: list[int], run: st.DataObject) -> None:
    tensor = torch.arange(math.prod(shape), dtype=torch.float64).view(shape)
    start = run.draw(st.integers(0, tensor.numel()))
    count = run.draw(st.integers(0, tensor.numel() - start))
    values = tensor.flatten()[start : start + count]
    found = list(Index.whole(shape).run(start).parts(values))
    assert len(found) <= max(1, 2 * len(shape) - 1)
    for offset, part in found:
        place = tuple(slice(o, o + s) for o, s in zip(offset, part.shape, strict=True))
        assert torch.equal(tensor[place], part)
    assert sum(part.numel() for _, part in found) == count


@given(shape=st.lists(st.integers(1, 5), min_size=1, max_size=4), run=st.data())
def test_what_is_read_is_the_run(shape: list[int], run: st.DataObject) -> None:
    tensor = torch.arange(math.prod(shape)).view(shape)

    def read(offset: Sequence[int], size: Sequence[int]) -> torch.Tensor:
        return tensor[tuple(slice(o, o + s) for o, s in zip(offset, size, strict=True))]

    start = run.draw(st.integers(0, tensor.numel()))
    target = torch.full((run.draw(st.integers(0, tensor.numel() - start)),), -1)
    shard = Shard("w", tuple(shape), Index.whole(shape).run(start), target)
    again = shard.read_like(read)
    shard.fill(read)
    assert torch.equal(target, tensor.flatten()[start : start + target.numel()])
    assert torch.equal(again, target)


def test_whole_rows_are_one_box() -> None:
    assert list(boxes_of_run((4, 3), 3, 6)) == [((1, 0), (2, 3))]
    assert list(boxes_of_run((), 0, 1)) == [((), ())]
