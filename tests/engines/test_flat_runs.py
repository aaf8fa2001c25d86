"""Runs of a flattened tensor equal the boxes that describe them."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from rapidformer_templates.engines.flat_runs import boxes, pieces_of, read_into


@given(shape=st.lists(st.integers(1, 5), max_size=4), run=st.data())
def test_a_run_is_its_boxes(shape: list[int], run: st.DataObject) -> None:
    tensor = torch.arange(math.prod(shape), dtype=torch.float64).view(shape)
    start = run.draw(st.integers(0, tensor.numel()))
    count = run.draw(st.integers(0, tensor.numel() - start))
    values = tensor.flatten()[start : start + count]
    found = list(pieces_of("w", shape, start, values))
    assert len(found) <= max(1, 2 * len(shape) - 1)
    for piece in found:
        place = tuple(slice(o, o + s) for o, s in zip(piece.offset, piece.tensor.shape, strict=True))
        assert torch.equal(tensor[place], piece.tensor)
    assert sum(piece.tensor.numel() for piece in found) == count


@given(shape=st.lists(st.integers(1, 5), min_size=1, max_size=4), run=st.data())
def test_what_is_read_is_the_run(shape: list[int], run: st.DataObject) -> None:
    tensor = torch.arange(math.prod(shape)).view(shape)

    class Whole:
        def read(self, kind: str, name: str, offset: tuple[int, ...], size: tuple[int, ...]) -> torch.Tensor:
            return tensor[tuple(slice(o, o + s) for o, s in zip(offset, size, strict=True))]

    start = run.draw(st.integers(0, tensor.numel()))
    target = torch.full((run.draw(st.integers(0, tensor.numel() - start)),), -1)
    read_into(target, Whole(), "weights", "w", shape, start)
    assert torch.equal(target, tensor.flatten()[start : start + target.numel()])


def test_whole_rows_are_one_box() -> None:
    assert list(boxes((4, 3), 3, 6)) == [((1, 0), (2, 3))]
    assert list(boxes((), 0, 1)) == [((), ())]
