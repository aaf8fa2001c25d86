"""Samples of chat and instruction data: tokens, and labels on the answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import numpy as np
from transformers import PreTrainedTokenizerFast

from rapidformer_templates.data.collate import Ragged, TokenizedSamples
from rapidformer_templates.data.finetuning.chat import Columns, Completion, Example, read_example, rows_of
from rapidformer_templates.data.finetuning.chat_template import ChatTemplate, EncodedChat, Rendered, encode
from rapidformer_templates.data.finetuning.messages import Message
from rapidformer_templates.data.finetuning.tables import DataPart
from rapidformer_templates.data.targets import IGNORED
from rapidformer_templates.data.text.bad_lines import BadLines
from rapidformer_templates.errors import DataError

T = TypeVar("T")
Fields = TypeVar("Fields")
PREDICTION_ADVICE = "fix the row: each row gets an answer"
"""Advice for a row to predict that cannot be used."""
PLAIN_NOTE = "the tokenizer has no chat template: a plain one is used, and exported with it"


@dataclass
class ChatReader:
    """Reads, renders and tokenizes the rows of a data set of conversations or completions.

    Attributes:
        tokenizer: a tokenizer without a chat template gets the plain one.
        seq_length: maximum number of tokens. Longer samples are truncated at the end.
        answers_only: only answers are learned. Otherwise all tokens are.
        whole: parts are complete. False for blocks of a stream, which may end up with no rows.
        bad: receives rows that cannot be used. The caller raises an error about them.
        notes: remarks about the data for the user.
    """

    tokenizer: PreTrainedTokenizerFast
    seq_length: int
    answers_only: bool
    whole: bool = True
    bad: BadLines = field(default_factory=BadLines)
    notes: list[str] = field(default_factory=list)

    @cached_property
    def _template(self) -> ChatTemplate:
        template = ChatTemplate(self.tokenizer)
        if template.is_plain:
            self.notes.append(PLAIN_NOTE)
        return template

    def samples(self, name: str, part: DataPart, columns: Columns) -> TokenizedSamples:
        """Return ``input_ids``, and with ``answers_only`` also ``labels``, which are -100 outside of answers.

        Args:
            name: name of the part, for the notes.

        Raises:
            DataError: a row cannot be used, or no answer has a token within the length.
        """
        texts = self.read(part, rows_of(part, columns), lambda fields: self.render(read_example(fields)))
        truncated, counts = self._encoded(texts)
        usable = [tokens for tokens in truncated if not self.answers_only or tokens.learned[1:].any()]
        self._add_notes(name, part, counts, len(usable))
        samples = {"input_ids": Ragged(tokens.ids for tokens in usable)}
        if self.answers_only:
            labels = (np.where(tokens.learned, tokens.ids, IGNORED) for tokens in usable)
            # The first token of a sample has no context to be predicted from.
            samples["labels"] = Ragged(np.append(IGNORED, row[1:]) for row in labels)
        return TokenizedSamples(samples)

    def read(self, part: DataPart, rows: Iterable[Fields], read_row: Callable[[Fields], T]) -> list[T]:
        """Apply a function to each row. Rows that cannot be used are left out and noted in ``bad``.

        Raises:
            DataError: no row can be used.
        """
        results: list[T] = []
        for row, fields in enumerate(rows):
            try:
                results.append(read_row(fields))
            except DataError as error:
                self.bad.note_at(part.where(row), error.message, error.hint or "")
        if not results and self.whole:
            self.bad.raise_all()
            message = f"none of the {len(part)} rows can be used; the last: {self.bad.skipped[-1]}"
            raise DataError(message, where=part.files[0], hint="fix the rows")
        return results

    def encoded(self, texts: Sequence[Rendered]) -> list[EncodedChat]:
        """Tokenize texts of one kind, truncated to the length."""
        return self._encoded(texts)[0]

    def _encoded(self, texts: Sequence[Rendered]) -> tuple[list[EncodedChat], _Counts]:
        """Tokenize texts, truncate them to the length, and count. Texts without a chat template get an end token."""
        counts, end = _Counts(len(texts)), self.tokenizer.eos_token_id
        bare = bool(texts) and texts[0].bare  # a column holds one kind of value
        truncated = []
        for tokens in encode(self.tokenizer, texts, special=bare):
            ids, learned = tokens.ids, tokens.learned
            if bare and end is not None and end not in ids[-1:]:
                ids, learned = np.append(ids, end), np.append(learned, True)
            counts.truncated += len(ids) > self.seq_length
            counts.split += tokens.split
            truncated.append(EncodedChat(ids[: self.seq_length], learned[: self.seq_length], tokens.split))
        return truncated, counts

    def render(self, example: Example) -> Rendered:
        """Return the text of a conversation or completion, and the positions of its answers."""
        if isinstance(example, Completion):
            text = example.prompt + example.completion
            return Rendered(text, [(len(example.prompt), len(text))], bare=True)
        if self.answers_only:
            return self._template.answers(example.messages, example.prompt_length)
        return Rendered(self._template.render(example.messages))

    def question(self, messages: Sequence[Message]) -> str:
        """Return the text of a conversation up to the answer that it asks for."""
        return self._template.render(messages, add_generation_prompt=True)

    def _add_notes(self, name: str, part: DataPart, counts: _Counts, usable: int) -> None:
        unused, length = counts.texts - usable, self.seq_length
        if not usable and self.whole:
            message = f"no token of an answer is within the first {length} tokens of any of the {counts.texts} samples"
            raise DataError(message, where=part.files[0], hint="use a greater --seq-length, or shorter prompts")
        if counts.truncated:
            note = f"{name}: {counts.truncated:,} of {counts.texts:,} samples are cut to {length} tokens"
            self.notes.append(note + (f"; {unused:,} with no part of an answer left are not used" if unused else ""))
        elif unused:
            self.notes.append(
                f"{name}: {unused:,} of {counts.texts:,} samples are not used: their answers have no token"
            )
        if counts.split and self.answers_only:
            self.notes.append(
                f"{name}: {counts.split:,} answers begin inside a token that begins in their prompt; "
                "put the space or line break between them into the answer"
            )


@dataclass
class _Counts:
    """Counts of a part: texts, truncated texts, and answers that begin inside a token."""

    texts: int
    truncated: int = 0
    split: int = 0
