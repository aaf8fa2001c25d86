"""``stop()`` in hooks and callbacks: the run ends after that step on all workers, as a complete run does."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from rapidformer_templates import Callback
from rapidformer_templates.run.checkpoint.format import candidates
from rapidformer_templates.run.folder import read_metrics
from tests.support.scored import Scored
from tests.support.worker_pool import run_in_workers

FLAGS = "--lr 0.1 --eval-interval 4 --log-interval 4"
REASON = "the loss is low enough"


class Stops(Callback):
    """Stops a run in one event at one step, on the ranks that are given."""

    def __init__(self, event: str, step: int = 0, ranks: tuple[int, ...] = (0,)) -> None:
        self.event, self.step, self.ranks = event, step, ranks
        self.is_main: bool | None = None
        self.steps_seen: list[int] = []

    def _react(self, trainer: Any, event: str, step: int = 0) -> None:
        self.is_main = trainer.is_main
        rank = trainer.engine.workers.rank
        if (event, step) == (self.event, self.step) and rank in self.ranks:
            trainer.stop(f"{REASON} on {rank}")

    def on_train_start(self, trainer: Any) -> None:
        self._react(trainer, "start")

    def on_step_end(self, trainer: Any, step: int, result: Any) -> None:
        self.steps_seen.append(step)
        self._react(trainer, "step", step)

    def on_epoch_end(self, trainer: Any, epoch: int) -> None:
        self._react(trainer, "epoch", epoch)

    def on_evaluate(self, trainer: Any, step: int, metrics: Mapping[str, float]) -> None:
        self._react(trainer, "evaluation", step)


def run(callback: Stops, *flags: str) -> dict[str, Any]:
    job = Scored([*FLAGS.split(), *flags], callbacks=[callback])
    job.scores, job.every = [0.5] * 40, 1
    return job.fit()


def test_it_ends_as_a_complete_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    callback = Stops("step", 6)
    summary = run(callback, "--train-iters", "20", "--save", str(tmp_path))
    why = f"after step 6 of 20: {REASON} on 0"
    assert (summary["steps"], summary["stopped_early"], callback.steps_seen) == (6, why, [1, 2, 3, 4, 5, 6])
    assert f"stopped early {why}\n" in capsys.readouterr().err
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines if "loss" in line] == [4, 6]
    assert [line["step"] for line in lines if "utility" in line] == [4, 6]
    assert next(path.name for path in candidates(tmp_path / "checkpoints")) == "step-6"
    assert json.loads((tmp_path / "summary.json").read_text())["stopped_early"] == why
    assert (tmp_path / "export").is_dir()


def test_the_weights_are_those_of_the_step(tmp_path: Path) -> None:
    """They equal those of a run that was planned to be that short."""
    summaries, weights = [], []
    for name, steps, callback in (("early", "20", Stops("step", 6)), ("short", "6", Stops("never"))):
        job = Scored(
            [*FLAGS.split(), "--train-iters", steps, "--lr-decay-style", "constant", "--save", str(tmp_path / name)],
            callbacks=[callback],
        )
        job.scores, job.every = [0.5] * 40, 1
        summaries.append(job.fit())
        weights.append(torch.cat([parameter.detach().flatten() for parameter in job.model.parameters()]))
    assert torch.equal(*weights)
    assert summaries[0]["metrics"] == summaries[1]["metrics"]


@pytest.mark.parametrize(
    ("event", "at", "steps"),
    [("start", 0, 0), ("step", 1, 1), ("evaluation", 4, 4), ("epoch", 1, 20), ("step", 40, 40), ("never", 0, 40)],
)
def test_every_event_may_stop(event: str, at: int, steps: int, tmp_path: Path) -> None:
    summary = run(Stops(event, at), "--epochs", "2", "--micro-batch-size", "4", "--save", str(tmp_path))
    assert summary["steps"] == steps
    assert (summary["stopped_early"] is None) == (steps == 40)
    assert (tmp_path / "export").is_dir()


def test_a_resumed_run_continues_and_the_next_fit_does_not_stop(tmp_path: Path) -> None:
    job = Scored([*FLAGS.split(), "--train-iters", "12", "--save", str(tmp_path)], callbacks=[Stops("step", 6)])
    job.scores, job.every = [0.5] * 40, 1
    assert job.fit()["steps"] == 6
    again = Scored([*FLAGS.split(), "--train-iters", "12", "--save", str(tmp_path), "--resume"])
    again.scores, again.every = [0.5] * 40, 1
    summary = again.fit()
    assert (summary["steps"], summary["stopped_early"]) == (12, None)
    job.callbacks[0].step = 0  # type: ignore[attr-defined]
    unsaved = [*FLAGS.split(), "--train-iters", "12", "--no-save"]
    other = Scored(unsaved, callbacks=[Stops("step", 6)])
    other.scores, other.every = [0.5] * 40, 1
    assert other.fit()["steps"] == 6
    other.callbacks[0].step = 0  # type: ignore[attr-defined]
    assert other.fit()["steps"] == 12


def _in_workers(workers: Any, folder: str, ranks: tuple[int, ...]) -> tuple[dict[str, Any], list[int], bool | None]:
    callback = Stops("step", 6, ranks)
    summary = run(callback, "--train-iters", "20", "--micro-batch-size", "2", "--save", folder)
    return summary, callback.steps_seen, callback.is_main


@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [(0,), (1,), (0, 1)], ids=str)
def test_all_workers_end_at_the_same_step(ranks: tuple[int, ...], tmp_path: Path) -> None:
    results = run_in_workers(2, _in_workers, str(tmp_path), ranks)
    for summary, steps, _ in results:
        assert steps == [1, 2, 3, 4, 5, 6]
        assert (summary["steps"], summary["stopped_early"]) == (6, f"after step 6 of 20: {REASON} on {min(ranks)}")
    assert [is_main for _, _, is_main in results] == [True, False]
    assert next(path.name for path in candidates(tmp_path / "checkpoints")) == "step-6"
