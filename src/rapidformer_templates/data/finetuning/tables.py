"""Reads a fine-tuning data set from ``--data-dir`` and ``--data-name``.

:mod:`rapidformer_templates.data.finetuning.locating` describes where it is searched for. Without a validation part,
``--validation-fraction`` of the training part is held out. ``--evaluate-test`` reads the test part as well, and
``--eval-data-name`` adds validation sets.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from rapidformer_templates.data.finetuning.column_names import check_column, find_column
from rapidformer_templates.data.finetuning.content_parts import rows_with_texts
from rapidformer_templates.data.finetuning.locating import (
    Located,
    evaluated_sets,
    held_out_rows,
    locate,
    locate_evaluated,
    locate_part,
    parts_read,
    unreadable_error,
)
from rapidformer_templates.data.streaming.rows import RowStream, StreamedRow
from rapidformer_templates.data.text.files import NUMBERED_BY_LINE, BadLines, Row
from rapidformer_templates.errors import DataError
from rapidformer_templates.planning.config import RunConfig
from rapidformer_templates.planning.flags import DataFlags
from rapidformer_templates.planning.metrics import TEST

if TYPE_CHECKING:
    import datasets  # imports pandas, so only code that reads a table pays for it

EMPTY, EMPTY_HINT = "the data set is empty", "it needs at least one row"
FIRST_ROWS = 100
"""Number of rows of a stream that are read to find its columns."""


@dataclass(frozen=True)
class DataPart:
    """The rows of one part.

    Attributes:
        table: the rows.
        origins: the file of each row (an index into ``files``) and its line or position there. Shape (rows, 2).
        files: the files, as the user would name them.
    """

    table: datasets.Dataset
    origins: np.ndarray
    files: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.table)

    def where(self, row: int) -> str:
        """Return the location of a row: ``file:line``, or ``file, row N`` for files without lines."""
        file, number = self.origins[row]
        name = self.files[file]
        return f"{name}:{number}" if Path(name).suffix.lower() in NUMBERED_BY_LINE else f"{name}, row {number}"

    def select(self, rows: Sequence[int] | np.ndarray) -> DataPart:
        return DataPart(self.table.select(rows), self.origins[rows], self.files)

    def column(self, flag: str, value: str | None, usual: Sequence[str]) -> str:
        """Return the column that the flag names, else the first of the usual names that exists.

        Raises:
            DataError: there is none. The message lists the columns.
        """
        return find_column(self.table.column_names, self.files[0], flag, value, usual)

    def check_column(self, flag: str, name: str) -> None:
        """Check that a column exists that was used to read other rows.

        Args:
            flag: the flag that names another column.

        Raises:
            DataError: it does not exist. The message lists the columns.
        """
        check_column(self.table.column_names, self.files[0], flag, name)


@dataclass(frozen=True)
class LoadedDataset:
    """A data set as read from its files.

    Attributes:
        train, valid, test: its parts.
        named: additional validation sets, by name.
        held_out: the validation part was held out of the training part.
        skipped: ``file:line: reason`` of the lines that were left out.
        stream: the rows of a streamed training part. ``train`` has the first of them.
    """

    train: DataPart
    valid: DataPart | None = None
    test: DataPart | None = None
    named: dict[str, DataPart] = field(default_factory=dict)
    stream: RowStream | None = None
    held_out: bool = False
    skipped: list[str] = field(default_factory=list)

    def parts(self) -> dict[str, DataPart]:
        """Return the existing parts by name. Evaluated sets have names from :func:`part_name`."""
        evaluated = {"": self.valid, **self.named, TEST: self.test}
        existing = {part_name(name): part for name, part in evaluated.items() if part is not None}
        return {"train": self.train, **existing}


def part_name(evaluated: str) -> str:
    """Return the name of the part for an evaluated set. The validation part itself has the name ""."""
    return {"": "valid", TEST: TEST}.get(evaluated, f"valid {evaluated}")


def read_dataset(config: RunConfig) -> LoadedDataset:
    """Read, check and split the data set that the flags name.

    Raises:
        DataError: a folder, file, line or part is missing or cannot be read.
    """
    if config.data.streaming:
        return _streamed(config)
    flags = config.data
    bad = BadLines(skip=flags.skip_bad_lines)
    located = locate(flags)
    files = _with_training(located.parts, flags)
    parts = {name: _read_part(located, paths, bad) for name, paths in files.items() if name in parts_read(flags)}
    train, valid = parts["train"], parts.get("valid")
    held_out = valid is None and flags.validation_fraction > 0
    if held_out:
        train, valid = _hold_out(train, flags.validation_fraction, config.training.seed)
    return LoadedDataset(
        train=_first(train, flags.max_train_samples),
        valid=valid and _first(valid, flags.max_eval_samples),
        test=parts.get(TEST),
        named=_read_named(flags, bad),
        held_out=held_out,
        skipped=bad.skipped,
    )


def read_part(config: RunConfig, name: str | None) -> LoadedDataset:
    """Read one part of a data set to evaluate. It is ``train``, too, because columns are searched there.

    Args:
        name: see :func:`locate_part`.

    Raises:
        DataError: it does not exist, or there are several parts and none is named. Also the errors of
            :func:`read_dataset`.
    """
    bad = BadLines(skip=config.data.skip_bad_lines)
    part = _first(_read_part(*locate_part(config.data, name), bad), config.data.max_eval_samples)
    return LoadedDataset(train=part, valid=part, skipped=bad.skipped)


def streamed_files(flags: DataFlags) -> Mapping[str, list[Path]]:
    """Return the files of each part of a streamed data set.

    Raises:
        DataError: ``datasets`` saved the data set.
    """
    located = locate(flags)
    if located.kind != "files":
        hint = "leave it out, or write the set as files: Dataset.to_parquet(…)"
        raise DataError(f"{located.name} was saved by datasets, and cannot be streamed", where="--streaming", hint=hint)
    return _with_training(located.parts, flags)


def _streamed(config: RunConfig) -> LoadedDataset:
    """Read the training part as a stream, with its first rows to find columns. Read the other parts whole."""
    flags = config.data
    files, bad = streamed_files(flags), BadLines(skip=flags.skip_bad_lines)
    seed = None if flags.shuffle_buffer == 0 else config.training.seed
    stream = RowStream(files["train"], seed, skip=flags.skip_bad_lines)
    parts = {name: read_files(files[name], bad) for name in parts_read(flags)[1:] if name in files}
    valid = parts.get("valid")
    beginning = stream.state()
    rows = [row for row in (next(stream) for _ in range(FIRST_ROWS)) if row.row is not None]
    if not rows:
        raise DataError(EMPTY, where=str(files["train"][0]), hint=EMPTY_HINT)
    stream.go_to(beginning)
    return LoadedDataset(
        train=part_of_stream(rows),
        valid=valid and _first(valid, flags.max_eval_samples),
        test=parts.get(TEST),
        named=_read_named(flags, bad),
        stream=stream,
        skipped=bad.skipped,
    )


def _first(part: DataPart, count: int | None) -> DataPart:
    return part if count is None or count >= len(part) else part.select(np.arange(count))


def _hold_out(part: DataPart, fraction: float, seed: int) -> tuple[DataPart, DataPart]:
    """Return (training, validation) rows in their original order. Both have at least one row."""
    if fraction >= 1 or len(part) < 2:
        message = f"nothing is left to train on when {fraction:g} of {len(part)} rows is held out"
        raise DataError(message, where="--validation-fraction", hint="hold out less, or 0 for no validation")
    count = held_out_rows(len(part), fraction)
    is_held_out = np.zeros(len(part), dtype=bool)
    is_held_out[np.random.default_rng(seed).permutation(len(part))[:count]] = True
    return part.select(np.flatnonzero(~is_held_out)), part.select(np.flatnonzero(is_held_out))


def _with_training(files: Mapping[str, list[Path]], flags: DataFlags) -> Mapping[str, list[Path]]:
    if "train" in files:
        return files
    names = ", ".join(str(path) for paths in files.values() for path in paths)
    hint = f"name a file train; there is: {names}"
    raise DataError("the data set has no training part", where=flags.data_dir, hint=hint)


def _read_named(flags: DataFlags, bad: BadLines) -> dict[str, DataPart]:
    """Read the additional validation sets."""
    sets = {}
    for name, one in evaluated_sets(flags).items():
        part = _read_part(*locate_evaluated(name, one), bad)
        sets[name] = _first(part, flags.max_eval_samples)
    return sets


def _read_part(located: Located, files: Sequence[Path], bad: BadLines) -> DataPart:
    """Return the rows of all files of a part, in order.

    Raises:
        DataError: there is no row, or a file or a line cannot be read.
    """
    if located.kind == "files":
        return read_files(files, bad)
    part = _read_saved(files[0]) if located.kind == "saved" else _read_cached(files)
    if not len(part):
        raise DataError(EMPTY, where=part.files[0], hint=EMPTY_HINT)
    return part


def _read_saved(folder: Path) -> DataPart:
    import datasets

    try:
        table = datasets.load_from_disk(str(folder))
    except (FileNotFoundError, OSError, ValueError, pa.ArrowInvalid) as error:
        raise unreadable_error(folder, error) from error
    assert isinstance(table, datasets.Dataset)
    return part_of_table(table, str(folder))


def _read_cached(files: Sequence[Path]) -> DataPart:
    import datasets

    try:
        table = datasets.concatenate_datasets([datasets.Dataset.from_file(str(file)) for file in files])
    except (OSError, ValueError, pa.ArrowInvalid) as error:
        raise unreadable_error(files[0], error) from error
    return part_of_table(table, str(files[0]))


def part_of_table(table: datasets.Dataset, name: str) -> DataPart:
    """Return the rows of a ``datasets.Dataset``, which knows the names of its labels."""
    origins = np.stack([np.zeros(len(table), int), np.arange(1, len(table) + 1)], axis=1)
    return DataPart(table.with_format(None), origins, (name,))


def read_files(files: Sequence[Path], bad: BadLines) -> DataPart:
    """Return the rows of one or more files. A key that a row lacks is None.

    Raises:
        DataError: the files have no row, or a line cannot be read.
    """
    rows: list[Row] = []
    origins: list[tuple[int, int]] = []
    for index, path in enumerate(files):
        for number, row in rows_with_texts(path, bad):
            rows.append(row)
            origins.append((index, number))
    names = tuple(str(path) for path in files)
    if not rows:
        note = f" ({len(bad.skipped)} lines were left out)" if bad.skipped else ""
        raise DataError(EMPTY + note, where=names[0], hint=EMPTY_HINT)
    return part_of(rows, origins, names)


def part_of(rows: Sequence[Row], origins: Sequence[tuple[int, int]], files: tuple[str, ...]) -> DataPart:
    """Build a table from rows. A key that a row lacks is None. For the arguments see :class:`DataPart`.

    Raises:
        DataError: a column has values of several kinds.
    """
    import datasets

    columns = {key: [row.get(key) for row in rows] for key in dict.fromkeys(key for row in rows for key in row)}
    untabled = DataPart(datasets.Dataset.from_dict({}), np.asarray(origins), files)
    for key, values in columns.items():
        _check_kinds(key, values, untabled)
    return DataPart(datasets.Dataset.from_dict(columns), untabled.origins, files)


def part_of_stream(rows: Sequence[StreamedRow]) -> DataPart:
    """Build a table from rows of a stream."""
    files = {path: number for number, path in enumerate(dict.fromkeys(str(row.path) for row in rows))}
    origins = [(files[str(row.path)], row.number) for row in rows]
    return part_of([row.row or {} for row in rows], origins, tuple(files))


def _check_kinds(key: str, values: list[object], part: DataPart) -> None:
    """Check that a table can hold the values of a column, and report the first row that does not fit."""
    if _is_refused(values):
        row = bisect_left(range(len(values) + 1), True, key=lambda count: _is_refused(values[:count])) - 1
        value = f"the column '{key}' holds {str(values[row])[:40]!r}"
        if _is_refused([values[row]]):
            hint = "fix the value: a table cannot hold a number of more than 64 bits or half of a character"
            raise DataError(f"{value}, which cannot be read", where=part.where(row), hint=hint)
        message = f"{value}, which has another type than the rows before"
        raise DataError(message, where=part.where(row), hint="a column holds values of one type")


def _is_refused(values: list[object]) -> bool:
    try:
        pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError, UnicodeError):
        return True
    return False
