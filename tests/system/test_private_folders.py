"""Temporary folders of launchers: private, and removed after a launcher that was really killed."""

from __future__ import annotations

import fcntl
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rapidformer_templates.errors import RapidformerError
from rapidformer_templates.run import launch_from_python
from rapidformer_templates.run.launch_from_python import TEMPLATE
from rapidformer_templates.run.lock import RunLock
from rapidformer_templates.system.files import (
    PREFIX,
    check_private,
    private_folder,
    remove_leftovers,
    try_writing,
    write_private,
)
from tests.support.messages import Says
from tests.support.programs import wait_until

ROOT = Path(__file__).resolve().parents[2]

LAUNCHER = """
import sys
from rapidformer_templates.system.launch import run_workers

run_workers([sys.executable, "-c", "import time; time.sleep(60)"], 1, shown=True)
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files of this process and of those that it starts."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def start_launcher(temporary: Path, count: int) -> subprocess.Popen[bytes]:
    """Start a launcher, and wait until ``count`` folders of launchers have the output of their workers."""
    process = subprocess.Popen([sys.executable, "-c", LAUNCHER], env={**os.environ, "PYTHONPATH": str(ROOT / "src")})
    wait_until(lambda: len(list(temporary.glob("rapidformer-*/stdout"))) >= count, "the launcher made no folder")
    return process


@pytest.mark.slow
def test_the_folder_of_a_killed_launcher_is_removed_at_the_next_start(temporary: Path) -> None:
    killed = start_launcher(temporary, 1)
    (left,) = temporary.glob("rapidformer-*")
    living = start_launcher(temporary, 2)
    try:
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        assert left.is_dir(), "a killed process cannot clean up"
        with private_folder() as own:
            folders = set(temporary.glob("rapidformer-*"))
            assert left not in folders
            assert len(folders) == 2, "the folder of the living launcher stays"
            remove_leftovers()
            assert own.is_dir(), "a folder in use stays"
    finally:
        living.terminate()
        living.wait(timeout=60)
    assert not list(temporary.glob("rapidformer-*"))


@pytest.mark.parametrize("content", [(), ("stdout",)])
def test_the_rest_of_a_folder_is_removed_whenever_its_launcher_was_killed(
    content: tuple[str, ...], temporary: Path
) -> None:
    """It may have been killed after it had made the folder, or while it removed it."""
    left = temporary / f"{PREFIX}x"
    left.mkdir(mode=0o700)
    for name in content:
        write_private(left / name, b"")
    with private_folder() as own:
        assert list(temporary.iterdir()) == [own]


def test_a_folder_that_another_launcher_removes_before_it_is_locked_is_made_again(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock, first = fcntl.flock, list[str]()

    def remove_first(descriptor: int, operation: int) -> None:
        if not first:
            first.append(os.readlink(f"/proc/self/fd/{descriptor}"))
            os.rmdir(first[0])
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    with private_folder() as own:
        assert first
        assert own.is_dir()
        assert str(own) not in first


def test_only_this_user_can_open_the_folder_and_its_files(temporary: Path) -> None:
    previous = os.umask(0)
    try:
        with private_folder() as folder:
            write_private(folder / "file", b"content")
            assert folder.stat().st_mode & 0o777 == 0o700
            assert [path.stat().st_mode & 0o777 for path in folder.iterdir()] == [0o600]
            check_private(folder / "file")
    finally:
        os.umask(previous)


class Payload:
    """Executes code when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.mark,)


@pytest.mark.parametrize("place", ["file", "folder", "owner"])
def test_a_template_that_others_could_have_written_is_not_unpickled(
    place: str, temporary: Path, monkeypatch: pytest.MonkeyPatch, says: Says
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(launch_from_python.launch, "report_errors", lambda body: body())
    mark = temporary / "executed"
    with private_folder() as folder:
        write_private(folder / TEMPLATE, pickle.dumps(Payload(mark)))
        if place == "file":
            (folder / TEMPLATE).chmod(0o666)
        elif place == "folder":
            folder.chmod(0o711)
        else:
            monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        with says(RapidformerError, PRIVATE=folder):
            launch_from_python.main(folder)
        assert not mark.exists()


KILLED = """
import os, signal, sys
from pathlib import Path
from rapidformer_templates.system.files import try_writing

os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
try_writing(Path(sys.argv[1]))
"""


def test_the_trial_file_of_a_killed_process_is_removed_by_the_next_run(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    (tmp_path / "checkpoints").mkdir()
    for folder in (tmp_path, tmp_path / "checkpoints"):
        ended = subprocess.run([sys.executable, "-c", KILLED, str(folder)], env=environment, check=False)
        assert ended.returncode == -signal.SIGKILL
        assert len(list(folder.glob(".try-*"))) == 1
    lock = RunLock(tmp_path)
    lock.acquire()
    assert not list(tmp_path.rglob(".try-*"))
    try_writing(tmp_path)
    lock.release(remove=True)
    assert [path.name for path in tmp_path.rglob("*")] == ["checkpoints"]
