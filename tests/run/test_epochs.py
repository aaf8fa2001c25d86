"""Lengths and intervals in epochs, samples, tokens and minutes take the steps that counts and clocks give."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from rapidformer_templates import Pretrainer
from rapidformer_templates.data.types import Bookmark, Data, Endless
from rapidformer_templates.errors import ConfigError
from rapidformer_templates.run import steps as run_steps
from rapidformer_templates.run.folder import read_metrics
from rapidformer_templates.system.workers import Workers
from tests.support.jobs import CausalJob
from tests.support.lines import Line
from tests.support.messages import Says
from tests.support.parity import trained
from tests.support.selection import by_default
from tests.support.texts import DOCUMENTS, write_jsonl
from tests.support.worker_pool import run_in_workers

pytestmark = pytest.mark.slow

MICRO, ACCUMULATED = "--micro-batch-size 8", "--micro-batch-size 2 --global-batch-size 8"


class Job(CausalJob):
    """A language model on the first ``count`` samples, in fp64. Six steps of 8 samples are one pass over 48."""

    count = 48
    double = True

    def __init__(self, flags: str, **values: Any) -> None:
        super().__init__([*flags.split(), "--lr", "1e-3", "--log-interval", "1", "--no-export-model"], **values)

    def build_data(self) -> Data:
        data = super().build_data()
        return Data(train=data.train[: self.count], valid=data.valid, collate=data.collate)


class OddJob(Job):
    """Seven steps are one pass. The last one of a pass has two samples if batches end with the pass."""

    count = 50


def curve(flags: str, job: type[Job] = Job) -> Any:
    return trained(job(flags))["curve"]


def evaluated(lines: list[dict[str, Any]]) -> list[int]:
    return [line["step"] for line in lines if "eval_loss" in line]


def test_a_length_in_epochs_takes_the_steps_of_epochs() -> None:
    by_epochs = trained(Job(f"--epochs 2 {MICRO}"))
    counted = trained(Job(f"--train-iters 2epochs {MICRO}"))
    assert len(counted["curve"]) == 12
    assert counted["curve"] == by_epochs["curve"]
    assert evaluated(counted["lines"]) == evaluated(by_epochs["lines"]) == [6, 12]


@pytest.mark.longer
def test_with_accumulation_it_is_the_run_of_that_many_steps() -> None:
    """If a pass does not divide, it has the steps of an epoch."""
    counted = curve(f"--train-iters 2epochs {ACCUMULATED}")
    assert counted == curve(f"--train-iters 12 {ACCUMULATED}")
    np.testing.assert_allclose(counted, curve(f"--epochs 2 {MICRO}"), rtol=1e-9)
    assert [len(curve(f"{length} {MICRO}", OddJob)) for length in ("--epochs 2", "--train-iters 2epochs")] == [14, 14]


@pytest.mark.parametrize(
    "batches",
    by_default(["--pack-sequences"], ["--pack-sequences", "--data-iterator dynamic-shape --tokens-per-batch 40"]),
)
def test_passes_over_rows_that_are_not_samples(batches: str, gpt_folder: Path, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", [{"text": text} for text in DOCUMENTS])
    flags = f"--task causal_lm --data-dir {tmp_path} --validation-fraction 0 --seq-length 40 --lr 1e-3 {batches}"
    sizes = f"--model-type gpt2 --num-layers 1 --hidden-size 16 --num-attention-heads 2 --tokenizer-path {gpt_folder}"
    flags += " --no-save"
    by_epochs = Pretrainer(f"{flags} {sizes} --micro-batch-size 4 --epochs 2".split()).fit()
    accumulated = "--micro-batch-size 2 --global-batch-size 4 --train-iters 2epochs"
    counted = Pretrainer(f"{flags} {sizes} {accumulated}".split()).fit()
    assert counted["receipts"]["micro_steps"] == 2
    if batches == "--pack-sequences":
        assert by_epochs["steps"] < 2 * len(DOCUMENTS) / 4, "rows hold several samples"
        assert counted["steps"] == by_epochs["steps"]
    else:  # a step is a number of micro batches with any number of rows
        assert counted["steps"] == 2 * -(-by_epochs["steps"] // 4)


def test_hooks_see_the_end_of_each_pass() -> None:
    epochs: list[int] = []
    job = Job(f"--train-iters 2.5epochs {ACCUMULATED}")
    job.on_epoch_end = epochs.append  # type: ignore[method-assign]
    trained(job)
    assert epochs == [1, 2]


def saved(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").glob("step-*"))


INTERVALS = "--eval-interval 0.25epochs --save-interval 1epoch --keep-checkpoints 99"


def _dies_in_step(last: int) -> Callable[..., None]:
    def on_step_end(step: int, result: Any) -> None:
        if step == last:
            raise InterruptedError

    return on_step_end


@pytest.mark.longer
@pytest.mark.parametrize("length", ["2epochs", "14"])
def test_intervals_in_epochs_and_a_resume_in_between(length: str, tmp_path: Path) -> None:
    flags = f"--train-iters {length} {ACCUMULATED} {INTERVALS}"
    # A pass has 7 steps: quarters end at 1.75, 3.5, 5.25, 7, 8.75, 10.5, 12.25 and 14, rounded up.
    OddJob(flags, save=str(tmp_path / "whole"), no_save=False).fit()
    whole = read_metrics(tmp_path / "whole/metrics.jsonl")
    assert evaluated(whole) == [2, 4, 6, 7, 9, 11, 13, 14]
    assert saved(tmp_path / "whole") == [7, 14]
    job = OddJob(flags, save=str(tmp_path / "cut"), no_save=False)
    with pytest.raises(InterruptedError), mock.patch.object(job, "on_step_end", _dies_in_step(10)):
        job.fit()
    OddJob(f"{flags} --resume", save=str(tmp_path / "cut"), no_save=False).fit()
    cut = read_metrics(tmp_path / "cut/metrics.jsonl")
    assert saved(tmp_path / "cut") == [7, 14]
    assert [_result(line) for line in cut] == [_result(line) for line in whole]


def _result(line: dict[str, Any]) -> tuple[Any, ...]:
    return line["step"], line.get("loss"), line.get("eval_loss"), line.get("lr")


def _in_a_worker(workers: Workers, flags: str) -> Any:
    with mock.patch("rapidformer_templates.system.launch.is_worker", return_value=False):
        return trained(OddJob(flags))["curve"]


@pytest.mark.longer
@pytest.mark.distributed
def test_two_workers_take_the_steps_of_one() -> None:
    flags = f"--train-iters 1.5epochs {ACCUMULATED}"  # 1.5 × 7 = 10.5
    both = run_in_workers(2, _in_a_worker, flags)
    assert [len(one) for one in both] == [11, 11]
    wanted = curve(f"--train-iters 11 {ACCUMULATED}", OddJob)
    assert curve(flags, OddJob) == wanted
    np.testing.assert_allclose(both[0], wanted, rtol=1e-9)


class Stream(Endless):
    """The samples of a list, again and again."""

    identity = "a list"

    def __init__(self, samples: Any) -> None:
        self.samples = samples
        self.bookmark: Bookmark = {"position": 0, "epoch": 0}

    def go_to(self, bookmark: Bookmark) -> None:
        self.bookmark = bookmark

    def __getitem__(self, position: int) -> Any:
        return self.samples[position % len(self.samples)]


class StreamJob(Job):
    def build_data(self) -> Data:
        data = super().build_data()
        return Data(train=Stream(data.train), valid=data.valid, collate=data.collate)


@pytest.mark.parametrize("flags", ["--epochs 1", "--train-iters 1epochs", "--train-iters 4 --save-interval 1epochs"])
def test_a_stream_has_no_epochs(flags: str, tmp_path: Path, says: Says) -> None:
    with says(ConfigError):
        StreamJob(flags, save=str(tmp_path / "run"), no_save=False).fit()
    assert not (tmp_path / "run/checkpoints").exists() or not saved(tmp_path / "run")


BY_COUNT = "--train-iters 10 --global-batch-size 8 --keep-checkpoints 99 --micro-batch-size 4"


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    return [line for line in read_metrics(folder / "metrics.jsonl") if name in line]


def train(folder: Path, flags: str) -> Path:
    Job(f"{BY_COUNT} {flags}", save=str(folder), no_save=False).fit()
    return folder


def crossings(counts: list[int], every: int) -> list[int]:
    """Return the steps (from 1) in which a multiple was reached, and the last step."""
    with_zero = itertools.pairwise([0, *counts])
    found = [step for step, (before, after) in enumerate(with_zero, 1) if after // every > before // every]
    return sorted({*found, len(counts)})


def test_a_run_prints_20_lines_and_writes_100_points(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--lr", "0.01", "--micro-batch-size", "20", "--train-iters", "250", "--device", "cpu"]
    Line([*flags, "--save", str(tmp_path)]).fit()
    assert [line["step"] for line in lines(tmp_path, "lr")] == [*range(2, 251, 2)]
    printed = [line.split("/")[0] for line in capsys.readouterr().err.splitlines() if " grad norm " in line]
    assert printed == [f"step {step}" for step in (*range(12, 241, 12), 250)]


def test_by_samples_and_tokens(tmp_path: Path) -> None:
    folder = train(tmp_path, "--save-interval 20samples --eval-interval 300tokens")
    tokens = [line["tokens"] for line in lines(folder, "lr")]
    assert saved(folder) == crossings([8 * step for step in range(1, 11)], 20) == [3, 5, 8, 10]
    assert 3 < len(crossings(tokens, 300)) < 10, "the case tells steps from tokens"
    assert [line["step"] for line in lines(folder, "eval_loss")] == crossings(tokens, 300)


def _by_clock(workers: Workers, folder: str) -> list[int]:
    """Each reading of the main worker's clock is 20 seconds after the previous one. The other clock does not move."""
    clock = mock.patch.object(run_steps, "now", side_effect=itertools.count(0, 20 if workers.rank == 0 else 0))
    with clock, mock.patch("rapidformer_templates.system.launch.is_worker", return_value=False):
        return saved(train(Path(folder), "--save-interval 1min"))


@pytest.mark.longer
@pytest.mark.distributed
def test_all_workers_go_by_one_clock(tmp_path: Path) -> None:
    """It is read at the start, before each step, and after a save. So a save is due in the third step after each."""
    assert run_in_workers(2, _by_clock, str(tmp_path)) == [[3, 6, 9, 10]] * 2
