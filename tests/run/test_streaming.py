"""Streamed shards and mixtures: each step has the same samples, with any readers and after any number of deaths."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rapidformer_templates import Pretrainer, Trainer
from rapidformer_templates.errors import CheckpointError
from rapidformer_templates.run.folder import read_metrics
from tests.support.texts import WORDS, write_jsonl
from tests.support.worker_pool import new_process, run_in_workers

MODEL = "--model-type gpt2 --num-layers 1 --hidden-size 16 --num-attention-heads 2 --dropout 0"
FLAGS = f"{MODEL} --lr 1e-3 --train-iters 10 --micro-batch-size 2 --global-batch-size 8 --log-interval 1"
TASKS = {
    "pretraining": "--task pretraining --seq-length 16 --shuffle-buffer 7",
    "packed": "--task causal_lm --seq-length 64 --pack-sequences --shuffle-buffer 11",
    "mixture": "--task causal_lm --seq-length 32 --validation-fraction 0",
}


class Seen:
    """Records the rows of each micro batch. Can kill its process after a step."""

    def begin(self, folder: Path, rank: int, dies_after: int | None) -> None:
        self.file, self.done, self.dies_after = folder / f"seen-{rank}.jsonl", 0, dies_after

    def on_train_start(self: Any) -> None:
        steps = sorted(int(path.name[5:]) for path in (self.run_folder / "checkpoints").glob("step-?*"))
        self.done = steps[-1] if steps else 0

    def compute_loss(self: Any, model: Any, batch: Any) -> Any:
        if model.training:
            with self.file.open("a") as file:
                file.write(json.dumps({"step": self.done + 1, "rows": batch["input_ids"].tolist()}) + "\n")
        return super().compute_loss(model, batch)  # type: ignore[misc]

    def on_step_end(self, step: int, result: Any) -> None:
        self.done = step
        if step == self.dies_after:
            os.kill(os.getpid(), signal.SIGKILL)


class SeenPretrainer(Seen, Pretrainer):
    pass


class SeenTrainer(Seen, Trainer):
    pass


def train(folder: Path, flags: Sequence[str], dies_after: int | None = None) -> None:
    run(None, folder, flags, dies_after)


def run(workers: Any, folder: Path, flags: Sequence[str], dies_after: int | None = None) -> None:
    folder.mkdir(exist_ok=True)
    job = (SeenPretrainer if "pretraining" in flags else SeenTrainer)([*flags, "--save", str(folder / "run")])
    job.run_folder = folder / "run"  # type: ignore[attr-defined]
    job.begin(folder, workers.rank if workers else 0, dies_after)
    job.fit()


def seen(folder: Path) -> dict[int, list[Any]]:
    """Return the rows of each step of all workers. If a step was repeated after a death, return the rows of the last
    time.
    """
    steps: dict[int, list[Any]] = {}
    for file in sorted(folder.glob("seen-*.jsonl")):
        for line in map(json.loads, file.read_text().splitlines()):
            steps.setdefault(line["step"], []).extend(line["rows"])
    return {step: sorted(rows) for step, rows in sorted(steps.items())}


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(folder / "run" / "metrics.jsonl") if "loss" in line]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write three shards. A run reads more than they have, so the stream restarts."""
    folder, draw = tmp_path_factory.mktemp("shards"), np.random.default_rng(0)
    for shard in range(3):
        rows = [{"text": " ".join(draw.choice(WORDS, draw.integers(2, 30)))} for _ in range(20)]
        write_jsonl(folder / f"train-{shard:05d}-of-00003.jsonl", rows)
    for name, word in (("a", "river"), ("b", "tree")):
        (folder / "sets").mkdir(exist_ok=True)
        write_jsonl(folder / "sets" / f"{name}.jsonl", [{"text": f"{word} {WORDS[i]} {i}"} for i in range(9)])
    return folder


def flags_of(task: str, shards: Path, tokenizer: Path) -> list[str]:
    data = {
        "pretraining": ["--streaming", "--data-path", f"{shards}/*.jsonl"],
        "packed": ["--streaming", "--data-dir", str(shards)],
        "mixture": ["--data-dir", str(shards / "sets"), "--data-name", "0.7 a 0.3 b"],
    }
    return [*f"{FLAGS} {TASKS[task]} --tokenizer-path {tokenizer} --save-interval 3".split(), *data[task]]


@pytest.mark.distributed
@pytest.mark.durable
@pytest.mark.parametrize("task", TASKS)
def test_killed_and_resumed_with_other_workers(task: str, shards: Path, gpt_folder: Path, tmp_path: Path) -> None:
    """Compare one process, one killed after step 5 and resumed by two, and one with two loader processes."""
    flags = flags_of(task, shards, gpt_folder)
    whole, killed, ahead = tmp_path / "whole", tmp_path / "killed", tmp_path / "ahead"
    train(whole, flags)
    process = new_process(train, killed, flags, 5)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    before = seen(killed)
    assert {step: before[step] for step in range(1, 6)} == {step: seen(whole)[step] for step in range(1, 6)}
    (killed / "seen-0.jsonl").unlink()
    run_in_workers(2, run, killed, [*flags, "--resume"])
    train(ahead, [*flags, "--dataloader-num-workers", "2"])
    assert {step: rows for step, rows in seen(whole).items() if step > 3} == seen(killed)
    assert seen(ahead) == seen(whole)
    assert all(len(rows) == 8 for rows in seen(whole).values())
    for folder in (killed, ahead):
        assert losses(folder) == pytest.approx(losses(whole), rel=1e-5)
    epochs = [line["epoch"] for line in read_metrics(whole / "run" / "metrics.jsonl") if "loss" in line]
    assert epochs == sorted(epochs)
    assert epochs[-1] >= 1
    change = ["--data-name", "0.6 a 0.4 b"] if task == "mixture" else ["--shuffle-buffer", "9"]
    with pytest.raises(CheckpointError, match=r"the order of the data would change: the (stream|corpus) was"):
        train(killed, [*flags, "--resume", "--train-iters", "12", *change])
