"""A loader of the script's, whose batches are drawn once and cut among the workers."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from rapidformer_templates.data.types import Batch
from rapidformer_templates.errors import ConfigError
from rapidformer_templates.planning.config import RunConfig, spelling
from rapidformer_templates.planning.plan import Sizes
from rapidformer_templates.system.random_state import seeded
from rapidformer_templates.system.workers import Workers

WHERE = "engine.compose(train_dataloader=…)"


class SharedLoader:
    """The batches of a loader, each seen by one worker.

    What samplers draw is rank 0's, so that any sampler will do, and hangs on ``seed`` and on the pass, or on the
    sampler's own generator, and not on the number of workers.
    """

    def __init__(self, loader: DataLoader[Any], workers: Workers, sizes: Sizes, seed: int) -> None:
        self._theirs, self._workers, self._seed, self._passes = loader, workers, seed, 0
        self._in_a_step = sizes.data * sizes.accumulation
        self._mine: list[list[Any]] = []
        # A copy, so that it has every option of theirs; the batch sampler of a loader cannot be set otherwise.
        self._ours, self._generator = copy.copy(loader), torch.Generator()
        vars(self._ours).update(batch_sampler=self._mine, generator=self._generator, _iterator=None)

    def __len__(self) -> int:
        """Batches that this worker sees in a pass."""
        batches: Any = self._theirs.batch_sampler
        return len(range(self._workers.data_rank, len(batches), self._workers.data))

    def steps(self) -> Iterator[list[Batch]]:
        """A pass: this worker's micro batches of each step, of the last one maybe fewer or none."""
        workers, many = self._workers, self._in_a_step
        seed, batches = workers.broadcast(self._drawn() if workers.is_main else None)
        self._passes += 1
        self._mine[:] = batches[workers.data_rank :: workers.data]
        self._generator.manual_seed(seed + workers.data_rank)  # its processes draw other numbers than another worker's
        made = iter(self._ours)
        for first in range(0, len(batches), many):
            yield list(islice(made, len(range(workers.data_rank, min(many, len(batches) - first), workers.data))))

    def _drawn(self) -> tuple[int, list[list[Any]]]:
        """(seed of the loader's processes, samples of each batch), drawn in the order in which torch's loader does."""
        theirs: Any = self._theirs.batch_sampler
        with seeded(self._seed + self._passes):
            batches = iter(theirs)
            seed = int(torch.empty((), dtype=torch.int64).random_(generator=self._theirs.generator))
            return seed, [list(batch) for batch in batches]


def checked_loader(loader: Any) -> DataLoader[Any]:
    """A loader whose batches can be cut among workers.

    Raises:
        ConfigError: its samples are not known, are divided already, or would be without an end.
    """
    is_stream = isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset)
    if is_stream or not isinstance(loader, DataLoader) or loader.batch_sampler is None:
        of = " over an IterableDataset" if is_stream else ""
        raise ConfigError(
            f"the train_dataloader is of type {type(loader).__name__}{of}, and no samples of its batches are known",
            where=WHERE,
            hint=f"give a torch DataLoader over a data set with a length, of {spelling('micro_batch_size')} samples; "
            "batches that each worker makes by itself are for rapidformer_templates.compose() (docs/own-loop.md)",
        )
    samplers = (loader.sampler, getattr(loader.batch_sampler, "sampler", None))
    if any(isinstance(sampler, DistributedSampler) for sampler in samplers):
        raise ConfigError(
            "the train_dataloader has a DistributedSampler, which divides the samples, and engine.compose divides them",
            where=WHERE,
            hint="DataLoader(…, shuffle=True), or without a sampler: every worker then sees its own batches",
        )
    try:
        len(loader)
    except TypeError:
        raise ConfigError(
            "nothing tells the length of a pass: the sampler of the train_dataloader has no __len__", where=WHERE,
            hint="write __len__(self) for the sampler: the number of samples, or of batches, that it draws",
        ) from None  # fmt: skip
    return loader


def micro_batch_of(loader: DataLoader[Any], config: RunConfig) -> dict[str, int]:
    """The flag that the loader says, where no other word does.

    Raises:
        ConfigError: they say different things.
    """
    if loader.batch_size is None:  # only a batch sampler knows
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
