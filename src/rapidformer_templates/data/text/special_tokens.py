"""Special tokens that a tokenizer adds around a text, and texts that have them already."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from transformers import PreTrainedTokenizerFast


def added_tokens(tokenizer: PreTrainedTokenizerFast) -> tuple[list[int], list[int]]:
    """Return the tokens that the tokenizer adds before and after a text."""
    bare, whole = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (False, True))
    starts = [i for i in range(len(whole)) if bare and whole[i : i + len(bare)] == bare]
    return (whole[: starts[0]], whole[starts[0] + len(bare) :]) if starts else ([], [])


def once(ids: list[int], added: tuple[list[int], list[int]]) -> slice:
    """Return which tokens of a text remain if the added ones are not there twice, as with a text that was rendered."""
    begin, end = added
    if len(ids) <= len(begin) + len(end):
        return slice(0, len(ids))
    begins_twice = bool(begin) and ids[: 2 * len(begin)] == begin * 2
    ends_twice = bool(end) and ids[-2 * len(end) :] == end * 2
    return slice(len(begin) * begins_twice, len(ids) - len(end) * ends_twice)


def drop_repeated(
    tokenizer: PreTrainedTokenizerFast, encoded: MutableMapping[str, list[Any]], notes: list[str] | None
) -> None:
    """Remove special tokens that the tokenizer has added to texts that have them already, in all fields.

    Args:
        notes: receives a remark for the user, once.
    """
    added, names, repeats = added_tokens(tokenizer), list(encoded), 0
    for row, ids in enumerate(encoded["input_ids"]):
        tokens = once(ids, added)
        if tokens != slice(0, len(ids)):
            repeats += 1
            for name in names:
                encoded[name][row] = encoded[name][row][tokens]
    note = "texts begin or end with special tokens that the tokenizer adds, so it does not add them again"
    if repeats and notes is not None and note not in notes:
        notes.append(note)
