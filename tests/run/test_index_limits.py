"""Token ids and labels outside of the model's tables: three lines with the samples, before a device sees the batch."""

from __future__ import annotations

import inspect
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
from tests.support.messages import Says

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


def line_of(kind: type, text: str) -> str:
    lines, first = inspect.getsourcelines(kind)
    return f"{__file__}:{first + next(number for number, line in enumerate(lines) if text in line)}"


def refuse(says: Says, job: type[Job], changes: Mapping[int, Mapping[str, Any]], part: str, **values: Any) -> str:
    """Expect three lines about changed samples, and return them."""
    with says(DataError, LOSS=line_of(OwnLoss, "return nn."), MODEL=line_of(Own, "return self.")):
        type("Changed", (job,), {"changes": {part: changes}, **values})(FLAGS).fit()
    assert len(says.said[-1].splitlines()) == 3
    return says.said[-1]


@pytest.mark.parametrize("part", ["train", "valid"])
def test_numbers_beyond_the_tables_of_the_model(part: str, says: Says) -> None:
    refuse(says, Job, {4: BAD_ID}, part)
    for label in (7, -1):
        refuse(says, Job, {3: {"labels": np.int64(label)}}, part)
    refuse(says, OwnLoss, {2: BAD_ID, 3: BAD_ID}, part, model_class=Around)


def test_a_label_that_has_no_loss_is_valid() -> None:
    made = type("Ignored", (Job,), {"changes": {"train": {1: {"labels": np.int64(-100)}}}})(FLAGS)
    assert made.fit()["steps"] == 3


@pytest.mark.parametrize(
    ("model", "bad"), [(Own, BAD_ID), (Own, BAD_LABEL), (Around, BAD_LABEL)], ids=["id", "label", "head"]
)
@pytest.mark.parametrize("part", ["train", "valid"])
def test_tables_that_only_user_code_has(model: type[nn.Module], bad: Mapping[str, Any], part: str, says: Says) -> None:
    """On a CPU torch finds the number itself. The error names the samples of the batch and the line of the user."""
    message = refuse(says, OwnLoss, {5: bad}, part, model_class=model)
    assert 5 in map(int, message.split("samples [")[1].split("]")[0].split(","))


def test_an_index_error_of_the_users_own_code_is_not_changed() -> None:
    class Broken(OwnLoss):
        def compute_loss(self, model: Any, batch: Any) -> torch.Tensor:
            return super().compute_loss(model, {**batch, "labels": batch["labels"][[5]]})

    with pytest.raises(IndexError):
        Broken(FLAGS).fit()


SOUNDS: dict[str, Any] = {
    "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8, "conv_dim": (8,),
    "conv_stride": (2,), "conv_kernel": (3,), "num_conv_pos_embeddings": 2, "num_conv_pos_embedding_groups": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("model", "vocabulary", "classes"),
    [
        (lambda: BertForTokenClassification(BERT), VOCABULARY, CLASSES),
        (lambda: GPT2LMHeadModel(GPT), VOCABULARY, VOCABULARY),
        (lambda: BertForSequenceClassification(BertConfig(**{**BERT.to_dict(), "num_labels": 1})), VOCABULARY, None),
        (Around, VOCABULARY, None),
        (Own, None, None),
        (lambda: Wav2Vec2ForCTC(Wav2Vec2Config(**SOUNDS)), None, None),
    ],
)
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
