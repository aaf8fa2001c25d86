"""The labels of data in the order of a pretrained head. Every run needs this module, so it imports no table library."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedConfig

from rapidformer_templates.errors import DataError
from rapidformer_templates.models.architectures import has_head_of


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
        return list(
            names
        ), f"the head is new: the model's own is for the labels {head_names}, and the data has {data_names}"
    if head_labels == [f"LABEL_{i}" for i in range(len(head_labels))]:
        return list(names), f"the model does not name its labels, so its outputs mean {data_names}, in this order"
    raise DataError(
        f"the head of the model is for the labels {head_names}, and the data has {data_names}",
        where="--pretrained-model-name-or-path",
        hint="give the labels of the data the model's names, or train a new head with --new-head",
    )
