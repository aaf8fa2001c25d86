"""The streams of random numbers that the data are drawn from."""

from __future__ import annotations

import enum


class Stream(enum.IntEnum):
    """The second number of a seed ``(seed, stream, …)``: what one stream draws tells nothing of the others.

    A run that goes on draws what it would have drawn, so that the numbers never change.
    """

    ORDER = 0
    """Permutations of the samples, epoch by epoch."""
    BATCHES = 1
    """The order of batches that were made by length."""
    SAMPLE = 2
    """Random changes of a training sample."""
    EVALUATION = 3
    """The same of samples that are evaluated."""
    PACKED_TRAINING = 4
    """Which samples share a row."""
    PACKED_VALIDATION = 5
    DOCUMENTS = 7
    """Which pieces of documents are cut in two, and where."""
    TRIAL = 8
    """Changes of the sample by which a switch tries the loss."""
    NOISE = 9
    """Noise on the embeddings of a training sample."""
    SHARDS = 10
    """The order of the files of a stream, epoch by epoch."""
    BLOCKS = 11
    """The order of the rows and the samples in a block of a stream."""
    MIXED = 12
    """The order of a set in a mixture, epoch by epoch."""
    PAIR_SAMPLES = 18
    PAIR_CHUNKS = 19
    PAIR_ORDERS = 20
