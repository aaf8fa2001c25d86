"""The batches of a script: its data loader, which is divided among the workers, and the targets of a batch."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from itertools import islice

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from rapidformer_templates.data.types import Batch
from rapidformer_templates.errors import ConfigError, RapidformerError
from rapidformer_templates.planning.config import RunConfig, spelling
from rapidformer_templates.planning.plan import Sizes
from rapidformer_templates.system.process_state import seeded
from rapidformer_templates.system.workers import Workers
from rapidformer_templates.trainer import Trainer

WHERE = "engine.compose(train_dataloader=…)"


class SharedLoader:
    """Divides the batches of a loader, so that each worker sees different ones.

    Rank 0 draws from the samplers, so that any sampler works. The draws depend on ``seed`` and the epoch, or on the
    sampler's own generator. They do not depend on the number of workers.
    """

    def __init__(self, loader: DataLoader[Batch], workers: Workers, sizes: Sizes, seed: int) -> None:
        self._script_loader, self._workers, self._seed, self._passes = loader, workers, seed, 0
        self._in_a_step = sizes.data * sizes.accumulation
        self._own_batches: list[list[object]] = []
        # A copy has every option of the original. `vars` is the only way to set the batch sampler of a loader.
        self._our_loader, self._generator = copy.copy(loader), torch.Generator()
        vars(self._our_loader).update(batch_sampler=self._own_batches, generator=self._generator, _iterator=None)

    def __len__(self) -> int:
        """Return the number of batches that this worker sees in one epoch."""
        return len(range(self._workers.data_rank, len(self._script_loader), self._workers.data))

    def steps(self) -> Iterator[list[Batch]]:
        """Yield this worker's micro batches for each step of one epoch. The last step may have fewer or none."""
        workers, many = self._workers, self._in_a_step
        drawn = workers.broadcast(self._drawn() if workers.is_main else None)
        assert drawn is not None  # by rank 0
        seed, batches = drawn
        self._passes += 1
        self._own_batches[:] = batches[workers.data_rank :: workers.data]
        self._generator.manual_seed(seed + workers.data_rank)  # each worker's loader processes draw different numbers
        iterator = iter(self._our_loader)
        for first in range(0, len(batches), many):
            yield list(islice(iterator, len(range(workers.data_rank, min(many, len(batches) - first), workers.data))))

    def _drawn(self) -> tuple[int, list[list[object]]]:
        """Return (seed of the loader's processes, samples of each batch), drawn in the same order as torch's loader."""
        sampler = self._script_loader.batch_sampler
        assert sampler is not None  # :func:`checked_loader`
        with seeded(self._seed + self._passes):
            batches = iter(sampler)
            seed = int(torch.empty((), dtype=torch.int64).random_(generator=self._script_loader.generator))
            return seed, [list(batch) for batch in batches]


def checked_loader(loader: object) -> DataLoader[Batch]:
    """Return the loader if its batches can be divided among workers.

    Raises:
        ConfigError: its samples are unknown or already divided, or its length is unknown.
    """
    is_stream = isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset)
    if is_stream or not isinstance(loader, DataLoader) or loader.batch_sampler is None:
        of = " over an IterableDataset" if is_stream else ""
        raise ConfigError(
            f"the train_dataloader is of type {type(loader).__name__}{of}, so the samples of its batches are unknown",
            where=WHERE,
            hint=f"give a torch DataLoader over a data set with a length, of {spelling('micro_batch_size')} samples; "
            "for batches that each worker makes itself, use rapidformer_templates.compose() (docs/own-loop.md)",
        )
    samplers = (loader.sampler, getattr(loader.batch_sampler, "sampler", None))
    if any(isinstance(sampler, DistributedSampler) for sampler in samplers):
        raise ConfigError(
            "the train_dataloader has a DistributedSampler, which divides the samples, but engine.compose "
            "divides them already",
            where=WHERE,
            hint="DataLoader(…, shuffle=True), or without a sampler: every worker then sees its own batches",
        )
    try:
        len(loader)
    except TypeError:
        raise ConfigError(
            "the length of a pass is unknown: the sampler of the train_dataloader has no __len__", where=WHERE,
            hint="write __len__(self) for the sampler: the number of samples, or of batches, that it draws",
        ) from None  # fmt: skip
    return loader


def micro_batch_of(loader: DataLoader[Batch], config: RunConfig) -> dict[str, int]:
    """Return the micro batch size of the loader as a flag, unless the flag is given already.

    Raises:
        ConfigError: the flag and the loader have different sizes.
    """
    if loader.batch_size is None:  # only the batch sampler knows it
        return {}
    name = "micro_batch_size"
    if name in config.origins and config.get(name) != loader.batch_size:
        raise ConfigError(
            f"the train_dataloader makes batches of {loader.batch_size} samples, and {spelling(name)} says "
            f"{config.get(name)}",
            where=config.origin(name),
            hint="DataLoader(…, batch_size=get_args().micro_batch_size), or leave the flag out",
        )
    return {} if name in config.origins else {name: loader.batch_size}


def checked_targets(template: Trainer, batch: Batch, loss: str, hint: str) -> float:
    """Return the number of labels of a batch that count.

    Args:
        loss: name of the loss, for the error message.
        hint: hint of the error message.

    Raises:
        RapidformerError: the batch has no labels, and a step has other micro batches, so that it needs a weight.
    """
    named = isinstance(batch, Mapping) or hasattr(batch, "get")
    sizes = template.plan.sizes
    if not (named and "labels" in batch) and sizes.data * sizes.accumulation > 1:
        raise RapidformerError(
            f"cannot tell what {loss} is a mean over: the batch has no 'labels'",
            where=f"{sizes.data * sizes.accumulation} micro batches per step, which must be weighted",
            hint=hint,
        )
    return Trainer.count_targets(template, batch)
