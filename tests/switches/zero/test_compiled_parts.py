"""DeepSpeed's compiled parts are built once, before the workers start. Nothing waits for a lock of a dead process."""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest

from rapidformer_templates.planning.plan import EngineOptions, Plan
from rapidformer_templates.switches.zero import compiled_parts as parts

# Builds like torch.utils.cpp_extension: it holds a file `lock` while it compiles, and a killed process leaves it.
FAKE = """
import os, pathlib, subprocess, time

class Builder:
    def load(self, verbose):
        root = pathlib.Path(os.environ["TORCH_EXTENSIONS_DIR"])
        folder = root / "cpu_adam"
        folder.mkdir(exist_ok=True)
        descriptor = os.open(folder / "lock", os.O_CREAT | os.O_EXCL)
        with (root.parent / "builds").open("a") as file:
            print(os.getpid(), file=file)
        (folder / "cpu_adam.so").write_text("half")
        seconds = os.environ.get("FAKE_SECONDS")
        if seconds:  # ninja starts each compiler in a separate process group
            compiler = subprocess.Popen(["sleep", seconds], process_group=0)
            (root.parent / "compiler").write_text(str(compiler.pid))
            compiler.wait()
        if "FAKE_ERROR" in os.environ:
            raise RuntimeError(os.environ["FAKE_ERROR"])
        (folder / "cpu_adam.so").write_text("the whole library")
        os.close(descriptor)
        (folder / "lock").unlink()

class Accelerator:
    def create_op_builder(self, name):
        assert name == "CPUAdamBuilder"
        return Builder()

def get_accelerator():
    return Accelerator()
"""
STARTER = "from rapidformer_templates.switches.zero.compiled_parts import build; build(['cpu_adam'], 'cpu')"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with a fast fake DeepSpeed and nothing built. The value is the folder for the compiled parts."""
    package = tmp_path / "site" / "deepspeed"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "accelerator.py").write_text(FAKE)
    info = tmp_path / "site" / "deepspeed-9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: deepspeed\nVersion: 9.9\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in (parts.FOLDER, parts.ACCELERATOR, "LOCAL_RANK"):
        monkeypatch.setenv(name, "")  # so that what a build sets is removed after the test
        monkeypatch.delenv(name)
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("c++", "ninja"):  # this machine may have none
        (tools / name).write_text("#!/bin/sh\nexit 0\n")
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(parts, "missing_library", lambda part, device: None)
    monkeypatch.setattr(parts, "OWN_LOCK_TIMEOUT", 0.3)
    return parts.folder("cpu")


def builds(root: Path) -> int:
    record = root.parent / "builds"
    return len(record.read_text().split()) if record.exists() else 0


def compiler(root: Path) -> int:
    """Return the process id of the running compiler."""
    record = root.parent / "compiler"
    wait_until(lambda: record.exists() and record.read_text())
    return int(record.read_text())


def wait_until(what: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def start(**environment: str) -> subprocess.Popen[str]:
    environment = {**os.environ, **environment}
    return subprocess.Popen(
        [sys.executable, "-c", STARTER],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background job ignores SIGINT, and its children inherit this.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


@pytest.mark.parametrize(
    ("offload", "needed"),
    [(None, ()), ("cpu", ("cpu_adam",)), ("nvme", ("cpu_adam", "async_io"))],
)
def test_needed_parts(offload: Literal["cpu", "nvme"] | None, needed: tuple[str, ...]) -> None:
    assert parts.needed_parts(offload) == needed


def test_built_once_with_a_message(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    parts.build_parts(Plan("Trainer", engine=parts.ENGINE, engine_options=EngineOptions(offload="cpu")))
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == "building DeepSpeed's cpu_adam (about a minute, once for this version) …"
    assert lines[1].startswith("built DeepSpeed's cpu_adam in ")
    assert os.environ[parts.FOLDER] == str(root)
    assert os.environ[parts.ACCELERATOR] == "cpu"
    assert root.name.startswith("deepspeed-9.9-torch-")
    assert parts.is_built("cpu_adam", root)
    parts.build_parts(Plan("Trainer", engine=parts.ENGINE, engine_options=EngineOptions(offload="cpu")))
    assert capfd.readouterr().err == ""
    assert builds(root) == 1


def test_other_engines_and_zero_alone_build_nothing(root: Path) -> None:
    parts.build_parts(Plan("Trainer", engine_options=EngineOptions(offload="cpu")))
    assert parts.FOLDER not in os.environ
    parts.build_parts(Plan("Trainer", engine=parts.ENGINE))
    assert os.environ[parts.FOLDER] == str(root)
    assert builds(root) == 0


def test_another_device_or_version_has_a_folder_of_its_own(root: Path, tmp_path: Path) -> None:
    parts.export("cpu")
    assert parts.folder("cpu") == root
    assert parts.folder("cuda") != root
    metadata = tmp_path / "site" / "deepspeed-9.9.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace("9.9", "10.0"))
    assert parts.folder("cpu").name.startswith("deepspeed-10.0-")


def test_half_written_library_does_not_count(root: Path) -> None:
    (root / "cpu_adam").mkdir(parents=True)
    (root / "cpu_adam" / "cpu_adam.so").write_text("half")
    assert not parts.is_built("cpu_adam", root)
    parts.build(["cpu_adam"], "cpu")
    assert (root / "cpu_adam" / "cpu_adam.so").read_text() == "the whole library"
    (root / "cpu_adam" / "cpu_adam.so").write_text("half")
    assert not parts.is_built("cpu_adam", root)
    (root / "cpu_adam.built").write_text("{")
    parts.build(["cpu_adam"], "cpu")
    assert builds(root) == 2


@pytest.mark.slow
def test_stale_lock_is_explained_and_removed(root: Path) -> None:
    parts.build(["cpu_adam"], "cpu")
    lock = root / "cpu_adam" / "lock"
    lock.touch()
    said: list[str] = []
    parts.build(["cpu_adam"], "cpu", said.append)
    assert said == [f"removed a lock that a killed build of DeepSpeed's cpu_adam left: {lock}"]
    assert not lock.exists()
    assert builds(root) == 1


@pytest.mark.slow
def test_lock_of_a_living_process_is_respected(root: Path) -> None:
    parts.build(["cpu_adam"], "cpu")
    lock = root / "cpu_adam" / "lock"
    descriptor = os.open(lock, os.O_CREAT | os.O_EXCL)
    assert parts.holder(lock) == os.getpid()

    def release() -> None:  # in the order of torch's FileBaton
        os.close(descriptor)
        time.sleep(0.05)
        lock.unlink()  # would fail if another process had removed it

    timer = threading.Timer(1.0, release)
    timer.start()
    said: list[str] = []
    started = time.monotonic()
    parts.build(["cpu_adam"], "cpu", said.append)
    assert time.monotonic() - started > 0.8
    assert said == [f"waiting for {lock} (process {os.getpid()})"]


@pytest.mark.slow
def test_lock_in_a_folder_of_the_user_is_refused_not_removed(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "mine"
    monkeypatch.setenv(parts.FOLDER, str(own))
    assert parts.export("cpu") == own
    parts.build(["cpu_adam"], "cpu")
    assert parts.is_built("cpu_adam", own)
    lock = own / "cpu_adam" / "lock"
    lock.touch()
    monkeypatch.setattr(parts, "FOREIGN_LOCK_TIMEOUT", 1.0)
    said: list[str] = []
    with pytest.raises(parts.PartError) as error:
        parts.build(["cpu_adam"], "cpu", said.append)
    assert said == [f"waiting for {lock} (delete it if nothing is building there)"]
    assert error.value.render().splitlines() == [
        "error: DeepSpeed's cpu_adam is locked, and no process on this machine is building it",
        f"  where  {lock}",
        "  help   delete this file if no other machine or container is building there",
    ]
    assert lock.exists()


@pytest.mark.slow
def test_two_builders_at_once(root: Path) -> None:
    starters = [start(FAKE_SECONDS="2") for _ in range(2)]
    told = [starter.communicate(timeout=60)[1] for starter in starters]
    assert [starter.returncode for starter in starters] == [0, 0]
    assert builds(root) == 1
    assert sum("built DeepSpeed's cpu_adam" in text for text in told) == 1
    assert sum("another process is building DeepSpeed's parts; waiting for it" in text for text in told) == 1


@pytest.mark.slow
def test_killed_starter_leaves_a_build_that_the_next_one_waits_for(root: Path) -> None:
    first = start(FAKE_SECONDS="2")
    wait_until((root / "cpu_adam" / "lock").exists)
    first.kill()
    first.communicate()
    said: list[str] = []
    parts.build(["cpu_adam"], "cpu", said.append)
    assert said == ["another process is building DeepSpeed's parts; waiting for it"]
    assert parts.is_built("cpu_adam", root)
    assert builds(root) == 1


def test_killed_build_leaves_no_lock(root: Path) -> None:
    first = start(FAKE_SECONDS="60")
    working = compiler(root)
    os.kill(int((root.parent / "builds").read_text()), signal.SIGKILL)
    text = first.communicate(timeout=60)[1]
    assert not alive(working)
    assert "error: the build of DeepSpeed's cpu_adam was killed by SIGKILL" in text.replace("PartError: ", "")
    assert "MAX_JOBS=1" in text
    assert not (root / "cpu_adam" / "lock").exists()
    parts.build(["cpu_adam"], "cpu")
    assert parts.is_built("cpu_adam", root)


@pytest.mark.slow
def test_interrupt_ends_the_build_and_leaves_no_lock(root: Path) -> None:
    starter = start(FAKE_SECONDS="60")
    processes = [compiler(root), int((root.parent / "builds").read_text())]
    starter.send_signal(signal.SIGINT)
    starter.communicate(timeout=60)
    assert starter.returncode != 0
    assert not any(alive(pid) for pid in processes)
    assert not (root / "cpu_adam" / "lock").exists()


def test_failed_build_shows_the_last_lines(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_ERROR", "cpu_adam.cpp:7: error: 'avx' was not declared\nninja: build stopped")
    with pytest.raises(parts.PartError) as error:
        parts.build(["cpu_adam"], "cpu", lambda line: None)
    text = error.value.render()
    assert text.startswith("error: the build of DeepSpeed's cpu_adam failed:\n")
    assert "cpu_adam.cpp:7: error: 'avx' was not declared\n    ninja: build stopped\n" in text
    assert text.endswith(f"  where  {root / 'cpu_adam.log'}\n  help   the file holds all of it")
    assert "cpu_adam.cpp:7" in (root / "cpu_adam.log").read_text()


def test_missing_tools(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = tmp_path / "tools"
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.setattr(parts.sysconfig, "get_path", lambda name: str(tmp_path / name))
    assert parts.problems("cpu_adam") is None
    (tools / "ninja").unlink()
    assert parts.problems("cpu_adam") == "no ninja on PATH: pip install ninja"
    (tools / "c++").unlink()
    assert parts.problems("cpu_adam") == "no C++ compiler (c++) on PATH: apt-get install g++"
    monkeypatch.setenv("CXX", "clang++-99 -v")
    with pytest.raises(parts.PartError) as error:
        parts.build(["cpu_adam"], "cpu")
    assert error.value.render().splitlines() == [
        "error: DeepSpeed's cpu_adam cannot be used here: no C++ compiler (clang++-99) on PATH",
        "  help   apt-get install g++",
    ]


def test_missing_libaio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\ncat >/dev/null\necho 'fatal error: libaio.h: No such file' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(parts.sysconfig, "get_path", lambda name: str(tmp_path))
    (tmp_path / "Python.h").touch()
    found = parts.missing_library("async_io", "cpu")
    assert found == ("libaio's header or library is missing", "apt-get install libaio-dev")
    assert parts.missing_library("cpu_adam", "cpu") is None
    (tmp_path / "Python.h").unlink()
    assert parts.missing_library("cpu_adam", "cpu") == (
        "Python's C headers (Python.h) are missing",
        "apt-get install python3-dev",
    )


def test_ninja_of_a_virtual_environment_that_is_not_active(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools, scripts = tmp_path / "tools", tmp_path / "scripts"
    scripts.mkdir()
    (tools / "ninja").rename(scripts / "ninja")
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.setattr(parts.sysconfig, "get_path", lambda name: str(scripts))
    parts.export("cpu")
    assert os.environ["PATH"].split(os.pathsep) == [str(scripts), str(tools)]


def test_ninja_of_the_environment_goes_before_another_on_path(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ninja rebuilds what another version of it has compiled: in the workers, where nobody sees the reason."""
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    shutil.copy(tmp_path / "tools" / "ninja", scripts)
    monkeypatch.setattr(parts.sysconfig, "get_path", lambda name: str(scripts))
    parts.export("cpu")
    assert shutil.which("ninja") == str(scripts / "ninja")


def test_parts_of_another_ninja_are_built_anew(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts.build(["cpu_adam"], "cpu")
    assert parts.is_built("cpu_adam", root)
    monkeypatch.setattr(parts, "find_ninja", lambda: str(tmp_path / "tools" / "c++"))
    assert not parts.is_built("cpu_adam", root)


def test_folder_that_cannot_be_written(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(parts.FOLDER, str(tmp_path / "file" / "folder"))
    with pytest.raises(parts.PartError, match="DeepSpeed's parts cannot be built"):
        parts.build(["cpu_adam"], "cpu")


@pytest.mark.exhaustive
@pytest.mark.deepspeed
def test_real_build_after_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``kill -9`` the compilers of DeepSpeed's own build. torch's lock remains, and the next build succeeds."""
    pytest.importorskip("deepspeed", reason="needs the deepspeed extra")
    if reason := parts.problems("cpu_adam"):
        pytest.skip(reason)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in (parts.FOLDER, "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    root = parts.folder("cpu")
    lock = root / "cpu_adam" / "lock"
    starter = start()
    wait_until((root / "cpu_adam" / "build.ninja").exists)
    time.sleep(1)  # compilers at work
    builder = parts.holder(lock)
    assert builder
    starter.kill()  # first, because it would clean up
    starter.communicate()
    parts._kill_session(builder)
    assert lock.exists()
    said: list[str] = []
    parts.build(["cpu_adam"], "cpu", said.append)
    assert f"removed a lock that a killed build of DeepSpeed's cpu_adam left: {lock}" in said
    assert said[-1].startswith("built DeepSpeed's cpu_adam")
    parts.export("cpu")
    program = "from deepspeed.ops.adam import DeepSpeedCPUAdam as A; import torch; A([torch.ones(3)])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert parts.is_built("cpu_adam", root)  # the worker compiled nothing again


def test_no_compiler_is_started_for_deepspeeds_all_reduce(monkeypatch: pytest.MonkeyPatch) -> None:
    deepspeed = pytest.importorskip("deepspeed")
    folders: list[str] = []
    monkeypatch.setattr(tempfile, "mkdtemp", lambda *arguments, **named: folders.append("made"))
    monkeypatch.delitem(vars(deepspeed.ops), "__compatible_ops__", raising=False)  # ask again, if another test did
    parts.leave_out_shm_comm()
    assert importlib.import_module("deepspeed.comm.torch").build_shm_op() is None
    assert not folders
