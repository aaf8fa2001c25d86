"""DeepSpeed's compiled parts are built once, before the workers start. Nothing waits for a lock of a dead process."""

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

import pytest

from rapidformer_templates.planning.plan import EngineOptions, Plan
from rapidformer_templates.switches.zero import compiled_parts as parts
from tests.support.messages import Says

# Builds like torch.utils.cpp_extension: it holds a file `lock` while it compiles, and a killed process leaves it.
FAKE = """
import os, pathlib, signal, subprocess, time

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
        if seconds:  # ninja starts each compiler in a separate process group, and ends it when it is interrupted
            compiler = subprocess.Popen(["sleep", seconds], process_group=0)
            signal.signal(signal.SIGINT, lambda *_: (compiler.kill(), os._exit(1)))
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
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"), prepend=os.pathsep)
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
    monkeypatch.setattr(parts.sysconfig, "get_path", lambda name: str(tools))
    (tools / "Python.h").touch()
    monkeypatch.setattr(parts, "LOCK_SECONDS", 0.3)
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
        start_new_session=True,  # a terminal sends Ctrl-C to all processes of a group
        # A shell's background job ignores SIGINT, and its children inherit this.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def test_built_once_with_a_message(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    plan = Plan("Trainer", engine=parts.ENGINE, engine_options=EngineOptions(offload="cpu"))
    parts.prepare(None, plan)
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == "building DeepSpeed's cpu_adam (it takes minutes, once for this version) …"
    assert lines[1].startswith("built DeepSpeed's cpu_adam in ")
    assert os.environ[parts.FOLDER] == str(root)
    assert os.environ[parts.ACCELERATOR] == "cpu"
    assert root.name.startswith("deepspeed-9.9-torch-")
    assert parts.is_built("cpu_adam", root)
    parts.prepare(None, plan)
    assert capfd.readouterr().err == ""
    assert builds(root) == 1


def test_half_written_library_does_not_count(root: Path, tmp_path: Path) -> None:
    (root / "cpu_adam").mkdir(parents=True)
    (root / "cpu_adam" / "cpu_adam.so").write_text("half")
    assert not parts.is_built("cpu_adam", root)
    parts.build(["cpu_adam"], "cpu")
    assert (root / "cpu_adam" / "cpu_adam.so").read_text() == "the whole library"
    stamp = (root / "cpu_adam.built").stat().st_mtime
    for changed in (root / "cpu_adam" / "cpu_adam.so", tmp_path / "tools" / "ninja"):  # ninja would compile again
        os.utime(changed, (stamp + 5, stamp + 5))
        assert not parts.is_built("cpu_adam", root)
        os.utime(changed, (stamp - 5, stamp - 5))
        assert parts.is_built("cpu_adam", root)


@pytest.mark.slow
def test_a_stale_lock_is_removed_and_that_of_a_worker_is_respected(
    root: Path, monkeypatch: pytest.MonkeyPatch, says: Says
) -> None:
    parts.build(["cpu_adam"], "cpu")
    lock = root / "cpu_adam" / "lock"
    lock.touch()
    parts.build(["cpu_adam"], "cpu", lambda line: says.text(line, ROOT=root))
    assert not lock.exists()
    assert builds(root) == 1
    lock.touch()
    monkeypatch.setattr(parts, "LOCK_SECONDS", 600)
    threading.Timer(0.2, lock.unlink).start()  # would fail if another process had removed it
    said: list[str] = []
    parts.build(["cpu_adam"], "cpu", said.append)
    assert (said, lock.exists()) == ([], False)


@pytest.mark.longer
def test_two_builders_at_once(root: Path) -> None:
    starters = [start(FAKE_SECONDS="2") for _ in range(2)]
    told = [starter.communicate(timeout=60)[1] for starter in starters]
    assert [starter.returncode for starter in starters] == [0, 0]
    assert builds(root) == 1
    assert sum("built DeepSpeed's cpu_adam" in text for text in told) == 1
    assert sum("another process is building DeepSpeed's parts; waiting for it" in text for text in told) == 1


def test_build_after_a_killed_one(root: Path) -> None:
    first = start(FAKE_SECONDS="60")
    working = compiler(root)
    os.kill(int((root.parent / "builds").read_text()), signal.SIGKILL)
    text = first.communicate(timeout=60)[1]
    os.kill(working, signal.SIGKILL)
    assert "error: the build of DeepSpeed's cpu_adam was killed by SIGKILL" in text.replace("PartError: ", "")
    assert "MAX_JOBS=1" in text
    assert (root / "cpu_adam" / "lock").exists()
    said: list[str] = []
    parts.build(["cpu_adam"], "cpu", said.append)
    assert [line.split()[0] for line in said] == ["building", "built"]


@pytest.mark.longer
def test_ctrl_c_ends_the_build(root: Path) -> None:
    starter = start(FAKE_SECONDS="60")
    processes = [compiler(root), int((root.parent / "builds").read_text())]
    os.killpg(starter.pid, signal.SIGINT)
    starter.communicate(timeout=60)
    assert starter.returncode != 0
    wait_until(lambda: not any(map(alive, processes)))
    parts.build(["cpu_adam"], "cpu")
    assert parts.is_built("cpu_adam", root)


def test_failed_build_shows_the_last_lines(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_ERROR", "cpu_adam.cpp:7: error: 'avx' was not declared\nninja: build stopped")
    with pytest.raises(parts.PartError, match="the build of DeepSpeed's cpu_adam failed:\n") as error:
        parts.build(["cpu_adam"], "cpu", lambda line: None)
    text = error.value.render()
    assert "cpu_adam.cpp:7: error: 'avx' was not declared\n    ninja: build stopped\n" in text
    assert f"  where  {root / 'cpu_adam.log'}\n  help   the file holds all of it" in text
    assert "cpu_adam.cpp:7" in (root / "cpu_adam.log").read_text()


def test_missing_tools(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says) -> None:
    tools = tmp_path / "tools"
    monkeypatch.setenv("PATH", str(tools))
    compiler = tools / "cc"
    compiler.write_text("#!/bin/sh\n/bin/cat >/dev/null\necho 'fatal error: libaio.h: No such file' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    says.text(str(parts.problems("async_io")))
    assert parts.problems("cpu_adam") is None
    (tools / "Python.h").unlink()
    says.text(str(parts.problems("cpu_adam")))
    (tools / "ninja").unlink()
    says.text(str(parts.problems("cpu_adam")))
    monkeypatch.setenv("CXX", "clang++-99 -v")
    with says(parts.PartError, VERSION=root.name):
        parts.build(["cpu_adam"], "cpu")


def test_ninja_of_a_virtual_environment_goes_first(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ninja rebuilds what another version of it has compiled: in the workers, where nobody sees the reason."""
    tools, scripts = tmp_path / "tools", tmp_path / "scripts"
    scripts.mkdir()
    shutil.copy(tools / "ninja", scripts)
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.setattr(parts.sysconfig, "get_path", lambda name: str(scripts))
    parts.export("cpu")
    assert os.environ["PATH"].split(os.pathsep) == [str(scripts), str(tools)]


def test_folder_that_cannot_be_written(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(parts.FOLDER, str(tmp_path / "file" / "folder"))
    with says(parts.PartError, VERSION=root.name):
        parts.build(["cpu_adam"], "cpu")


@pytest.mark.exhaustive
@pytest.mark.deepspeed
def test_real_build_after_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``kill -9`` DeepSpeed's own build. torch's lock remains, and the next build succeeds."""
    pytest.importorskip("deepspeed", reason="needs the deepspeed extra")
    if reason := parts.problems("cpu_adam"):
        pytest.skip(reason)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in (parts.FOLDER, "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    root = parts.folder("cpu")
    starter = start()
    wait_until((root / "cpu_adam" / "build.ninja").exists)
    time.sleep(1)  # compilers at work
    os.killpg(starter.pid, signal.SIGKILL)
    starter.communicate()
    assert (root / "cpu_adam" / "lock").exists()
    said: list[str] = []
    parts.build(["cpu_adam"], "cpu", said.append)
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
