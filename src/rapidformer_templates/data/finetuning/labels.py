"""Names of labels, and their numbers: read from data, or in the order of a pretrained head.

Every run needs this module, so it imports no table library.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedConfig

from rapidformer_templates.data.collate import IGNORED
from rapidformer_templates.data.text.bad_lines import BadLines
from rapidformer_templates.errors import DataError, did_you_mean
from rapidformer_templates.models.architectures import has_head_of

if TYPE_CHECKING:
    from rapidformer_templates.data.finetuning.tables import DataPart

MULTI = "multi_label_classification"
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)
INTEGER = re.compile(r"-?\d{1,400}")
"""Matches what ``int`` can read. A superscript such as "²" is a digit, but ``int`` refuses it."""


def label_text(value: object) -> str | None:
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


def is_missing_label(value: object, declared: Sequence[str] | None) -> bool:
    """Return whether a number means "no label": -100, which losses ignore, or -1 if names are declared."""
    return label_text(value) in ((str(IGNORED),) if declared is None else (str(IGNORED), "-1"))


def label_name(value: object, declared: Sequence[str] | None, column: str) -> str | None:
    """Return the name of a label, or None if it is empty.

    Raises:
        DataError: names are declared, and the label is not among them. The caller adds the location.
    """
    if declared is None or value is None:
        return label_text(value)
    assert isinstance(value, int)  # a column that declares names holds their numbers
    if not 0 <= value < len(declared):
        message = f"the label in column '{column}' is {value}; {len(declared)} names are declared"
        raise DataError(message, hint="save the data set with the names of all of its labels")
    return declared[value]


def label_names(labelled: Sequence[tuple[DataPart, Sequence[str]]], column: str) -> list[str]:
    """Return the different labels of some parts, in order.

    Args:
        labelled: parts with one label per row.

    Raises:
        DataError: the labels are measures.
    """
    declared = declared_names(labelled[0][0], column)
    if declared is not None:
        return declared
    names = {name for _, of_part in labelled for name in of_part}
    if all(NUMBER.fullmatch(name) for name in names):
        # Numbers that are not integers are measures. Each would become a separate class.
        for part, of_part in labelled:
            row = _first_measure(of_part)
            if row is not None:
                measured = of_part[row]
                raise DataError(
                    f"the column '{column}' holds measures, such as {measured}, not classes",
                    where=part.where(row),
                    hint="learn them with --problem-type regression; if these numbers are classes, give them names, "
                    f"such as 'class {measured}'",
                )
    return sorted_names(names)


def _first_measure(names: Sequence[str]) -> int | None:
    return next((row for row, name in enumerate(names) if not float(name).is_integer()), None)


def problem_of(part: DataPart, column: str) -> str:
    """Return the problem type of labels, as transformers names it.

    Labels that are not all integers are a regression. Lists are several labels per row. Anything else is one class per
    row.
    """
    values = [value for value in part.table[column][:] if value is not None]
    if values and isinstance(values[0], list):
        return MULTI
    numbers = [text for text in map(label_text, values) if text is not None]
    is_measured = all(NUMBER.fullmatch(text) for text in numbers) and _first_measure(numbers) is not None
    return "regression" if is_measured else "single_label_classification"


def measure(value: object, column: str) -> float:
    """Return the number to predict.

    Raises:
        DataError: it is missing, or is not finite. The caller adds the location.
    """
    text = None if isinstance(value, bool) else label_text(value)
    if text is None or not NUMBER.fullmatch(text):
        message = f"the column '{column}' holds {value!r}, which is not a number to predict"
        raise DataError(message, hint="fill it, or remove the row")
    return float(text)


def label_set(values: object, declared: Sequence[str] | None, column: str) -> list[str]:
    """Return the names of a row's labels. It may have none.

    Raises:
        DataError: the row does not have a list, or its list has an empty label. The caller adds the location.
    """
    if not isinstance(values, list):
        message = f"the column '{column}' holds {values!r}, not a list of labels"
        raise DataError(message, hint='write a list, such as ["red", "round"], or []')
    names = [label_name(value, declared, column) for value in values]
    if None in names:
        raise DataError(f"a label in column '{column}' is empty", hint="leave it out of the list")
    return [name for name in names if name is not None]


def single_label(value: object, declared: Sequence[str] | None, column: str) -> str:
    """Return the name of a row's only label.

    Raises:
        DataError: it is empty, or means "no label". The caller adds the location.
    """
    if is_missing_label(value, declared):
        message = f"the label in column '{column}' is {value}, which is not a label"
        raise DataError(message, hint="fill it, or remove the row")
    name = label_name(value, declared, column)
    if name is None:
        raise DataError(f"the label in column '{column}' is empty", hint="fill it, or remove the row")
    return name


def label_reader(part: DataPart, column: str, problem: str | None = None) -> Callable[[object], Any]:
    """Return the function that reads the label of a row for a problem type."""
    if problem == "regression":
        return partial(measure, column=column)
    read = label_set if problem == MULTI else single_label
    return partial(read, declared=declared_names(part, column), column=column)


def known_labels(
    part: DataPart, rows: Iterable[Iterable[str | None]], names: Sequence[str], *, in_any_case: bool
) -> list[list[str | None]]:
    """Return the labels of each row, which must be those of the training part. A word may have none.

    Args:
        in_any_case: give labels the case of ``names`` if they differ only in it, as :func:`in_order_of_head` does.

    Raises:
        DataError: a label is not among ``names``.
    """
    bad, known = BadLines(advice=""), {None, *names}
    lower = {name.lower(): name for name in names}
    if not in_any_case or len(lower) < len(names):
        lower = {}
    found = []
    for row, row_labels in enumerate(rows):
        found.append([name if name in known else lower.get(str(name).lower(), name) for name in row_labels])
        unknown = next((name for name in found[-1] if name not in known), None)
        if unknown is not None:
            hint = did_you_mean(unknown, names, f"the training part has: {', '.join(names)}")
            bad.note_at(part.where(row), f"unknown label '{unknown}'", hint)
    bad.raise_all()
    return found


def labels_of_model(model_config: PreTrainedConfig) -> list[str]:
    """Return the labels that a model names, in the order of its head."""
    return [str(name) for _, name in sorted((model_config.id2label or {}).items())]


def in_order_of_head(
    names: Sequence[str], model_config: PreTrainedConfig, auto_class: str, *, new_head: bool
) -> tuple[list[str], str | None]:
    """Return the labels in the order of a pretrained head's outputs, and a note for the user or None.

    Labels of the data and of the model match if they differ only in case.

    Args:
        names: labels of the data in their own order, which a new head uses.
        new_head: the trained head is not used.

    Raises:
        DataError: the head was trained for the same number of labels with other names.
    """
    if new_head:
        return list(names), None
    head_labels = labels_of_model(model_config)
    is_trained = has_head_of(model_config, auto_class)
    lower = {name.lower(): name for name in names}
    if len(lower) < len(names) or len({name.lower() for name in head_labels}) < len(head_labels):
        lower = {name: name for name in names}
    spelled = [name if name in lower else name.lower() for name in head_labels]
    if set(lower) == set(spelled) or (is_trained and set(lower) < set(spelled)):
        return [lower.get(folded, name) for folded, name in zip(spelled, head_labels, strict=True)], None
    if not is_trained:
        return list(names), None
    head_names, data_names = ", ".join(head_labels), ", ".join(names)
    if len(head_labels) != len(names):
        note = f"the head is new: the model's own is for the labels {head_names}, and the data has {data_names}"
        return list(names), note
    if head_labels == [f"LABEL_{i}" for i in range(len(head_labels))]:
        return list(names), f"the model does not name its labels, so its outputs mean {data_names}, in this order"
    message = f"the head of the model is for the labels {head_names}, and the data has {data_names}"
    hint = "give the labels of the data the model's names, or train a new head with --new-head"
    raise DataError(message, where="--pretrained-model-name-or-path", hint=hint)
