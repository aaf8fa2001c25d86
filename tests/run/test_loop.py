"""The loop: what it refuses, what it logs, and what it does not change when an error occurs."""

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
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

from rapidformer_templates import Data, Finetuner
from rapidformer_templates.data.loader import MicroBatch
from rapidformer_templates.errors import ConfigError, DataError, NonFiniteLoss
from rapidformer_templates.run.checkpoint import format as checkpoint
from rapidformer_templates.run.folder import read_metrics
from rapidformer_templates.run.step_errors import IndexLimits
from tests.support import jobs
from tests.support.index_jobs import BERT, CLASSES, GPT, LENGTH, VOCABULARY, Job
from tests.support.lines import FLAGS as LINE
from tests.support.lines import Line
from tests.support.messages import Says
from tests.support.parity import trained


@pytest.mark.slow
def test_a_model_that_is_not_of_transformers_learns(tmp_path: Path) -> None:
    job = Line([*LINE, "--train-iters", "200", "--save", str(tmp_path / "run"), "--weight-decay", "0"])
    job.fit()
    weight, bias = (p.item() for p in job.model.parameters())
    assert weight == pytest.approx(2, abs=0.05)
    assert bias == pytest.approx(1, abs=0.05)
    exported, told = (tmp_path / "run" / name for name in ("export/model.safetensors", "summary.json"))
    assert exported.stat().st_mode == told.stat().st_mode  # everyone who may read one may read the other


@pytest.mark.parametrize("flags", [[], ["--async-save"]], ids=["waiting", "async"])
def test_non_finite_loss_names_step_and_samples_and_touches_nothing(flags: list[str], tmp_path: Path) -> None:
    """A save in the background is completed first."""
    folder = tmp_path / "run"
    accumulated = ["--train-iters", "5", "--global-batch-size", "8"]
    job = Line([*LINE, *accumulated, "--save", str(folder), "--save-interval", "1", *flags])
    job.poisoned = 7
    with pytest.raises(NonFiniteLoss) as caught:
        job.fit()
    step = int(caught.value.message.split()[1].rstrip(":"))
    assert step > 1
    samples = job._run.order.step(step - 1)[0].tolist()
    (microbatch,) = (samples[i : i + 4] for i in (0, 4) if 7 in samples[i : i + 4])
    assert caught.value.where == f"training samples {sorted(microbatch)}"
    assert all(torch.isfinite(p).all() for p in job.model.parameters())
    assert [line["step"] for line in read_metrics(folder / "metrics.jsonl")] == list(range(1, step))
    newest = checkpoint.candidates(folder / "checkpoints")[0]
    assert newest.name == f"step-{step - 1}"
    assert torch.equal(checkpoint.Reader(newest).read("weights", "weight", (0, 0), (1, 1)), job.model.weight.detach())
    assert not list((folder / "checkpoints").glob("*.tmp"))


def test_saves_in_the_background_are_told_when_they_are_whole(tmp_path: Path) -> None:
    told: list[tuple[int, str | None]] = []

    class Told(Line):
        def on_checkpoint(self, step: int, folder: Path) -> None:
            told.append((step, checkpoint.problem_of(folder)))

        def on_train_end(self, summary: Any) -> None:
            told.append((0, None))

    flags = [*LINE, "--epochs", "2", "--save", str(tmp_path / "run"), "--save-interval", "2", "--async-save"]
    Told([*flags, "--keep-checkpoints", "1"]).fit()
    assert told == [(2, None), (4, None), (6, None), (8, None), (10, None), (0, None)]
    assert [path.name for path in checkpoint.candidates(tmp_path / "run/checkpoints")] == ["step-10"]


CLASS_WEIGHTS = torch.tensor([1.0, 4.0, 0.5])


class Weighted(jobs.ClassJob):
    double = True

    def compute_loss(self, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return cross_entropy(logits, batch["labels"], weight=CLASS_WEIGHTS.double())


class CountedWeights(Weighted):
    def count_targets(self, batch: Any) -> float:
        return float(CLASS_WEIGHTS[batch["labels"]].sum())


def test_class_weights_that_are_counted_do_not_depend_on_the_micro_batch() -> None:
    flags = ["--lr", "1e-2", "--train-iters", "4", "--global-batch-size", "16", "--log-interval", "1"]
    whole, counted, uncounted = (
        trained(kind([*flags, "--micro-batch-size", str(size)]))["curve"]
        for kind, size in ((Weighted, 16), (CountedWeights, 2), (Weighted, 2))
    )
    assert np.allclose(counted, whole, rtol=1e-12)
    assert not np.allclose(uncounted, whole, rtol=1e-3)


def test_short_last_batch_is_neither_lost_nor_padded(tmp_path: Path) -> None:
    seen: list[int] = []

    class Counting(Line):
        def count_targets(self, batch: Any) -> float:
            seen.append(len(batch["x"]))
            return super().count_targets(batch)

    Counting([*LINE, "--epochs", "1", "--micro-batch-size", "8", "--save", str(tmp_path / "run")]).fit()
    assert sorted(seen) == [4, 8, 8]
    assert read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]["samples"] == 20


def test_metrics_and_summary_have_the_promised_fields(tmp_path: Path) -> None:
    Line([*LINE, "--epochs", "1", "--save", str(tmp_path / "run")]).fit()
    line = read_metrics(tmp_path / "run" / "metrics.jsonl")[0]
    assert set(line) == {
        "step", "epoch", "loss", "grad_norm", "lr", "samples", "tokens", "samples_per_second", "step_ms",
        "peak_memory_mb", "skipped",
    }  # fmt: skip
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert {"metrics", "throughput", "peak_memory_mb", "wall_seconds", "parameters", "versions", "receipts"} <= set(
        summary
    )
    assert summary["parameters"] == 2
    assert summary["receipts"]["parameter_bytes"] == 8
    assert summary["receipts"]["optimizer_state_bytes"] == 2 * (4 + 4) + 2 * 4  # two moments and a step count for each
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert plan["template"] == "Trainer"
    assert plan["values"]["--lr"] == {"value": 0.1, "origin": "command line"}


@pytest.mark.parametrize("has_tokens", [True, False])
def test_tokens_are_counted_if_a_batch_has_them(
    has_tokens: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Masked(Line):
        def build_data(self) -> Data:
            data = super().build_data()
            mask = {"attention_mask": np.ones(3, dtype=np.int64)} if has_tokens else {}
            data.train = [{**sample, **mask} for sample in data.train]
            return data

    summary = Masked([*LINE, "--epochs", "2", "--save", str(tmp_path / "run")]).fit()
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert {"tokens_per_second" in line for line in lines if "loss" in line} == {has_tokens}
    assert ("tokens_per_second" in summary["throughput"]) == ("tokens/s" in capsys.readouterr().out) == has_tokens
    assert summary["tokens"] == 3 * 40 * has_tokens


def test_template_flag_against_the_script_is_refused(says: Says) -> None:
    with says(ConfigError):
        type("Mine", (Finetuner,), {})(["--template", "Trainer"])


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
