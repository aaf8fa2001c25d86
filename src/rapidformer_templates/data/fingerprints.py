"""Checksums of samples, which recognize them in another pass over the data, in another process and after a resume."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from rapidformer_templates.data.collate import Ragged, TokenizedSamples
from rapidformer_templates.data.indexed.blend import Blend, ShuffledEpochs
from rapidformer_templates.data.loader import load
from rapidformer_templates.data.order import BatchRequest, Stream
from rapidformer_templates.data.types import Batch, Data, Endless

PROBES = 16
"""Number of samples that are compared when a run is resumed."""

Fingerprint = Mapping[str, Any]
"""Checksums of training samples (``some`` and ``all``) and the ``text`` of the first one. Empty if it is unknown."""

KEPT, SHOWN = 4000, 20
"""Characters of that text that are kept, and that are shown on each side of a difference."""


def checksum(sample: object, start: int = 0) -> int:
    """Return the CRC-32 of the content of a sample: tensors, arrays, images, texts and numbers in any containers.

    An object of another class only counts with the name of its class.

    Args:
        start: checksum of what comes before.
    """
    if isinstance(sample, Ragged):
        sample = (sample.values, sample.lengths)
    elif isinstance(sample, Mapping):
        sample = list(sample.items())
    elif dataclasses.is_dataclass(sample):
        sample = list(vars(sample).items())
    elif isinstance(sample, torch.Tensor):
        sample = sample.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    elif isinstance(sample, np.ndarray) and sample.dtype == object:
        sample = sample.tolist()
    if isinstance(sample, list | tuple):
        for part in sample:
            start = checksum(part, start)
        return zlib.crc32(b"%d" % len(sample), start)
    if hasattr(sample, "tobytes"):
        return zlib.crc32(sample.tobytes(), start)
    is_plain = sample is None or isinstance(sample, str | bytes | bool | int | float | complex)
    return zlib.crc32(repr(sample if is_plain else type(sample)).encode(errors="surrogatepass"), start)


def first_samples(data: Data, seed: int) -> tuple[list[int], Batch]:
    """Return checksums of some training samples as they are loaded, and the first one alone in a batch.

    The first ones of a stream, else samples from all parts of the set. Empty if a sample is another one each time.
    """
    samples = data.train
    assert samples is not None
    indices = range(PROBES)
    if not isinstance(samples, Endless):
        indices = np.unique(np.linspace(0, len(samples) - 1, PROBES).astype(int)).tolist()
    requests = [BatchRequest([index], (seed, Stream.SAMPLE), [index]) for index in (0, *indices)]
    batches = [loaded.batch for loaded in load(samples, data, requests, workers=0, pin_memory=False)]
    again, *checksums = map(checksum, batches)
    return (checksums if again == checksums[0] else []), batches[0]


def contents(samples: object) -> int | None:
    """Return a checksum of all samples of a set that has them in memory, or of the sets of a mixture. Else None."""
    if isinstance(samples, TokenizedSamples):
        return checksum(samples.fields)
    if isinstance(samples, ShuffledEpochs):
        return contents(samples.samples)
    return checksum([contents(one) for one in samples.sets]) if isinstance(samples, Blend) else None


def difference(was: Fingerprint, now: Fingerprint) -> str | None:
    """Return how the samples of two fingerprints differ, or None if no difference is known."""
    if not was or not now or (was["some"], was["all"]) == (now["some"], now["all"]):
        return None
    texts = was["text"], now["text"]
    if texts[0] != texts[1]:
        common = next((i for i, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), min(map(len, texts)))
        before, after = (repr(text[max(common - SHOWN, 0) : common + SHOWN]) for text in texts)
        return f"the first one has {after} where it had {before}"
    others = sum(a != b for a, b in zip(was["some"], now["some"], strict=True))
    return f"{others} of {len(now['some'])} that are compared differ" if others else "another one differs"
