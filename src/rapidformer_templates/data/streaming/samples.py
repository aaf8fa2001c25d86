"""Samples of a stream, in the same order for all workers, with bookmarks for resuming.

Rows are read in blocks. The samples of a block depend only on its rows, on the rest of the previous block, and on the
seed. Samples are numbered consecutively. Nothing else decides which samples are in a step. Each worker reads the whole
stream and takes the samples with its own numbers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rapidformer_templates.data.order import BatchRequest, even_requests
from rapidformer_templates.data.random_streams import Stream
from rapidformer_templates.data.streaming.rows import RowStream, StreamedRow
from rapidformer_templates.data.text.bad_lines import add_by_reason
from rapidformer_templates.data.types import Bookmark, Endless, SampleSet, SizeOf, size_function
from rapidformer_templates.errors import DataError
from rapidformer_templates.planning.flags import DataFlags

BUFFER = 1000
"""Number of rows that are shuffled together by default, as in ``datasets``."""


def buffer_of(flags: DataFlags) -> int:
    """Return the number of rows that are shuffled together."""
    return BUFFER if flags.shuffle_buffer is None else flags.shuffle_buffer


@dataclass(frozen=True)
class BlockResult:
    """The result of a block of rows.

    Attributes:
        samples: the samples, possibly none.
        remainder: the rest for the next block, as plain values for a checkpoint.
        skipped: ``file:line: reason`` of each bad row that was left out.
    """

    samples: SampleSet
    remainder: Any = None
    skipped: Sequence[str] = ()


MakeBlock = Callable[[list[StreamedRow], Any, np.random.Generator], BlockResult]
"""Takes the rows of a block, the rest of the previous block (None for the first), and a generator."""


@dataclass
class _Block:
    """Numbered samples, and the position of the stream before them."""

    samples: SampleSet
    order: np.ndarray
    bookmark: Bookmark

    @property
    def first(self) -> int:
        return int(self.bookmark["position"])

    def __contains__(self, position: int) -> bool:
        return self.first <= position < self.first + len(self.order)

    def index(self, position: int) -> int:
        return int(self.order[position - self.first])


class StreamedSamples(Endless):
    """The samples of a stream. There is an item ``p`` for every ``p`` from 0 on.

    Read them in ascending order. An earlier position is read again from the last bookmark passed to :meth:`go_to`, or
    from the beginning.

    Args:
        rows: the stream.
        make: converts a block of rows to samples.
        seed: seed of the order of the samples in a block.
        buffer: number of rows that are shuffled together. 0 means no shuffling.
        identity: everything else that the samples depend on, as a text.
    """

    def __init__(self, rows: RowStream, make: MakeBlock, *, seed: int, buffer: int, identity: str) -> None:
        self.rows = rows
        self.make = make
        self.seed = seed
        self.buffer = buffer
        self.identity = f"{identity}, {buffer} rows shuffled together"
        self.bookmark: Bookmark = {
            "position": 0, "block": 0, "epoch": 0, "stream": rows.state(), "left": None, "reasons": {}
        }  # fmt: skip
        self._beginning = self._known = copy.deepcopy(self.bookmark)
        self._next = self.bookmark
        self._blocks: list[_Block] = []
        self._block_of_position: dict[int, _Block] = {}

    def go_to(self, bookmark: Bookmark) -> None:
        """Move to the position at which a stream of the same files, seed and buffer returned this bookmark."""
        self._known = bookmark
        self._rewind(bookmark)

    def _rewind(self, bookmark: Bookmark) -> None:
        self.bookmark = self._next = copy.deepcopy(bookmark)
        self.rows.go_to(self._next["stream"])
        self._blocks = []

    def __getitem__(self, position: int) -> object:
        return self.__getitems__([position])[0]

    def __getitems__(self, positions: Sequence[int]) -> list[object]:
        """Return several items. Two blocks are kept, so that a batch may cross their border."""
        blocks = [self._block(position) for position in positions]
        self._block_of_position = dict(zip(positions, blocks, strict=True))
        self.bookmark = blocks[-1].bookmark
        return [block.samples[block.index(p)] for block, p in zip(blocks, positions, strict=True)]

    @property
    def size_of(self) -> SizeOf | None:
        """Returns (samples, tokens) of the items last read if items are rows of several samples, else None."""
        return self._size_of if self._blocks and size_function(self._blocks[-1].samples) else None

    def _size_of(self, positions: list[int]) -> tuple[int, int]:
        samples = tokens = 0
        for position in positions:
            block = self._block_of_position[position]
            size_of = size_function(block.samples)
            assert size_of is not None
            size = size_of([block.index(position)])
            samples, tokens = samples + size[0], tokens + size[1]
        return samples, tokens

    def _block(self, position: int) -> _Block:
        if self._blocks and position < self._blocks[0].first:
            self._rewind(self._known if self._known["position"] <= position else self._beginning)
        while True:
            for block in reversed(self._blocks):
                if position in block:
                    return block
            self._blocks = [*self._blocks[-1:], self._read()]

    def _read(self) -> _Block:
        """Return the next block that has a sample.

        Raises:
            DataError: a whole pass over the files gave no sample.
        """
        began, bookmark = self.rows.epoch, self._next
        while True:
            rows, skipped = self._next_rows()
            generator = np.random.default_rng((self.seed, Stream.BLOCKS, self._next["block"]))
            result = self.make(rows, self._next["left"], generator)
            count, skipped = len(result.samples), [*skipped, *result.skipped]
            order = generator.permutation(count) if self.buffer else np.arange(count)
            block = _Block(result.samples, order, bookmark)
            self._next = {
                "position": block.first + count,
                "block": self._next["block"] + 1,
                "epoch": self.rows.epoch,
                "stream": copy.deepcopy(self.rows.state()),
                "left": result.remainder,
                # A checkpoint of an older version has no reasons.
                "reasons": add_by_reason(self._next.get("reasons", {}), skipped),
            }
            if count:
                return block
            if self.rows.epoch > began + 1:
                message = "there is no sample in any of the files"
                raise DataError(message, where=str(self.rows.files[0]), hint="use more text, or a shorter --seq-length")

    def _next_rows(self) -> tuple[list[StreamedRow], list[str]]:
        """Return the rows of a block, and the lines that were left out between them."""
        rows: list[StreamedRow] = []
        skipped: list[str] = []
        began = self.rows.epoch
        while len(rows) < (self.buffer or BUFFER):
            row = next(self.rows)
            skipped += row.skipped
            if row.row is not None:
                rows.append(row)
            elif self.rows.epoch > began + 1 and not rows:
                hint = "it needs at least one row"
                raise DataError("the data set is empty", where=str(self.rows.files[0]), hint=hint)
        return rows, skipped

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_blocks": [], "_block_of_position": {}}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._rewind(self.bookmark)


class StreamOrder:
    """The order of the samples of a stream, which equals that of the stream itself.

    Args:
        samples: the stream.
        global_batch: samples per step.
        seed: seed of everything random in it.
    """

    by_epochs = False
    steps_per_epoch = 0
    """Unknown."""

    def __init__(self, samples: Endless, global_batch: int, seed: int) -> None:
        self.samples = samples
        self.global_batch = global_batch
        self.seed = seed

    def epoch(self, step: int) -> float:
        """Return 0, because it is unknown. Bookmarks have the number of complete passes."""
        return 0.0

    def step(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (numbers, positions) of the samples of ``step``. Both are the same."""
        positions = np.arange(step * self.global_batch, (step + 1) * self.global_batch)
        return positions, positions

    def requests(self, step: int, count: int, own_indices: range) -> Iterator[BatchRequest]:
        """Split the global batch into ``count`` even pieces."""
        return even_requests(*self.step(step), self.seed, count, own_indices)

    def depends_on(self) -> dict[str, object]:
        """Return what the samples of a step depend on."""
        return {
            "--seed": self.seed,
            "--global-batch-size": self.global_batch,
            "the stream": self.samples.identity,
        }
