"""One run of ``bench peers``, in a process of its own.

``python -m benchmarks.peers_job SOLUTION FOLDER SEED`` trains on the tweets in
``FOLDER``. It waits for a line on standard input before each turn, and writes one to standard output
at the end of each: ``paused``, or the run's figures as JSON.
"""

from __future__ import annotations

import contextlib
import csv
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rapidformer_templates.commands.demo import DATA_NAME, demo_model_folder

BATCH, EPOCHS, LR, WEIGHT_DECAY, WARMUP, MAX_LENGTH = 32, 1, 2e-4, 0.01, 0.1, 64
STEPS_A_TURN = 4
PAUSED = "paused\n"
LABELS = ("negative", "neutral", "positive")

Figures = dict[str, float]
Collate = Callable[[list[Any]], dict[str, Any]]


class Watch:
    """Times the training steps, lets the other solutions have their turns, and counts what was computed."""

    def __init__(self, pause: Callable[[], None]) -> None:
        self._pause = pause
        self.mark = 0.0  # since when the clock runs
        self.seconds = 0.0  # from before the first step to after the last, without the turns of others
        self.steps = self.batches = self.tokens = self.positions = 0

    def training_starts(self) -> None:
        self._pause()
        self.mark = time.perf_counter()

    def step_ends(self) -> None:
        now = time.perf_counter()
        self.seconds += now - self.mark
        self.steps += 1
        if self.steps % STEPS_A_TURN == 0:
            self._pause()
        self.mark = time.perf_counter()

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
        return {
            "samples_per_second": samples * EPOCHS / self.seconds,
            "eval_samples_per_second": held_out / eval_seconds,
            "positions_a_token": self.positions / self.tokens,
            "accuracy": accuracy,
            "train_seconds": self.seconds,
            "eval_seconds": eval_seconds,
        }


def ours(folder: Path, seed: int, watch: Watch) -> Figures:
    """The black box's own template and flags; what is added only looks on."""
    from rapidformer_templates.data.types import Data
    from rapidformer_templates.finetuner import Finetuner

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
            self.eval_seconds = time.perf_counter() - watch.mark

    with tempfile.TemporaryDirectory(prefix="rapidformer-peers-") as save:
        flags = [
            *("--task", "sequence_classification", "--pretrained-model-name-or-path", demo_model_folder()),
            *("--data-dir", folder, "--data-name", DATA_NAME, "--seq-length", MAX_LENGTH),
            *("--micro-batch-size", BATCH, "--epochs", EPOCHS, "--lr", LR, "--lr-warmup-fraction", WARMUP),
            *("--weight-decay", WEIGHT_DECAY, "--optimizer", "adamw_torch_fused", "--seed", seed, "--save", save),
        ]
        template = Watched([str(flag) for flag in flags])
        summary = template.fit()
    train, valid = template.data.train or [], template.data.valid or []
    return watch.figures(len(train), len(valid), template.eval_seconds, summary["metrics"]["accuracy"])


def transformers_trainer(folder: Path, seed: int, watch: Watch, sampling: str) -> Figures:
    """The same by transformers' Trainer, as its documentation shows it; batches padded to their longest.

    Args:
        sampling: ``random`` or ``group_by_length``.
    """
    import transformers

    transformers.set_seed(seed)
    tokenizer = transformers.AutoTokenizer.from_pretrained(demo_model_folder())
    train, valid = (_tokenized(folder / f"{DATA_NAME}-{part}.csv", tokenizer) for part in ("train", "valid"))
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


SOLUTIONS: dict[str, Callable[[Path, int, Watch], Figures]] = {
    "rapidformer_templates": ours,
    "transformers, dynamic padding": partial(transformers_trainer, sampling="random"),
    "transformers, grouped by length": partial(transformers_trainer, sampling="group_by_length"),
}


def main() -> None:
    solution, folder, seed = sys.argv[1:]
    answers = sys.stdout

    def pause() -> None:
        print(PAUSED, end="", file=answers, flush=True)
        sys.stdin.readline()

    sys.stdin.readline()
    with contextlib.redirect_stdout(sys.stderr):  # what the libraries say is no answer
        figures = SOLUTIONS[solution](Path(folder), int(seed), Watch(pause))
    print(json.dumps(figures), file=answers, flush=True)


if __name__ == "__main__":
    main()
