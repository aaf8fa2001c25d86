"""``--mirror``: a run in object storage is resumed to the bit, and an incomplete copy never counts."""

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from rapidformer_templates.errors import CheckpointError, ConfigError
from rapidformer_templates.run import mirror
from rapidformer_templates.run.checkpoint.format import problem_of
from rapidformer_templates.run.folder import read_metrics
from rapidformer_templates.system import files
from rapidformer_templates.system.workers import Workers
from tests.support.jobs import CausalJob
from tests.support.lines import FLAGS, Died, Line
from tests.support.messages import Says
from tests.support.selection import by_default
from tests.support.webhdfs_server import WebHdfs, serve_webhdfs
from tests.support.worker_pool import run_in_workers

pytestmark = pytest.mark.slow

WEIGHTS = "weights-00000-00000.safetensors"
STEPS = [*FLAGS, "--train-iters", "10", "--save-interval", "2"]


class Dying(Line):
    """Waits at step 5 until the checkpoint of step 4 is copied. Then its machine is lost after step 7."""

    copy: Path

    def on_step_end(self, step: int, result: Any) -> None:
        if step == 5:
            wait_for(self.copy / "checkpoints" / "step-4" / "manifest.json")
        if step == 7:
            raise Died


def files_of(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def harm(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1] + b"\x7f")


def wait_for(path: Path) -> None:
    end = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < end, f"{path} was not copied"
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def _without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(mirror, "PAUSE_SECONDS", 0.02)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[WebHdfs]:
    (tmp_path / "served").mkdir()
    with serve_webhdfs(tmp_path / "served") as served:
        yield served


def names(folder: Path) -> set[str]:
    return {path.name for path in (folder / "checkpoints").iterdir()}


@pytest.mark.parametrize("kind", by_default(["file"], ["file", "webhdfs"]))
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
        assert problem_of(copy / "checkpoints" / name) is None
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


@pytest.mark.longer
def test_storage_that_is_gone_for_a_while_ends_no_run(
    tmp_path: Path, server: WebHdfs, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "RETRY_SECONDS", (0.01, 0.02))

    class Back(Line):
        def on_step_end(self, step: int, result: Any) -> None:
            if step == 1:
                server.fails_after = 0
            if step == 9:
                time.sleep(0.3)
                server.fails_after = None

    Back([*STEPS, "--save", str(tmp_path / "run"), "--mirror", server.url, "--overwrite"]).fit()
    printed = capsys.readouterr().err
    assert f"warning: copying to {server.url} failed" in printed
    assert f"the run is copied to {server.url}" in printed
    assert names(server.folder / "run") == {"step-8", "step-10"}


class Gone(Line):
    """Loses its storage after the first step."""

    server: WebHdfs

    def on_step_end(self, step: int, result: Any) -> None:
        self.server.fails_after = 0


def test_storage_that_is_gone_is_reported(tmp_path: Path, server: WebHdfs, capsys: pytest.CaptureFixture[str]) -> None:
    job = Gone([*STEPS, "--save", str(tmp_path / "run"), "--mirror", server.url])
    job.server = server
    assert job.fit()["steps"] == 10
    assert f"warning: {server.url} is incomplete" in capsys.readouterr().err
    for more in ([], ["--resume"]):
        with pytest.raises(ConfigError, match="cannot be read"):
            Line([*STEPS, "--save", str(tmp_path / "other"), "--mirror", server.url, *more]).fit()
    assert not (tmp_path / "other" / "checkpoints").exists(), "it does not start from the beginning"


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    Line([*STEPS, "--save", str(tmp_path / "run"), "--mirror", f"file://{tmp_path}/copy"]).fit()
    return tmp_path / "copy"


@pytest.mark.parametrize("damage", by_default(["damaged"], ["no manifest", "damaged"]))
def test_half_a_copy_is_not_taken(
    damage: str, copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = copied / "checkpoints" / "step-10"
    if damage == "no manifest":
        (newest / "manifest.json").unlink()
    else:
        harm(newest / WEIGHTS)
    Line([*STEPS, "--save", str(tmp_path / "other"), "--mirror", f"file://{copied}", "--resume"]).fit()
    assert "step-8" in capsys.readouterr().err.partition("resuming from")[2].partition("\n")[0]
    assert problem_of(newest) is None, "the next copy replaces it"


@pytest.mark.parametrize("at", by_default([24], range(12, 60, 12)))
def test_a_copy_that_ends_anywhere_is_whole_or_does_not_count(at: int, tmp_path: Path, server: WebHdfs) -> None:
    """The server stops to answer after some requests, as if the machine of the run were lost."""
    server.fails_after = at
    Line([*STEPS, "--save", str(tmp_path / "run"), "--mirror", server.url]).fit()
    for manifest in (server.folder / "run").rglob("manifest.json"):
        assert not manifest.read_bytes() or problem_of(manifest.parent) is None


def test_another_run_is_not_overwritten(copied: Path, tmp_path: Path, says: Says) -> None:
    flags = [*STEPS, "--save", str(tmp_path / "new"), "--mirror", f"file://{copied}"]
    with says(ConfigError):
        Line(flags).fit()
    Line([*FLAGS, "--train-iters", "4", *flags[len(STEPS) :], "--overwrite"]).fit()
    assert names(copied) == {"step-4"}


@pytest.mark.longer
@pytest.mark.parametrize("kind", ["file", "webhdfs"])
def test_an_overwritten_copy_keeps_nothing_of_the_old_run(kind: str, tmp_path: Path, server: WebHdfs) -> None:
    """Such as its adapters, which peft would add to the new weights, or one part more. Other files stay."""
    copy = server.folder / "run"
    url = server.url if kind == "webhdfs" else f"file://{copy}"
    flags = [*STEPS, "--save", str(tmp_path / "run"), "--mirror", url]
    Line(flags).fit()
    old = ("export/adapter_config.json", "export/deep/old.bin", "model/old.json", "deepspeed.json", "mine.txt")
    for name in old:
        (copy / name).parent.mkdir(exist_ok=True)
        (copy / name).write_text("{}")
    Line([*flags, "--overwrite"]).fit()
    for folder in ("export", "model"):
        assert files_of(copy / folder) == files_of(tmp_path / "run" / folder)
    assert not (copy / "deepspeed.json").exists()
    assert (copy / "mine.txt").exists()
    (copy / "export" / "model-00002-of-00002.safetensors").write_bytes(b"")
    Line([*flags, "--train-iters", "12", "--resume"]).fit()
    assert files_of(copy / "export") == files_of(tmp_path / "run" / "export")


def test_the_copy_replaces_damaged_checkpoints(
    copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(run, tmp_path / "whole")
    for checkpoint in (run / "checkpoints").glob("step-*"):
        harm(checkpoint / WEIGHTS)
    flags = [*FLAGS, "--train-iters", "12", "--resume", "--save"]
    with pytest.raises(CheckpointError, match="is intact"):
        Line([*flags, str(run)]).fit()
    again = Line([*flags, str(run), "--mirror", f"file://{copied}"])
    again.fit()
    assert f"fetched step-10 from file://{copied}" in capsys.readouterr().err
    whole = Line([*flags, str(tmp_path / "whole")])
    whole.fit()
    assert torch.equal(again.model.weight, whole.model.weight)


class Waiting(Line):
    """Waits at step 3 until another run, which was also started without a copy under the URL, has begun to copy."""

    copy: Path
    other: str

    def on_step_end(self, step: int, result: Any) -> None:
        if step == 3 and self.other:
            wait_for(self.copy / "checkpoints" / "step-2" / "manifest.json")
            job = Line([*STEPS, "--save", self.other, "--mirror", f"file://{self.copy}"])
            with mock.patch.object(mirror.Mirror, "begin"):  # it looked before anything was copied
                job.fit()


@pytest.mark.longer
def test_two_runs_do_not_copy_to_one_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = Waiting([*STEPS, "--seed", "1", "--save", str(tmp_path / "first"), "--mirror", f"file://{tmp_path}/copy"])
    first.copy, first.other = tmp_path / "copy", str(tmp_path / "second")
    first.fit()
    printed = capsys.readouterr().err
    url = f"file://{tmp_path}/copy"
    assert f"{url} holds the checkpoints of another run; {tmp_path / 'second'} has everything" in printed
    assert f"the run is copied to {url}" in printed
    assert files_of(tmp_path / "copy" / "export") == files_of(tmp_path / "first" / "export")
    for name in ("checkpoints/step-10/weights-00000-00000.safetensors", "metrics.jsonl"):
        assert (tmp_path / "copy" / name).read_bytes() == (tmp_path / "first" / name).read_bytes()


@pytest.mark.parametrize("url", ["s3://bucket/run", "nowhere://run"])
def test_unknown_storage_is_refused_before_the_run(url: str, tmp_path: Path, says: Says) -> None:
    with mock.patch.dict("sys.modules", {"s3fs": None}), says(ConfigError):
        Line([*STEPS, "--save", str(tmp_path / "run"), "--mirror", url]).fit()
    assert not (tmp_path / "run").exists()
