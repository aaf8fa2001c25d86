"""The run folder: which run owns it, what may be deleted in it, and errors that are found before anything is built."""

import contextlib
import errno
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest

from rapidformer_templates import Data
from rapidformer_templates.errors import ConfigError, RapidformerError
from rapidformer_templates.run import folder as run_folder
from rapidformer_templates.run.checkpoint import format as checkpoint
from rapidformer_templates.run.folder import CONTENTS, RunFolder, RunLock, read_metrics
from rapidformer_templates.system.workers import Workers
from tests.support.crash_points import each_crash
from tests.support.lines import FLAGS, Died, Line, Mortal
from tests.support.messages import Says
from tests.support.selection import by_default
from tests.support.shelf import Shelf
from tests.support.worker_pool import Failure, alone, outcomes_in_workers

SHORT = [*FLAGS, "--epochs", "2", "--keep-checkpoints", "1"]


def train(folder: Path, *flags: str, dies_after: int | None = None) -> dict[str, Any]:
    job = Mortal([*SHORT, "--save", str(folder), *flags])
    job.dies_after = dies_after
    return job.fit()


def contents(folder: Path) -> dict[str, bytes]:
    """Return the contents of every file in a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a run that dies in its second epoch."""
    folder = tmp_path_factory.mktemp("half") / "run"
    with pytest.raises(Died):
        train(folder, dies_after=7)
    return folder


@pytest.mark.slow
def test_overwrite_and_load_leave_the_new_run_alone(half: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(folder)  # up to step 10, which is later than the loaded checkpoint
    (folder / "mine.txt").write_text("kept")
    with pytest.raises(Died):
        train(folder, "--load", str(half), "--overwrite", "--save-interval", "1", dies_after=8)
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"latest", "step-7"}
    assert (folder / "checkpoints" / "latest").read_text() == "step-7\n"
    assert not (folder / "export").exists()
    assert (folder / "mine.txt").read_text() == "kept"
    summary = train(folder, "--resume")
    assert summary["steps"] == 10
    assert [line["step"] for line in read_metrics(folder / "metrics.jsonl")] == [6, 7, 8, 9, 10]


@pytest.mark.parametrize(
    "flags", ["--load RUN", "--load LINK/checkpoints", "--load RUN/checkpoints/step-5", "--load RUN/..", "--resume"]
)
def test_an_overwrite_that_would_lose_a_run_is_refused(flags: str, half: Path, tmp_path: Path, says: Says) -> None:
    """For example, the new run loads from this folder, or the loaded folder has no checkpoint."""
    before, link = contents(half), tmp_path / "link"
    link.symlink_to(half)
    with says(RapidformerError, LINK=link, RUN=half, ABOVE=half.parent):
        train(half, *flags.replace("RUN", str(half)).replace("LINK", str(link)).split(), "--overwrite")
    assert contents(half) == before


def test_nothing_is_deleted_through_a_link(half: Path, tmp_path: Path, says: Says) -> None:
    disk, folder = tmp_path / "disk", tmp_path / "run"
    shutil.copytree(half, folder)
    (folder / "checkpoints").rename(disk)
    (folder / "checkpoints").symlink_to(disk)
    train(folder, "--resume")  # uses it
    before = contents(disk)
    assert any(name.startswith("step-10/") for name in before)
    with says(ConfigError):
        train(folder, "--overwrite")
    assert contents(disk) == before
    (tmp_path / "name").symlink_to(folder)
    (folder / "checkpoints").unlink()
    train(tmp_path / "name", "--overwrite")  # a link to the folder itself is another name for it
    assert (folder / "checkpoints" / "step-10").is_dir()


@pytest.mark.parametrize("name", ["export/mine", "summary.json"])
def test_what_is_no_run_is_not_overwritten(name: str, tmp_path: Path, says: Says) -> None:
    mine = tmp_path / name
    mine.parent.mkdir(exist_ok=True)
    mine.write_text("mine")
    with says(ConfigError):
        Line([*FLAGS, "--train-iters", "1", "--save", str(tmp_path), "--overwrite"]).fit()
    assert mine.read_text() == "mine"


@pytest.mark.durable
def test_a_death_in_an_overwrite_leaves_the_old_run_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mixture of both could be mistaken for a run."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # power is not cut here
    old = tmp_path / "old"
    old.mkdir()
    for name in CONTENTS:
        (old / name).mkdir() if "." not in name else (old / name).write_text("old")
    checkpoint.save(old / "checkpoints", 5, Shelf([]), {}, alone())

    def prepare(number: int) -> Path:
        return Path(shutil.copytree(old, tmp_path / str(number)))

    def overwrite(folder: Path) -> None:
        RunFolder(folder).prepare({"engine_options": {}}, overwrite=True)

    seen = set()
    for folder in each_crash(prepare, overwrite):
        found, passed_over = checkpoint.newest_complete(folder / "checkpoints", alone())
        whole = all((folder / name).exists() for name in CONTENTS)
        assert not passed_over
        assert found is None or whole
        seen.add(found is None)
        overwrite(folder)  # the next call finishes what was left
        assert {path.name for path in folder.iterdir()} == {"plan.json", "checkpoints"}
    assert seen == {True, False}


def test_parts_of_checkpoints_are_removed_even_if_no_save_follows(tmp_path: Path) -> None:
    """A run that was killed while it deleted an older checkpoint, after the last one was complete."""
    words = [*FLAGS, "--train-iters", "1", "--save", str(tmp_path)]
    Line(words).fit()
    part = tmp_path / "checkpoints" / "step-0.tmp"
    part.mkdir()
    (part / "index.json").write_text("{}")
    Line([*words, "--resume"]).fit()
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["latest", "step-1"]


@pytest.mark.parametrize("flags", [[], ["--resume"], ["--overwrite"]], ids=["fresh", "resume", "overwrite"])
def test_a_second_run_is_refused_and_told_of_the_first(flags: list[str], half: Path, tmp_path: Path) -> None:
    folder = half if flags else tmp_path / "run"
    lock = RunLock(folder)
    lock.acquire()
    before = contents(folder)
    with pytest.raises(ConfigError, match=f"another run writes into .*: process {os.getpid()} on .*, since 20"):
        train(folder, *flags)
    assert contents(folder) == before
    lock.release(remove=True)
    assert not (half / run_folder.LOCK).exists()
    assert (tmp_path / "run").exists() is False, "a folder that was made for the lock alone goes with it"


def test_a_run_holds_its_folder_and_leaves_no_lock(tmp_path: Path) -> None:
    class Nosy(Line):
        def build_data(self) -> Data:
            with pytest.raises(ConfigError, match="another run writes into"):
                train(tmp_path)
            return super().build_data()

        def on_train_end(self, summary: Any) -> None:
            with pytest.raises(ConfigError, match="another run writes into"):
                train(tmp_path, "--resume")

    Nosy([*SHORT, "--save", str(tmp_path)]).fit()
    assert not (tmp_path / run_folder.LOCK).exists()
    train(tmp_path, "--resume")
    assert not [file for file in psutil.Process().open_files() if Path(file.path).is_relative_to(tmp_path)]


@contextlib.contextmanager
def _in_a_process(body: Callable[[], object]) -> Iterator[Any]:
    """Fork a process that runs the body and then waits. Kill it at the end of the context."""
    fork = multiprocessing.get_context("fork")
    is_done = fork.Event()
    process = fork.Process(target=lambda: (body(), is_done.set(), signal.pause()))
    process.start()
    assert is_done.wait(60)
    try:
        yield process
    finally:
        process.kill()
        process.join()


@pytest.mark.durable
def test_kill_9_leaves_no_lock(tmp_path: Path) -> None:
    with _in_a_process(RunLock(tmp_path).acquire) as child, pytest.raises(ConfigError, match=f"process {child.pid} on"):
        run_folder.try_folder(tmp_path)
    assert json.loads((tmp_path / run_folder.LOCK).read_text())["process"] == child.pid
    run_folder.try_folder(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.durable
def test_a_process_that_is_ending_keeps_its_lock_for_a_moment(tmp_path: Path) -> None:
    with _in_a_process(RunLock(tmp_path).acquire) as child:
        threading.Timer(0.2, child.kill).start()
        run_folder.try_folder(tmp_path)  # as a run that resumes at once


@pytest.mark.durable
def test_a_loader_process_does_not_keep_the_lock(tmp_path: Path) -> None:
    lock = RunLock(tmp_path)
    lock.acquire()
    with _in_a_process(lambda: None):
        lock.release(remove=True)
        run_folder.try_folder(tmp_path)


def test_the_lock_lasts_as_long_as_any_worker(tmp_path: Path) -> None:
    """The first worker may have been killed while the others are still writing."""
    first, other = RunLock(tmp_path), RunLock(tmp_path)
    token = first.acquire()
    first.allow_sharing()
    assert other.acquire_shared(token, write=True)
    first.release(remove=False)
    with pytest.raises(ConfigError, match="another run writes into"):
        run_folder.try_folder(tmp_path)
    other.release(remove=False)
    run_folder.try_folder(tmp_path)


def test_a_file_system_without_locks_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str], says: Says) -> None:
    with mock.patch.object(run_folder.fcntl, "flock", side_effect=OSError(errno.ENOLCK, "No locks available")):
        train(tmp_path)
    says.text("\n".join(line for line in capsys.readouterr().err.splitlines() if line.startswith("warning")))


class Unbuilt(Line):
    def build_data(self) -> Data:
        raise AssertionError("the folder is tried first")


def refused(says: Says, folder: Path) -> None:
    with says(ConfigError):
        Unbuilt([*SHORT, "--save", str(folder)]).fit()


def test_a_folder_that_cannot_be_made_is_refused_first(tmp_path: Path, says: Says) -> None:
    for link in (tmp_path / "link", tmp_path / "run" / "checkpoints"):
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    for folder in (*(tmp_path / name for name in ("file", "file/run", "link")), Path("/proc/run")):
        refused(says, folder)
    with pytest.raises(ConfigError, match="cannot be written to: a folder does not exist"):  # names a temporary file
        Unbuilt([*SHORT, "--save", str(tmp_path / "run")]).fit()


@pytest.mark.durable
@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
def test_a_disk_that_does_not_take_a_page_is_refused_first(number: int, tmp_path: Path, says: Says) -> None:
    with mock.patch("os.pwrite", side_effect=OSError(number, os.strerror(number))):
        refused(says, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(disk)], check=False).returncode:
        pytest.skip("file systems can only be mounted by root")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.durable
def test_a_full_disk_and_a_read_only_one(small_disk: Path, says: Says) -> None:
    with contextlib.suppress(OSError), (small_disk / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    refused(says, small_disk / "run")
    (small_disk / "filler").unlink()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    refused(says, small_disk / "run")


def _train_until_full(workers: Workers, folder: str, full_at: int, free_at: int) -> None:
    """Train while the disk is full from the line of a step until that of another one."""
    write = os.write

    def write_if_there_is_space(descriptor: int, data: bytes) -> int:
        if "metrics.jsonl" in os.readlink(f"/proc/self/fd/{descriptor}"):
            step = int(re.findall(rb'"step": (\d+)', data)[-1])
            if full_at <= step < free_at:
                write(descriptor, data[: len(data) // 2])  # a part fits
                raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data)

    with mock.patch("os.write", write_if_there_is_space):
        Line([*FLAGS, "--epochs", "2", "--save", folder, "--save-interval", "100"]).fit()


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("full_at", "saved"), by_default([(6, ["step-6"])], [(3, ["step-4", "step-6"]), (6, ["step-6"])])
)
def test_metrics_on_a_full_disk_fail_the_end_of_a_run(
    full_at: int, saved: list[str], tmp_path: Path, says: Says
) -> None:
    one, other = outcomes_in_workers(2, _train_until_full, str(tmp_path), full_at, 100)
    assert isinstance(one, Failure), "the run did not end"
    assert (one.kind, other.text) == ("RapidformerError", one.text), one.trace
    says.text(one.text)
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*")) == saved


@pytest.mark.distributed
def test_a_disk_that_is_full_for_a_while_costs_no_line(tmp_path: Path) -> None:
    outcomes_in_workers(2, _train_until_full, str(tmp_path), 3, 5)
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").open()] == [1, 2, 3, 4, 5, 6]
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*")) == ["step-4", "step-6"]


def test_garbled_metrics_stop_no_resume(half: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    shutil.copytree(half, folder)
    lines = (folder / "metrics.jsonl").read_bytes().split(b"\n")
    lines[1], lines[3] = b"\x00\xff{" + lines[1][5:], b"[1, 2]"
    (folder / "metrics.jsonl").write_bytes(b"\n".join(lines))
    train(folder, "--resume")
    assert "warning: left out lines of metrics.jsonl that cannot be read: 2, 4" in capsys.readouterr().err
    assert [line["step"] for line in read_metrics(folder / "metrics.jsonl")] == [1, 3, 5, 6, 7, 8, 9, 10]


def test_a_lock_that_is_removed_meanwhile_is_taken_anew(tmp_path: Path) -> None:
    """The previous run removes the file after this run opens it and before this run locks it."""
    flock, lock = run_folder.fcntl.flock, RunLock(tmp_path)
    removed: list[Path] = []

    def late(*arguments: Any) -> None:
        if not removed:
            lock.path.unlink()
            removed.append(lock.path)
        flock(*arguments)

    with mock.patch.object(run_folder.fcntl, "flock", late):
        lock.acquire()
    with pytest.raises(ConfigError, match="another run writes into"):
        run_folder.try_folder(tmp_path)
    lock.release(remove=True)
