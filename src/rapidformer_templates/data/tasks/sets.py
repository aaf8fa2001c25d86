"""The sets of a fine-tuning task: parts that are tokenized whole, or a stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rapidformer_templates.data.collate import TokenizedSamples
from rapidformer_templates.data.finetuning.tables import LoadedDataset, UsableRows, part_of_stream
from rapidformer_templates.data.streaming import BlockResult, StreamedRow, StreamedSamples, buffer_of
from rapidformer_templates.data.tasks.base import Task
from rapidformer_templates.data.text.bad_lines import BadLines
from rapidformer_templates.data.types import SampleSet

Make = Callable[..., TokenizedSamples]
"""Makes samples from (name, part, block). ``block`` is None for a whole part, else a block of a stream."""


@dataclass(frozen=True)
class Block:
    """Marks a part as a block of a stream. It gets no notes, and it may end up empty.

    Attributes:
        generator: random generator for making the samples.
        bad: receives the rows that cannot be used.
    """

    generator: np.random.Generator
    bad: BadLines


def sets_of(raw: LoadedDataset, task: Task, make: Make) -> dict[str, TokenizedSamples | StreamedSamples]:
    """Return the samples of each existing part by name.

    Raises:
        DataError: rows cannot be used.
    """
    whole = {name: part for name, part in raw.parts().items() if name != "train" or raw.stream is None}
    sets: dict[str, TokenizedSamples | StreamedSamples]
    sets = {name: make(name, part, None) for name, part in whole.items()}
    task.bad.raise_all()
    if raw.stream is not None:
        config = task.config
        packed = ", packed" if config.data.pack_sequences else ""
        sets["train"] = StreamedSamples(
            raw.stream,
            _BlockOfRows(make, task.usable_rows, config.data.skip_bad_lines),
            seed=config.training.seed,
            buffer=buffer_of(config.data),
            identity=f"{raw.stream.identity} in samples of {config.model.seq_length} tokens{packed}",
        )
    return sets


@dataclass(frozen=True)
class _BlockOfRows:
    """Makes one sample per row, or packs several rows. No rows are left over for the next block."""

    make: Make
    usable: UsableRows
    skip: bool

    def __call__(self, rows: list[StreamedRow], remainder: object, generator: np.random.Generator) -> BlockResult:
        assert remainder is None
        block = Block(generator, BadLines(skip=self.skip))
        part = self.usable(part_of_stream(rows, block.bad), block.bad)
        samples: SampleSet = self.make("train", part, block) if len(part) else ()
        block.bad.raise_all(is_part=True)
        return BlockResult(samples, skipped=block.bad.skipped)
