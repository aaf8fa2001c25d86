"""The unigram loss, compared with the likelihood computed token by token."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from rapidformer_templates.data.indexed import tools
from rapidformer_templates.data.indexed.dataset import IndexedDataset
from rapidformer_templates.data.indexed.tools import add_sums
from rapidformer_templates.data.indexed.writer import IndexedWriter
from rapidformer_templates.errors import DataError


def test_unigram_loss_is_that_of_single_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "CHUNK", 37)  # so that counting needs several chunks
    generator = np.random.default_rng(0)
    documents = [generator.zipf(1.5, size).clip(max=99).astype(np.uint16) for size in generator.integers(1, 40, 60)]
    with IndexedWriter(tmp_path / "set", np.dtype(np.uint16)) as writer:
        writer.add(np.concatenate(documents), np.array([len(d) for d in documents]))
    train = [int(token) for document in documents[5:50] for token in document]
    held_out = [int(token) for document in documents[50:] for token in document]
    counts, size = Counter(train), max(train + held_out) + 1
    expected = -sum(math.log((counts[token] + 1) / (len(train) + size)) for token in held_out) / len(held_out)
    found = tools.unigram_loss(IndexedDataset(tmp_path / "set"), (5, 50), (50, 60))
    assert found == pytest.approx(expected, rel=1e-12)


def test_negative_tokens_are_refused(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "set", np.dtype(np.int32)) as writer:
        writer.add(np.array([1, 2, -3, 4]), np.array([2, 2]))
    with pytest.raises(DataError, match="there are negative tokens, such as -3"):
        tools.counts_of(IndexedDataset(tmp_path / "set"), (0, 2))
    with pytest.raises(DataError, match="there are negative tokens, such as -3"):
        add_sums(str(tmp_path / "set"))
