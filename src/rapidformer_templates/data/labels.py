"""Names of labels, and their numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import datasets
from transformers import PreTrainedConfig

from rapidformer_templates.data.files import nearest
from rapidformer_templates.data.reading import Part
from rapidformer_templates.errors import DataError


def label_text(value: Any) -> str | None:
    """A label as text, the same from every file format (1, 1.0 and "1" are one label); None if it is empty."""
    if value is None or value != value:  # NaN is how tables of numbers spell an empty cell
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value).strip() or None


def sorted_names(names: Iterable[str], model_config: PreTrainedConfig) -> list[str]:
    """Label names in an order that depends on the set of names only.

    Whole numbers are sorted as numbers. A pretrained model that knows exactly these labels keeps
    its order, so that its head stays valid.
    """
    found = set(names)
    own = [str(name) for _, name in sorted((model_config.id2label or {}).items())]
    if set(own) == found:
        return own
    numbers = all(name.lstrip("-").isdigit() for name in found)
    return sorted(found, key=int) if numbers else sorted(found)


def declared_names(part: Part, column: str) -> list[str] | None:
    """The names that a saved data set declares for a column of labels or of lists of labels."""
    feature = part.table.features[column]
    inner = getattr(feature, "feature", feature)
    return list(inner.names) if isinstance(inner, datasets.ClassLabel) else None


def label_names(parts: Sequence[Part], column: str, model_config: PreTrainedConfig) -> list[str]:
    """The labels that the parts hold, in their order.

    Raises:
        DataError: a label is empty.
    """
    declared = declared_names(parts[0], column)
    if declared is not None:
        return declared
    return sorted_names((name for part in parts for name in _names(part, column)), model_config)


def encode_labels(part: Part, column: str, names: Sequence[str]) -> list[int]:
    """The number of each row's label.

    Raises:
        DataError: a label is empty or is not among ``names``.
    """
    numbers = {name: i for i, name in enumerate(names)}
    found = _names(part, column)
    for row, name in enumerate(found):
        if name not in numbers:
            unknown_label(name, names, part.where(row))
    return [numbers[name] for name in found]


def unknown_label(name: str, names: Sequence[str], where: str) -> None:
    """Raise the error about a label that the training part does not have."""
    hint = f"{nearest(name, names)}the training part has: {', '.join(names)}"
    raise DataError(f"unknown label '{name}'", where=where, hint=hint)


def _names(part: Part, column: str) -> list[str]:
    declared = declared_names(part, column)
    names: list[str] = []
    for row, value in enumerate(part.table[column][:]):
        name = declared[value] if declared and value is not None and value >= 0 else label_text(value)
        if name is None:
            raise DataError(
                f"the label in column '{column}' is empty", where=part.where(row), hint="fill it, or take the row out"
            )
        names.append(name)
    return names
