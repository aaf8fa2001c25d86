"""Masked language modelling: predict masked tokens from the tokens around them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from rapidformer_templates.data.collate import PadCollate, TokenizedSamples
from rapidformer_templates.data.finetuning.tables import DataPart
from rapidformer_templates.data.generation import Generation, TrainedModel
from rapidformer_templates.data.pretraining.masking import MaskTokens, check_mask_probability
from rapidformer_templates.data.targets import IGNORED
from rapidformer_templates.data.tasks.base import (
    Inputs,
    Record,
    Task,
    as_data,
    padding_of,
    round_score,
    text_value,
    texts_of,
    tokenized,
    with_tokens,
)
from rapidformer_templates.data.tasks.causal_lm import predicted_tokens, token_accuracy
from rapidformer_templates.data.tasks.sets import Block, sets_of
from rapidformer_templates.data.text.bad_lines import BadLines
from rapidformer_templates.data.types import Data, ModelOutputs, Sample, Tensors
from rapidformer_templates.errors import DataError
from rapidformer_templates.planning.tasks import TEXT_COLUMNS

BEST = 5
"""Number of candidate tokens reported for each mask."""


class MaskedLM(Task):
    """Each text is one sample, cut to the sequence length. Masks change in each epoch. The metric is token accuracy."""

    name = "masked_lm"
    auto_class = "AutoModelForMaskedLM"
    best_metric = "eval_loss"

    def check(self) -> None:
        super().check()
        check_mask_probability(self.config.data.mask_prob)
        self._mask()

    def _mask(self) -> MaskTokens:
        flags = self.config.data
        return MaskTokens(self.tokenizer, flags.mask_prob, whole_words=flags.whole_word_mask)

    def read_data(self) -> Data:
        raw = self.read_rows()
        collate = PadCollate({**padding_of(self.tokenizer), "labels": IGNORED})
        return as_data(sets_of(raw, self, self._set), collate, self._mask())

    def usable_rows(self, part: DataPart, bad: BadLines) -> DataPart:
        """Return the rows with a text. Empty texts are only left out on request."""
        column = self.column(part, "text_column", TEXT_COLUMNS)
        return part.usable([column], partial(text_value, column=column, may_be_empty=not bad.skip), bad)

    def _set(self, name: str, part: DataPart, block: Block | None) -> TokenizedSamples:
        column = self.column(part, "text_column", TEXT_COLUMNS)
        fields = tokenized(self.tokenizer, texts_of(part, column), max_length=self.seq_length)
        return TokenizedSamples({**fields, "input_ids": with_tokens(fields["input_ids"], part, column)})

    def predict(self, outputs: ModelOutputs, batch: Tensors) -> tuple[list[np.ndarray], list[np.ndarray]]:
        return predicted_tokens(outputs.logits.argmax(dim=-1), batch["labels"])

    def compute_metrics(self, predictions: list[np.ndarray], references: list[np.ndarray]) -> dict[str, float]:
        return token_accuracy(predictions, references)

    def inputs(self, part: DataPart) -> Inputs:
        column = self.column(part, "text_column", TEXT_COLUMNS)
        samples = self._set("input", part, None)
        for row, sample in enumerate(samples):
            if self.tokenizer.mask_token_id not in sample["input_ids"]:
                mask, length = self.tokenizer.mask_token, self.seq_length
                message = f"there is no {mask} within the first {length} tokens of the column '{column}'"
                raise DataError(message, where=part.where(row), hint=f"write {mask} in place of the word to predict")
        return Inputs.of(samples)

    def records(self, model: TrainedModel, rows: Sequence[Sample], generation: Generation) -> list[Record]:
        """Return the most likely tokens for each mask, and the text with the first candidates filled in."""
        outputs, batch = self.outputs(model, rows)
        hidden = batch["input_ids"] == self.tokenizer.mask_token_id
        best = outputs.logits.float().softmax(dim=-1).topk(BEST, dim=-1)
        filled = torch.where(hidden, best.indices[..., 0], batch["input_ids"])
        return [
            {
                "text": self.tokenizer.decode(filled[i][batch["attention_mask"][i] > 0], skip_special_tokens=True),
                "masks": [
                    self._candidates(best.indices[i, place].tolist(), best.values[i, place].tolist())
                    for place in hidden[i].nonzero()[:, 0].tolist()
                ],
            }
            for i in range(len(rows))
        ]

    def _candidates(self, tokens: list[int], scores: list[float]) -> list[Record]:
        return [
            {"token": str(self.tokenizer.decode([token])).strip(), "score": round_score(score)}
            for token, score in zip(tokens, scores, strict=True)
        ]
