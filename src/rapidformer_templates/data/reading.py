"""Reading of a fine-tuning data set from ``--data-dir`` and ``--data-name``.

What is looked for, in this order, with EXT one of csv, tsv, json, jsonl, parquet:

1. ``DIR/NAME/``, or ``DIR`` itself without a name: a folder saved by ``datasets``, else files called
   ``train.EXT``, ``validation.EXT`` (or valid, val, dev) and ``test.EXT``, also in shards
   (``train-00000-of-00002.parquet``); else its only file.
2. ``DIR/NAME`` with its extension, or ``DIR/NAME.EXT``: one file.
3. ``DIR/NAME-train.EXT`` and so on, with ``-``, ``_`` or ``.`` before the part.

Without a validation part, ``--validation-fraction`` of the training part is held out.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa

from rapidformer_templates.config import RunConfig, spelling
from rapidformer_templates.data.files import NUMBERED_BY_LINE, ROW_READERS, BadLines, Row, nearest
from rapidformer_templates.errors import DataError
from rapidformer_templates.flags import DataFlags

PART_NAMES = {"train": "train", "valid": "valid", "validation": "valid", "val": "valid", "dev": "valid", "test": "test"}
STEM = re.compile(r"^(?:(?P<name>.+)[-_.])?(?P<part>train|validation|valid|val|dev|test)(?:-\d+-of-\d+)?$")
SHARD = re.compile(r"-\d+-of-\d+$")
SAVED = ("dataset_dict.json", "state.json")
"""Files by which ``datasets`` marks a folder that it saved."""


@dataclass(frozen=True)
class Part:
    """The rows of the training, validation or test part.

    Attributes:
        table: the rows.
        origins: the file of each row (an index into ``files``) and its line or place there, shape (rows, 2).
        files: the files, as the user would name them.
    """

    table: datasets.Dataset
    origins: np.ndarray
    files: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.table)

    def where(self, row: int) -> str:
        """Where a row stands: ``file:line``, or ``file, row N`` in files that have no lines."""
        file, number = self.origins[row]
        name = self.files[file]
        return f"{name}:{number}" if Path(name).suffix.lower() in NUMBERED_BY_LINE else f"{name}, row {number}"

    def select(self, rows: Sequence[int] | np.ndarray) -> Part:
        return Part(self.table.select(rows), self.origins[rows], self.files)

    def column(self, flag: str, value: str | None, usual: Sequence[str]) -> str:
        """The column that the flag names, else the first of the usual names that is there.

        Raises:
            DataError: there is none; the columns are listed.
        """
        columns = self.table.column_names
        where = f"{spelling(flag)} {value}" if value else self.files[0]
        if value is None:
            found = next((name for name in usual if name in columns), None)
            if found is not None:
                return found
            message = f"none of the columns is called {', '.join(usual)} in {self.files[0]}"
            raise DataError(message, where=where, hint=f"choose one with {spelling(flag)}: {', '.join(columns)}")
        if value in columns:
            return value
        message = f"there is no column '{value}' in {self.files[0]}"
        raise DataError(message, where=where, hint=f"{nearest(value, columns)}columns: {', '.join(columns)}")


@dataclass(frozen=True)
class Raw:
    """A data set as it was read.

    Attributes:
        train, valid, test: its parts.
        held_out: the validation part was held out of the training part here.
        skipped: ``file:line: reason`` of the lines that were left out.
    """

    train: Part
    valid: Part | None = None
    test: Part | None = None
    held_out: bool = False
    skipped: list[str] = field(default_factory=list)

    def parts(self) -> dict[str, Part]:
        """The parts that are there, by name."""
        named = {"train": self.train, "valid": self.valid, "test": self.test}
        return {name: part for name, part in named.items() if part is not None}


def read_dataset(config: RunConfig) -> Raw:
    """Read, check and cut the data set that the flags name.

    Raises:
        DataError: a folder, file, line or part that is missing or cannot be read.
    """
    flags = config.data
    bad = BadLines(skip=flags.skip_bad_lines)
    parts = _read_parts(flags, bad)
    if "train" not in parts:
        there = ", ".join(file for part in parts.values() for file in part.files)
        raise DataError(
            "the data set has no training part", where=flags.data_dir, hint=f"name a file train; there is: {there}"
        )
    for part in parts.values():
        if not len(part):
            raise DataError("the data set is empty", where=part.files[0], hint="it needs at least one row")
    train, valid = parts["train"], parts.get("valid")
    held_out = valid is None and flags.validation_fraction > 0
    if held_out:
        train, valid = _hold_out(train, flags.validation_fraction, config.training.seed)
    return Raw(
        train=_first(train, flags.max_train_samples),
        valid=valid and _first(valid, flags.max_eval_samples),
        test=parts.get("test") and _first(parts["test"], flags.max_eval_samples),
        held_out=held_out,
        skipped=bad.skipped,
    )


def _first(part: Part, count: int | None) -> Part:
    return part if count is None or count >= len(part) else part.select(np.arange(count))


def _hold_out(part: Part, fraction: float, seed: int) -> tuple[Part, Part]:
    """(training, validation) rows, each in their order; at least one row is left in both."""
    if fraction >= 1 or len(part) < 2:
        message = f"nothing is left to train on when {fraction:g} of {len(part)} rows is held out"
        raise DataError(message, where="--validation-fraction", hint="hold out less, or 0 for no validation")
    count = min(max(1, round(len(part) * fraction)), len(part) - 1)
    held = np.zeros(len(part), dtype=bool)
    held[np.random.default_rng(seed).permutation(len(part))[:count]] = True
    return part.select(np.flatnonzero(~held)), part.select(np.flatnonzero(held))


def _read_parts(flags: DataFlags, bad: BadLines) -> dict[str, Part]:
    found = locate(flags)
    if isinstance(found, Path):
        return _read_saved(found)
    return {part: _read_files(files, bad) for part, files in found.items()}


def locate(flags: DataFlags) -> Path | dict[str, list[Path]]:
    """Where the data set is: a folder that ``datasets`` saved, or the files of each part.

    Raises:
        DataError: nothing is there, or more than one thing fits.
    """
    if flags.data_dir is None:
        raise DataError("no data is named", where="--data-dir", hint="give --data-dir DIR and --data-name NAME")
    folder = Path(flags.data_dir)
    if not folder.is_dir():
        siblings = [str(p) for p in folder.parent.iterdir()] if folder.parent.is_dir() else []
        hint = nearest(str(folder), siblings) + "give the folder that holds the files"
        raise DataError(f"the folder {folder} does not exist", where="--data-dir", hint=hint)
    name = flags.data_name
    if name is not None and (folder / name).is_dir():
        folder, name = folder / name, None
    if name is None and any((folder / mark).is_file() for mark in SAVED):
        return folder
    return _locate(folder, name)


def _locate(folder: Path, name: str | None) -> dict[str, list[Path]]:
    """The files of each part, by the rules at the head of this module."""
    files = sorted(p for p in folder.iterdir() if p.is_file() and p.suffix.lower() in ROW_READERS)
    parts: dict[str, list[Path]] = {}
    for path in files:
        match = STEM.match(path.stem)
        if match and match["name"] == name:
            parts.setdefault(PART_NAMES[match["part"]], []).append(path)
    if "train" not in parts:
        whole = [p for p in files if name in (p.name, p.stem)] if name else ([] if parts else files)
        if whole:
            parts["train"] = whole
    for fitting in parts.values():
        if len(fitting) > 1 and not all(SHARD.search(path.stem) for path in fitting):
            hint = "keep one, or choose one with --data-name: " + ", ".join(path.name for path in fitting)
            raise DataError(f"several files in {folder} fit", where="--data-name", hint=hint)
    if not parts:
        there = sorted(p.name for p in folder.iterdir())
        what = f"there is no data set '{name}' in {folder}" if name else f"there is no data file in {folder}"
        listed = ", ".join(there[:20]) or "nothing"
        hint = f"{nearest(name or '', there)}the folder holds: {listed}; files can be {', '.join(ROW_READERS)}"
        raise DataError(what, where="--data-name" if name else "--data-dir", hint=hint)
    return parts


def _read_saved(folder: Path) -> dict[str, Part]:
    try:
        saved = datasets.load_from_disk(str(folder))
    except (FileNotFoundError, OSError, ValueError, pa.ArrowInvalid) as error:
        raise DataError(
            f"the saved data set cannot be read: {error}", where=str(folder), hint="save it anew"
        ) from error
    tables = saved if isinstance(saved, datasets.DatasetDict) else {"train": saved}
    parts: dict[str, Part] = {}
    for name, table in tables.items():
        part = PART_NAMES.get(str(name))
        if part is not None:
            origins = np.stack([np.zeros(len(table), int), np.arange(1, len(table) + 1)], axis=1)
            parts[part] = Part(table.with_format(None), origins, (str(folder / str(name)),))
    return parts


def _read_files(files: Sequence[Path], bad: BadLines) -> Part:
    """The rows of one or more files; a key that some rows lack is None there."""
    rows: list[Row] = []
    origins: list[tuple[int, int]] = []
    for index, path in enumerate(files):
        for number, row in ROW_READERS[path.suffix.lower()](path, bad):
            rows.append(row)
            origins.append((index, number))
    names = tuple(str(path) for path in files)
    if not rows:
        note = f" ({len(bad.skipped)} lines were left out)" if bad.skipped else ""
        raise DataError(f"the data set is empty{note}", where=names[0], hint="it needs at least one row")
    columns = {key: [row.get(key) for row in rows] for key in dict.fromkeys(key for row in rows for key in row)}
    untabled = Part(datasets.Dataset.from_dict({}), np.asarray(origins), names)
    for key, values in columns.items():
        _check_kinds(key, values, untabled)
    return Part(datasets.Dataset.from_dict(columns), untabled.origins, names)


def _check_kinds(key: str, values: list[object], part: Part) -> None:
    """A column holds one kind of value; name the first row where it does not."""

    def mixed(count: int) -> bool:
        try:
            pa.array(values[:count])
        except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError):
            return True
        return False

    if mixed(len(values)):
        row = bisect_left(range(len(values) + 1), True, key=mixed) - 1
        message = f"the column '{key}' holds {str(values[row])[:40]!r}, which is of another kind than the rows before"
        raise DataError(message, where=part.where(row), hint="a column holds one kind of value")
