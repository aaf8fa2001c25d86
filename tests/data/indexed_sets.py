"""Small indexed data sets, made on the spot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rapidformer_templates.data.indexed.dataset import IndexedDataset
from rapidformer_templates.data.indexed.writer import IndexedWriter


def numbered(prefix: Path, lengths: Sequence[int], first: int = 0) -> IndexedDataset:
    """A set in which every token is another number, counted from ``first``."""
    tokens = np.arange(first, first + sum(lengths), dtype=np.int32)
    with IndexedWriter(prefix, tokens.dtype, overwrite=True) as writer:
        writer.add(tokens, np.asarray(lengths))
    return IndexedDataset(prefix)
