"""One run of ``bench peers``, in a process of its own.

``python -m rapidformer_templates.bench.peers_job SOLUTION FOLDER SEED RESULT`` trains on the tweets
in ``FOLDER/data`` and writes its figures to the file ``RESULT``.
"""

from __future__ import annotations

import csv
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rapidformer_templates.bench.demo_data import DATA_NAME, demo_model_folder

BATCH, EPOCHS, LR, WEIGHT_DECAY, WARMUP, MAX_LENGTH = 32, 1, 5e-5, 0.01, 0.1, 128
LABELS = ("negative", "neutral", "positive")

Figures = dict[str, float]
Collate = Callable[[list[Any]], dict[str, Any]]


class Watch:
    """Times the training from before its first step to after its last, and counts what it computed."""

    def __init__(self) -> None:
        self.began = self.first_step = self.last_step = time.perf_counter()
        self.batches = self.tokens = self.positions = 0

    def training_starts(self) -> None:
        self.first_step = time.perf_counter()

    def step_ends(self) -> None:
        self.last_step = time.perf_counter()

    def counting(self, collate: Collate, samples: int) -> Collate:
        """``collate``, counting tokens and positions of the batches in which ``samples`` are trained on."""
        in_training = math.ceil(samples / BATCH) * EPOCHS

        def counted(rows: list[Any]) -> dict[str, Any]:
            batch = collate(rows)
            self.batches += 1
            if self.batches <= in_training:
                self.tokens += int(batch["attention_mask"].sum())
                self.positions += batch["attention_mask"].numel()
            return batch

        return counted

    def figures(self, samples: int, held_out: int, eval_seconds: float, accuracy: float) -> Figures:
        train_seconds = self.last_step - self.first_step
        return {
            "samples_per_second": samples * EPOCHS / train_seconds,
            "eval_samples_per_second": held_out / eval_seconds,
            "positions_a_token": self.positions / self.tokens,
            "accuracy": accuracy,
            "train_seconds": train_seconds,
            "total_seconds": time.perf_counter() - self.began,
        }


def ours(folder: Path, seed: int) -> Figures:
    """The black box's own template and flags; what is added only looks on."""
    from rapidformer_templates import Data, Finetuner

    watch = Watch()

    class Watched(Finetuner):
        def build_data(self) -> Data:
            data = super().build_data()
            assert data.train is not None
            assert data.collate is not None
            data.collate = watch.counting(data.collate, len(data.train))
            return data

        def on_train_start(self) -> None:
            watch.training_starts()

        def on_step_end(self, step: int, result: Any) -> None:
            watch.step_ends()

        def on_evaluate(self, step: int, metrics: Any) -> None:
            self.eval_seconds = time.perf_counter() - watch.last_step

    with tempfile.TemporaryDirectory(prefix="rapidformer-peers-") as save:
        flags = [
            *("--task", "sequence_classification", "--pretrained-model-name-or-path", demo_model_folder()),
            *("--data-dir", folder / "data", "--data-name", DATA_NAME, "--seq-length", MAX_LENGTH),
            *("--micro-batch-size", BATCH, "--epochs", EPOCHS, "--lr", LR, "--lr-warmup-fraction", WARMUP),
            *("--weight-decay", WEIGHT_DECAY, "--optimizer", "adamw_torch_fused", "--seed", seed, "--save", save),
        ]
        template = Watched([str(flag) for flag in flags])
        summary = template.fit()
    train, valid = template.data.train or [], template.data.valid or []
    return watch.figures(len(train), len(valid), template.eval_seconds, summary["metrics"]["accuracy"])


def transformers_trainer(folder: Path, seed: int, sampling: str) -> Figures:
    """The same by transformers' Trainer, as its documentation shows it; batches padded to their longest.

    Args:
        sampling: ``random`` or ``group_by_length``.
    """
    import transformers

    watch = Watch()
    transformers.set_seed(seed)
    tokenizer = transformers.AutoTokenizer.from_pretrained(demo_model_folder())
    train, valid = (_tokenized(folder / "data" / f"{DATA_NAME}-{part}.csv", tokenizer) for part in ("train", "valid"))
    model = transformers.AutoModelForSequenceClassification.from_pretrained(demo_model_folder(), num_labels=len(LABELS))

    class Look(transformers.TrainerCallback):
        def on_train_begin(self, *unused: Any, **also_unused: Any) -> None:
            watch.training_starts()

        def on_step_end(self, *unused: Any, **also_unused: Any) -> None:
            watch.step_ends()

    with tempfile.TemporaryDirectory(prefix="rapidformer-peers-") as save:
        arguments = transformers.TrainingArguments(
            output_dir=save,
            per_device_train_batch_size=BATCH,
            per_device_eval_batch_size=BATCH,
            num_train_epochs=EPOCHS,
            learning_rate=LR,
            lr_scheduler_type="linear",
            warmup_steps=WARMUP,
            weight_decay=WEIGHT_DECAY,
            max_grad_norm=1.0,
            optim="adamw_torch_fused",
            train_sampling_strategy=sampling,
            seed=seed,
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
            report_to=[],
        )
        trainer = transformers.Trainer(
            model,
            arguments,
            data_collator=watch.counting(transformers.DataCollatorWithPadding(tokenizer), len(train)),
            train_dataset=train,
            eval_dataset=valid,
            compute_metrics=_accuracy,
            callbacks=[Look()],
        )
        trainer.train()
        began = time.perf_counter()
        metrics = trainer.evaluate()
    return watch.figures(len(train), len(valid), time.perf_counter() - began, metrics["eval_accuracy"])


def _accuracy(evaluated: Any) -> Figures:
    return {"accuracy": float((evaluated.predictions.argmax(-1) == evaluated.label_ids).mean())}


def _tokenized(file: Path, tokenizer: Any) -> Any:
    with file.open(encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines))
    encoded = tokenizer([row["text"] for row in rows], truncation=True, max_length=MAX_LENGTH)
    return [
        {"labels": LABELS.index(row["label"]), **{name: encoded[name][i] for name in encoded}}
        for i, row in enumerate(rows)
    ]


SOLUTIONS: dict[str, Callable[[Path, int], Figures]] = {
    "rapidformer_templates": ours,
    "transformers, dynamic padding": lambda folder, seed: transformers_trainer(folder, seed, "random"),
    "transformers, grouped by length": lambda folder, seed: transformers_trainer(folder, seed, "group_by_length"),
}


def main() -> None:
    solution, folder, seed, result = sys.argv[1:]
    figures = SOLUTIONS[solution](Path(folder), int(seed))
    Path(result).write_text(json.dumps(figures), encoding="utf-8")


if __name__ == "__main__":
    main()
