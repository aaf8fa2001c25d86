"""``--mirror``: a run in object storage is resumed to the bit, and an incomplete copy never counts."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rapidformer_templates.errors import CheckpointError, ConfigError
from rapidformer_templates.run import mirror
from rapidformer_templates.run.checkpoint import check as checkpoint_check
from rapidformer_templates.run.folder import read_metrics
from rapidformer_templates.system import files
from rapidformer_templates.system.workers import Workers
from tests.support.jobs import CausalJob
from tests.support.lines import FLAGS, Line
from tests.support.selection import by_default
from tests.support.webhdfs_server import WebHdfs, serve_webhdfs
from tests.support.worker_pool import run_in_workers

pytestmark = pytest.mark.slow

STEPS = [*FLAGS, "--train-iters", "10", "--save-interval", "2"]


class Died(Exception):
    """Stands for the loss of the machine."""


class Dying(Line):
    """Waits at step 5 until the checkpoint of step 4 is copied, and dies after step 7."""

    copy: Path

    def on_step_end(self, step: int, result: Any) -> None:
        if step == 5:
            wait_for(self.copy / "checkpoints" / "step-4" / "manifest.json")
        if step == 7:
            raise Died


def wait_for(path: Path) -> None:
    end = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < end, f"{path} was not copied"
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def _without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(mirror, "MAX_PAUSE_SECONDS", 0.02)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[WebHdfs]:
    (tmp_path / "served").mkdir()
    with serve_webhdfs(tmp_path / "served") as served:
        yield served


def names(folder: Path) -> set[str]:
    return {path.name for path in (folder / "checkpoints").iterdir()}


@pytest.mark.parametrize("kind", ["file", "webhdfs"])
def test_a_run_whose_machine_is_lost_continues_to_the_bit(kind: str, tmp_path: Path, server: WebHdfs) -> None:
    whole = Line([*STEPS, "--save", str(tmp_path / "whole")])
    whole.fit()
    copy = server.folder / "run"
    url = server.url if kind == "webhdfs" else f"file://{copy}"
    first = Dying([*STEPS, "--save", str(tmp_path / "first"), "--mirror", url])
    first.copy = copy
    with pytest.raises(Died):
        first.fit()
    assert names(copy) == {"step-4", "step-6"}
    shutil.rmtree(tmp_path / "first")
    second = Line([*STEPS, "--save", str(tmp_path / "second"), "--mirror", url, "--resume"])
    second.fit()
    assert torch.equal(second.model.weight, whole.model.weight)
    steps = [line["step"] for line in read_metrics(tmp_path / "second" / "metrics.jsonl")]
    assert steps == list(range(1, 11))
    assert names(copy) == {"step-8", "step-10"}
    for name in ("step-8", "step-10"):
        assert checkpoint_check.problem_of(copy / "checkpoints" / name) is None
    for name in ("metrics.jsonl", "summary.json", "export/model.safetensors"):
        assert (copy / name).read_bytes() == (tmp_path / "second" / name).read_bytes()


def count_steps(workers: Workers, flags: list[str]) -> int:
    job = CausalJob(flags)
    job.fit()
    return len(job.curve)


@pytest.mark.longer
@pytest.mark.distributed
@pytest.mark.parametrize("layout", ["--fsdp-memory-optimization", "--tensor-model-parallel-size 2"])
def test_two_workers_continue_from_the_copy(layout: str, tmp_path: Path) -> None:
    """The first worker fetches the checkpoint, and all of them read it."""
    steps = "--lr 1e-3 --device cpu --micro-batch-size 2 --global-batch-size 4 --lr-decay-iters 6 --save-interval 2"
    flags = [*steps.split(), *layout.split()]
    copy = ["--mirror", f"file://{tmp_path}/copy"]
    run_in_workers(2, count_steps, [*flags, "--train-iters", "6", "--save", str(tmp_path / "whole")])
    run_in_workers(2, count_steps, [*flags, "--train-iters", "4", "--save", str(tmp_path / "first"), *copy])
    shutil.rmtree(tmp_path / "first")
    rest = [*flags, "--train-iters", "6", "--save", str(tmp_path / "second"), *copy, "--resume"]
    assert run_in_workers(2, count_steps, rest) == [2, 2]
    weights = [(tmp_path / run / "export" / "model.safetensors").read_bytes() for run in ("whole", "second", "copy")]
    assert weights[0] == weights[1] == weights[2]
    assert "step-6" in names(tmp_path / "copy")


def test_storage_that_is_gone_for_a_while_ends_no_run(
    tmp_path: Path, server: WebHdfs, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "RETRY_SECONDS", (0.01, 0.02))

    class Back(Line):
        def on_step_end(self, step: int, result: Any) -> None:
            if step == 9:
                time.sleep(0.3)
                server.fails_after = None

    server.fails_after = 0
    Back([*STEPS, "--save", str(tmp_path / "run"), "--mirror", server.url, "--overwrite"]).fit()
    printed = capsys.readouterr().err
    assert f"warning: copying to {server.url} failed" in printed
    assert f"the run is copied to {server.url}" in printed
    assert names(server.folder / "run") == {"step-8", "step-10"}


def test_storage_that_stays_away_is_reported(
    tmp_path: Path, server: WebHdfs, capsys: pytest.CaptureFixture[str]
) -> None:
    server.fails_after = 0
    job = Line([*STEPS, "--save", str(tmp_path / "run"), "--mirror", server.url])
    assert job.fit()["steps"] == 10
    assert f"warning: {server.url} is incomplete" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="cannot be read"):
        Line([*STEPS, "--save", str(tmp_path / "other"), "--mirror", server.url, "--resume"]).fit()
    assert not (tmp_path / "other" / "checkpoints").exists(), "it does not start from the beginning"


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    Line([*STEPS, "--save", str(tmp_path / "run"), "--mirror", f"file://{tmp_path}/copy"]).fit()
    return tmp_path / "copy"


@pytest.mark.parametrize("damage", ["no manifest", "damaged", "half"])
def test_an_incomplete_copy_is_not_taken(
    damage: str, copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = copied / "checkpoints" / "step-10"
    weights = newest / "weights-00000-00000.safetensors"
    if damage == "no manifest":
        (newest / "manifest.json").unlink()
    elif damage == "damaged":
        weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    else:
        weights.write_bytes(weights.read_bytes()[:40])
    other = Line([*STEPS, "--save", str(tmp_path / "other"), "--mirror", f"file://{copied}", "--resume"])
    other.fit()
    assert "resuming from" in (printed := capsys.readouterr().err)
    assert "step-8" in printed.partition("resuming from")[2].partition("\n")[0]
    assert checkpoint_check.problem_of(newest) is None, "the next copy replaces it"


@pytest.mark.parametrize("at", by_default(range(0, 60, 12), range(0, 60, 6)))
def test_a_copy_that_ends_anywhere_is_whole_or_does_not_count(at: int, tmp_path: Path, server: WebHdfs) -> None:
    """The server stops to answer after some requests, as if the machine of the run were lost."""
    server.fails_after = at
    Line([*STEPS, "--save", str(tmp_path / "run"), "--mirror", server.url]).fit()
    for manifest in (server.folder / "run").rglob("manifest.json"):
        assert not manifest.read_bytes() or checkpoint_check.problem_of(manifest.parent) is None


def test_another_run_is_not_overwritten(copied: Path, tmp_path: Path) -> None:
    flags = [*STEPS, "--save", str(tmp_path / "new"), "--mirror", f"file://{copied}"]
    with pytest.raises(ConfigError, match="already holds the checkpoints of a run"):
        Line(flags).fit()
    Line([*FLAGS, "--train-iters", "4", *flags[len(STEPS) :], "--overwrite"]).fit()
    assert names(copied) == {"step-4"}


@pytest.mark.parametrize(
    ("url", "message", "hint"),
    [
        ("s3://bucket/run", "s3:// needs another package", "pip install s3fs"),
        ("nowhere://run", "unknown kind of storage 'nowhere://'", "give a URL such as"),
    ],
)
def test_unknown_storage_is_refused_before_the_run(
    url: str, message: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "s3fs", None)
    with pytest.raises(ConfigError, match=message) as caught:
        Line([*STEPS, "--save", str(tmp_path / "run"), "--mirror", url]).fit()
    assert str(caught.value.hint).startswith(hint)
    assert not (tmp_path / "run").exists()
