"""Runs on preferences: a tiny pretrained model, rows of different lengths, and the curve of a run with any flags."""

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


def words(count: int, seed: int = 0) -> str:
    return " ".join(np.random.default_rng(seed).choice(WORDS, count))


def pairs(count: int = 14) -> list[dict[str, Any]]:
    """Return prompts with answers of 1 to 9 words."""
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
    """Return texts, each with a number to predict or a list of labels."""
    labels = [[["a"], [], ["b", "a"]][i % 3] if kind is list else i / 4 for i in range(14)]
    return [{"text": words(2 + i % 7, i), "label": label} for i, label in enumerate(labels)]


def pretrained(folder: Path, tokenizer: Path, layers: int = 2) -> Path:
    """Save a model whose word probabilities are far from equal, and return its folder."""
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
    """Save such a model and rows, and return the flags of a run on them."""
    folder.mkdir(parents=True, exist_ok=True)
    write_jsonl(folder / "train.jsonl", rows)
    write_jsonl(folder / "valid.jsonl", rows[:5])
    model = pretrained(folder / "model", tokenizer, layers)
    return [*FLAGS.split(), "--data-dir", str(folder), "--pretrained-model-name-or-path", str(model)]


METRICS = ("loss", "grad_norm", "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")


def run(flags: Sequence[str]) -> Curve:
    """Train and return the numbers that batching must not change, for each training and evaluation line of the metrics.

    Args:
        flags: the run is not saved unless they contain ``--save``.
    """
    task = [] if "--task" in flags else ["--task", "preference"]
    where = [] if "--save" in flags else ["--no-save"]
    return metric_rows(parity.trained(Trainer([*flags, *task, *where]))["lines"])


def curve_of(save: Path | str) -> Curve:
    """Return the same numbers for a run folder."""
    return metric_rows(read_metrics(Path(save) / "metrics.jsonl"))


def metric_rows(lines: Sequence[Mapping[str, Any]]) -> Curve:
    """Return the same numbers for lines of metrics.

    A number that is not finite becomes NaN, because ``metrics.jsonl`` does not contain such numbers.
    """
    rows = [[line[name] for name in (*METRICS, "eval_loss") if name in line] for line in lines]
    return [[value if value is not None and math.isfinite(value) else math.nan for value in line] for line in rows]


def run_all(workers: Any, runs: Mapping[str, Sequence[str]]) -> dict[str, Curve]:
    """Train several runs one after the other in one group of workers. Return their curves by name."""
    return {name: run(flags) for name, flags in runs.items()}
