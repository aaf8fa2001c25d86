"""Loads micro batches from sample indices and moves them to the device."""

from __future__ import annotations

import copy
import gc
import math
from collections import UserDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, default_collate
from torch.utils.data._utils.pin_memory import pin_memory as pin

from rapidformer_templates.data import types
from rapidformer_templates.data.collate import PackedRow, collate_to_shape
from rapidformer_templates.data.order import BatchRequest, Order, Stream
from rapidformer_templates.errors import DataError
from rapidformer_templates.planning.flags import DataFlags
from rapidformer_templates.system import accelerator


def field_of(batch: types.Batch, name: str) -> torch.Tensor | None:
    """Return a tensor of a batch by name, or None if the batch has no names or no such tensor."""
    get: Callable[[str], torch.Tensor | None] | None = getattr(batch, "get", None)
    return get(name) if get else None


@dataclass
class MicroBatch:
    """A batch and where it comes from.

    Attributes:
        batch: the return value of ``collate``.
        samples: indices of its samples.
        targets: number of targets that its loss is a mean over.
        idle: the batch does not count.
        size: (samples, tokens) in it if the order or the data set knows them. None if they can be read from the batch.
        mask_facts, shown_tokens: see :meth:`inspect_masks`.
        positions: for each row, the position of its sample in the order. -1 for a row that does not count.
        bookmark: position of a stream before these samples.
        random_key: numbers that the random numbers of its forward depend on. None continues the stream of the worker.
    """

    batch: types.Batch
    samples: list[int]
    targets: float = 0
    idle: bool = False
    size: tuple[int, int] | None = None
    mask_facts: dict[str, bool] = field(default_factory=dict)
    shown_tokens: int | None = None
    positions: Sequence[int] = ()
    bookmark: types.Bookmark | None = None
    random_key: tuple[int, ...] | None = None

    def inspect_masks(self) -> None:
        """Precompute what models query about masks and positions while the batch is on the host.

        ``mask_facts`` then has one bool for ``attention_mask`` (nothing is masked) and one for ``position_ids`` (each
        row is consecutive). It only has entries for fields that exist, with integers or bools of shape (samples,
        tokens). ``shown_tokens`` is the number of tokens that such an ``attention_mask`` does not mask.
        """
        self.mask_facts, self.shown_tokens = {}, None
        for name in ("attention_mask", "position_ids"):
            tensor = field_of(self.batch, name)
            if not isinstance(tensor, torch.Tensor) or tensor.is_floating_point():
                continue
            if tensor.ndim != 2 or not tensor.is_cpu:
                continue
            values = tensor.numpy()
            if name == "attention_mask":
                self.shown_tokens = int(np.count_nonzero(values))
                self.mask_facts[name] = self.shown_tokens == values.size
            else:
                self.mask_facts[name] = bool((np.diff(values, axis=-1) == 1).all())

    @property
    def sample_count(self) -> int:
        """Number of samples in it."""
        return self.size[0] if self.size else len(self.samples)

    @property
    def tokens(self) -> int:
        """Number of tokens without padding."""
        if self.size:
            return self.size[1]
        mask = field_of(self.batch, "attention_mask")
        return self.padded_tokens if mask is None else int(mask.sum())

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the input tokens, or empty if the batch has none."""
        ids = field_of(self.batch, "input_ids")
        return () if ids is None else tuple(ids.shape)

    @property
    def padded_tokens(self) -> int:
        """Number of tokens including padding."""
        return math.prod(self.shape) if self.shape else 0

    def pin_memory(self) -> MicroBatch:
        """Move this micro batch to page-locked memory. The loader calls it."""
        self.batch = pin(self.batch)
        return self


class _Fetcher(Dataset[MicroBatch]):
    """A data set whose items are micro batches, so that loader processes collate them."""

    def __init__(self, samples: types.SampleSet | types.Endless, data: types.Data) -> None:
        self.samples = samples
        self.augment, self.augments_evaluation = data.augment, data.augments_evaluation
        self.collate = data.collate or _default_collate

    def __getitem__(self, request: BatchRequest) -> MicroBatch:
        many = getattr(self.samples, "__getitems__", None)
        items = many(request.samples) if many else [self.samples[i] for i in request.samples]
        size = None
        if isinstance(items[0], PackedRow):
            size = sum(row.samples for row in items), sum(len(row["input_ids"]) for row in items)
        if self.augment and (self.augments_evaluation or request.key[1] != Stream.EVALUATION):
            generators = (np.random.default_rng((*request.key, position)) for position in request.positions)
            items = [self.augment(item, generator) for item, generator in zip(items, generators, strict=True)]
        if request.shape is not None:
            batch = collate_to_shape(self.collate, items, request.shape)
            size = (len(items), request.tokens)
            positions = [*request.positions, *[-1] * (request.shape.rows - len(items))]
            return MicroBatch(batch, request.samples, idle=request.idle, size=size, positions=positions)
        batch = self.collate(items)
        if batch is None:
            hint = "return the batch: a dict of tensors"
            raise DataError("collate returned None", where="Data(collate=…)", hint=hint)
        return MicroBatch(
            batch,
            request.samples,
            idle=request.idle,
            size=size,
            positions=request.positions,
            bookmark=getattr(self.samples, "bookmark", None),
        )


def _default_collate(items: list[object]) -> types.Batch:
    """Collate with torch's default function.

    Raises:
        DataError: the samples differ in kind or shape.
    """
    try:
        return default_collate(items)
    except (TypeError, ValueError, RuntimeError, KeyError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        message = f"samples cannot be combined into a batch: {reason}"
        raise DataError(message, where="build_data()", hint="give Data a collate function") from error


def train_requests(
    order: Order, start: int, stop: int, *, rank: int, data_size: int, accumulation: int
) -> Iterator[BatchRequest]:
    """Yield the requests of one rank for steps ``start`` to ``stop``, ``accumulation`` of them per step."""
    count = data_size * accumulation
    for step in range(start, stop):
        yield from order.requests(step, count, range(rank, count, data_size))


def eval_requests(
    lengths: np.ndarray | None, size: int, seed: int, *, rank: int, data_size: int, micro_batch: int
) -> list[BatchRequest]:
    """Return the requests of one rank for the first ``size`` samples. Samples of similar length share a batch.

    Every rank gets the same number. Ranks without a sample left get an idle one.
    """
    order = np.arange(size) if lengths is None else np.argsort(lengths[:size], kind="stable")
    batches = [order[i : i + micro_batch] for i in range(0, size, micro_batch)]
    requests = []
    for first in range(0, len(batches), data_size):
        idle = first + rank >= len(batches)
        samples = batches[first if idle else first + rank].tolist()
        requests.append(BatchRequest(samples, (seed, Stream.EVALUATION), samples, idle))
    return requests


def processes_of(flags: DataFlags, device: torch.device) -> tuple[int, bool]:
    """Return the number of loader processes, and whether batches are in page-locked memory."""
    is_async = accelerator.is_asynchronous(device)
    workers = flags.dataloader_num_workers if flags.dataloader_num_workers is not None else (2 if is_async else 0)
    return workers, flags.dataloader_pin_memory if flags.dataloader_pin_memory is not None else is_async


def load(
    samples: types.SampleSet | types.Endless,
    data: types.Data,
    requests: Iterable[BatchRequest],
    *,
    workers: int,
    pin_memory: bool,
) -> Iterator[MicroBatch]:
    """Return micro batches for ``requests``. Loader processes make them, or this process if ``workers`` is 0."""
    fetcher = _Fetcher(samples, data)
    if workers == 0 and not pin_memory:
        return map(fetcher.__getitem__, requests)
    loader = DataLoader(
        fetcher,
        sampler=requests,
        batch_size=None,
        num_workers=workers,
        pin_memory=pin_memory,
        # The loader draws a seed. It needs its own generator, or a resumed run would see other random numbers.
        generator=torch.Generator(),
        worker_init_fn=_keep_garbage,
    )
    collects = gc.isenabled()
    gc.disable()  # until the loader processes have started
    try:
        return iter(loader)
    finally:
        if collects:
            gc.enable()


def _keep_garbage(worker: int) -> None:
    """In a forked loader process, never collect garbage from before the fork.

    The destructor of a process group waits for its threads. They do not exist after a fork, so the loader would hang or
    crash.
    """
    gc.freeze()
    gc.enable()


def on_device(batches: Iterable[MicroBatch], device: torch.device, ahead: int) -> Iterator[MicroBatch]:
    """Move micro batches to ``device`` while it computes earlier ones.

    On a CPU nothing is moved. Read what the host needs from a micro batch before this. Batches of custom classes are
    left for the engine to move.

    Args:
        ahead: number of micro batches in transfer in addition to the current one.
    """
    side = accelerator.side_stream(device) if accelerator.is_asynchronous(device) else None
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
            yield _wait_for_copy(*moving.popleft())
    while moving:
        yield _wait_for_copy(*moving.popleft())


def _wait_for_copy(microbatch: MicroBatch, copy_event: torch.Event) -> MicroBatch:
    """Make the compute stream wait for the copy. The host does not wait."""
    computes = torch.accelerator.current_stream()
    computes.wait_event(copy_event)
    for leaf in _leaves(microbatch.batch):
        if isinstance(leaf, torch.Tensor) and accelerator.is_asynchronous(leaf.device):
            leaf.record_stream(computes)  # the side stream owns its memory and must not reuse it too early
    return microbatch


def _leaves(batch: types.Batch) -> list[object]:
    return tree_leaves(batch.data if isinstance(batch, UserDict) else batch)


def sample_lengths(samples: types.SampleSet, data: types.Data, *, training: bool) -> np.ndarray | None:
    """Return the lengths of the samples if known: ``Data.lengths``, the set's own, or those of ``input_ids``.

    A set whose ``lengths`` is None has samples of equal or unknown length.
    """
    if training and data.lengths is not None:
        return np.asarray(data.lengths)
    if hasattr(samples, "lengths") and not callable(samples.lengths):
        return None if samples.lengths is None else np.asarray(samples.lengths)
    if len(samples) and isinstance(samples[0], Mapping) and "input_ids" in samples[0]:
        return np.fromiter((len(samples[i]["input_ids"]) for i in range(len(samples))), np.int64, len(samples))
    return None


def to_device(batch: types.Batch, device: torch.device) -> types.Batch:
    """Move the tensors of a batch to ``device`` and keep everything else."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        parts = [to_device(value, device) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    if isinstance(batch, UserDict):  # transformers' BatchEncoding: its own method waits for each copy
        other = copy.copy(batch)
        other.data = to_device(batch.data, device)
        return other
    move: Callable[[torch.device], types.Batch] | None = getattr(batch, "to", None)
    return move(device) if move else batch
