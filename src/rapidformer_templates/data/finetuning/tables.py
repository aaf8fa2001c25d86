"""Reads a fine-tuning data set from ``--data-dir`` and ``--data-name``.

:mod:`rapidformer_templates.data.finetuning.locating` describes where it is searched for. Without a validation part,
``--validation-fraction`` of the training part is held out. ``--evaluate-test`` reads the test part as well, and
``--eval-data-name`` adds validation sets.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import pyarrow as pa

from rapidformer_templates.data.finetuning import locating
from rapidformer_templates.data.finetuning.messages import rows_with_texts
from rapidformer_templates.data.streaming import RowStream, StreamedRow
from rapidformer_templates.data.text.bad_lines import BadLines
from rapidformer_templates.data.text.files import NUMBERED_BY_LINE, Row, data_suffix
from rapidformer_templates.errors import DataError
from rapidformer_templates.planning.config import RunConfig
from rapidformer_templates.planning.flag_values import TEST
from rapidformer_templates.planning.flags import DataFlags

if TYPE_CHECKING:
    import datasets  # imports pandas, so only code that reads a table pays for it

T = TypeVar("T")

EMPTY, EMPTY_HINT = "the data set is empty", "it needs at least one row"
FIRST_ROWS = 100
"""Number of rows of a stream that are read to find its columns."""


def row_location(file: str, number: int) -> str:
    """Return the location of a row: ``file:line``, or ``file, row N`` for files without lines."""
    return f"{file}:{number}" if data_suffix(Path(file)) in NUMBERED_BY_LINE else f"{file}, row {number}"


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
        """Return the location of a row, as :func:`row_location` writes it."""
        file, number = self.origins[row]
        return row_location(self.files[file], number)

    def select(self, rows: Sequence[int] | np.ndarray) -> DataPart:
        return DataPart(self.table.select(rows), self.origins[rows], self.files)

    def read(self, columns: Sequence[str], read_row: Callable[..., T], advice: str = "") -> list[T]:
        """Return the results of a function for the values of each row in some columns.

        Args:
            read_row: raises a :class:`DataError` for a row that cannot be used.
            advice: what to do about such a row.

        Raises:
            DataError: one error about all rows that cannot be used.
        """
        bad = BadLines(advice=advice)
        results = [result for _, result in self._results(columns, read_row, bad)]
        bad.raise_all()
        return results

    def usable(self, columns: Sequence[str], check_row: Callable[..., object], bad: BadLines) -> DataPart:
        """Return the rows for which a function raises no :class:`DataError`. The others are noted in ``bad``."""
        rows = [row for row, _ in self._results(columns, check_row, bad)]
        return self if len(rows) == len(self) else self.select(rows)

    def _results(self, columns: Sequence[str], read_row: Callable[..., T], bad: BadLines) -> Iterator[tuple[int, T]]:
        values = (self.table[name][:] for name in columns)
        for row, fields in enumerate(zip(*values, strict=True)):
            try:
                yield row, read_row(*fields)
            except DataError as error:
                bad.note_at(self.where(row), error.message, error.hint or "")

    def column(self, flag: str, value: str | None, usual: Sequence[str]) -> str:
        """Return the column that the flag names, else the first of the usual names that exists.

        Raises:
            DataError: there is none. The message lists the columns.
        """
        return locating.find_column(self.table.column_names, self.files[0], flag, value, usual)

    def check_column(self, flag: str, name: str) -> None:
        """Check that a column exists that was used to read other rows.

        Args:
            flag: the flag that names another column.

        Raises:
            DataError: it does not exist. The message lists the columns.
        """
        locating.check_column(self.table.column_names, self.files[0], flag, name)


@dataclass(frozen=True)
class LoadedDataset:
    """A data set as read from its files.

    Attributes:
        train, valid, test: its parts.
        named: additional validation sets, by name.
        held_out: the validation part was held out of the training part.
        stream: the rows of a streamed training part. ``train`` has the first of them.
    """

    train: DataPart
    valid: DataPart | None = None
    test: DataPart | None = None
    named: dict[str, DataPart] = field(default_factory=dict)
    stream: RowStream | None = None
    held_out: bool = False

    def parts(self) -> dict[str, DataPart]:
        """Return the existing parts by name. Evaluated sets have names from :func:`part_name`."""
        evaluated = {"": self.valid, **self.named, TEST: self.test}
        existing = {part_name(name): part for name, part in evaluated.items() if part is not None}
        return {"train": self.train, **existing}


def part_name(evaluated: str) -> str:
    """Return the name of the part for an evaluated set. The validation part itself has the name ""."""
    return {"": "valid", TEST: TEST}.get(evaluated, f"valid {evaluated}")


UsableRows = Callable[[DataPart, BadLines], DataPart]
"""Returns the rows of a part that a task can use, and notes the others. It is called for the training part first."""


def read_dataset(config: RunConfig, bad: BadLines | None = None, usable: UsableRows | None = None) -> LoadedDataset:
    """Read, check and split the data set that the flags name. By default, all rows are usable.

    Args:
        bad: receives the lines and rows that cannot be used.

    Raises:
        DataError: a folder, file or part is missing, or lines or rows cannot be used.
    """
    bad = BadLines(skip=config.data.skip_bad_lines) if bad is None else bad
    flags = config.data
    located, stream = locate_training(flags), None
    parts: dict[str, DataPart] = {}
    if flags.streaming:
        parts["train"], stream = _open_stream(located.parts["train"], config, usable)
    for name in locating.parts_read(flags):
        if name in located.parts and name not in parts:
            parts[name] = _read_part(located, located.parts[name], bad, usable)
    named: dict[str, DataPart] = {}
    for name, one in locating.evaluated_sets(flags).items():
        part = _read_part(*locating.locate_evaluated(name, one), bad, usable)
        named[name] = _first(part, flags.max_eval_samples)
    bad.raise_all()
    train, valid = parts["train"], parts.get("valid")
    held_out = stream is None and valid is None and flags.validation_fraction > 0
    if held_out:
        train, valid = _hold_out(train, config)
    return LoadedDataset(
        train=_first(train, flags.max_train_samples) if stream is None else train,
        valid=valid and _first(valid, flags.max_eval_samples),
        test=parts.get(TEST),
        named=named,
        stream=stream,
        held_out=held_out,
    )


def _hold_out(rows: DataPart, config: RunConfig) -> tuple[DataPart, DataPart]:
    """Return the rows to train on, and a share of random rows for validation.

    Raises:
        DataError: none is left to train on.
    """
    fraction = config.data.validation_fraction
    if fraction >= 1 or len(rows) < 2:
        message = f"nothing is left to train on when {fraction:g} of {len(rows)} rows is held out"
        raise DataError(message, where="--validation-fraction", hint="hold out less, or 0 for no validation")
    shuffled = np.random.default_rng(config.training.seed).permutation(len(rows))
    is_held_out = np.zeros(len(rows), dtype=bool)
    is_held_out[shuffled[: locating.held_out_rows(len(rows), fraction)]] = True
    return rows.select(np.flatnonzero(~is_held_out)), rows.select(np.flatnonzero(is_held_out))


def read_part(
    config: RunConfig, name: str | None, bad: BadLines | None = None, usable: UsableRows | None = None
) -> LoadedDataset:
    """Read one part of a data set to evaluate. It is ``train``, too, because columns are searched there.

    Args:
        name: see :func:`locate_part`. The training part leaves out the rows that the flags hold out for validation.
        bad: receives the lines and rows that cannot be used.

    Raises:
        DataError: it does not exist, or there are several parts and none is named. Also the errors of
            :func:`read_dataset`.
    """
    bad = BadLines(skip=config.data.skip_bad_lines) if bad is None else bad
    part = _read_part(*locating.locate_part(config.data, name), bad, usable)
    bad.raise_all()
    if name == "train":
        if "valid" not in locating.locate(config.data, read=()).parts and config.data.validation_fraction > 0:
            part, _ = _hold_out(part, config)
        part = _first(part, config.data.max_train_samples)
    part = _first(part, config.data.max_eval_samples)
    return LoadedDataset(train=part, valid=part)


def locate_training(flags: DataFlags) -> locating.Located:
    """Find a data set with a training part, which must be files if it is streamed.

    Raises:
        DataError: there is no training part, or ``datasets`` saved what should be streamed.
    """
    located = locating.locate(flags)
    if flags.streaming and located.kind != "files":
        hint = "leave it out, or write the set as files: Dataset.to_parquet(…)"
        raise DataError(f"{located.name} was saved by datasets, and cannot be streamed", where="--streaming", hint=hint)
    if "train" not in located.parts:
        names = ", ".join(str(path) for paths in located.parts.values() for path in paths)
        hint = f"name a file train; there is: {names}"
        raise DataError("the data set has no training part", where=flags.data_dir, hint=hint)
    return located


def _open_stream(files: list[Path], config: RunConfig, usable: UsableRows | None) -> tuple[DataPart, RowStream]:
    """Return the first rows of a streamed training part, which show the columns, and the stream from its beginning."""
    seed = None if config.data.shuffle_buffer == 0 else config.training.seed
    stream = RowStream(files, seed, skip=config.data.skip_bad_lines)
    beginning = stream.state()
    rows = [row for row in (next(stream) for _ in range(FIRST_ROWS)) if row.row is not None]
    if not rows:
        raise DataError(EMPTY, where=str(files[0]), hint=EMPTY_HINT)
    stream.go_to(beginning)
    train = part_of_stream(rows, BadLines(skip=True))
    if usable:
        usable(train, BadLines(skip=True))  # finds the columns; the rows are checked when they are used
    return train, stream


def _first(part: DataPart, count: int | None) -> DataPart:
    return part if count is None or count >= len(part) else part.select(np.arange(count))


def _read_part(located: locating.Located, files: Sequence[Path], bad: BadLines, usable: UsableRows | None) -> DataPart:
    """Return the usable rows of all files of a part, in order.

    Raises:
        DataError: there is no such row, or a file or a line cannot be read.
    """
    if located.kind == "files":
        part = read_files(files, bad)
    else:
        import datasets

        try:
            if located.kind == "saved":
                table = datasets.load_from_disk(str(files[0]))
            else:
                table = datasets.concatenate_datasets([datasets.Dataset.from_file(str(file)) for file in files])
        except locating.SAVED_DATA_ERRORS as error:
            raise locating.unreadable_error(files[0], error) from error
        assert isinstance(table, datasets.Dataset)
        if not len(table):
            raise DataError(EMPTY, where=str(files[0]), hint=EMPTY_HINT)
        part = part_of_table(table, str(files[0]))
    rows = usable(part, bad) if usable else part
    if not len(rows) and bad.skip:
        message = f"none of the {len(part)} rows can be used; the last: {bad.skipped[-1]}"
        raise DataError(message, where=part.files[0], hint="fix the rows")
    return rows


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
        bad.raise_all()
        note = f" ({len(bad.skipped)} lines were left out)" if bad.skipped else ""
        raise DataError(EMPTY + note, where=names[0], hint=EMPTY_HINT)
    return part_of(rows, origins, names, bad)


def part_of(
    rows: Sequence[Mapping[str, object]],
    origins: Sequence[tuple[int, int]],
    files: tuple[str, ...],
    bad: BadLines | None = None,
) -> DataPart:
    """Build a table from rows. A key that a row lacks is None. For the arguments see :class:`DataPart`.

    Args:
        bad: receives rows whose values have another type than those of the rows before. None: they are an error.

    Raises:
        DataError: a column has values that a table cannot hold.
    """
    import datasets

    if bad is not None:
        rows, origins = _of_one_type(rows, origins, files, bad)
    columns = {key: [row.get(key) for row in rows] for key in dict.fromkeys(key for row in rows for key in row)}
    untabled = DataPart(datasets.Dataset.from_dict({}), np.asarray(origins), files)
    for key, values in columns.items():
        if "\0" in key or _is_refused([key]):
            row = next(number for number, row in enumerate(rows) if key in row)
            hint = "rename it: the name of a column cannot have a zero byte or half of a character"
            raise DataError(f"the column {key!r} cannot be read", where=untabled.where(row), hint=hint)
        if _is_refused(values):
            # The first row whose value does not fit into the table with those before.
            row = bisect_left(range(len(values) + 1), True, key=lambda count: _is_refused(values[:count])) - 1
            what, hint = "which has another type than the rows before", "a column holds values of one type"
            if _is_refused([values[row]]):
                what = "which cannot be read"
                hint = "fix the value: a table cannot hold a number of more than 64 bits or half of a character"
            message = f"the column '{key}' holds {str(values[row])[:40]!r}, {what}"
            raise DataError(message, where=untabled.where(row), hint=hint)
    try:
        table = datasets.Dataset.from_dict(columns)
    except (pa.ArrowException, ValueError) as error:  # names of inner fields, for instance, that a table cannot have
        reason = str(error).partition("\n")[0]
        hint = "write texts, numbers, and lists or objects of them with plain names"
        raise DataError(f"the rows cannot be read as a table: {reason}", where=files[0], hint=hint) from error
    return DataPart(table, untabled.origins, files)


def _of_one_type(
    rows: Sequence[Mapping[str, object]], origins: Sequence[tuple[int, int]], files: tuple[str, ...], bad: BadLines
) -> tuple[Sequence[Mapping[str, object]], Sequence[tuple[int, int]]]:
    """Return the rows whose values have the types of the rows before, with their origins."""
    keys = dict.fromkeys(key for row in rows for key in row)
    refused = [key for key in keys if _is_refused([row.get(key) for row in rows])]
    if not refused:
        return rows, origins
    types: dict[str, str] = {}
    fitting = []
    for number, row in enumerate(rows):
        for key in refused:
            value = row.get(key)
            kind = "number" if type(value) in (int, float) else type(value).__name__
            # The first value of a column decides its type.
            if value is not None and types.setdefault(key, kind) != kind:
                file, line = origins[number]
                reason = f"the column '{key}' holds {str(value)[:40]!r}, which has another type than the rows before"
                bad.note_at(row_location(files[file], line), reason, "a column holds values of one type")
                break
        else:
            fitting.append(number)
    return [rows[number] for number in fitting], [origins[number] for number in fitting]


def part_of_stream(rows: Sequence[StreamedRow], bad: BadLines | None = None) -> DataPart:
    """Build a table from rows of a stream. For ``bad`` see :func:`part_of`."""
    files = {path: number for number, path in enumerate(dict.fromkeys(str(row.path) for row in rows))}
    origins = [(files[str(row.path)], row.number) for row in rows]
    return part_of([row.row or {} for row in rows], origins, tuple(files), bad)


def _is_refused(values: list[object]) -> bool:
    try:
        pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError, UnicodeError):
        return True
    return False
