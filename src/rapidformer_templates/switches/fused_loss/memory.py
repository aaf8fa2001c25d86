"""How many rows have logits at a time, and what that saves. Imports no torch: the planner asks."""

from __future__ import annotations

CHUNK_BYTES = {"cpu": 64 * 2**20, "accelerator": 512 * 2**20}
"""So much may the logits of a chunk take in fp32. The gradient of the head's weight is added to once a chunk, so an
accelerator, whose products take less time than that, wants larger ones."""


def rows_at_once(rows: int, vocabulary: int, device: str) -> int:
    """How many of ``rows`` have their logits in memory at a time: at most a quarter, so that all never have."""
    return max(1, min(CHUNK_BYTES["cpu" if device == "cpu" else "accelerator"] // (4 * vocabulary), -(-rows // 4)))


def saved_bytes(rows: int, vocabulary: int, *, half: bool, device: str = "accelerator") -> int:
    """What fusing the loss takes from the peak of memory.

    Without it the loss keeps, for each row and word, the logarithm of the probability and its gradient
    in fp32, and in half precision the logits or their gradient besides: 8 or 10 bytes. With it the same
    numbers are there for a chunk of rows.

    Args:
        rows: tokens of a micro batch.
        vocabulary: words that the head scores.
        half: whether products are computed in 16 bits.
        device: ``cpu``, or what torch calls the accelerator.
    """
    return max(0, (rows - rows_at_once(rows, vocabulary, device)) * vocabulary * (10 if half else 8))
