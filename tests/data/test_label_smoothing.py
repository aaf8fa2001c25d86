"""Label smoothing in the built-in tasks, compared with torch's own argument on the logits of the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers.trainer_pt_utils import LabelSmoother

from rapidformer_templates import Trainer, flag
from rapidformer_templates.errors import ConfigError, ModelError
from rapidformer_templates.run.folder import read_metrics
from tests.support.requests import codes
from tests.support.texts import DOCUMENTS, WORDS, write_jsonl

SHARE = 0.3
SIZES = "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --dropout 0"
FLAGS = (
    f"{SIZES} --lr 1e-2 --train-iters 3 --global-batch-size 6 --micro-batch-size 3 --log-interval 1 --no-export-model"
)
CASES = {
    "sequence_classification": "bert",
    "token_classification": "bert",
    "masked_lm": "bert",
    "causal_lm": "gpt2",
    "seq2seq_lm": "t5",
    "pretraining": "gpt2",
}


class ByHand(Trainer):
    """Applies torch's argument to the logits during training."""

    def compute_loss(self, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits, labels = model(**batch).logits, batch.get("shift_labels", batch["labels"])
        if self.config.training.task == "causal_lm":
            logits, labels = logits[:, :-1], labels[:, 1:]
        share = SHARE if torch.is_grad_enabled() else 0.0
        return cross_entropy(logits.flatten(0, -2), labels.flatten(), label_smoothing=share)


@pytest.fixture
def flags_of(tmp_path: Path, bert_folder: Path, gpt_folder: Path) -> Callable[[str], list[str]]:
    rows = [
        {
            "text": f"{' '.join(WORDS[i % 9 : i % 9 + 3 + i % 4])}",
            "label": "abc"[i % 3],
            "target": f"{WORDS[i % 7]} {WORDS[i % 5]}",
        }
        for i in range(24)
    ]
    tagged = [
        {"tokens": row["text"].split(), "tags": ["x" if len(w) > 3 else "y" for w in row["text"].split()]}
        for row in rows
    ]
    texts = [{"text": row["text"]} for row in rows]
    pairs = [{"source": row["text"], "target": row["target"]} for row in rows]
    by_task = {"token_classification": tagged, "masked_lm": texts, "causal_lm": texts, "seq2seq_lm": pairs}

    def make(task: str) -> list[str]:
        tokenizer = gpt_folder if CASES[task] == "gpt2" else bert_folder
        common = f"--task {task} --model-type {CASES[task]} --tokenizer-path {tokenizer} {FLAGS}"
        if task == "pretraining":
            corpus = write_jsonl(tmp_path / "corpus.jsonl", [{"text": text} for text in DOCUMENTS])
            return f"{common} --data-path {corpus} --data-cache-dir {tmp_path / 'cache'}".split()
        own = by_task.get(task, [{"text": row["text"], "label": row["label"]} for row in rows])
        write_jsonl(tmp_path / "train.jsonl", own)
        return f"{common} --data-dir {tmp_path} --data-name train --validation-fraction 0.25".split()

    return make


def lines_of(kind: type[Trainer], flags: list[str], folder: Path) -> tuple[list[float], dict[str, float]]:
    """Return the loss of each step, and the evaluation."""
    kind([*flags, "--save", str(folder)]).fit()
    lines = read_metrics(folder / "metrics.jsonl")
    (evaluation,) = [line for line in lines if "eval_loss" in line]
    return [line["loss"] for line in lines if "loss" in line], evaluation


@pytest.mark.slow
@pytest.mark.parametrize("task", CASES)
def test_the_loss_of_a_task_is_torchs_smoothed_one(task: str, flags_of: Any, tmp_path: Path) -> None:
    flags = flags_of(task)
    wanted, evaluation = lines_of(ByHand, flags, tmp_path / "by-hand")
    found, told = lines_of(Trainer, [*flags, "--label-smoothing", str(SHARE)], tmp_path / "flag")
    assert found == pytest.approx(wanted, rel=2e-6)
    assert told["eval_loss"] == pytest.approx(evaluation["eval_loss"], rel=2e-6)
    plain, _ = lines_of(Trainer, flags, tmp_path / "plain")
    assert max(abs(one - other) for one, other in zip(plain, found, strict=True)) > 1e-3


def test_a_first_evaluation_is_told_without_smoothing(flags_of: Any, tmp_path: Path) -> None:
    """The learning rate is zero, so the weights are the initial ones, with and without the flag."""
    flags = [*flags_of("sequence_classification"), "--lr", "0"]
    _, plain = lines_of(Trainer, flags, tmp_path / "plain")
    losses, smoothed = lines_of(Trainer, [*flags, "--label-smoothing", "0.9"], tmp_path / "smoothed")
    assert smoothed["eval_loss"] == plain["eval_loss"]
    assert losses != [line["loss"] for line in read_metrics(tmp_path / "plain/metrics.jsonl") if "loss" in line]


def test_it_is_the_loss_of_transformers() -> None:
    """Compare with transformers' own LabelSmoother."""
    torch.manual_seed(0)
    logits, labels = torch.randn(3, 5, 7), torch.randint(0, 7, (3, 5))
    labels[0, 2:] = -100
    theirs = LabelSmoother(epsilon=SHARE)({"logits": logits}, labels)
    ours = cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=SHARE)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    "flags",
    ["--task question_answering", "", "--task pretraining --model-type bert --sentence-pairs"],
)
def test_other_losses_are_refused(flags: str) -> None:
    assert codes(f"{flags} --label-smoothing 0.1") == ["RF112"]


def test_a_model_without_a_cross_entropy_ends_the_run(flags_of: Any) -> None:
    class Squares(Trainer):
        def compute_loss(self, model: Any, batch: dict[str, torch.Tensor]) -> Any:
            def squares(labels: torch.Tensor, **inputs: torch.Tensor) -> Any:
                return SimpleNamespace(loss=model(**inputs).logits.square().mean())

            return super().compute_loss(squares, batch)

    with pytest.raises(ModelError, match="not torch's cross-entropy"):
        Squares([*flags_of("masked_lm"), "--label-smoothing", "0.1", "--no-save"]).fit()


def test_a_flag_of_ones_own_with_the_name_of_ours_is_told() -> None:
    @dataclass(frozen=True)
    class MyFlags:
        """Mine"""

        label_smoothing: float = flag(0.0, "my own")

    class Mine(Trainer):
        Flags = MyFlags

    with pytest.raises(ConfigError, match="--label-smoothing is a flag of the library") as caught:
        Mine([])
    assert caught.value.where == "MyFlags"
