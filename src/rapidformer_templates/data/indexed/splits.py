"""``--split``: which sequences are for training, validation and test."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import pairwise

import numpy as np

from rapidformer_templates.errors import DataError


def split_shares(split: str) -> list[float]:
    """The three shares of ``--split``; those that are not given are 0.

    Raises:
        DataError: the text is not up to three shares, or they sum to nothing.
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
    """The sequences [first, last) of each part; each is in one part.

    Shares are cumulated and rounded as Megatron-LM's core does.
    """
    parts = (np.asarray(shares) / np.sum(shares)).tolist()
    sums: list[float] = reduce(lambda done, part: [*done, done[-1] + part], parts, [0.0])
    return list(pairwise(round(share * count) for share in sums))
