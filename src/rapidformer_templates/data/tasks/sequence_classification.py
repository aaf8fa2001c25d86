"""Sequence classification: a text, or a pair of texts, has one label."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

from rapidformer_templates.data.collate import PadCollate, TokenizedSamples
from rapidformer_templates.data.finetuning.labels import encode_labels, label_names
from rapidformer_templates.data.finetuning.tables import Part, read_dataset
from rapidformer_templates.data.tasks.base import (
    TEXT_COLUMNS,
    Task,
    as_data,
    label_map,
    padding_of,
    texts_of,
    tokenized,
)
from rapidformer_templates.data.types import Data
from rapidformer_templates.errors import DataError

PAIRS = {
    "sentence1": "sentence2",
    "premise": "hypothesis",
    "question1": "question2",
    "question": "sentence",
    "text": "text_pair",
}
"""First columns of the usual text pairs, with their second ones."""

LABEL_COLUMNS = ("label", "labels", "sentiment", "class", "category", "target")


class SequenceClassification(Task):
    """Labels are texts or whole numbers; metrics are accuracy, macro F1 and Matthews' correlation."""

    name = "sequence_classification"
    auto_class = "AutoModelForSequenceClassification"
    best_metric = "accuracy"

    def read_data(self) -> Data:
        raw, flags = read_dataset(self.config), self.config.data
        self.skipped = raw.skipped
        text = raw.train.column("text_column", flags.text_column, (*TEXT_COLUMNS, *PAIRS))
        pair = flags.pair_column or (PAIRS.get(text) if PAIRS.get(text) in raw.train.table.column_names else None)
        label = raw.train.column("label_column", flags.label_column, LABEL_COLUMNS)
        # What was held out of one file may hold a rare label that is not among the rows that are left.
        known = [raw.train, raw.valid] if raw.held_out and raw.valid else [raw.train]
        self.labels = label_names(known, label, self.model_config)
        if len(self.labels) < 2:
            hint = "choose another --label-column; if the rows are sorted by label, shuffle them or use more of them"
            raise DataError(f"every row has the label '{self.labels[0]}'", where=raw.train.files[0], hint=hint)
        sets = {name: self._samples(part, text, pair, label) for name, part in raw.parts().items()}
        return as_data(sets, PadCollate(padding_of(self.tokenizer)))

    def _samples(self, part: Part, text: str, pair: str | None, label: str) -> TokenizedSamples:
        texts = texts_of(part, part.column("text_column", text, ()))
        pairs = texts_of(part, part.column("pair_column", pair, ())) if pair else None
        labels = encode_labels(part, part.column("label_column", label, ()), self.labels)
        rows = tokenized(self.tokenizer, texts, pairs, truncation=True, max_length=self.seq_length)
        return TokenizedSamples({**rows, "labels": labels})

    def config_overrides(self) -> dict[str, Any]:
        return {**label_map(self.labels), "problem_type": "single_label_classification"}

    def predict(self, outputs: Any, batch: Mapping[str, torch.Tensor]) -> tuple[list[Any], list[Any]]:
        return outputs.logits.argmax(dim=-1).tolist(), batch["labels"].tolist()

    def compute_metrics(self, predictions: list[Any], references: list[Any]) -> dict[str, float]:
        return {
            "accuracy": float(accuracy_score(references, predictions)),
            "f1": float(f1_score(references, predictions, average="macro", zero_division=0)),
            "matthews": float(matthews_corrcoef(references, predictions)),
        }
