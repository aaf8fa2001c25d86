"""The sets of a fine-tuning task: parts that are tokenized whole, or a stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rapidformer_templates.data.collate import TokenizedSamples
from rapidformer_templates.data.finetuning.tables import Raw, part_of_stream
from rapidformer_templates.data.streaming.rows import RowStream, StreamedRow
from rapidformer_templates.data.streaming.samples import Made, StreamedSamples, buffer_of
from rapidformer_templates.planning.config import RunConfig

Make = Callable[..., TokenizedSamples]
"""Makes samples of (name, part, block): of a whole part, where ``block`` is None, or of a block of a stream."""


@dataclass(frozen=True)
class Block:
    """A part is a block of a stream: nothing is told of it, and nothing may be left of it.

    Attributes:
        generator: for what is drawn in making its samples.
        skipped: takes ``file:line: reason`` of each row that cannot be used and is left out.
    """

    generator: np.random.Generator
    skipped: list[str] = field(default_factory=list)


def sets_of(raw: Raw, config: RunConfig, make: Make) -> dict[str, Any]:
    """The samples of each part that is there, by its name."""
    whole = {name: part for name, part in raw.parts().items() if name != "train" or raw.stream is None}
    sets: dict[str, Any] = {name: make(name, part, None) for name, part in whole.items()}
    if raw.stream is not None:
        sets["train"] = _streamed(raw.stream, config, make)
    return sets


def _streamed(rows: RowStream, config: RunConfig, make: Make) -> StreamedSamples:
    packed = ", packed" if config.data.pack_sequences else ""
    return StreamedSamples(
        rows,
        _MadeOfRows(make),
        seed=config.training.seed,
        buffer=buffer_of(config.data),
        identity=f"{rows.identity} in samples of {config.model.seq_length} tokens{packed}",
    )


@dataclass(frozen=True)
class _MadeOfRows:
    """Each row is a sample, or its share of a packed one; nothing is left over for the next block."""

    make: Make

    def __call__(self, rows: list[StreamedRow], left: Any, generator: np.random.Generator) -> Made:
        assert left is None
        block = Block(generator)
        return Made(self.make("train", part_of_stream(rows), block), skipped=block.skipped)
