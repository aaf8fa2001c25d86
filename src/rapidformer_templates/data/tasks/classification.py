"""Classification of texts or text pairs, and of the words of a text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from tokenizers import Encoding

from rapidformer_templates.data.collate import IGNORED, PadCollate, Ragged, TokenizedSamples
from rapidformer_templates.data.finetuning import labels
from rapidformer_templates.data.finetuning.tables import DataPart
from rapidformer_templates.data.generation import Generation, TrainedModel
from rapidformer_templates.data.tasks import base
from rapidformer_templates.data.text.bad_lines import BadLines
from rapidformer_templates.data.types import Data, ModelOutputs, Sample, Tensors
from rapidformer_templates.errors import DataError
from rapidformer_templates.planning.tasks import PAIRS, TEXT_COLUMNS, WORD_COLUMNS

LABEL_COLUMNS = ("label", "labels", "sentiment", "class", "category", "target")


class SequenceClassification(base.Task):
    """Labels are texts or integers, lists of them, or numbers to predict (``--problem-type``).

    The metrics depend on the labels. One label per sample: accuracy, macro F1 and Matthews' correlation. Several
    labels: micro and macro F1, and the fraction of samples whose labels are all right. Numbers: mean squared error,
    mean absolute error and Pearson's correlation.
    """

    name = "sequence_classification"
    auto_class = "AutoModelForSequenceClassification"
    best_metric = "accuracy"
    problem = "single_label_classification"
    state_fields = ("columns", "labels", "problem")
    _decides = True  # whether the problem is not known yet

    def read_data(self) -> Data:
        raw = self.read_rows()
        read: dict[str, tuple[DataPart, list[Any]]] = {}
        for name, part in raw.parts().items():
            column = self.column(part, "label_column", LABEL_COLUMNS)
            read[name] = part, part.read([column], labels.label_reader(part, column, self.problem))
        if not self.is_trained:
            self.best_metric = {"regression": "mse", labels.MULTI: "f1"}.get(self.problem, "accuracy")
            # Rows held out of one file may have a rare label that the remaining rows lack.
            self._set_labels([read["train"], read["valid"]] if raw.held_out else [read["train"]])
        sets = {name: self._samples(*labelled) for name, labelled in read.items()}
        return base.as_data(sets, PadCollate(base.padding_of(self.tokenizer)))

    def _set_labels(self, labelled: list[tuple[DataPart, list[Any]]]) -> None:
        """Find the names of the labels. There must be two, or one of which rows may have several."""
        train, where = labelled[0][0], labelled[0][0].files[0]
        column = self.column(train, "label_column", LABEL_COLUMNS)
        if self.problem == "regression":
            self.labels = ["LABEL_0"]  # the head has one output, with the default name
            return
        if self.problem == labels.MULTI:
            used = {name for _, rows in labelled for row in rows for name in row}
            names = labels.declared_names(train, column) or labels.sorted_names(used)
            if not names:
                raise DataError("no row has a label", where=where, hint="choose another --label-column")
        else:
            names = labels.label_names(labelled, column)
            if len(names) < 2:
                hint = "choose another --label-column; if the rows are sorted by label, shuffle them or use more"
                raise DataError(f"every row has the label '{names[0]}'", where=where, hint=f"{hint} of them")
        self.labels = self.in_order_of_head(names)

    def usable_rows(self, part: DataPart, bad: BadLines) -> DataPart:
        """Return the rows with a text and a label. The training part decides which problem the labels are."""
        text, pair = self._text_columns(part)
        label = self.column(part, "label_column", LABEL_COLUMNS)
        if not self.is_trained and self._decides:
            self.problem, self._decides = self.config.data.problem_type or labels.problem_of(part, label), False
        texts = [text, pair] if pair else [text]
        read_label = labels.label_reader(part, label, self.problem)

        def check(*values: object) -> None:
            for column, value in zip(texts, values, strict=False):
                base.text_value(value, column, may_be_empty=False)
            read_label(values[-1])

        return part.usable([*texts, label], check, bad)

    def merge_decisions(self, others: Sequence[base.Task]) -> None:
        super().merge_decisions(others)
        tasks = [task for task in others if isinstance(task, SequenceClassification)]
        if len(problems := {task.problem for task in tasks}) > 1:
            hint = "set what the labels are with --problem-type, or mix sets of one kind"
            message = f"the sets of the mixture are of different kinds ({', '.join(sorted(problems))})"
            raise DataError(message, where="--data-name", hint=hint)
        self.problem, self.best_metric = tasks[0].problem, tasks[0].best_metric

    def _text_columns(self, part: DataPart) -> tuple[str, str | None]:
        """Return the text column, and the column of second texts or None."""
        text = self.column(part, "text_column", (*TEXT_COLUMNS, *PAIRS))
        return text, self.column_if_any(part, "pair_column", (PAIRS[text],) if text in PAIRS else ())

    def _samples(self, part: DataPart, targets: list[Any]) -> TokenizedSamples:
        if self.problem == labels.MULTI:
            rows = labels.known_labels(part, targets, self.labels, in_any_case=self.is_trained)
            targets = [[float(name in row) for name in self.labels] for row in rows]
        elif self.problem != "regression":
            rows = labels.known_labels(part, ([name] for name in targets), self.labels, in_any_case=self.is_trained)
            numbers: dict[str | None, int] = {name: i for i, name in enumerate(self.labels)}
            targets = [numbers[name] for [name] in rows]
        return TokenizedSamples({**self._tokens(part), "labels": targets})

    def _tokens(self, part: DataPart) -> dict[str, Ragged]:
        text, pair = self._text_columns(part)
        texts = base.texts_of(part, text)
        return self.tokens_of(part, text, texts, base.texts_of(part, pair) if pair else None)

    def config_overrides(self) -> dict[str, object]:
        return {**base.label_map(self.labels), "problem_type": self.problem}

    @classmethod
    def planned_batch(cls, rows: int, tokens: int) -> dict[str, torch.Tensor]:
        return {**super().planned_batch(rows, tokens), "labels": torch.zeros(rows, dtype=torch.long)}

    def predict(self, outputs: ModelOutputs, batch: Tensors) -> tuple[base.Predictions, base.Predictions]:
        if self.problem == "regression":
            return outputs.logits[:, 0].tolist(), batch["labels"].tolist()
        if self.problem == labels.MULTI:
            return (outputs.logits > 0).int().tolist(), batch["labels"].int().tolist()
        return outputs.logits.argmax(dim=-1).tolist(), batch["labels"].tolist()

    def compute_metrics(self, predictions: base.Predictions, references: base.Predictions) -> dict[str, float]:
        if self.problem == "regression":
            guesses, truths = np.asarray(predictions), np.asarray(references)
            differences, varies = guesses - truths, len(truths) > 1 and np.ptp(guesses) > 0 and np.ptp(truths) > 0
            return {
                "mse": float(np.mean(differences**2)),
                "mae": float(np.mean(np.abs(differences))),
                "pearson": float(np.corrcoef(guesses, truths)[0, 1]) if varies else 0.0,
            }
        # Imported here because it takes a second and only an evaluation needs it.
        from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

        if self.problem == labels.MULTI:
            guesses, truths = np.asarray(predictions), np.asarray(references)
            return {
                "f1": float(f1_score(truths, guesses, average="micro", zero_division=0)),
                "f1_macro": float(f1_score(truths, guesses, average="macro", zero_division=0)),
                "exact_match": float(accuracy_score(truths, guesses)),
            }
        return {
            "accuracy": float(accuracy_score(references, predictions)),
            "f1": float(f1_score(references, predictions, average="macro", zero_division=0)),
            "matthews": float(matthews_corrcoef(references, predictions)),
        }

    def label_state_of_config(self) -> base.Record:
        names = labels.labels_of_model(self.model_config)
        alone = "regression" if len(names) == 1 else "single_label_classification"
        return {"labels": names, "problem": self.config.data.problem_type or self.model_config.problem_type or alone}

    def inputs(self, part: DataPart) -> base.Inputs:
        return base.Inputs.of(TokenizedSamples(self._tokens(part)))

    def records(self, model: TrainedModel, rows: Sequence[Sample], generation: Generation) -> list[base.Record]:
        """Return the label of each row, or its labels, with the score of every label."""
        logits = self.outputs(model, rows)[0].logits.float().cpu()
        if self.problem == "regression":
            return [{"value": base.round_score(value)} for value in logits[:, 0].tolist()]
        has_several = self.problem == labels.MULTI
        records: list[base.Record] = []
        for shares in (logits.sigmoid() if has_several else logits.softmax(dim=-1)).tolist():
            scores = {name: base.round_score(value) for name, value in zip(self.labels, shares, strict=True)}
            if has_several:
                likely = [name for name, value in zip(self.labels, shares, strict=True) if value > 0.5]
                records.append({"labels": likely, "scores": scores})
            else:
                name = self.labels[int(np.argmax(shares))]
                records.append({"label": name, "score": scores[name], "scores": scores})
        return records


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
            self.labels = self.in_order_of_head(labels.declared_names(raw.train, tags) or labels.sorted_names(distinct))
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
        tags = labels.known_labels(part, (names for _, names in rows), self.labels, in_any_case=self.is_trained)
        encodings = self._encodings([words for words, _ in rows])
        targets = [
            _first_pieces(encoding.word_ids, [numbers[name] for name in names])
            for encoding, names in zip(encodings, tags, strict=True)
        ]
        return TokenizedSamples({"input_ids": self._ids(part, encodings), "labels": Ragged(targets)})

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
        return {"labels": labels.labels_of_model(self.model_config)}

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
    targets, previous = [], None
    for word in word_ids:
        targets.append(IGNORED if word is None or word == previous else tags[word])
        previous = word
    return targets


def _reader_of_rows(
    part: DataPart, words: str, tags: str
) -> Callable[[object, object], tuple[list[str], list[str | None]]]:
    """Return a function that reads the words and tags of a row. It raises an error for a row that cannot be used."""
    declared = labels.declared_names(part, tags)

    def read_tag(mark: object) -> str | None:
        if labels.is_missing_label(mark, declared):
            return None
        name = labels.label_name(mark, declared, tags)
        if name is None:
            raise DataError(f"a tag in column '{tags}' is empty", hint="words without a name have the tag O")
        return name

    def read(text: object, marks: object) -> tuple[list[str], list[str | None]]:
        split = _words(text, words)
        if not split:
            raise DataError(f"the text in column '{words}' is empty", hint="fill it, or remove the row")
        marked = _in_list(marks, tags)
        if len(split) != len(marked):
            hint = "each word needs one tag; texts are split at spaces"
            raise DataError(f"{len(split)} words have {len(marked)} tags", hint=hint)
        return split, list(map(read_tag, marked))

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
