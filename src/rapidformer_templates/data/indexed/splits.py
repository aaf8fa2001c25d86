"""Splits sequences into training, validation and test parts for ``--split``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import pairwise

import numpy as np

from rapidformer_templates.errors import DataError


def split_shares(split: str) -> list[float]:
    """Return the three shares of ``--split``. Missing shares are 0.

    Raises:
        DataError: the text is not one to three shares, or they sum to 0.
    """
    try:
        shares = [float(share) for share in split.replace("/", ",").split(",")]
    except ValueError:
        shares = []
    if not 1 <= len(shares) <= 3 or min(shares) < 0 or sum(shares) <= 0:
        hint = "write three shares, such as 969,30,1"
        raise DataError(f"'{split}' are not shares of a corpus", where="--split", hint=hint)
    return shares + [0.0] * (3 - len(shares))


def split_sequences(shares: Sequence[float], count: int) -> list[tuple[int, int]]:
    """Return the sequences [first, last) of each part. Each sequence is in one part.

    Shares are accumulated and rounded as in Megatron-LM's core.
    """
    parts = (np.asarray(shares) / np.sum(shares)).tolist()
    sums: list[float] = reduce(lambda done, part: [*done, done[-1] + part], parts, [0.0])
    return list(pairwise(round(share * count) for share in sums))
