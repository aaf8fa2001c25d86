"""Label smoothing in the built-in tasks, compared with torch's own argument on the logits of the model."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from rapidformer_templates import Trainer, flag
from rapidformer_templates.errors import ConfigError, ModelError
from rapidformer_templates.run.folder import read_metrics
from tests.support.messages import Says
from tests.support.requests import codes
from tests.support.texts import DOCUMENTS, ROW_OF, WORDS, write_jsonl

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
    def make(task: str) -> list[str]:
        tokenizer = gpt_folder if CASES[task] == "gpt2" else bert_folder
        common = f"--task {task} --model-type {CASES[task]} --tokenizer-path {tokenizer} {FLAGS}"
        if task == "pretraining":
            corpus = write_jsonl(tmp_path / "corpus.jsonl", [{"text": text} for text in DOCUMENTS])
            return f"{common} --data-path {corpus} --data-cache-dir {tmp_path / 'cache'}".split()
        rows = [ROW_OF[task](" ".join(WORDS[i % 9 : i % 9 + 3 + i % 4])) for i in range(24)]
        for i, row in enumerate(rows):
            row |= {"target": f"{WORDS[i % 7]} {WORDS[i % 5]}"} if task == "seq2seq_lm" else {}
            row |= {"ner_tags": ["xy"[len(w) > 3] for w in row["tokens"]]} if task == "token_classification" else {}
        write_jsonl(tmp_path / "train.jsonl", rows)
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


@pytest.mark.parametrize(
    "flags", ["--task question_answering", "", "--task pretraining --model-type bert --sentence-pairs"]
)
def test_other_losses_are_refused(flags: str) -> None:
    assert codes(f"{flags} --label-smoothing 0.1") == ["RF112"]


def test_a_model_without_a_cross_entropy_ends_the_run(flags_of: Any, says: Says) -> None:
    class Squares(Trainer):
        def compute_loss(self, model: Any, batch: dict[str, torch.Tensor]) -> Any:
            def squares(labels: torch.Tensor, **inputs: torch.Tensor) -> Any:
                return SimpleNamespace(loss=model(**inputs).logits.square().mean())

            return super().compute_loss(squares, batch)

    with says(ModelError):
        Squares([*flags_of("masked_lm"), "--label-smoothing", "0.1", "--no-save"]).fit()


def test_a_flag_of_ones_own_with_the_name_of_ours_is_told(says: Says) -> None:
    @dataclass(frozen=True)
    class MyFlags:
        """Mine"""

        label_smoothing: float = flag(0.0, "my own")

    with says(ConfigError):
        type("Mine", (Trainer,), {"Flags": MyFlags})([])
