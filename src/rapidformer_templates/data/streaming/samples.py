"""Samples of a stream in one order for all workers, and how a run finds its place in them again.

Rows are read in blocks. What a block is made into is a function of its rows, of what was left over of the
block before, and of the seed; its samples are numbered through. So which samples a step has depends on nothing
else: each worker reads all of the stream, and takes those of its own numbers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from rapidformer_templates.data.order import Request, even_requests
from rapidformer_templates.data.random_streams import Stream
from rapidformer_templates.data.streaming.rows import RowStream, StreamedRow
from rapidformer_templates.data.types import Bookmark, Endless
from rapidformer_templates.errors import DataError
from rapidformer_templates.planning.flags import DataFlags

BUFFER = 1000
"""Rows that are shuffled together where ``--shuffle-buffer`` says nothing; ``datasets`` shuffles as many."""

LISTED = 5


def buffer_of(flags: DataFlags) -> int:
    """Rows that are shuffled together."""
    return BUFFER if flags.shuffle_buffer is None else flags.shuffle_buffer


class Samples(Protocol):
    """The samples of a block, in their order."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any) -> Any: ...


@dataclass(frozen=True)
class Made:
    """What a block of rows has become.

    Attributes:
        samples: may be none.
        left: what is left over for the next block: plain values, for a checkpoint.
        skipped: ``file:line: reason`` of each row that cannot be used and was left out.
    """

    samples: Samples
    left: Any = None
    skipped: Sequence[str] = ()


Make = Callable[[list[StreamedRow], Any, np.random.Generator], Made]
"""Takes the rows of a block, what was left over of the block before (None of the first), and a generator."""


@dataclass
class _Block:
    """Samples with their numbers, and where the stream stood before them."""

    samples: Samples
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
    """The samples of a stream; item ``p`` is there for every ``p`` from 0 on.

    They are to be asked for in ascending order. A step back reads from the last bookmark that was gone to, or from
    the beginning.

    Args:
        rows: the stream.
        make: what a block of rows becomes.
        seed: of the order of the samples in a block.
        buffer: rows that are shuffled together; 0 shuffles nothing.
        identity: what the samples depend on beside the seed and the buffer, in words.
    """

    def __init__(self, rows: RowStream, make: Make, *, seed: int, buffer: int, identity: str) -> None:
        self.rows = rows
        self.make = make
        self.seed = seed
        self.buffer = buffer
        self.identity = f"{identity}, {buffer} rows shuffled together"
        self.bookmark: Bookmark = {
            "position": 0, "block": 0, "epoch": 0, "stream": rows.state(), "left": None, "skipped": 0, "lines": []
        }  # fmt: skip
        self._beginning = self._known = copy.deepcopy(self.bookmark)
        self._next = self.bookmark
        self._blocks: list[_Block] = []
        self._asked: dict[int, _Block] = {}

    def go_to(self, bookmark: Bookmark) -> None:
        """Stand where a stream of the same files, seed and buffer stood when it gave this bookmark."""
        self._known = bookmark
        self._rewind(bookmark)

    def _rewind(self, bookmark: Bookmark) -> None:
        self.bookmark = self._next = copy.deepcopy(bookmark)
        self.rows.go_to(self._next["stream"])
        self._blocks = []

    def __getitem__(self, position: int) -> Any:
        return self.__getitems__([position])[0]

    def __getitems__(self, positions: Sequence[int]) -> list[Any]:
        """Several items; two blocks are kept, so that a batch may lie across their border."""
        blocks = [self._block(position) for position in positions]
        self._asked = dict(zip(positions, blocks, strict=True))
        self.bookmark = blocks[-1].bookmark
        return [block.samples[block.index(p)] for block, p in zip(blocks, positions, strict=True)]

    @property
    def size_of(self) -> Callable[[list[int]], tuple[int, int]] | None:
        """(samples, tokens) in the items last asked for, where items are rows of several samples."""
        return self._size_of if self._blocks and hasattr(self._blocks[-1].samples, "size_of") else None

    def _size_of(self, positions: list[int]) -> tuple[int, int]:
        sizes = [block.samples.size_of([block.index(p)]) for p in positions for block in (self._asked[p],)]  # type: ignore[attr-defined]
        return sum(size[0] for size in sizes), sum(size[1] for size in sizes)

    def _block(self, position: int) -> _Block:
        if self._blocks and position < self._blocks[0].first:
            self._rewind(self._known if self._known["position"] <= position else self._beginning)
        while True:
            for block in reversed(self._blocks):
                if position in block:
                    return block
            self._blocks = [*self._blocks[-1:], self._read()]

    def _read(self) -> _Block:
        """The next block that has a sample.

        Raises:
            DataError: there was none in a whole pass over the files.
        """
        began, bookmark = self.rows.epoch, self._next
        while True:
            rows, skipped = self._take()
            generator = np.random.default_rng((self.seed, Stream.BLOCKS, self._next["block"]))
            made = self.make(rows, self._next["left"], generator)
            count, skipped = len(made.samples), [*skipped, *made.skipped]
            order = generator.permutation(count) if self.buffer else np.arange(count)
            block = _Block(made.samples, order, bookmark)
            self._next = {
                "position": block.first + count,
                "block": self._next["block"] + 1,
                "epoch": self.rows.epoch,
                "stream": copy.deepcopy(self.rows.state()),
                "left": made.left,
                "skipped": self._next["skipped"] + len(skipped),
                "lines": list(dict.fromkeys([*self._next["lines"], *skipped]))[:LISTED],
            }
            if count:
                return block
            if self.rows.epoch > began + 1:
                message = "there is no sample in all of the files"
                raise DataError(message, where=str(self.rows.files[0]), hint="use more text, or a shorter --seq-length")

    def _take(self) -> tuple[list[StreamedRow], list[str]]:
        """The rows of a block, and the lines that were left out between them."""
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

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_blocks": [], "_asked": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._rewind(self.bookmark)


class StreamOrder:
    """The order of the samples of a stream: its own.

    Args:
        samples: the stream.
        global_batch: samples a step.
        seed: of everything that is random in it.
    """

    by_epochs = False
    steps_per_epoch = 0
    """Not known."""

    def __init__(self, samples: Endless, global_batch: int, seed: int) -> None:
        self.samples = samples
        self.global_batch = global_batch
        self.seed = seed

    def epoch(self, step: int) -> float:
        """Not known beforehand; bookmarks tell how many passes were complete."""
        return 0.0

    def step(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """(numbers, positions) of the samples of ``step``, which are the same."""
        positions = np.arange(step * self.global_batch, (step + 1) * self.global_batch)
        return positions, positions

    def requests(self, step: int, count: int, mine: range) -> Iterator[Request]:
        """The global batch cut into ``count`` even pieces."""
        return even_requests(*self.step(step), self.seed, count, mine)

    def depends_on(self) -> dict[str, Any]:
        """What the samples of a step depend on."""
        return {
            "--seed": self.seed,
            "--global-batch-size": self.global_batch,
            "the stream": self.samples.identity,
        }
