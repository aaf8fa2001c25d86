"""Number of rows whose logits are in memory at a time, and the memory that this saves.

The planner needs no torch here.
"""

from __future__ import annotations

CHUNK_BYTES = {"cpu": 64 * 2**20, "accelerator": 512 * 2**20}
"""Bytes that the fp32 logits of a chunk may take.

The gradient of the head's weight is accumulated once per chunk. An accelerator computes products faster than
that, so its chunks are larger.
"""


def rows_at_once(rows: int, vocabulary: int, device: str) -> int:
    """Return how many of ``rows`` have logits in memory at a time. It is at most a quarter, so never all of them."""
    return max(1, min(CHUNK_BYTES["cpu" if device == "cpu" else "accelerator"] // (4 * vocabulary), -(-rows // 4)))


def saved_bytes(rows: int, vocabulary: int, *, half: bool, device: str = "accelerator") -> int:
    """Return the bytes by which fusing the loss lowers the peak.

    Without fusing, the loss keeps the log probability and its gradient in fp32 for each row and word. In half
    precision, it also keeps the logits or their gradient. That makes 8 or 10 bytes. With fusing, only a chunk of
    rows needs these numbers.

    Args:
        rows: tokens of a micro batch.
        vocabulary: words that the head scores.
        half: whether products are computed in 16 bits.
        device: ``cpu``, or torch's name of the accelerator.
    """
    return max(0, (rows - rows_at_once(rows, vocabulary, device)) * vocabulary * (10 if half else 8))
