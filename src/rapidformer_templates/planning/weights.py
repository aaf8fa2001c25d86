"""Names with weights before them, as in Megatron-LM's blends: ``0.3 A 0.7 B``. Does not import torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from rapidformer_templates.errors import DataError
from rapidformer_templates.planning.metrics import TEST

SET_NAME = re.compile(r"[\w.-]+")
"""Valid names of validation sets."""


def named_sets(words: Sequence[str] | None, flag: str) -> dict[str, str]:
    """Parse words such as ``hard=FILE`` to sets by name. The name of a set without one is the set itself.

    Raises:
        DataError: a name is invalid, appears twice, or is the name of the test part.
    """
    sets: dict[str, str] = {}
    for word in words or ():
        name, equals, of = word.partition("=")
        if not SET_NAME.fullmatch(name) or (equals and not of):
            raise DataError(
                f"'{word}' is not the name of a set", where=flag, hint="write NAME=SET, as in hard=hard.jsonl"
            )
        if name == TEST:
            hint = "--evaluate-test evaluates the test part, at the end; give another set another name"
            raise DataError("a validation set is called test", where=flag, hint=hint)
        if name in sets:
            raise DataError(f"two sets are called {name}", where=flag, hint="give each its own name: NAME=SET")
        sets[name] = of or name
    return sets


def weighted(words: Sequence[str], flag: str) -> list[tuple[str, str]]:
    """Parse words to (weight, name) pairs. Weights keep their spelling. Empty if the first word is not a weight.

    Args:
        words: weights and names, alternating.
        flag: the flag of these words, for messages.

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
    """Return (weight, name) of each data set if ``--data-name`` names a mixture. Empty if it names one set.

    Raises:
        DataError: weights and names do not alternate, or a data set is named twice.
    """
    pairs = weighted((data_name or "").split(), "--data-name")
    names = [name for _, name in pairs]
    if len(set(names)) < len(names):
        raise DataError("a data set is named twice", where=f"--data-name {data_name}", hint="add its weights up")
    return pairs
