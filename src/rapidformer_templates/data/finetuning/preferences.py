"""Preference data: pairs of answers, or single answers labelled good or bad. Rows, tokens and batches.

A row has one of these forms:

- a prompt with a ``chosen`` and a ``rejected`` answer, all texts or all lists of messages
- two whole conversations ``chosen`` and ``rejected``, whose common beginning is the prompt
- for answers with their own label: a prompt with a ``completion`` and a ``label`` that is true or false

Answers of messages can have tools in a further column.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import repeat

import numpy as np
import torch

from rapidformer_templates.data.collate import IGNORED, Ragged, TokenizedSamples, pad_rows
from rapidformer_templates.data.finetuning.chat import ChatExample, Completion, Example, read_completion
from rapidformer_templates.data.finetuning.chat_samples import ChatReader, EncodedChat, Rendered
from rapidformer_templates.data.finetuning.labels import label_text
from rapidformer_templates.data.finetuning.messages import TOOL_COLUMNS, common_length, read_messages, read_tools
from rapidformer_templates.data.finetuning.tables import DataPart
from rapidformer_templates.data.types import Sample
from rapidformer_templates.errors import DataError

PROMPT = "prompt"
"""The prompt column if no flag names another one."""

GOOD = {"true": True, "1": True, "false": False, "0": False}
"""Labels of answers. Files such as csv hold them as text."""


@dataclass(frozen=True)
class Answer:
    """An answer with its prompt, as it was read and as a text."""

    example: Example
    rendered: Rendered


LabelledAnswer = tuple[Answer, bool]
"""An answer, and whether it is good."""


def _prompts_and_tools(part: DataPart, prompt: str | None, tools: str | None) -> list[Iterable[object]]:
    """Return the prompts and the tools of all rows. Each is None if there is no such column.

    Raises:
        DataError: the column that ``tools`` names does not exist.
    """
    usual = next((name for name in TOOL_COLUMNS if name in part.table.column_names), None)
    columns = prompt, part.column("tools_column", tools, ()) if tools else usual
    return [part.table[name][:] if name else repeat(None, len(part)) for name in columns]


def pairs_of(part: DataPart, prompt: str | None, tools: str | None, reader: ChatReader) -> list[tuple[Answer, Answer]]:
    """Return the chosen and the rejected answer of each row, each with the prompt.

    Args:
        prompt: the column of prompts. None if the answers contain them.
        tools: the column of tools. None if it has a usual name, or if there is none.

    Raises:
        DataError: a column is missing, or a row cannot be used.
    """
    names = [_column(part, name) for name in ("chosen", "rejected")]
    rows = zip(*_prompts_and_tools(part, prompt, tools), *(part.table[name][:] for name in names), strict=True)

    def read_pair(fields: tuple[object, object, object, object]) -> tuple[Answer, Answer]:
        """Read a row. The common beginning of its answers is the prompt if there is no other."""
        prompt, tools, chosen, rejected = fields
        pair: tuple[Example, Example]
        if isinstance(chosen, list) and isinstance(rejected, list) and not isinstance(prompt, list):
            chosen, rejected = read_messages(chosen, "chosen"), read_messages(rejected, "rejected")
            common, schemas = common_length(chosen, rejected), read_tools(tools)
            pair = ChatExample(chosen, common, schemas), ChatExample(rejected, common, schemas)
            if not common:
                raise DataError("the chosen and the rejected conversation do not begin with the same message")
        elif isinstance(chosen, str) and isinstance(rejected, str) and prompt is None:
            common = common_length(chosen, rejected)
            texts = [(text[:common], text[common:], tools) for text in (chosen, rejected)]
            pair = read_completion(*texts[0]), read_completion(*texts[1])
        else:
            pair = read_completion(prompt, chosen, tools), read_completion(prompt, rejected, tools)
        if chosen == rejected:
            raise DataError("the chosen and the rejected answer are the same")
        return Answer(pair[0], reader.render(pair[0])), Answer(pair[1], reader.render(pair[1]))

    return reader.read(part, rows, read_pair)


def has_pairs(part: DataPart) -> bool:
    """Return whether the rows hold pairs of a chosen and a rejected answer."""
    return {"chosen", "rejected"} <= set(part.table.column_names)


def labelled_answers_of(
    part: DataPart, prompt: str | None, tools: str | None, reader: ChatReader
) -> list[LabelledAnswer]:
    """Return answers with their labels, like :func:`pairs_of`. Pairs give all chosen answers first, then all others.

    Raises:
        DataError: a column is missing, or a row cannot be used.
    """
    if has_pairs(part):
        pairs = pairs_of(part, prompt, tools, reader)
        return [(chosen, True) for chosen, _ in pairs] + [(rejected, False) for _, rejected in pairs]
    prompts_and_tools = _prompts_and_tools(part, prompt or part.column("text_column", None, (PROMPT,)), tools)
    answers = (part.table[_column(part, name)][:] for name in ("completion", "label"))

    def read_answer(fields: tuple[object, object, object, object]) -> LabelledAnswer:
        prompt_text, tools, completion, label = fields
        is_good = GOOD.get((label_text(label) or "").lower())
        if is_good is None:
            hint = "write true for an answer that is wanted, and false for others"
            raise DataError(f"the label is {label!r}", hint=hint)
        example = read_completion(prompt_text, completion, tools)
        return Answer(example, reader.render(example)), is_good

    return reader.read(part, zip(*prompts_and_tools, *answers, strict=True), read_answer)


def _column(part: DataPart, name: str) -> str:
    """Check that a column exists that no flag can name.

    Raises:
        DataError: it does not exist.
    """
    if name not in part.table.column_names:
        hint = f"rename the one that holds them; columns: {', '.join(part.table.column_names)}"
        raise DataError(f"there is no column '{name}'", where=part.files[0], hint=hint)
    return name


class PreferenceSamples(TokenizedSamples):
    """Samples of two rows each. The length of a sample is the length of its longer row."""

    @property
    def lengths(self) -> np.ndarray:
        second = next(name for name in self.fields if name.endswith("_input_ids"))
        return np.maximum(super().lengths, self.rows_of(second).lengths)


def pair_samples(name: str, pairs: Sequence[tuple[Answer, Answer]], reader: ChatReader) -> PreferenceSamples:
    """Tokenize both answers of each pair, with labels on the answers.

    Args:
        name: name of the part, for the notes.

    Raises:
        DataError: there is no pair in which both answers have a token within the length.
    """
    chosen, rejected = (reader.encoded([pair[i].rendered for pair in pairs]) for i in (0, 1))
    usable = _usable(name, chosen, rejected, reader)
    return PreferenceSamples(_fields("", chosen, usable) | _fields("rejected_", rejected, usable))


def labelled_samples(name: str, answers: Sequence[LabelledAnswer], reader: ChatReader) -> PreferenceSamples:
    """Tokenize each answer, and its prompt with an answer to another prompt. KTO measures drift on the latter.

    The other answer comes from the last earlier sample with a different prompt. It depends only on the data set, so the
    division into batches changes nothing.

    Raises:
        DataError: no sample has a token of both answers within the length.
    """
    all_examples = [answer.example for answer, _ in answers]
    prompts = [json.dumps([e.prompt, e.tools if isinstance(e, ChatExample) else None]) for e in all_examples]
    if len(set(prompts)) == 1:
        reader.notes.append(f"{name}: all answers are to one prompt, so KTO measures drift on other answers to it")
    others: list[int] = []
    for i, prompt in enumerate(prompts):
        if i and prompt == prompts[i - 1]:
            others.append(others[-1])
            continue
        # The search wraps around at the start of the data set. If all prompts are equal, it is the previous sample.
        earlier = range(i - 1, i - len(prompts), -1)
        others.append(next((other for other in earlier if prompts[other] != prompt), i - 1))
    swapped = [reader.render(_swapped(all_examples[i], all_examples[other])) for i, other in enumerate(others)]
    matched, mismatched = reader.encoded([answer.rendered for answer, _ in answers]), reader.encoded(swapped)
    usable = _usable(name, matched, mismatched, reader)
    good: dict[str, Ragged | list[bool]] = {"is_good": [answers[i][1] for i in usable]}
    return PreferenceSamples(_fields("", matched, usable) | _fields("kl_", mismatched, usable) | good)


def _swapped(example: Example, other: Example) -> Example:
    """Return the prompt of one example with the answer of another. Both have the same type."""
    if isinstance(example, Completion) and isinstance(other, Completion):
        return Completion(example.prompt, other.completion)
    assert isinstance(example, ChatExample)
    assert isinstance(other, ChatExample)
    return replace(example, messages=[*example.prompt, *other.messages[other.prompt_length :]])


def _usable(name: str, first: Sequence[EncodedChat], second: Sequence[EncodedChat], reader: ChatReader) -> list[int]:
    """Return the indices of the samples whose two answers both have a token within the length. Others are noted.

    Raises:
        DataError: there is none.
    """
    # The first token of a row has no context to be predicted from.
    usable = [i for i, rows in enumerate(zip(first, second, strict=True)) if all(row.learned[1:].any() for row in rows)]
    total = len(first)
    if not usable:
        message = f"no token of an answer is within the first {reader.seq_length} tokens of any of the {total} samples"
        raise DataError(message, where="--seq-length", hint="use a greater --seq-length, or shorter prompts")
    if len(usable) < total:
        why = f"an answer has no token within {reader.seq_length} tokens"
        reader.notes.append(f"{name}: {total - len(usable):,} of {total:,} samples are not used: {why}")
    return usable


def _fields(prefix: str, rows: Sequence[EncodedChat], indices: Sequence[int]) -> dict[str, Ragged | list[bool]]:
    ids, labels = Ragged(rows[i].ids for i in indices), Ragged(rows[i].labels for i in indices)
    return {f"{prefix}input_ids": ids, f"{prefix}labels": labels}


@dataclass(frozen=True)
class PreferenceCollate:
    """Collates samples of two rows, padded on the right.

    For pairs, the chosen answers come first and then the rejected ones, in one tensor (2 × samples, tokens), so that
    one forward is enough. For answers with labels the two rows stay separate (``input_ids``, ``kl_input_ids``).
    ``show_count`` is 1 for each sample. Other fields have one number per sample.
    """

    pad_token_id: int

    def __call__(self, samples: list[Sample]) -> dict[str, torch.Tensor]:
        if "kl_input_ids" in samples[0]:
            batch = self._padded(samples) | self._padded(samples, "kl_")
        else:
            rejected = ({name: sample[f"rejected_{name}"] for name in ("input_ids", "labels")} for sample in samples)
            batch = self._padded([*samples, *rejected])
        numbers = [name for name in samples[0] if not name.endswith(("input_ids", "labels"))]
        batch |= {name: torch.tensor([sample[name] for sample in samples]) for name in numbers}
        return batch | {"counted": torch.ones(len(samples))}

    def _padded(self, rows: Sequence[Sample], prefix: str = "") -> dict[str, torch.Tensor]:
        ids, filled = pad_rows([row[f"{prefix}input_ids"] for row in rows], self.pad_token_id)
        labels, _ = pad_rows([row[f"{prefix}labels"] for row in rows], IGNORED)
        return {
            f"{prefix}input_ids": torch.from_numpy(ids),
            f"{prefix}attention_mask": torch.from_numpy(filled.astype(np.int64)),
            f"{prefix}labels": torch.from_numpy(labels),
        }
