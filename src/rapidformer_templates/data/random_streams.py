"""Streams of random numbers for the data."""

from __future__ import annotations

import enum


class Stream(enum.IntEnum):
    """The second number of a seed ``(seed, stream, …)``. Streams are independent of each other.

    A resumed run must draw the same numbers, so these values never change.
    """

    ORDER = 0
    """Permutations of the samples, per epoch."""
    BATCHES = 1
    """The order of batches that are grouped by length."""
    SAMPLE = 2
    """Random changes of a training sample."""
    EVALUATION = 3
    """Random changes of an evaluation sample."""
    PACKED_TRAINING = 4
    """Assignment of samples to packed rows."""
    PACKED_VALIDATION = 5
    DOCUMENTS = 7
    """Which pieces of documents are split in two, and where."""
    TRIAL = 8
    """Changes of the sample with which a switch tries the loss."""
    NOISE = 9
    """Noise on the embeddings of a training sample."""
    SHARDS = 10
    """The order of the files of a stream, per epoch."""
    BLOCKS = 11
    """The order of the rows and the samples in a block of a stream."""
    MIXED = 12
    """The order of a set in a mixture, per epoch."""
    PAIR_SAMPLES = 18
    PAIR_CHUNKS = 19
    PAIR_ORDERS = 20
