"""Causal language modelling: each text is continued token by token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from rapidformer_templates.data.collate import CausalCollate, Ragged, TokenizedSamples
from rapidformer_templates.data.reading import Part, read_dataset
from rapidformer_templates.data.tasks.base import TEXT_COLUMNS, Task, as_data, texts_of, tokenized
from rapidformer_templates.data.types import Data
from rapidformer_templates.targets import IGNORED


class CausalLM(Task):
    """Each text is one sample, with an end token and cut to the sequence length; metric: token accuracy."""

    name = "causal_lm"
    auto_class = "AutoModelForCausalLM"
    best_metric = "eval_loss"
    greater_is_better = False

    def build_data(self) -> Data:
        raw = read_dataset(self.config)
        self.skipped = raw.skipped
        column = raw.train.column("text_column", self.config.data.text_column, TEXT_COLUMNS)
        sets = {name: self._samples(part, column) for name, part in raw.parts().items()}
        assert isinstance(self.tokenizer.pad_token_id, int)
        return as_data(sets, CausalCollate(self.tokenizer.pad_token_id))

    def _samples(self, part: Part, column: str) -> TokenizedSamples:
        rows = tokenized(self.tokenizer, texts_of(part, part.column("text_column", column, ())))["input_ids"]
        return TokenizedSamples(
            {"input_ids": Ragged(self._ended(rows[i])[: self.seq_length] for i in range(len(rows)))}
        )

    def _ended(self, row: np.ndarray) -> np.ndarray:
        """A text with the end token, by which the model learns where to stop."""
        end = self.tokenizer.eos_token_id
        return row if end is None or (len(row) and row[-1] == end) else np.append(row, end)

    def predict(self, outputs: Any, batch: Mapping[str, torch.Tensor]) -> tuple[list[Any], list[Any]]:
        # The logits at one token predict the next.
        return predicted_tokens(outputs.logits[:, :-1].argmax(dim=-1), batch["labels"][:, 1:])

    def compute_metrics(self, predictions: list[Any], references: list[Any]) -> dict[str, float]:
        return token_accuracy(predictions, references)


def predicted_tokens(tokens: torch.Tensor, labels: torch.Tensor) -> tuple[list[Any], list[Any]]:
    """(predicted, true) tokens of each sample where there is a label. Both arguments: (samples, tokens)."""
    guesses, truths = tokens.cpu().numpy(), labels.cpu().numpy()
    wanted = truths != IGNORED
    return [g[w] for g, w in zip(guesses, wanted, strict=True)], [t[w] for t, w in zip(truths, wanted, strict=True)]


def token_accuracy(predictions: list[Any], references: list[Any]) -> dict[str, float]:
    """Share of target tokens that were predicted."""
    total = sum(map(len, references))
    right = sum(int((p == r).sum()) for p, r in zip(predictions, references, strict=True))
    return {"token_accuracy": right / total if total else 0.0}
