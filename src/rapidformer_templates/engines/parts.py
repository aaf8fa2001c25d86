"""The parts of a tensor that workers get, and who sends which values for that if each has an equal share of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch.distributed.tensor import Placement

from rapidformer_templates.engines.boxes import Index


@dataclass(frozen=True)
class Parts:
    """The part of a tensor that each worker gets.

    Attributes:
        placement: how the tensor is divided over ``size`` workers.
        ranks: the rank among them, for each worker that builds the model. Several workers may get the same part.
    """

    placement: Placement
    size: int
    ranks: tuple[int, ...]

    def index(self, shape: tuple[int, ...], worker: int) -> Index:
        """Return the values of a tensor of ``shape`` that a worker gets."""
        return Index.of_rank(shape, [self.placement], [self.size], [self.ranks[worker]])


class View(NamedTuple):
    """Arguments of ``torch.Tensor.as_strided``."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> View:
        return cls(tensor.size(), tensor.stride(), int(tensor.storage_offset()))


class PartExchange(NamedTuple):
    """The values of a tensor that this worker sends to another one from its share, and receives for its part."""

    peer: int
    sent: Sequence[View]
    received: Sequence[View]


@lru_cache(maxsize=256)  # the blocks of a model have the same shapes
def exchanges_of(shape: tuple[int, ...], parts: Parts, count: int, worker: int) -> Sequence[PartExchange]:
    """Return what a worker exchanges with each other one, so that all get their parts of a tensor.

    Args:
        count: elements of the share that each worker has.
    """
    total = math.prod(shape)
    own, part = parts.index(shape, worker), torch.empty(parts.index(shape, worker).local, device="meta")
    sent_to: dict[int, list[View]] = {}  # by the rank of the receiver
    exchanges = []
    for peer, rank in enumerate(parts.ranks):
        if rank not in sent_to:
            sent_to[rank] = [
                View.of(values) for _, values in _in_share(shape, parts.index(shape, peer), worker, count, total)
            ]
        received = [View.of(part[place]) for place, _ in _in_share(shape, own, peer, count, total)]
        if sent_to[rank] or received:
            exchanges.append(PartExchange(peer, sent_to[rank], received))
    return exchanges


def _in_share(
    shape: tuple[int, ...], index: Index, worker: int, count: int, total: int
) -> Iterator[tuple[tuple[slice, ...], torch.Tensor]]:
    """Yield (position in the part, values) for each box that a part has in common with the share of a worker."""
    start, end = min(worker * count, total), min((worker + 1) * count, total)
    return index.parts_in_run(shape, start, torch.empty(end - start, device="meta"))


@lru_cache(maxsize=256)
def starts_in_file(shape: tuple[int, ...], parts: Parts) -> Sequence[int] | None:
    """Return where each worker's part begins in the flattened tensor. None if a part is not a run of whole rows."""
    starts = [parts.index(shape, worker).start_of_run(shape) for worker in range(len(parts.ranks))]
    known = [start for start in starts if start is not None]
    return known if len(known) == len(starts) else None
