"""Temporary files: private folders of launchers, removed after kills, and tensors whose memory the system can take."""

import errno
import fcntl
import mmap
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rapidformer_templates.errors import RapidformerError
from rapidformer_templates.run import new_workers
from rapidformer_templates.run.folder import RunLock
from rapidformer_templates.run.new_workers import TEMPLATE
from rapidformer_templates.system import tensor_files
from rapidformer_templates.system.files import (
    PREFIX,
    check_private,
    private_folder,
    remove_leftovers,
    try_writing,
    write_private,
)
from rapidformer_templates.system.tensor_files import TensorFiles
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
    monkeypatch.setattr(new_workers.launch, "report_errors", lambda body: body())
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
            new_workers.main(folder)
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


TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.uint8, torch.bool)


def _tensors() -> list[torch.Tensor]:
    of_types = [torch.arange(6).reshape(2, 3).to(dtype) for dtype in TYPES]
    return [*of_types, torch.randn(5, 7).t(), torch.tensor(2.5), torch.empty(0, 3), torch.randn(3, 4)[:, 1:3]]


@pytest.mark.parametrize("file_bytes", [64, 1 << 26])
def test_stored_tensors_equal_the_originals(file_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_files, "FIRST_FILE", file_bytes)
    originals = _tensors()
    with TensorFiles(tmp_path) as files:
        stored = [files.store(tensor) for tensor in originals]
        assert list(tmp_path.iterdir()) == []  # nothing remains if the process dies
    for tensor, original in zip(stored, originals, strict=True):
        assert tensor.dtype == original.dtype
        assert torch.equal(tensor, original)
        assert tensor.untyped_storage().nbytes() == original.numel() * original.element_size()


def test_a_stored_tensor_is_not_stored_again(tmp_path: Path) -> None:
    with TensorFiles(tmp_path) as files:
        stored = files.store(torch.randn(4, 4))
        assert files.store(stored) is stored
        view = stored[1:].t()
        assert files.store(view) is view
        other = files.store(stored.clone())
        stored.zero_()
        assert bool(other.any())


def test_parameters_are_stored_with_their_later_values(tmp_path: Path) -> None:
    with TensorFiles(tmp_path) as files:
        with files.parameters_stored():
            layer = nn.Linear(4, 3)
            layer.bias.data = torch.ones(3)
            layer.bias.data += 1
        for parameter in layer.parameters():
            values = parameter.data
            assert files.store(values) is values
        layer.bias.data = torch.zeros(3)
        assert files.store(layer.bias.data) is not layer.bias.data
    assert layer.weight.requires_grad


def test_results_of_functions_are_stored(tmp_path: Path) -> None:
    with TensorFiles(tmp_path) as files:
        stored = files.store(torch.arange(24.0).reshape(4, 6))
        with files.results_stored():
            left, right = (part.contiguous() for part in stored.chunk(2, dim=1))
        for part in (left, right):
            assert files.store(part) is part
        assert torch.equal(torch.cat([left, right], dim=1), stored)


def test_file_systems_without_shared_mappings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as network file systems that cannot write through a mapping."""
    real = mmap.mmap

    def private_only(descriptor: int, size: int, flags: int = mmap.MAP_SHARED) -> Any:
        if flags & mmap.MAP_SHARED:
            raise OSError(errno.ENODEV, "no such device")
        return real(descriptor, size, flags=flags)

    monkeypatch.setattr(mmap, "mmap", private_only)
    with TensorFiles(tmp_path) as files:
        for original in _tensors():
            assert torch.equal(files.store(original), original)
