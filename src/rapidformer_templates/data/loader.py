"""From sample indices to micro batches on their way to the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate
from torch.utils.data._utils.pin_memory import pin_memory as pin

from rapidformer_templates.data.order import SampleOrder
from rapidformer_templates.data.types import Batch, Data


@dataclass(frozen=True)
class Request:
    """The samples of one micro batch of one rank.

    Attributes:
        samples: indices into the data set.
        key: with the place of a sample, what its random changes depend on.
        places: for each sample, its place in the order (in an evaluation, its index).
        idle: there was no sample left for this rank; the batch only keeps it in step with the others.
    """

    samples: list[int]
    key: tuple[int, int]
    places: list[int]
    idle: bool = False


@dataclass
class MicroBatch:
    """A batch with its origin.

    Attributes:
        batch: what ``collate`` made.
        samples: indices of its samples.
        targets: number of targets in it that the loss is a mean over.
        idle: it counts for nothing.
        size: (samples, tokens) in it where one item of the data set holds several samples; None where
            they can be read off the batch.
    """

    batch: Batch
    samples: list[int]
    targets: float = 0
    idle: bool = False
    size: tuple[int, int] | None = None

    @property
    def sample_count(self) -> int:
        """Samples in it."""
        return self.size[0] if self.size else len(self.samples)

    def pin_memory(self) -> MicroBatch:
        """This micro batch in page-locked memory; the loader calls it."""
        self.batch = pin(self.batch)
        return self


class _Fetcher(Dataset[MicroBatch]):
    """A data set of whole micro batches, so that a loader process makes them."""

    def __init__(self, samples: Any, data: Data) -> None:
        self.samples = samples
        self.size_of: Callable[[list[int]], tuple[int, int]] | None = getattr(samples, "size_of", None)
        self.augment = data.augment
        self.collate = data.collate or default_collate

    def __getitem__(self, request: Request) -> MicroBatch:
        many = getattr(self.samples, "__getitems__", None)
        items = many(request.samples) if many else [self.samples[i] for i in request.samples]
        if self.augment:
            generators = (np.random.default_rng((*request.key, place)) for place in request.places)
            items = [self.augment(item, generator) for item, generator in zip(items, generators, strict=True)]
        size = self.size_of(request.samples) if self.size_of else None
        return MicroBatch(self.collate(items), request.samples, idle=request.idle, size=size)


def train_requests(
    order: SampleOrder, start: int, stop: int, *, rank: int, data_size: int, accumulation: int
) -> Iterator[Request]:
    """The requests of one rank for steps ``start`` to ``stop``: ``accumulation`` of them a step.

    A short global batch (the end of an epoch) is spread evenly, so that nothing is lost or doubled.
    """
    shares, key = data_size * accumulation, (order.seed, 2)
    for step in range(start, stop):
        samples, places = (column.tolist() for column in order.step(step))
        for share in range(rank, shares, data_size):
            first, end = len(samples) * share // shares, len(samples) * (share + 1) // shares
            idle = first == end
            piece = slice(0, 1) if idle else slice(first, end)
            yield Request(samples[piece], key, places[piece], idle)


def eval_requests(
    lengths: np.ndarray | None, size: int, seed: int, *, rank: int, data_size: int, micro_batch: int
) -> list[Request]:
    """The requests of one rank for the first ``size`` samples, those of like lengths together.

    Every rank gets equally many; ranks without a sample left get an idle one.
    """
    order = np.arange(size) if lengths is None else np.argsort(lengths[:size], kind="stable")
    batches = [order[i : i + micro_batch] for i in range(0, size, micro_batch)]
    requests = []
    for first in range(0, len(batches), data_size):
        idle = first + rank >= len(batches)
        samples = batches[first if idle else first + rank].tolist()
        requests.append(Request(samples, (seed, 3), samples, idle))
    return requests


def load(samples: Any, data: Data, requests: Any, *, workers: int, pin_memory: bool) -> Iterator[MicroBatch]:
    """Micro batches for ``requests``, made by loader processes or, with none, in this one."""
    fetcher = _Fetcher(samples, data)
    if workers == 0 and not pin_memory:
        return map(fetcher.__getitem__, requests)
    loader = DataLoader(
        fetcher,
        sampler=requests,
        batch_size=None,
        num_workers=workers,
        pin_memory=pin_memory,
        # The loader draws a seed; from its own generator, or a resumed run would see other random numbers.
        generator=torch.Generator(),
    )
    return iter(loader)


def sample_lengths(samples: Any, data: Data, *, training: bool) -> np.ndarray | None:
    """Lengths of the samples where they can be had: ``Data.lengths``, the set's own, or their ``input_ids``.

    A set whose ``lengths`` are None has none: they are all alike, or not known beforehand.
    """
    if training and data.lengths is not None:
        return np.asarray(data.lengths)
    if hasattr(samples, "lengths") and not callable(samples.lengths):
        return None if samples.lengths is None else np.asarray(samples.lengths)
    if len(samples) and isinstance(samples[0], Mapping) and "input_ids" in samples[0]:
        return np.fromiter((len(samples[i]["input_ids"]) for i in range(len(samples))), np.int64, len(samples))
    return None


def to_device(batch: Any, device: torch.device) -> Any:
    """The tensors of a batch on ``device``; everything else as it is."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        moved = [to_device(value, device) for value in batch]
        return type(batch)(*moved) if hasattr(batch, "_fields") else type(batch)(moved)
    move: Callable[..., Any] | None = getattr(batch, "to", None)
    return move(device) if move else batch
