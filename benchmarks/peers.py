"""``benchmarks peers``: the demo's job with this library and with transformers' Trainer, everything else being equal.

Both use the same model, tweets, batch size, epochs, learning rate, schedule, weight decay, clipping and optimizer. Each
solution runs in a separate process. The processes take turns of a few steps, so that a busy moment of the machine hits
all of them.
"""

from __future__ import annotations

import argparse
import csv
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.contest import Advance, Answer, Flag, asks, bars, median_sd, progress, table, verdict
from benchmarks.workers import Ended, Loop, StepDone
from rapidformer_templates.commands.demo import DATA_NAME, demo_model_folder, make_demo_data
from rapidformer_templates.data.types import Data, Endless

OURS = "rapidformer_templates"
GOALS = {"transformers, dynamic padding": 1.4, "transformers, grouped by length": 1.1}
"""Goals: samples per second of this library relative to the others."""

BATCH, EPOCHS, LR, WEIGHT_DECAY, WARMUP, MAX_LENGTH = 32, 1, 2e-4, 0.01, 0.1, 64
STEPS_A_TURN = 4
LABELS = ("negative", "neutral", "positive")

Figures = dict[str, float]
Collate = Callable[[list[Any]], dict[str, Any]]


class Count:
    """Counts tokens in the training batches, and positions that were computed for them, including padding."""

    def __init__(self) -> None:
        self.batches = self.tokens = self.positions = 0

    def counting(self, collate: Collate, samples: int) -> Collate:
        """Wrap ``collate`` to count the training batches of ``samples`` samples."""
        in_training = math.ceil(samples / BATCH) * EPOCHS

        def counted(rows: list[Any]) -> dict[str, Any]:
            batch = collate(rows)
            self.batches += 1
            if self.batches <= in_training:
                self.tokens += int(batch["attention_mask"].sum())
                self.positions += batch["attention_mask"].numel()
            return batch

        return counted

    def figures(self, seconds: float, eval_seconds: float, sizes: tuple[int, int], accuracy: float) -> Figures:
        """Return the results of a run. ``sizes`` are the numbers of training and held-out samples."""
        return {
            "samples_per_second": sizes[0] * EPOCHS / seconds,
            "eval_samples_per_second": sizes[1] / eval_seconds,
            "positions_per_token": self.positions / self.tokens,
            "accuracy": accuracy,
            "train_seconds": seconds,
            "eval_seconds": eval_seconds,
        }


def ours(step_done: StepDone, folder: Path, seed: int) -> Figures:
    """Run the black box's own template and flags. The added code only observes."""
    from rapidformer_templates.finetuner import Finetuner

    count = Count()

    class Watched(Finetuner):
        def build_data(self) -> Data:
            data = super().build_data()
            assert data.collate is not None
            data.collate = count.counting(data.collate, _size(data))
            return data

        def on_train_start(self) -> None:
            step_done.begin()

        def on_step_end(self, step: int, result: Any) -> None:
            step_done()
            self.trained = time.perf_counter()

        def on_evaluate(self, step: int, metrics: Any) -> None:
            self.eval_seconds = time.perf_counter() - self.trained

    with tempfile.TemporaryDirectory(prefix="rapidformer-peers-") as save:
        flags = [
            *("--task", "sequence_classification", "--pretrained-model-name-or-path", demo_model_folder()),
            *("--data-dir", folder, "--data-name", DATA_NAME, "--seq-length", MAX_LENGTH),
            *("--micro-batch-size", BATCH, "--epochs", EPOCHS, "--lr", LR, "--lr-warmup-fraction", WARMUP),
            *("--weight-decay", WEIGHT_DECAY, "--optimizer", "adamw_torch_fused", "--seed", seed, "--save", save),
        ]
        template = Watched([str(flag) for flag in flags])
        accuracy = template.fit()["metrics"]["accuracy"]
    sizes = _size(template.data), len(template.data.valid or [])
    return count.figures(step_done.seconds, template.eval_seconds, sizes, accuracy)


def _size(data: Data) -> int:
    """Return the number of training samples."""
    assert data.train is not None, "the demo's data set has a training part"
    assert not isinstance(data.train, Endless), "the demo's data set is not streamed"
    return len(data.train)


def transformers_trainer(step_done: StepDone, folder: Path, seed: int, sampling: str) -> Figures:
    """Run the same job with transformers' Trainer, as its documentation shows, padding batches to their longest sample.

    Args:
        sampling: ``random`` or ``group_by_length``.
    """
    import transformers

    from benchmarks.models import callbacks, trainer_arguments

    transformers.set_seed(seed)
    count, model_folder = Count(), demo_model_folder()
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder)
    train, valid = (_tokenized(folder / f"{DATA_NAME}-{part}.csv", tokenizer) for part in ("train", "valid"))
    with tempfile.TemporaryDirectory(prefix="rapidformer-peers-") as save:
        arguments = trainer_arguments(
            save,
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
        )
        trainer = transformers.Trainer(
            transformers.AutoModelForSequenceClassification.from_pretrained(model_folder, num_labels=len(LABELS)),
            arguments,
            data_collator=count.counting(transformers.DataCollatorWithPadding(tokenizer), len(train)),
            train_dataset=train,
            eval_dataset=valid,
            compute_metrics=_accuracy,
            callbacks=callbacks(on_train_begin=step_done.begin, on_step_end=step_done),
        )
        trainer.train()
        began = time.perf_counter()
        metrics = trainer.evaluate()
    sizes = len(train), len(valid)
    return count.figures(step_done.seconds, time.perf_counter() - began, sizes, metrics["eval_accuracy"])


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


SOLUTIONS: dict[str, Callable[..., Figures]] = {
    OURS: ours,
    "transformers, dynamic padding": partial(transformers_trainer, sampling="random"),
    "transformers, grouped by length": partial(transformers_trainer, sampling="group_by_length"),
}


def measure_peers(options: argparse.Namespace, advance: Advance) -> dict[str, list[Figures]]:
    """Run all solutions side by side, ``options.repeats`` times. Returns the results of each run."""
    demo_model_folder()  # fails before anything starts if the model is missing
    runs: dict[str, list[Figures]] = {name: [] for name in SOLUTIONS}
    with tempfile.TemporaryDirectory(prefix="rapidformer-peers-") as name:
        make_demo_data(Path(name), options.train, options.held_out)
        for repeat in range(options.repeats):
            with ExitStack() as stack:
                loops = {
                    solution: stack.enter_context(closing(Loop(work, Path(name), repeat, workers=1)))
                    for solution, work in SOLUTIONS.items()
                }
                while loops:
                    for solution, loop in list(loops.items()):
                        try:
                            loop.advance(STEPS_A_TURN)
                        except Ended as end:
                            runs[solution].append(end.results[0])
                            del loops[solution]
            advance(f"repeat {repeat + 1}")
    return runs


@asks(
    Flag("repeats", 3, "runs per solution"),
    Flag("train", 2000, "training tweets"),
    Flag("held-out", 1000, "held-out tweets"),
)
def answer(options: argparse.Namespace) -> Answer:
    with progress("peers", options.repeats) as advance:
        runs = measure_peers(options, advance)
    over = {peer: ratios(runs, peer) for peer in GOALS}
    columns = {
        "training samples/s": ("samples_per_second", ".1f"),
        "evaluation samples/s": ("eval_samples_per_second", ".1f"),
        "positions per token": ("positions_per_token", ".3f"),
        "accuracy": ("accuracy", ".3f"),
    }
    rows = [
        {"name": name, **{field: median_sd([run[field] for run in own], form) for field, form in columns.values()}}
        for name, own in runs.items()
    ]
    cells = {"solution": "{name}", **{heading: f"{{{field}}}" for heading, (field, _) in columns.items()}}
    speeds = {name: [run["samples_per_second"] for run in own] for name, own in runs.items()}
    return Answer(
        {"train": options.train, "held_out": options.held_out, "runs": runs, "ratios": over},
        table("the demo's job, median ± standard deviation over the runs", rows, cells),
        [
            f"{median_sd(over[peer])} × {peer}; goal {goal} ×: {verdict(statistics.median(over[peer]) >= goal)}"
            for peer, goal in GOALS.items()
        ],
        bars("training samples per second", speeds, ours=[OURS]),
    )


def ratios(runs: dict[str, list[Figures]], peer: str) -> list[float]:
    """Return our training speed relative to a peer's, repeat by repeat."""
    pairs = zip(runs[OURS], runs[peer], strict=True)
    return [round(ours["samples_per_second"] / theirs["samples_per_second"], 3) for ours, theirs in pairs]
