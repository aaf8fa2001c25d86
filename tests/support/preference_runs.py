"""Runs on preferences: a tiny pretrained folder, rows of unequal lengths, and the curve of a run with any flags."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from rapidformer_templates import Trainer
from rapidformer_templates.run.folder import read_metrics
from tests.support import parity
from tests.support.texts import WORDS, write_jsonl

STEPS = 3
Curve = list[list[float]]
FLAGS = (
    f"--train-iters {STEPS} --lr 5e-3 --lr-decay-style constant --clip-grad 1 --log-interval 1 --seq-length 48"
    " --adam-epsilon 1e-3 --global-batch-size 4 --validation-fraction 0 --no-export-model"
)


def words(count: int, seed: int) -> str:
    return " ".join(np.random.default_rng(seed).choice(WORDS, count))


def pairs(count: int = 14) -> list[dict[str, Any]]:
    """Prompts with answers of 1 to 9 words."""
    return [
        {"prompt": words(2 + i % 4, i), "chosen": " " + words(1 + i % 9, 50 + i), "rejected": " " + words(3, 90 + i)}
        for i in range(count)
    ]


def judged(count: int = 14) -> list[dict[str, Any]]:
    return [
        {"prompt": words(2 + i % 4, i), "completion": " " + words(1 + i % 5, 50 + i), "label": i % 3 > 0}
        for i in range(count)
    ]


def scored(kind: type) -> list[dict[str, Any]]:
    """Texts with a number to predict each, or with a list of labels."""
    labels = [[["a"], [], ["b", "a"]][i % 3] if kind is list else i / 4 for i in range(14)]
    return [{"text": words(2 + i % 7, i), "label": label} for i, label in enumerate(labels)]


def pretrained(folder: Path, tokenizer: Path, layers: int = 2) -> Path:
    """A model whose words are far from equally likely."""
    words_of = AutoTokenizer.from_pretrained(tokenizer)
    torch.manual_seed(5)
    config = GPT2Config(
        vocab_size=len(words_of), n_positions=64, n_embd=32, n_layer=layers, n_head=4, initializer_range=0.2,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    GPT2LMHeadModel(config).save_pretrained(folder)
    words_of.save_pretrained(folder)
    return folder


def make(folder: Path, tokenizer: Path, rows: Sequence[dict[str, Any]], layers: int = 2) -> list[str]:
    """The flags of a run on such a model and rows."""
    folder.mkdir(parents=True, exist_ok=True)
    write_jsonl(folder / "train.jsonl", rows)
    write_jsonl(folder / "valid.jsonl", rows[:5])
    model = pretrained(folder / "model", tokenizer, layers)
    return [*FLAGS.split(), "--data-dir", str(folder), "--pretrained-model-name-or-path", str(model)]


TOLD = ("loss", "grad_norm", "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")


def run(flags: Sequence[str]) -> Curve:
    """For each line of the metrics, training and evaluation, the numbers that no cut into batches may change.

    Args:
        flags: without a folder unless they name one.
    """
    task = [] if "--task" in flags else ["--task", "preference"]
    where = [] if "--save" in flags else ["--no-save"]
    return told_of(parity.trained(Trainer([*flags, *task, *where]))["lines"])


def curve_of(save: Path | str) -> Curve:
    """The same of a run folder."""
    return told_of(read_metrics(Path(save) / "metrics.jsonl"))


def told_of(lines: Sequence[Mapping[str, Any]]) -> Curve:
    """The same of lines of metrics. A number that is not finite is NaN, as ``metrics.jsonl`` has none of these."""
    told = [[line[name] for name in (*TOLD, "eval_loss") if name in line] for line in lines]
    return [[value if value is not None and math.isfinite(value) else math.nan for value in line] for line in told]


def run_all(workers: Any, runs: Mapping[str, Sequence[str]]) -> dict[str, Curve]:
    """Several runs, one behind the other, in one group of workers, by their names."""
    return {name: run(flags) for name, flags in runs.items()}
