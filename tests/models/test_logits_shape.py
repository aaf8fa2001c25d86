"""Views, flattenings and indices that keep complete rows of logits, found by what torch does to a different width."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from rapidformer_templates.models.divided_tensor import flattens_rows, rows_of_view, selects_rows

SHAPE, WIDTH = (4, 6, 5), 7
"""Logits of 5 words, whose rows are computed from 7 hidden features. No size is a multiple of another one."""
WHOLE = torch.arange(4 * 6 * 5).view(SHAPE)
ROWS = torch.arange(4 * 6)
HIDDEN = ROWS.view(4, 6, 1).expand(4, 6, WIDTH).contiguous()


def assert_same_rows(logits: torch.Tensor, hidden: torch.Tensor) -> None:
    assert logits.shape[:-1] == hidden.shape[:-1]
    assert torch.equal(logits[..., 0] // 5, hidden[..., 0])


@pytest.mark.parametrize("sizes", [(24, 5), (-1, 5), (24, -1), (4, 3, 2, 5), (2, 12, -1), (2, -1, 5)])
def test_views_of_whole_rows(sizes: tuple[int, ...]) -> None:
    rows = rows_of_view(sizes, SHAPE)
    assert rows is not None
    assert_same_rows(WHOLE.view(sizes), HIDDEN.view(*rows, WIDTH))


@pytest.mark.parametrize("sizes", [(120,), (-1,), (5, 24), (12, 10), (4, 30), (0, -1), ()])
def test_views_that_cut_rows(sizes: tuple[int, ...]) -> None:
    assert rows_of_view(sizes, SHAPE) is None


def test_flattening() -> None:
    for start, end in itertools.product(range(-3, 3), repeat=2):
        if start % 3 > end % 3:
            continue
        flat = WHOLE.flatten(start, end)
        assert flattens_rows(3, start, end) == (flat.shape[-1] == SHAPE[-1]), (start, end)
        if flattens_rows(3, start, end):
            assert_same_rows(flat, HIDDEN.flatten(start, end))


MASK = torch.tensor([True, False, True, True])
ENTRIES = (0, slice(None), slice(1, None), slice(None, -1), ..., None, MASK[:4], torch.tensor([2, 0]))


def test_every_index_of_a_few_entries() -> None:
    taken = 0
    for length in (1, 2, 3, 4):
        for index in itertools.product(ENTRIES, repeat=length):
            taken += _index(index)
    for index in ENTRIES:
        taken += _index(index)
    assert taken > 100


def _index(index: Any) -> bool:
    try:
        logits = WHOLE[index]
    except (IndexError, RuntimeError):
        return False
    if not selects_rows(index, 3):
        return False
    assert_same_rows(logits, HIDDEN[index])
    assert logits.shape[-1] == SHAPE[-1]
    return True
