"""Names with weights before them, as Megatron-LM writes blends: ``0.3 A 0.7 B``. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rapidformer_templates.errors import DataError


def weighted(words: Sequence[str], flag: str) -> list[tuple[str, str]]:
    """(weight, name) of each name, the weight as it was written; empty where the first word is no weight.

    Args:
        words: in turns a weight and a name.
        flag: what they stand at, for messages.

    Raises:
        DataError: weights and names do not alternate.
    """
    if len(words) < 2 or not _is_weight(words[0]):
        return []
    pairs = list(zip(words[::2], words[1::2], strict=False))
    if len(words) % 2 or not all(_is_weight(weight) and not _is_weight(name) for weight, name in pairs):
        hint = "write a weight before each corpus: 0.3 A 0.7 B"
        raise DataError("weights and corpora do not alternate", where=f"{flag} {' '.join(words)}", hint=hint)
    return pairs


def _is_weight(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return not Path(word).exists()


def mixture_of(data_name: str | None) -> list[tuple[str, str]]:
    """(weight, name) of each data set of a mixture that ``--data-name`` names; empty where it names one set.

    Raises:
        DataError: weights and names do not alternate, or a set is named twice.
    """
    pairs = weighted((data_name or "").split(), "--data-name")
    names = [name for _, name in pairs]
    if len(set(names)) < len(names):
        raise DataError("a data set is named twice", where=f"--data-name {data_name}", hint="add its weights up")
    return pairs
