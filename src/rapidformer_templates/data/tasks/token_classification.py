"""Token classification: each word of a text has a tag (names, parts of speech …)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from tokenizers import Encoding

from rapidformer_templates.data.collate import IGNORED, PadCollate, Ragged, TokenizedSamples
from rapidformer_templates.data.finetuning.labels import (
    declared_names,
    is_missing_label,
    label_name,
    labels_of_model,
    sorted_names,
    unknown_label,
)
from rapidformer_templates.data.finetuning.tables import DataPart
from rapidformer_templates.data.generation import Generation, TrainedModel
from rapidformer_templates.data.tasks import base
from rapidformer_templates.data.text.bad_lines import BadLines
from rapidformer_templates.data.types import Data, ModelOutputs, Sample, Tensors
from rapidformer_templates.errors import DataError
from rapidformer_templates.planning.tasks import WORD_COLUMNS

TAG_COLUMNS = ("ner_tags", "tags", "pos_tags", "labels")


class TokenClassification(base.Task):
    """Words and tags are lists of equal length, or texts that are split at spaces.

    The first token of a word carries its tag. Its other tokens, and words without a tag, carry -100. The metrics are
    seqeval's precision, recall and F1 over whole entities, and the accuracy over words. Words that are cut off at the
    sequence length are not counted.
    """

    name = "token_classification"
    auto_class = "AutoModelForTokenClassification"
    best_metric = "f1"
    state_fields = ("columns", "labels")

    def read_data(self) -> Data:
        raw = self.read_rows()
        _, tags = self._columns(raw.train)
        read: dict[str, tuple[DataPart, list[tuple[list[str], list[str | None]]]]] = {}
        for name, part in raw.parts().items():
            columns = self._columns(part)
            read[name] = part, part.read(columns, _reader_of_rows(part, *columns))
        # Rows held out of one file may have a rare tag that the remaining rows lack.
        labelled = ("train", "valid") if raw.held_out else ("train",)
        distinct = {tag for name in labelled for _, row in read[name][1] for tag in row if tag is not None}
        if not distinct:
            hint = "choose another --label-column, or tag the words"
            raise DataError(f"no word has a tag in column '{tags}'", where=raw.train.files[0], hint=hint)
        if not self.is_trained:
            self.labels = self.in_order_of_head(declared_names(raw.train, tags) or sorted_names(distinct))
        sets = {name: self._samples(*part) for name, part in read.items()}
        return base.as_data(sets, PadCollate({**base.padding_of(self.tokenizer), "labels": IGNORED}))

    def _columns(self, part: DataPart) -> tuple[str, str]:
        """Return the column of words and the column of tags."""
        return self._words_column(part), self.column(part, "label_column", TAG_COLUMNS)

    def _words_column(self, part: DataPart) -> str:
        return self.column(part, "text_column", WORD_COLUMNS)

    def usable_rows(self, part: DataPart, bad: BadLines) -> DataPart:
        columns = self._columns(part)
        return part.usable(columns, _reader_of_rows(part, *columns), bad)

    def _samples(self, part: DataPart, rows: list[tuple[list[str], list[str | None]]]) -> TokenizedSamples:
        """Tokenize rows of words and tag names. None marks a word without a tag."""
        numbers: dict[str | None, int] = {name: i for i, name in enumerate(self.labels)} | {None: IGNORED}
        bad = BadLines(advice="")
        for row, (_, names) in enumerate(rows):
            unknown = next((name for name in names if name is not None and name not in numbers), None)
            if unknown is not None:
                error = unknown_label(unknown, self.labels)
                bad.note_at(part.where(row), error.message, error.hint or "")
        bad.raise_all()
        encodings = self._encodings([words for words, _ in rows])
        labels = [
            _first_pieces(encoding.word_ids, [numbers[name] for name in names])
            for encoding, (_, names) in zip(encodings, rows, strict=True)
        ]
        return TokenizedSamples({"input_ids": self._ids(part, encodings), "labels": Ragged(labels)})

    def _ids(self, part: DataPart, encodings: Sequence[Encoding]) -> Ragged:
        return base.with_tokens(Ragged(e.ids for e in encodings), part, self._words_column(part))

    def _encodings(self, words: list[list[str]]) -> list[Encoding]:
        # Byte-level tokenizers recognize a word inside a sentence by the space before it.
        space = " " if getattr(self.tokenizer, "add_prefix_space", None) is False else ""
        texts = {word: space + word for row in words for word in row}
        alone = self.tokenizer([[text] for text in texts.values()], is_split_into_words=True, add_special_tokens=False)
        without = [word for word, ids in zip(texts, alone["input_ids"], strict=True) if not ids]
        if without:  # each needs a token that has its tag
            unknown = self.tokenizer.unk_token or self.tokenizer.mask_token or self.tokenizer.eos_token
            texts |= dict.fromkeys(without, space + unknown)
            note = f"words without a token ({', '.join(map(repr, without[:3]))}) are read as {unknown}"
            self.notes += [note] if note not in self.notes else []
        spaced = [[texts[word] for word in row] for row in words]
        encodings: list[Encoding] = []
        for start in range(0, len(spaced), 1000):
            encoded = self.tokenizer(
                spaced[start : start + 1000],
                is_split_into_words=True,
                truncation=True,
                max_length=self.seq_length,
                verbose=False,
            )
            assert encoded.encodings is not None  # fast tokenizers always have encodings
            encodings += encoded.encodings
        return encodings

    def config_overrides(self) -> dict[str, object]:
        return base.label_map(self.labels)

    def predict(self, outputs: ModelOutputs, batch: Tensors) -> tuple[list[list[str]], list[list[str]]]:
        guesses, truths = outputs.logits.argmax(dim=-1).cpu().numpy(), batch["labels"].cpu().numpy()
        labelled = truths != IGNORED
        return self._names(guesses, labelled), self._names(truths, labelled)

    def _names(self, numbers: np.ndarray, labelled: np.ndarray) -> list[list[str]]:
        return [[self.labels[i] for i in row[keep]] for row, keep in zip(numbers, labelled, strict=True)]

    def compute_metrics(self, predictions: list[list[str]], references: list[list[str]]) -> dict[str, float]:
        # Imported here because it takes a second and only an evaluation needs it.
        from seqeval.metrics import accuracy_score, f1_score, precision_score, recall_score

        return {
            "precision": float(precision_score(references, predictions, zero_division=0)),
            "recall": float(recall_score(references, predictions, zero_division=0)),
            "f1": float(f1_score(references, predictions, zero_division=0)),
            "accuracy": float(accuracy_score(references, predictions)),
        }

    def label_state_of_config(self) -> base.Record:
        return {"labels": labels_of_model(self.model_config)}

    def inputs(self, part: DataPart) -> base.Inputs:
        column = self._words_column(part)
        words = part.read([column], partial(_words, column=column))
        encodings = self._encodings(words)
        places = [_first_pieces(e.word_ids, range(len(row))) for e, row in zip(encodings, words, strict=True)]
        ids = self._ids(part, encodings)
        rows = [{"input_ids": ids[i], "places": place, "words": len(words[i])} for i, place in enumerate(places)]
        return base.Inputs(rows, ids.lengths)

    def records(self, model: TrainedModel, rows: Sequence[Sample], generation: Generation) -> list[base.Record]:
        """Return a tag for each word, or None for a word that is cut off at the sequence length."""
        outputs, _ = self.outputs(model, [{"input_ids": row["input_ids"]} for row in rows])
        records = []
        for row, guesses in zip(rows, outputs.logits.argmax(dim=-1).cpu().tolist(), strict=True):
            tags: list[str | None] = [None] * row["words"]
            for token, word in enumerate(row["places"]):
                if word != IGNORED:
                    tags[word] = self.labels[guesses[token]]
            records.append({"tags": tags})
        return records


def _first_pieces(word_ids: Sequence[int | None], tags: Sequence[int]) -> list[int]:
    """Return one label per token: the tag of its word for the first token of a word, else -100."""
    labels, previous = [], None
    for word in word_ids:
        labels.append(IGNORED if word is None or word == previous else tags[word])
        previous = word
    return labels


def _reader_of_rows(
    part: DataPart, words: str, tags: str
) -> Callable[[object, object], tuple[list[str], list[str | None]]]:
    """Return a function that reads the words and tags of a row. It raises an error for a row that cannot be used."""
    names = declared_names(part, tags)

    def read(text: object, marks: object) -> tuple[list[str], list[str | None]]:
        split = _words(text, words)
        if not split:
            raise DataError(f"the text in column '{words}' is empty", hint="fill it, or remove the row")
        marked = _in_list(marks, tags)
        if len(split) != len(marked):
            hint = "each word needs one tag; texts are split at spaces"
            raise DataError(f"{len(split)} words have {len(marked)} tags", hint=hint)
        return split, [_tag(mark, names, tags) for mark in marked]

    return read


def _words(text: object, column: str) -> list[str]:
    words = _in_list(text, column)
    if None in words:
        raise DataError(f"a word in column '{column}' is empty", hint="fill it, or remove it with its tag")
    return [str(word) for word in words]


def _in_list(value: object, column: str) -> Sequence[object]:
    """Return a list unchanged, and split a text at spaces."""
    if value is None:
        raise DataError(f"the column '{column}' is empty", hint="fill it, or remove the row")
    if isinstance(value, str):
        return value.split()
    if not isinstance(value, list):
        hint = 'write a list, such as ["New", "York"], or a text, which is split at spaces'
        raise DataError(f"the column '{column}' holds {value!r}", hint=hint)
    return value


def _tag(value: object, declared: Sequence[str] | None, column: str) -> str | None:
    if is_missing_label(value, declared):
        return None
    name = label_name(value, declared, column)
    if name is None:
        raise DataError(f"a tag in column '{column}' is empty", hint="words without a name have the tag O")
    return name
