"""Token ids and labels outside of the model's tables: three lines with the samples, before a device sees the batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
    GPT2LMHeadModel,
    PaliGemmaConfig,
    PreTrainedModel,
    Wav2Vec2Config,
    Wav2Vec2ForCTC,
)

from rapidformer_templates.data.loader import MicroBatch
from rapidformer_templates.errors import DataError
from rapidformer_templates.run.step_errors import IndexLimits
from tests.support.index_jobs import BERT, CLASSES, GPT, LENGTH, VOCABULARY, Job

FLAGS = ["--lr", "0.1", "--micro-batch-size", "2", "--epochs", "1", "--no-save", "--device", "cpu"]


class Own(nn.Module):
    """A module without anything of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, CLASSES)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.words(input_ids).mean(dim=1))


class Around(nn.Module):
    """A user's head on a body of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = BertModel(BERT), nn.Linear(8, CLASSES)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(input_ids).last_hidden_state[:, 0])


class OwnLoss(Job):
    model_class: type[nn.Module] = Own

    def build_model(self) -> nn.Module:
        return self.model_class()

    def compute_loss(self, model: Any, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch["input_ids"]), batch["labels"])


BAD_ID, BAD_LABEL = {"input_ids": np.array([1, 57, 2, 99])}, {"labels": np.int64(7)}


def error_of(job: type[Job], changes: Mapping[int, Mapping[str, Any]], part: str = "train", **values: Any) -> DataError:
    made = type("Changed", (job,), {"changes": {part: changes}, **values})(FLAGS)
    with pytest.raises(DataError) as caught:
        made.fit()
    assert len(caught.value.render().splitlines()) == 3
    return caught.value


@pytest.mark.parametrize(("part", "name"), [("train", "training"), ("valid", "validation")])
def test_a_token_id_beyond_the_vocabulary(part: str, name: str) -> None:
    error = error_of(Job, {4: BAD_ID}, part)
    assert error.message == "the token id 99 in 'input_ids' is not one of the 20 tokens of the model's vocabulary"
    assert error.where == f"{name} samples [4]"
    assert "resize_token_embeddings" in str(error.hint)


@pytest.mark.parametrize(("part", "name"), [("train", "training"), ("valid", "validation")])
@pytest.mark.parametrize("label", [7, -1])
def test_a_label_beyond_the_classes(part: str, name: str, label: int) -> None:
    error = error_of(Job, {3: {"labels": np.int64(label)}}, part)
    assert error.message == f"the label {label} in 'labels' is not one of the 3 classes of the model"
    assert error.where == f"{name} samples [3]"


def test_a_label_that_has_no_loss_is_valid() -> None:
    made = type("Ignored", (Job,), {"changes": {"train": {1: {"labels": np.int64(-100)}}}})(FLAGS)
    assert made.fit()["steps"] == 3


@pytest.mark.parametrize(("model", "bad"), [(Own, BAD_ID), (Own, BAD_LABEL), (Around, BAD_LABEL)])
@pytest.mark.parametrize(("part", "name"), [("train", "training"), ("valid", "validation")])
def test_tables_that_only_the_users_code_knows(
    model: type[nn.Module], bad: Mapping[str, Any], part: str, name: str
) -> None:
    """On a CPU torch finds the number itself. The error names the samples of the batch and the line of the user."""
    error = error_of(OwnLoss, {5: bad}, part, model_class=model)
    assert error.message.startswith("a number of the batch is beyond the table that it indexes: ")
    assert str(error.where).startswith(f"{name} samples [")
    assert f"{__file__}:" in str(error.where)
    assert 5 in map(int, str(error.where).split("[")[1].split("]")[0].split(","))


def test_the_embedding_inside_a_module_of_the_user_is_known() -> None:
    error = error_of(OwnLoss, {2: BAD_ID, 3: BAD_ID}, model_class=Around)
    assert error.message.startswith("the token id 99 in 'input_ids'")


def test_an_index_error_of_the_users_own_code_is_not_changed() -> None:
    class Broken(OwnLoss):
        def compute_loss(self, model: Any, batch: Any) -> torch.Tensor:
            return super().compute_loss(model, {**batch, "labels": batch["labels"][[5]]})

    with pytest.raises(IndexError):
        Broken(FLAGS).fit()


@pytest.mark.parametrize(
    ("model", "vocabulary", "classes"),
    [
        (lambda: BertForTokenClassification(BERT), VOCABULARY, CLASSES),
        (lambda: GPT2LMHeadModel(GPT), VOCABULARY, VOCABULARY),
        (lambda: BertForSequenceClassification(BertConfig(**{**BERT.to_dict(), "num_labels": 1})), VOCABULARY, None),
        (Around, VOCABULARY, None),
        (Own, None, None),
        (
            lambda: Wav2Vec2ForCTC(
                Wav2Vec2Config(
                    hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, conv_dim=(8,),
                    conv_stride=(2,), conv_kernel=(3,), num_conv_pos_embeddings=2, num_conv_pos_embedding_groups=1,
                )
            ),
            None, None,
        ),
    ],
)  # fmt: skip
def test_limits_of_models(model: Any, vocabulary: int | None, classes: int | None) -> None:
    limits = IndexLimits.of(model(), own_loss=False)
    assert (limits.vocabulary, limits.classes) == (vocabulary, classes)


def test_tokens_that_a_model_replaces_are_not_refused() -> None:
    model: PreTrainedModel = GPT2LMHeadModel(GPT)
    vars(model.config)["image_token_index"] = VOCABULARY
    assert IndexLimits.of(model, own_loss=False).vocabulary is None
    assert "image_token_index" in vars(PaliGemmaConfig()), "the name that such a model uses"


def test_what_is_not_checked() -> None:
    """Batches on a device, floats, unknown fields, and negative numbers that a hook may replace."""
    limits = IndexLimits(VOCABULARY, CLASSES, allows_negative=True)
    beyond = torch.full((2, LENGTH), 99)
    for batch in (
        {"input_ids": beyond.to("meta")},
        {"labels": torch.full((2,), 9.0)},
        {"positions": beyond},
        {"input_ids": beyond * 0 - 1, "labels": torch.tensor([-1, -7])},
        {"input_ids": torch.empty((0, LENGTH), dtype=torch.int64)},
        (beyond, beyond),
    ):
        limits.check(MicroBatch(batch, [0, 1]), "samples")
    for batch in ({"decoder_input_ids": beyond}, {"labels": beyond[:, 0]}):
        with pytest.raises(DataError, match=r"samples \[0, 1\]"):
            limits.check(MicroBatch(batch, [0, 1]), "samples")


def test_rows_that_are_more_than_the_samples() -> None:
    """A preference has two rows per sample. Rows that only fill a shape do not show their sample."""
    limits = IndexLimits(VOCABULARY)
    ids = torch.zeros((4, LENGTH), dtype=torch.int64)
    ids[3, 1] = 50
    for samples, named in (([7, 8], r"\[8\]"), ([7, 8, 9], r"\[7, 8, 9\]"), ([], r"\[\]")):
        with pytest.raises(DataError, match=f"samples {named}"):
            limits.check(MicroBatch({"input_ids": ids}, samples), "samples")
