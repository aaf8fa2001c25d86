"""Sequence classification: one label, several labels or a number for each text or pair of texts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from rapidformer_templates.data.collate import PadCollate, Ragged, TokenizedSamples
from rapidformer_templates.data.finetuning.labels import (
    encode_label_sets,
    encode_labels,
    label_names,
    label_reader,
    label_set_names,
    labels_of_model,
    measure,
    problem_of,
)
from rapidformer_templates.data.finetuning.tables import DataPart
from rapidformer_templates.data.generation import Generation, TrainedModel
from rapidformer_templates.data.tasks import base
from rapidformer_templates.data.text.bad_lines import BadLines
from rapidformer_templates.data.types import Data, ModelOutputs, Sample, Tensors
from rapidformer_templates.errors import DataError
from rapidformer_templates.planning.tasks import PAIRS, TEXT_COLUMNS

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
        label = self.column(raw.train, "label_column", LABEL_COLUMNS)
        # Rows held out of one file may have a rare label that the remaining rows lack.
        labelled = [raw.train, raw.valid] if raw.held_out and raw.valid else [raw.train]
        if not self.is_trained:
            self.best_metric = {"regression": "mse", "multi_label_classification": "f1"}.get(self.problem, "accuracy")
            several = self.problem == "multi_label_classification"
            if self.problem == "regression":
                self.labels = ["LABEL_0"]  # the head has one output, with the default name
            else:
                names, where = (label_set_names if several else label_names)(labelled, label), labelled[0].files[0]
                if several and not names:
                    raise DataError("no row has a label", where=where, hint="choose another --label-column")
                if not several and len(names) < 2:
                    hint = "choose another --label-column; if the rows are sorted by label, shuffle them or use more"
                    raise DataError(f"every row has the label '{names[0]}'", where=where, hint=f"{hint} of them")
                self.labels = self.in_order_of_head(names)
        sets = {name: self._samples(part) for name, part in raw.parts().items()}
        return base.as_data(sets, PadCollate(base.padding_of(self.tokenizer)))

    def usable_rows(self, part: DataPart, bad: BadLines) -> DataPart:
        """Return the rows with a text and a label. The training part decides which problem the labels are."""
        text, pair = self._text_columns(part)
        label = self.column(part, "label_column", LABEL_COLUMNS)
        if not self.is_trained and self._decides:
            self.problem, self._decides = self.config.data.problem_type or problem_of([part], label), False
        texts = [text, pair] if pair else [text]
        read_label = label_reader(part, label, self.problem)

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

    def _samples(self, part: DataPart) -> TokenizedSamples:
        column = self.column(part, "label_column", LABEL_COLUMNS)
        labels: Sequence[object]
        if self.problem == "regression":
            labels = part.read([column], partial(measure, column=column))
        elif self.problem == "multi_label_classification":
            labels = encode_label_sets(part, column, self.labels)
        else:
            labels = encode_labels(part, column, self.labels)
        return TokenizedSamples({**self._tokens(part), "labels": labels})

    def _tokens(self, part: DataPart) -> dict[str, Ragged]:
        text, pair = self._text_columns(part)
        texts = base.texts_of(part, text)
        pairs = base.texts_of(part, pair) if pair else None
        fields = base.tokenized(self.tokenizer, texts, pairs, max_length=self.seq_length, notes=self.notes)
        return {**fields, "input_ids": base.with_tokens(fields["input_ids"], part, text)}

    def config_overrides(self) -> dict[str, object]:
        return {**base.label_map(self.labels), "problem_type": self.problem}

    @classmethod
    def planned_batch(cls, rows: int, tokens: int) -> dict[str, torch.Tensor]:
        return {**super().planned_batch(rows, tokens), "labels": torch.zeros(rows, dtype=torch.long)}

    def predict(self, outputs: ModelOutputs, batch: Tensors) -> tuple[base.Predictions, base.Predictions]:
        if self.problem == "regression":
            return outputs.logits[:, 0].tolist(), batch["labels"].tolist()
        if self.problem == "multi_label_classification":
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

        if self.problem == "multi_label_classification":
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
        labels = labels_of_model(self.model_config)
        alone = "regression" if len(labels) == 1 else "single_label_classification"
        return {"labels": labels, "problem": self.config.data.problem_type or self.model_config.problem_type or alone}

    def inputs(self, part: DataPart) -> base.Inputs:
        return base.Inputs.of(TokenizedSamples(self._tokens(part)))

    def records(self, model: TrainedModel, rows: Sequence[Sample], generation: Generation) -> list[base.Record]:
        """Return the label of each row, or its labels, with the score of every label."""
        logits = self.outputs(model, rows)[0].logits.float().cpu()
        if self.problem == "regression":
            return [{"value": base.round_score(value)} for value in logits[:, 0].tolist()]
        has_several = self.problem == "multi_label_classification"
        records: list[base.Record] = []
        for shares in (logits.sigmoid() if has_several else logits.softmax(dim=-1)).tolist():
            scores = {name: base.round_score(value) for name, value in zip(self.labels, shares, strict=True)}
            if has_several:
                labels = [name for name, value in zip(self.labels, shares, strict=True) if value > 0.5]
                records.append({"labels": labels, "scores": scores})
            else:
                name = self.labels[int(np.argmax(shares))]
                records.append({"label": name, "score": scores[name], "scores": scores})
        return records
