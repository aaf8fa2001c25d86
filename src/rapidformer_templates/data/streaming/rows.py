"""A stream of the rows of files over many epochs.

It is an iterable data set of ``datasets``, whose state stores the current position.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rapidformer_templates.data.finetuning.messages import rows_with_texts
from rapidformer_templates.data.random_streams import Stream
from rapidformer_templates.data.text.bad_lines import BadLines
from rapidformer_templates.data.text.files import Row, TextUnit, data_suffix, text_documents
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


class RowStream:
    """An endless stream of the rows of some files. After the last row it starts again.

    Args:
        files: the shards. They are read one after another.
        seed: seed of their order, which is new in each epoch. None keeps the given order.
        skip: leave out lines that cannot be read.
        text_unit: the unit of text that is one document in a ``.txt`` file.
        column: name of the column for such documents.

    Attributes:
        epoch: number of complete passes.
    """

    def __init__(
        self,
        files: Sequence[Path],
        seed: int | None,
        *,
        skip: bool = False,
        text_unit: TextUnit = "paragraph",
        column: str = "text",
    ) -> None:
        self.files = list(files)
        self.seed = seed
        self.skip, self.text_unit, self.column = skip, text_unit, column
        self.epoch = 0
        self._begin(None)

    def _begin(self, shard_state: dict[str, Any] | None) -> None:
        import datasets  # imported here, so that only streaming pays for it

        order = np.arange(len(self.files))
        if self.seed is not None:
            order = np.random.default_rng((self.seed, Stream.SHARDS, self.epoch)).permutation(len(self.files))
        files = [str(self.files[i]) for i in order]
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
        return {name: value for name, value in self.__dict__.items() if name not in ("_set", "_rows")} | {
            "_state": self.state()
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        stands = state.pop("_state")
        self.__dict__.update(state)
        self.go_to(stands)


def _rows(files: list[str], skip: bool, unit: TextUnit, column: str) -> Iterator[dict[str, object]]:
    """Yield the rows of one shard after another for the iterable data set."""
    for name in files:
        path, bad = Path(name), BadLines(skip=skip)
        rows: Iterator[tuple[int, Row]] = rows_with_texts(path, bad)
        if data_suffix(path) == ".txt":
            rows = ((number, {column: text}) for number, text in text_documents(path, bad, unit=unit))
        for number, row in rows:
            bad.raise_all(is_part=True)
            yield {"path": name, "number": number, "row": row, "skipped": bad.skipped}
            bad.skipped = []
        bad.raise_all(is_part=True)
        if bad.skipped:
            yield {"path": name, "number": 0, "row": None, "skipped": bad.skipped}
