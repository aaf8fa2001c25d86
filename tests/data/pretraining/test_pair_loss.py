"""The loss of sentence pairs, compared with transformers' own and with itself on parts of a batch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AlbertConfig, AlbertForPreTraining, BertConfig, BertForPreTraining

from rapidformer_templates.data.collate import IGNORED, PadCollate
from rapidformer_templates.data.pretraining.masking import MaskTokens
from rapidformer_templates.data.pretraining.objectives import pair_loss
from rapidformer_templates.errors import RapidformerError
from rapidformer_templates.models.architectures import pair_label_of
from tests.support.sentence_pairs import FEW, FIRST, make, some_corpus, tokenizer_of, write

PAD = 0
COLLATE = PadCollate({"input_ids": PAD, "token_type_ids": 0, "labels": IGNORED})
SIZES = {
    "vocab_size": FIRST + FEW, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 32, "max_position_embeddings": 64,
}  # fmt: skip


def models() -> Iterator[tuple[str, Any]]:
    torch.manual_seed(0)
    yield "next_sentence_label", BertForPreTraining(BertConfig(**SIZES)).eval()
    yield "sentence_order_label", AlbertForPreTraining(AlbertConfig(**SIZES, embedding_size=8)).eval()


def test_models_take_the_batches_and_their_losses_are_ours(tmp_path: Path) -> None:
    dataset, mask = write(some_corpus(30), tmp_path), MaskTokens(tokenizer_of(FEW), 0.15, at_least_one=True)
    for label, model in models():
        assert pair_label_of(model.config.model_type) == label
        pairs = make(dataset, mask, label=label)
        samples = [pairs[p] for p in range(12)]
        assert {sample[label] for sample in samples} == {0, 1}
        batch = COLLATE(samples)
        masked = int((batch["labels"] != IGNORED).sum())
        with torch.no_grad():
            reference = model(**batch).loss
            total, count = pair_loss(model, batch, label, masked / 12)
        assert count == masked
        assert torch.isfinite(reference)
        # The two agree when the batch's own mean number of masked tokens is used.
        torch.testing.assert_close(total / count, reference)


def test_the_loss_does_not_depend_on_padding_or_on_how_a_batch_is_cut(tmp_path: Path) -> None:
    dataset, mask = write(some_corpus(30), tmp_path), MaskTokens(tokenizer_of(FEW), 0.15, at_least_one=True)
    for label, model in models():
        model.double()
        pairs = make(dataset, mask, label=label, short_probability=0.5)
        samples = [pairs[p] for p in range(8)]
        assert len({len(sample["input_ids"]) for sample in samples}) > 1
        weight = mask.probability * pairs.mean_tokens
        with torch.no_grad():
            whole = pair_loss(model, COLLATE(samples), label, weight)
            cuts = [pair_loss(model, COLLATE(samples[i:j]), label, weight) for i, j in ((0, 1), (1, 4), (4, 8))]
        torch.testing.assert_close(sum(total for total, _ in cuts), whole[0])
        assert sum(count for _, count in cuts) == whole[1]


@pytest.mark.parametrize("model_type", ["bert", "big_bird", "ernie", "megatron-bert", "mobilebert"])
def test_architectures_with_next_sentences(model_type: str) -> None:
    assert pair_label_of(model_type) == "next_sentence_label"


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("roberta", "no head that predicts"),
        ("electra", "no head that predicts"),
        ("gpt2", "no head that predicts"),
        ("fnet", "not take a padding mask"),
    ],
)
def test_architectures_without_a_head_for_pairs_are_refused(model_type: str, message: str) -> None:
    with pytest.raises(RapidformerError, match=message) as error:
        pair_label_of(model_type)
    assert error.value.hint
