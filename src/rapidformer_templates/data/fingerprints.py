"""Checksums of samples, which recognize them in another pass over the data and in another process."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Mapping

import numpy as np
import torch


def checksum(sample: object, start: int = 0) -> int:
    """Return the CRC-32 of the content of a sample: tensors, arrays, images, texts and numbers in any containers.

    Of an object of another class only the name of the class counts.

    Args:
        start: checksum of what comes before.
    """
    if dataclasses.is_dataclass(sample):
        sample = vars(sample)
    if isinstance(sample, torch.Tensor):
        sample = sample.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    if isinstance(sample, np.ndarray) and sample.dtype == object:
        sample = sample.tolist()
    if isinstance(sample, Mapping):
        sample = list(sample.items())
    if isinstance(sample, list | tuple):
        for part in sample:
            start = checksum(part, start)
        return zlib.crc32(b"%d" % len(sample), start)
    if hasattr(sample, "tobytes"):
        return zlib.crc32(sample.tobytes(), start)
    is_plain = sample is None or isinstance(sample, str | bytes | bool | int | float | complex)
    return zlib.crc32(repr(sample if is_plain else type(sample)).encode(errors="surrogatepass"), start)
