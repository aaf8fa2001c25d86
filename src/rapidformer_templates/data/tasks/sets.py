"""The sets of a fine-tuning task: parts that are tokenized whole, or a stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rapidformer_templates.data.collate import TokenizedSamples
from rapidformer_templates.data.finetuning.tables import LoadedDataset, part_of_stream
from rapidformer_templates.data.streaming.rows import RowStream, StreamedRow
from rapidformer_templates.data.streaming.samples import BlockResult, StreamedSamples, buffer_of
from rapidformer_templates.planning.config import RunConfig

Make = Callable[..., TokenizedSamples]
"""Makes samples from (name, part, block). ``block`` is None for a whole part, else a block of a stream."""


@dataclass(frozen=True)
class Block:
    """Marks a part as a block of a stream. It gets no notes, and it may end up empty.

    Attributes:
        generator: random generator for making the samples.
        skipped: receives ``file:line: reason`` of each bad row that is left out.
    """

    generator: np.random.Generator
    skipped: list[str] = field(default_factory=list)


def sets_of(raw: LoadedDataset, config: RunConfig, make: Make) -> dict[str, Any]:
    """Return the samples of each existing part by name."""
    whole = {name: part for name, part in raw.parts().items() if name != "train" or raw.stream is None}
    sets: dict[str, Any] = {name: make(name, part, None) for name, part in whole.items()}
    if raw.stream is not None:
        sets["train"] = _streamed(raw.stream, config, make)
    return sets


def _streamed(rows: RowStream, config: RunConfig, make: Make) -> StreamedSamples:
    packed = ", packed" if config.data.pack_sequences else ""
    return StreamedSamples(
        rows,
        _BlockOfRows(make),
        seed=config.training.seed,
        buffer=buffer_of(config.data),
        identity=f"{rows.identity} in samples of {config.model.seq_length} tokens{packed}",
    )


@dataclass(frozen=True)
class _BlockOfRows:
    """Makes one sample per row, or packs several rows. No rows are left over for the next block."""

    make: Make

    def __call__(self, rows: list[StreamedRow], remainder: Any, generator: np.random.Generator) -> BlockResult:
        assert remainder is None
        block = Block(generator)
        return BlockResult(self.make("train", part_of_stream(rows), block), skipped=block.skipped)
