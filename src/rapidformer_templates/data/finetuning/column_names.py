"""The columns of fine-tuning data: their usual names, and which of them a file has. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rapidformer_templates.data.finetuning.locating import flags_of_sets, locate
from rapidformer_templates.data.text.bad_lines import BadLines
from rapidformer_templates.data.text.files import ROW_READERS, data_suffix
from rapidformer_templates.errors import DataError, MistakeCollector, did_you_mean
from rapidformer_templates.planning.config import spelling
from rapidformer_templates.planning.flags import DataFlags
from rapidformer_templates.planning.tasks import TASKS

FIXED = (".csv", ".tsv", ".parquet")
"""Formats in which all rows have the same columns."""

MAX_READ_BYTES = 5_000_000
"""Files of other formats are read for their columns only up to this size."""


def find_column(columns: Sequence[str], file: str, flag: str, value: str | None, usual: Sequence[str]) -> str:
    """Return the column that a flag names, else the first of the usual names that exists.

    Args:
        columns: the columns of the file.
        value: the value of the flag.

    Raises:
        DataError: there is none. The message lists the columns.
    """
    where = f"{spelling(flag)} {value}" if value else file
    if value is None:
        usual_name = next((name for name in usual if name in columns), None)
        if usual_name is not None:
            return usual_name
        message = f"none of the columns is called {', '.join(dict.fromkeys(usual))} in {file}"
        raise DataError(message, where=where, hint=f"choose one with {spelling(flag)}: {', '.join(columns)}")
    if value in columns:
        return value
    message = f"there is no column '{value}' in {file}"
    raise DataError(message, where=where, hint=did_you_mean(value, columns, f"columns: {', '.join(columns)}"))


def check_column(columns: Sequence[str], file: str, flag: str, name: str) -> None:
    """Check that a column exists that was used to read other rows.

    Args:
        columns: the columns of the file.
        flag: the flag that names another column.

    Raises:
        DataError: it does not exist. The message lists the columns.
    """
    if name not in columns:
        hint = f"columns: {', '.join(columns)}; {spelling(flag)} names another one"
        message = f"there is no column '{name}', which was used to read the training part"
        raise DataError(message, where=file, hint=did_you_mean(name, columns, hint))


def columns_of(path: Path) -> list[str] | None:
    """Return the columns of a file, or None if it has no row, or if finding them would take long."""
    reader = ROW_READERS.get(data_suffix(path))
    if reader is None or (data_suffix(path) not in FIXED and path.stat().st_size > MAX_READ_BYTES):
        return None
    rows = (row for _, row in reader(path, BadLines(skip=True)))
    if data_suffix(path) in FIXED:
        return list(next(rows, {})) or None
    return list(dict.fromkeys(name for row in rows for name in row)) or None


def check_training_columns(flags: DataFlags) -> None:
    """Check that the training files have the columns that flags name.

    Raises:
        DataError: a column is missing.
    """
    values = {flag: getattr(flags, flag) for flag in ("text_column", "pair_column", "label_column", "tools_column")}
    named = {flag: value for flag, value in values.items() if value is not None}
    for one in flags_of_sets(flags) if named else ():
        located = locate(one)
        files = located.parts.get("train", []) if located.kind == "files" else []
        columns = columns_of(files[0]) if files else None
        if columns is None or "paragraphs" in columns:  # SQuAD's nested rows get their columns later
            continue
        mistakes = MistakeCollector()
        for flag, value in named.items():
            mistakes.run(find_column, columns, str(files[0]), flag, value, ())
        mistakes.raise_all()


def check_input_columns(task: str | None, flags: DataFlags, trained: Mapping[str, str | None], path: Path) -> None:
    """Check that a file of rows to predict has the columns of the task.

    Args:
        task: the task of the model.
        trained: the columns of the training part, by flag.

    Raises:
        DataError: a column is missing.
    """
    columns = columns_of(path)
    if task is None or columns is None or "paragraphs" in columns:
        return
    facts = TASKS[task]
    mistakes = MistakeCollector()
    for flag, usual in facts.input_columns.items():
        value, trained_name = getattr(flags, flag), trained.get(flag)
        with mistakes.collect():
            # A text of any usual column can be continued, and not only of the one that the model was trained on.
            if value is None and trained_name is not None and not facts.continues_text:
                check_column(columns, str(path), flag, trained_name)
            elif value is not None or (usual and trained_name not in columns):
                find_column(columns, str(path), flag, value, usual)
    mistakes.raise_all()
