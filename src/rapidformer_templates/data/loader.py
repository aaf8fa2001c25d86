"""From sample indices to micro batches on their way to the device."""

from __future__ import annotations

import copy
import gc
import math
from collections import UserDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, default_collate
from torch.utils.data._utils.pin_memory import pin_memory as pin

from rapidformer_templates.data.checks import checked_batch, collated
from rapidformer_templates.data.collate import collate_to_shape
from rapidformer_templates.data.order import Order, Request
from rapidformer_templates.data.random_streams import Stream
from rapidformer_templates.data.types import Batch, Bookmark, Data
from rapidformer_templates.system import accelerator


def field_of(batch: Batch, name: str) -> torch.Tensor | None:
    """A tensor of a batch by its name, where it has names."""
    get: Callable[[str], torch.Tensor | None] | None = getattr(batch, "get", None)
    return get(name) if get else None


QUESTIONS: Mapping[str, Callable[[np.ndarray], bool]] = {
    "attention_mask": lambda mask: bool(mask.all()),
    "position_ids": lambda positions: bool((np.diff(positions, axis=-1) == 1).all()),
}
"""Fields of a batch that models ask of in each forward, and what."""


@dataclass
class MicroBatch:
    """A batch with its origin.

    Attributes:
        batch: what ``collate`` made.
        samples: indices of its samples.
        targets: number of targets in it that the loss is a mean over.
        idle: it counts for nothing.
        size: (samples, tokens) in it, where the order or the data set knows them; None where they can be
            read off the batch.
        looked: see :meth:`look`.
        positions: for each row, the position of its sample in the order; -1 for a row that counts for nothing.
        bookmark: of a stream, where it stood before these samples.
    """

    batch: Batch
    samples: list[int]
    targets: float = 0
    idle: bool = False
    size: tuple[int, int] | None = None
    looked: dict[str, bool] = field(default_factory=dict)
    positions: Sequence[int] = ()
    bookmark: Bookmark | None = None

    def look(self) -> None:
        """Note what models will ask of the batch's masks and positions, while it is on the host.

        ``looked`` then says of ``attention_mask`` whether it masks nothing, and of ``position_ids`` whether
        each row is one run of numbers: of each that is there, of integers or bools and of shape (samples, tokens).
        """
        self.looked = {}
        for name, question in QUESTIONS.items():
            tensor = field_of(self.batch, name)
            if not isinstance(tensor, torch.Tensor) or tensor.is_floating_point():
                continue
            if tensor.ndim == 2 and tensor.is_cpu:
                self.looked[name] = question(tensor.numpy())

    @property
    def sample_count(self) -> int:
        """Samples in it."""
        return self.size[0] if self.size else len(self.samples)

    @property
    def tokens(self) -> int:
        """Tokens that are not padding."""
        if self.size:
            return self.size[1]
        mask = field_of(self.batch, "attention_mask")
        return self.padded_tokens if mask is None else int(mask.sum())

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the input tokens; empty where the batch has none."""
        ids = field_of(self.batch, "input_ids")
        return () if ids is None else tuple(ids.shape)

    @property
    def padded_tokens(self) -> int:
        """Tokens with padding."""
        return math.prod(self.shape) if self.shape else 0

    def pin_memory(self) -> MicroBatch:
        """This micro batch in page-locked memory; the loader calls it."""
        self.batch = pin(self.batch)
        return self


class _Fetcher(Dataset[MicroBatch]):
    """A data set of whole micro batches, so that a loader process makes them."""

    def __init__(self, samples: Any, data: Data) -> None:
        self.samples = samples
        self.augment = data.augment
        self.collate = data.collate or self._by_default

    def __getitem__(self, request: Request) -> MicroBatch:
        many = getattr(self.samples, "__getitems__", None)
        items = many(request.samples) if many else [self.samples[i] for i in request.samples]
        if self.augment:
            generators = (np.random.default_rng((*request.key, position)) for position in request.positions)
            items = [self.augment(item, generator) for item, generator in zip(items, generators, strict=True)]
        if request.shape is not None:
            batch = collate_to_shape(self.collate, items, request.shape)
            known = (len(items), request.tokens)
            positions = [*request.positions, *[-1] * (request.shape.rows - len(items))]
            return MicroBatch(batch, request.samples, idle=request.idle, size=known, positions=positions)
        size_of: Callable[[list[int]], tuple[int, int]] | None = getattr(self.samples, "size_of", None)
        return MicroBatch(
            checked_batch(self.collate(items)),
            request.samples,
            idle=request.idle,
            size=size_of(request.samples) if size_of else None,
            positions=request.positions,
            bookmark=getattr(self.samples, "bookmark", None),
        )

    @staticmethod
    def _by_default(items: list[Any]) -> Batch:
        return collated(default_collate, items, "build_data()")


def train_requests(
    order: Order, start: int, stop: int, *, rank: int, data_size: int, accumulation: int
) -> Iterator[Request]:
    """The requests of one rank for steps ``start`` to ``stop``: ``accumulation`` of them a step."""
    count = data_size * accumulation
    for step in range(start, stop):
        yield from order.requests(step, count, range(rank, count, data_size))


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
        requests.append(Request(samples, (seed, Stream.EVALUATION), samples, idle))
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
        worker_init_fn=_keep_garbage,
    )
    collects = gc.isenabled()
    gc.disable()  # until the loader processes have begun
    try:
        return iter(loader)
    finally:
        if collects:
            gc.enable()


def _keep_garbage(worker: int) -> None:
    """Never collect, in a forked loader process, what was garbage before the fork.

    The destructor of a process group waits for its threads, which a fork lacks: the loader would hang or crash.
    """
    gc.freeze()
    gc.enable()


def on_device(batches: Iterable[MicroBatch], device: torch.device, ahead: int) -> Iterator[MicroBatch]:
    """The same micro batches with their tensors on ``device``, moved there while it computes earlier ones.

    A CPU has them already. What is to be read of a micro batch on the host must be read before. A batch
    of a class of its own is left for the engine to move.

    Args:
        ahead: micro batches that are on their way besides the one that is handed out.
    """
    side = accelerator.side_stream(device) if accelerator.computes_apart(device) else None
    if side is None:
        yield from batches
        return
    moving: deque[tuple[MicroBatch, torch.Event]] = deque()
    for microbatch in batches:
        if all(isinstance(leaf, torch.Tensor) or not hasattr(leaf, "to") for leaf in _leaves(microbatch.batch)):
            with side:
                microbatch.batch = to_device(microbatch.batch, device)
        moving.append((microbatch, accelerator.recorded_event(device, side)))
        if len(moving) > ahead:
            yield _arrived(*moving.popleft())
    while moving:
        yield _arrived(*moving.popleft())


def _arrived(microbatch: MicroBatch, moved: torch.Event) -> MicroBatch:
    """Have the stream that computes wait for the copy; the host does not."""
    computes = torch.accelerator.current_stream()
    computes.wait_event(moved)
    for leaf in _leaves(microbatch.batch):
        if isinstance(leaf, torch.Tensor) and accelerator.computes_apart(leaf.device):
            leaf.record_stream(computes)  # its memory is the side stream's, which must not take it back too early
    return microbatch


def _leaves(batch: Batch) -> list[Any]:
    return tree_leaves(batch.data if isinstance(batch, UserDict) else batch)


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
    if isinstance(batch, UserDict):  # BatchEncoding of transformers, whose own method waits for each copy
        other = copy.copy(batch)
        other.data = to_device(batch.data, device)
        return other
    move: Callable[..., Any] | None = getattr(batch, "to", None)
    return move(device) if move else batch
