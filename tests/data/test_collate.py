"""Padding compared with transformers' own, and the labels of causal models compared with the resulting loss."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from rapidformer_templates.data.collate import IGNORED, CausalCollate, PadCollate, Ragged, TokenizedSamples, pad_rows

TEXTS = ["the cat", "the big red dog runs in the house", "", "he sees"]


def test_padding_is_that_of_the_tokenizer(bert_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(bert_folder)
    rows = tokenizer(TEXTS)["input_ids"]
    reference = tokenizer.pad({"input_ids": rows}, return_tensors="pt")
    samples = TokenizedSamples({"input_ids": Ragged(rows), "labels": [3, 1, 2, 0]})
    batch = PadCollate({"input_ids": tokenizer.pad_token_id})([samples[i] for i in range(len(samples))])
    assert torch.equal(batch["input_ids"], reference["input_ids"])
    assert torch.equal(batch["attention_mask"], reference["attention_mask"])
    assert batch["labels"].tolist() == [3, 1, 2, 0]
    assert batch["labels"].dtype == torch.int64


def test_samples_are_a_sequence() -> None:
    rows = [[1, 2, 3], [], [4]]
    samples = TokenizedSamples({"input_ids": Ragged(rows), "labels": ["a", "b", "c"]})
    assert [sample["input_ids"].tolist() for sample in samples] == rows
    assert samples[-1]["labels"] == "c"
    assert samples[np.int64(2)]["input_ids"].tolist() == [4]
    assert samples.lengths.tolist() == [3, 0, 1]
    with pytest.raises(IndexError):
        samples[3]


def test_causal_labels_leave_out_padding_and_the_first_token() -> None:
    samples = TokenizedSamples({"input_ids": Ragged([[5, 6, 7], [8]])})
    batch = CausalCollate(0)([samples[0], samples[1]])
    assert batch["labels"].tolist() == [[IGNORED, 6, 7], [IGNORED, IGNORED, IGNORED]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert "attention_mask" not in CausalCollate(0, mask=False)([samples[0]])


def test_rows_without_a_token_get_one_of_padding() -> None:
    padded, filled = pad_rows([np.array([], dtype=np.int32)], 9)
    assert padded.tolist() == [[9]]
    assert not filled.any()
