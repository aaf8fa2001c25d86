"""Masked language modelling: hidden tokens of each text are found from those around them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from rapidformer_templates.data.collate import PadCollate, TokenizedSamples
from rapidformer_templates.data.finetuning.tables import Part, read_dataset
from rapidformer_templates.data.pretraining.masking import MaskTokens, check_mask_probability
from rapidformer_templates.data.targets import IGNORED
from rapidformer_templates.data.tasks.base import TEXT_COLUMNS, Task, as_data, padding_of, texts_of, tokenized
from rapidformer_templates.data.tasks.causal_lm import predicted_tokens, token_accuracy
from rapidformer_templates.data.tasks.sets import Block, sets_of
from rapidformer_templates.data.types import Data


class MaskedLM(Task):
    """Each text is one sample, cut to the sequence length and masked anew in each epoch; metric: token accuracy."""

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
        raw, flags = read_dataset(self.config), self.config.data
        self.skipped = raw.skipped
        column = raw.train.column("text_column", flags.text_column, TEXT_COLUMNS)
        collate = PadCollate({**padding_of(self.tokenizer), "labels": IGNORED})
        return as_data(sets_of(raw, self.config, partial(self._set, column)), collate, self._mask())

    def _set(self, column: str, name: str, part: Part, block: Block | None) -> TokenizedSamples:
        texts = texts_of(part, part.column("text_column", column, ()))
        return TokenizedSamples(tokenized(self.tokenizer, texts, truncation=True, max_length=self.seq_length))

    def predict(self, outputs: Any, batch: Mapping[str, torch.Tensor]) -> tuple[list[Any], list[Any]]:
        return predicted_tokens(outputs.logits.argmax(dim=-1), batch["labels"])

    def compute_metrics(self, predictions: list[Any], references: list[Any]) -> dict[str, float]:
        return token_accuracy(predictions, references)
