"""A small classifier of transformers whose samples may have token ids and labels outside of its tables."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, GPT2Config

from rapidformer_templates import Data, Trainer

VOCABULARY, CLASSES, LENGTH = 20, 3, 4
BERT = BertConfig(
    vocab_size=VOCABULARY, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8,
    num_labels=CLASSES,
)  # fmt: skip
GPT = GPT2Config(vocab_size=VOCABULARY, n_positions=8, n_embd=8, n_layer=1, n_head=1)


class Job(Trainer):
    """Six samples of right ids and labels, except for changes of single samples in a part."""

    changes: Mapping[str, Mapping[int, Mapping[str, Any]]] = {}

    def build_data(self) -> Data:
        parts = {}
        for part in ("train", "valid"):
            rows = [{"input_ids": np.arange(LENGTH) + i, "labels": np.int64(i % CLASSES)} for i in range(6)]
            parts[part] = [row | dict(self.changes.get(part, {}).get(i, {})) for i, row in enumerate(rows)]
        return Data(**parts)

    def build_model(self) -> nn.Module:
        return BertForSequenceClassification(BERT)
