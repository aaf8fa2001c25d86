"""Names of labels, and their numbers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from rapidformer_templates.data.finetuning.tables import DataPart
from rapidformer_templates.data.targets import IGNORED
from rapidformer_templates.errors import DataError, did_you_mean

NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)
INTEGER = re.compile(r"-?\d{1,400}")
"""Matches what ``int`` can read. A superscript such as "²" is a digit, but ``int`` refuses it."""


def label_text(value: Any) -> str | None:
    """Return a label as text, or None if it is empty. 1, 1.0 and "1" from any file format are the same label."""
    if value is None or value != value:  # NaN is an empty cell in numeric columns
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value).strip() or None


def sorted_names(names: Iterable[str]) -> list[str]:
    """Sort label names. The order depends only on the set of names, and integers are sorted as numbers."""
    distinct = set(names)
    are_integers = all(INTEGER.fullmatch(name) for name in distinct)
    return sorted(distinct, key=lambda name: (int(name), name)) if are_integers else sorted(distinct)


def declared_names(part: DataPart, column: str) -> list[str] | None:
    """Return the names that a saved data set declares for a column of labels or of lists of labels, or None."""
    import datasets  # imports pandas, so only code that reads a table pays for it

    feature = part.table.features[column]
    inner = getattr(feature, "feature", feature)
    return list(inner.names) if isinstance(inner, datasets.ClassLabel) else None


def is_missing_label(value: Any, declared: Sequence[str] | None) -> bool:
    """Return whether a number means "no label": -100, which losses ignore, or -1 if names are declared."""
    return label_text(value) in ((str(IGNORED),) if declared is None else (str(IGNORED), "-1"))


def label_name(value: Any, declared: Sequence[str] | None, column: str, part: DataPart, row: int) -> str | None:
    """Return the name of a label, or None if it is empty.

    Raises:
        DataError: names are declared, and the label is not among them.
    """
    if declared is None or value is None:
        return label_text(value)
    if not 0 <= value < len(declared):
        message = f"the label in column '{column}' is {value}; {len(declared)} names are declared"
        raise DataError(message, where=part.where(row), hint="save the data set with the names of all of its labels")
    return declared[value]


def label_names(parts: Sequence[DataPart], column: str) -> list[str]:
    """Return the labels of the parts, in order.

    Raises:
        DataError: a label is empty or means "no label", or the labels are measures.
    """
    names_of_parts = [_names(part, column) for part in parts]
    declared = declared_names(parts[0], column)
    if declared is not None:
        return declared
    for part, names in zip(parts, names_of_parts, strict=True):
        _refuse_measures(part, column, names, set().union(*names_of_parts))
    return sorted_names(name for names in names_of_parts for name in names)


def _refuse_measures(part: DataPart, column: str, names: Sequence[str], of_all: set[str]) -> None:
    """Refuse a column of non-integer numbers. They are measures, and each would become a separate class."""
    row = _first_measure(names) if all(NUMBER.fullmatch(name) for name in of_all) else None
    if row is not None:
        raise DataError(
            f"the column '{column}' holds measures, such as {names[row]}, not classes",
            where=part.where(row),
            hint="learn them with --problem-type regression; if these numbers are classes, give them names, "
            f"such as 'class {names[row]}'",
        )


def _first_measure(names: Sequence[str]) -> int | None:
    return next((row for row, name in enumerate(names) if not float(name).is_integer()), None)


def problem_of(parts: Sequence[DataPart], column: str) -> str:
    """Return the problem type of labels, as transformers names it.

    Labels that are not all integers are a regression. Lists are several labels per row. Anything else is one class per
    row.
    """
    first = next((value for part in parts for value in part.table[column][:] if value is not None), None)
    if isinstance(first, list):
        return "multi_label_classification"
    texts = [label_text(value) for part in parts for value in part.table[column][:]]
    numbers = [text for text in texts if text is not None]
    is_measured = all(NUMBER.fullmatch(text) for text in numbers) and _first_measure(numbers) is not None
    return "regression" if is_measured else "single_label_classification"


def measures(part: DataPart, column: str) -> list[float]:
    """Return the number of each row.

    Raises:
        DataError: a number is missing, or is not finite.
    """
    numbers = []
    for row, value in enumerate(part.table[column][:]):
        text = None if isinstance(value, bool) else label_text(value)
        if text is None or not NUMBER.fullmatch(text):
            message = f"the column '{column}' holds {value!r}, which is not a number to predict"
            raise DataError(message, where=part.where(row), hint="fill it, or remove the row")
        numbers.append(float(text))
    return numbers


def label_sets(part: DataPart, column: str) -> list[list[str]]:
    """Return the names of each row's labels. A row may have none.

    Raises:
        DataError: a row does not have a list, or its list has an empty label.
    """
    declared = declared_names(part, column)
    sets = []
    for row, values in enumerate(part.table[column][:]):
        if not isinstance(values, list):
            message = f"the column '{column}' holds {values!r}, not a list of labels"
            raise DataError(message, where=part.where(row), hint='write a list, such as ["red", "round"], or []')
        names = [label_name(value, declared, column, part, row) for value in values]
        if None in names:
            message = f"a label in column '{column}' is empty"
            raise DataError(message, where=part.where(row), hint="leave it out of the list")
        sets.append([name for name in names if name is not None])
    return sets


def label_set_names(parts: Sequence[DataPart], column: str) -> list[str]:
    """Return all labels that occur in lists of labels, in order."""
    declared = declared_names(parts[0], column)
    names_used = {name for part in parts for names in label_sets(part, column) for name in names}
    return declared or sorted_names(names_used)


def encode_label_sets(part: DataPart, column: str, names: Sequence[str]) -> list[list[float]]:
    """Return, for each row, 1 for each label that it has and 0 for the others, in the order of ``names``.

    Raises:
        DataError: a label is not among ``names``.
    """
    rows = label_sets(part, column)
    for row, row_labels in enumerate(rows):
        for name in row_labels:
            if name not in names:
                unknown_label(name, names, part.where(row))
    return [[float(name in row_labels) for name in names] for row_labels in rows]


def encode_labels(part: DataPart, column: str, names: Sequence[str]) -> list[int]:
    """Return the index of each row's label in ``names``.

    Raises:
        DataError: a label is empty or is not among ``names``.
    """
    numbers = {name: i for i, name in enumerate(names)}
    names_here = _names(part, column)
    for row, name in enumerate(names_here):
        if name not in numbers:
            unknown_label(name, names, part.where(row))
    return [numbers[name] for name in names_here]


def unknown_label(name: str, names: Sequence[str], where: str) -> None:
    """Raise the error for a label that the training part does not have."""
    hint = did_you_mean(name, names, f"the training part has: {', '.join(names)}")
    raise DataError(f"unknown label '{name}'", where=where, hint=hint)


def _names(part: DataPart, column: str) -> list[str]:
    declared = declared_names(part, column)
    names: list[str] = []
    for row, value in enumerate(part.table[column][:]):
        if is_missing_label(value, declared):
            message = f"the label in column '{column}' is {value}, which is not a label"
            raise DataError(message, where=part.where(row), hint="fill it, or remove the row")
        name = label_name(value, declared, column, part, row)
        if name is None:
            raise DataError(
                f"the label in column '{column}' is empty", where=part.where(row), hint="fill it, or remove the row"
            )
        names.append(name)
    return names
