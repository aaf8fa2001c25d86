"""Streams of rows, samples and windows, in the same order for all workers, with bookmarks for resuming.

The rows come from an iterable data set of ``datasets``, whose state stores the current position. They are read in
blocks, which end with each pass over the files. The samples of a block depend only on its rows, on the rest of the
previous block, and on the seed. Samples are numbered consecutively. Nothing else decides which samples are in a step.
Each worker reads the whole stream and takes the samples with its own numbers.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from rapidformer_templates.data.finetuning.messages import rows_with_texts
from rapidformer_templates.data.fingerprints import checksum
from rapidformer_templates.data.order import Order, Stream, spread
from rapidformer_templates.data.text.bad_lines import BadLines, add_by_reason
from rapidformer_templates.data.text.encoding import Encoder, EncodingJob, EncodingRecipe
from rapidformer_templates.data.text.fast_tokenizers import NotEquivalent
from rapidformer_templates.data.text.files import Row, TextUnit, data_suffix, raw_rows
from rapidformer_templates.data.types import Bookmark, Endless, Rows, SampleSet
from rapidformer_templates.errors import DataError
from rapidformer_templates.planning.flags import DataFlags
from rapidformer_templates.system.files import hash_of


@dataclass(frozen=True)
class StreamedRow:
    """A row with its location.

    Attributes:
        path: its file.
        number: its line, or its position in a file without lines.
        row: the columns. None after the last row of a file if only unreadable lines were left.
        skipped: ``file:line: reason`` of each line before it that was left out.
    """

    path: Path
    number: int
    row: Row | None
    skipped: Sequence[str]


@dataclass(eq=False)
class RowStream:
    """An endless stream of the rows of some files. After the last row it starts again.

    Attributes:
        files: the shards. They are read one after another.
        seed: seed of their order, which is new in each epoch. None keeps the given order.
        skip: leave out lines that cannot be read.
        text_unit: the unit of text that is one document in a ``.txt`` file.
        column: name of the column for such documents.
        epoch: number of complete passes.
    """

    files: Sequence[Path]
    seed: int | None
    _: KW_ONLY
    skip: bool = False
    text_unit: TextUnit = "paragraph"
    column: str = "text"
    epoch: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._begin(None)

    def _begin(self, shard_state: dict[str, Any] | None) -> None:
        import datasets  # imported here, so that only streaming pays for it

        order = np.arange(len(self.files))
        if self.seed is not None:
            order = np.random.default_rng((self.seed, Stream.SHARDS, self.epoch)).permutation(len(self.files))
        files = [str(self.files[i]) for i in order.tolist()]
        options = {"skip": self.skip, "unit": self.text_unit, "column": self.column}
        self._set = datasets.IterableDataset.from_generator(_rows, gen_kwargs={"files": files, **options})
        if shard_state is not None:
            self._set.load_state_dict(shard_state)
        # Use iter(). In a loader process, a loop over the set would yield only a part of the shards.
        self._rows: Iterator[dict[str, list[Any]]] = self._set.iter(batch_size=1)
        self._process = os.getpid()
        self._begun_at = shard_state  # until a row is read, state_dict() of the set is its beginning

    @property
    def identity(self) -> str:
        """Describes the files, so that a resumed run can detect other files."""
        sizes = [file.stat().st_size for file in self.files]
        key = hash_of([[file.name for file in self.files], sizes])
        return f"{len(sizes)} files of {sum(sizes):,} bytes ({key[:8]})"

    def state(self) -> dict[str, Any]:
        """Return the position as plain values, for :meth:`go_to`."""
        begun_at = self._begun_at
        return {"epoch": self.epoch, "rows": self._set.state_dict() if begun_at is None else copy.deepcopy(begun_at)}

    def go_to(self, state: dict[str, Any]) -> None:
        """Move to the position of a stream of the same files and seed. The current file is read up to it again."""
        self.epoch = state["epoch"]
        self._begin(state["rows"])

    def __next__(self) -> StreamedRow:
        if self._process != os.getpid():  # a forked process would share the file position with its parent
            self.go_to(self.state())
        for row in self._rows:
            self._begun_at = None
            return StreamedRow(Path(row["path"][0]), row["number"][0], row["row"][0], row["skipped"][0])
        self.epoch += 1
        self._begin(None)
        return StreamedRow(self.files[0], 0, None, ())

    def __getstate__(self) -> dict[str, object]:
        kept = {name: value for name, value in self.__dict__.items() if name not in ("_set", "_rows")}
        return kept | {"_state": self.state()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        stands = state.pop("_state")
        self.__dict__.update(state)
        self.go_to(stands)


def _rows(files: list[str], skip: bool, unit: TextUnit, column: str) -> Iterator[dict[str, object]]:
    """Yield the rows of one shard after another for the iterable data set."""
    for name in files:
        path, bad = Path(name), BadLines(skip=skip)
        rows = raw_rows(path, column, bad, unit=unit) if data_suffix(path) == ".txt" else rows_with_texts(path, bad)
        for number, row in rows:
            bad.raise_all(is_part=True)
            yield {"path": name, "number": number, "row": row, "skipped": bad.skipped}
            bad.skipped = []
        bad.raise_all(is_part=True)
        if bad.skipped:
            yield {"path": name, "number": 0, "row": None, "skipped": bad.skipped}


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

    def __post_init__(self) -> None:
        first: int = self.bookmark["position"]
        self.positions = range(first, first + len(self.order))

    def __getitem__(self, position: int) -> object:
        return self.samples[int(self.order[position - self.positions.start])]


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
        self.identity = f"{identity}, {buffer} rows of a pass shuffled together"
        self.apart = 1
        self.bookmark: Bookmark = {
            "position": 0, "block": 0, "epoch": 0, "stream": rows.state(), "left": None, "reasons": {}, "last": []
        }  # fmt: skip
        self._beginning = self._known = copy.deepcopy(self.bookmark)
        self._next = self.bookmark
        self._blocks: list[_Block] = []

    def keep_apart(self, count: int) -> None:
        """Let any ``count`` consecutive samples be distinct, as far as the order of a block can achieve it."""
        self.apart = count if self.buffer else 1  # rows in their own order never repeat too soon

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
        self.bookmark = blocks[-1].bookmark
        return [block[position] for block, position in zip(blocks, positions, strict=True)]

    def _block(self, position: int) -> _Block:
        # A spawned process has no blocks.
        first = self._blocks[0].positions.start if self._blocks else self._next["position"]
        if position < first:
            self._rewind(self._known if self._known["position"] <= position else self._beginning)
        while True:
            for block in reversed(self._blocks):
                if position in block.positions:
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
            skipped += result.skipped
            order, last = self._order(result.samples, generator)
            block = _Block(result.samples, order, bookmark)
            self._next = {
                "position": block.positions.stop,
                "block": self._next["block"] + 1,
                "epoch": self.rows.epoch,
                "stream": copy.deepcopy(self.rows.state()),
                "left": result.remainder,
                "reasons": add_by_reason(self._next["reasons"], skipped),
                "last": last,
            }
            if block.positions:
                return block
            if self.rows.epoch > began + 1:
                message = "there is no sample in any of the files"
                raise DataError(message, where=str(self.rows.files[0]), hint="use more text, or a shorter --seq-length")

    def _order(self, samples: SampleSet, generator: np.random.Generator) -> tuple[np.ndarray, list[int]]:
        """Return the order of the samples of a block, and checksums of the last samples so far."""

        def identity(index: int) -> int:
            return checksum(samples[int(index)])

        order, before = np.arange(len(samples)), self._next["last"]
        if self.buffer:
            order = generator.permutation(len(samples))
            spread(order, before, len(order), identity)
        last = [*before, *map(identity, order[len(order) + 1 - self.apart :])]
        return order, last[len(last) + 1 - self.apart :]

    def _next_rows(self) -> tuple[list[StreamedRow], list[str]]:
        """Return the rows of a block, all of one pass, and the lines that were left out between them."""
        rows: list[StreamedRow] = []
        skipped: list[str] = []
        began = self.rows.epoch
        while len(rows) < (self.buffer or BUFFER):
            epoch, row = self.rows.epoch, next(self.rows)
            skipped += row.skipped
            if row.row is not None:
                rows.append(row)
            elif rows and self.rows.epoch > epoch:
                break
            elif self.rows.epoch > began + 1 and not rows:
                hint = "it needs at least one row"
                raise DataError("the data set is empty", where=str(self.rows.files[0]), hint=hint)
        return rows, skipped

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_blocks": []}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._rewind(self.bookmark)


@dataclass(eq=False)
class StreamOrder(Order):
    """The order of the samples of a stream, which equals that of the stream itself.

    Attributes:
        samples: the stream.
        global_batch: samples per step.
        seed: seed of everything random in it.
    """

    samples: Endless
    global_batch: int
    seed: int
    steps_per_epoch = 0
    """Unknown."""

    def epoch(self, step: int) -> float:
        """Return 0, because it is unknown. Bookmarks have the number of complete passes."""
        return 0.0

    def step(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (numbers, positions) of the samples of ``step``. Both are the same."""
        positions = np.arange(step * self.global_batch, (step + 1) * self.global_batch)
        return positions, positions

    def depends_on(self) -> dict[str, object]:
        """Return what the samples of a step depend on."""
        identity = self.samples.identity
        return {"--seed": self.seed, "--global-batch-size": self.global_batch, "the stream": identity}


@dataclass
class WindowsOfDocuments:
    """Makes windows from documents, one per row. The rest at the end starts the first window of the next block.

    An item has ``input_ids`` of shape (length + overlap,). With ``marks_documents`` it also has ``documents`` of that
    shape: a number that changes where a document begins. The items are like those of :class:`GPTSamples`, except for
    the order.

    Attributes:
        recipe: how text becomes tokens, with an end token.
        length: tokens from the beginning of one window to the beginning of the next.
        overlap: tokens that a window shares with the next one.
        marks_documents: also return ``documents``.
        shuffles: put the documents of a block into a random order.
    """

    recipe: EncodingRecipe
    length: int
    _: KW_ONLY
    overlap: int
    marks_documents: bool = False
    shuffles: bool = True
    _encoder: Encoder | None = field(default=None, init=False)

    def __call__(
        self, rows: list[StreamedRow], remainder: list[list[int]] | None, generator: np.random.Generator
    ) -> BlockResult:
        skipped: list[str] = []
        documents = list(self._encoded(rows, skipped))
        if self.shuffles:
            documents = [documents[i] for i in generator.permutation(len(documents))]
        # The rest is a list of pieces of documents. The first piece began in an earlier window.
        pieces = [*map(np.asarray, remainder or []), *documents]
        tokens = np.concatenate([np.empty(0, np.int32), *pieces]).astype(np.int32)
        numbers = np.repeat(np.arange(len(pieces)), [len(piece) for piece in pieces])
        count = max(0, (len(tokens) - self.overlap) // self.length)
        columns = {"input_ids": self._windows(tokens, count)}
        if self.marks_documents:
            columns["documents"] = self._windows(numbers, count)
        rest, of = tokens[count * self.length :], numbers[count * self.length :]
        rest_of_documents = [piece.tolist() for piece in np.split(rest, np.flatnonzero(np.diff(of)) + 1)]
        return BlockResult(Rows(columns), rest_of_documents, skipped)

    def _encoded(self, rows: list[StreamedRow], skipped: list[str]) -> Iterator[np.ndarray]:
        """Yield the tokens of each row, file by file in their order."""
        for path, group in groupby(rows, key=lambda row: row.path):
            part = [(row.number, row.row or {}) for row in group]
            if self._encoder is None:
                # Use the tokenizer with a cache of pieces if it equals the plain one, also on the first rows.
                try:
                    encoder = Encoder(replace(self.recipe, way="pieces", skip=True))
                    encoder(EncodingJob(path, part, 0, check=True))
                    encoder.recipe = self.recipe
                except NotEquivalent:
                    encoder = Encoder(self.recipe)
                self._encoder = encoder
            encoded = self._encoder(EncodingJob(path, part, 0, check=False))
            skipped += encoded.skipped
            yield from np.split(encoded.columns[0].tokens, np.cumsum(encoded.columns[0].lengths)[:-1])

    def _windows(self, flat: np.ndarray, count: int) -> np.ndarray:
        """Return ``count`` windows as rows of a new array. A view would keep the whole block in memory."""
        if not count:
            return np.empty((0, self.length + self.overlap), flat.dtype)
        windows = np.lib.stride_tricks.sliding_window_view(flat, self.length + self.overlap)[:: self.length]
        return windows[:count].copy()

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_encoder": None}
