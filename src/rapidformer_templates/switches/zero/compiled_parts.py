"""DeepSpeed's compiled parts.

They are built before the workers start, in a separate folder, with waits that always end.

DeepSpeed compiles a part when a worker first uses it. A compile that is killed leaves a file ``lock``, and torch's
loader waits for that file forever. So the parts of a run are built before its workers start, each in a child process.
They are built under a lock that the kernel releases when its process dies. This module imports neither torch nor
deepspeed.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import importlib.util
import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from rapidformer_templates.errors import RapidformerError
from rapidformer_templates.planning.environment import Launched, launched
from rapidformer_templates.planning.plan import Plan
from rapidformer_templates.system.files import sync, user_cache, write_json
from rapidformer_templates.system.replaced_functions import patch_function

ENGINE = "rapidformer_templates.switches.zero.engine:DeepSpeedEngine"
INSTALL = "pip install 'rapidformer_templates[deepspeed]'"
FOLDER = "TORCH_EXTENSIONS_DIR"  # where torch looks for compiled parts
ACCELERATOR = "DS_ACCELERATOR"  # DeepSpeed's device, which also decides how a part is compiled

BUILD_SECONDS = 1800
"""The time limit of a build in seconds. Nothing in this module waits longer for another process."""
OWN_LOCK_TIMEOUT = 3.0
"""How many seconds a lock in our folder may have no visible owner. Loading a part takes less than one second."""
FOREIGN_LOCK_TIMEOUT = 900.0
"""The same limit for a user's folder, where the builder may run on another machine. A build takes less than this."""

Say = Callable[[str], None]


class PartError(RapidformerError):
    """A run needs a compiled part that cannot be built or loaded on this machine."""


@dataclass(frozen=True)
class CompiledPart:
    """A compiled part: DeepSpeed's builder, its subfolders, the switches that need it, its build time on 2 cores."""

    builder: str
    folders: tuple[str, ...]
    serves: tuple[str, ...]
    takes: str


# DeepSpeed's shm_comm is missing here on purpose: see :func:`leave_out_shm_comm`.
PARTS = {
    "cpu_adam": CompiledPart("CPUAdamBuilder", ("cpu_adam",), ("cpu-offload", "nvme-offload"), "about a minute"),
    "async_io": CompiledPart("AsyncIOBuilder", ("async_io", "pin_memory"), ("nvme-offload",), "about five minutes"),
}


def build_parts(plan: Plan) -> None:
    """Build the parts that the plan needs, and set DeepSpeed's environment variables. Children inherit the variables.

    Call it before the workers start, and again in each worker. If everything is built, it takes a few milliseconds.

    Raises:
        PartError: a part is needed and cannot be built.
    """
    if plan.engine == ENGINE:
        export(plan.device)
        build(needed_parts(plan.engine_options.offload), plan.device)


def needed_parts(offload: Literal["cpu", "nvme"] | None) -> tuple[str, ...]:
    """Return the parts that a run needs. CPU and GPU need the same parts.

    ZeRO without offload needs no parts, because the optimizer is torch's.
    """
    if offload is None:
        return ()
    return ("cpu_adam", "async_io") if offload == "nvme" else ("cpu_adam",)


def leave_out_shm_comm() -> None:
    """Disable DeepSpeed's shared-memory all-reduce. Call it in CPU workers before DeepSpeed's communication starts.

    DeepSpeed would compile it on first use, which takes half a minute. Only its tensor-parallel layers call it.
    Training always uses gloo. Even the question whether it can be compiled starts a compiler in each worker, and a
    worker that is killed meanwhile leaves a folder in the temporary directory.
    """
    communication = importlib.import_module("deepspeed.comm.torch")  # its attribute of this name is torch itself
    patch_function(communication, "build_shm_op", lambda build: None)


def ask_processor_once() -> None:
    """Cache the processor information in a worker.

    DeepSpeed queries py-cpuinfo up to three times, one CPU second each.
    """
    with suppress(ImportError):
        import cpuinfo

        patch_function(cpuinfo, "get_cpu_info", _ask_once)


@cache
def _ask_once(ask: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    return ask()


def export(device: str) -> Path:
    """Set the environment variables that point this process and its children to the parts. Return the folder.

    A folder or accelerator that the user has set stays.
    """
    root = folder(device)
    os.environ[FOLDER] = str(root)
    os.environ.setdefault(ACCELERATOR, device)
    ninja = find_ninja()
    if ninja and ninja != shutil.which("ninja"):  # torch searches PATH only
        os.environ["PATH"] = os.pathsep.join([str(Path(ninja).parent), os.environ.get("PATH", os.defpath)])
    return root


def folder(device: str) -> Path:
    """Return the folder of the parts: the user's ``TORCH_EXTENSIONS_DIR``, or ours.

    Raises a :class:`PartError` if DeepSpeed or torch is not installed.
    """
    user_folder = os.environ.get(FOLDER)
    if user_folder and not is_own_folder(Path(user_folder)):
        return Path(user_folder)
    try:
        versions = [version(name) for name in ("deepspeed", "torch")]
    except PackageNotFoundError as error:
        raise PartError(f"{error.name} is not installed", hint=INSTALL) from error
    # The name depends on everything that affects a compiled part: versions, device, paths, processor.
    facts = [str(_source(name)) for name in ("deepspeed", "torch")] + [_processor()]
    digest = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:8]
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    return _our_root() / f"deepspeed-{versions[0]}-torch-{versions[1]}-{python}-{device}-{digest}"


def is_own_folder(root: Path) -> bool:
    """Return whether this package created the folder of parts, and not the user."""
    return root.parent == _our_root()


def _our_root() -> Path:
    return user_cache() / "deepspeed"


def _source(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    return Path(spec.origin or "") if spec else Path()


def _processor() -> str:
    """Return the instruction sets of the processor. Parts are compiled for it, and machines may share home folders."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def find_ninja() -> str | None:
    """Return the path of ninja in this Python environment, even if it is not active. Otherwise search PATH.

    Another version of ninja would recompile what this one has built.
    """
    return shutil.which("ninja", path=sysconfig.get_path("scripts")) or shutil.which("ninja")


def problems(part: str, device: str = "cpu") -> str | None:
    """Return why a part cannot be built here and what to do about it, or None. Takes at most 0.1 s."""
    missing = missing_tool() or missing_library(part, device)
    return f"{missing[0]}: {missing[1]}" if missing else None


def missing_tool() -> tuple[str, str] | None:
    """Return (what is missing, what to do) for the tools that torch needs even to load a part that is already built."""
    if importlib.util.find_spec("deepspeed") is None:
        return "deepspeed is not installed", INSTALL
    if shutil.which(_compiler()) is None:
        return f"no C++ compiler ({_compiler()}) on PATH", "apt-get install g++"
    if find_ninja() is None:
        return "no ninja on PATH", "pip install ninja"
    return None


def missing_library(part: str, device: str) -> tuple[str, str] | None:
    """Return (what is missing, what to do) for the headers and libraries that a part is compiled against."""
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return "Python's C headers (Python.h) are missing", "apt-get install python3-dev"
    if part != "async_io":
        return None
    # A program that uses libaio must link, with the search paths of the compiler.
    command = [_compiler(), "-x", "c++", "-", "-laio", "-o", os.devnull]
    program = "#include <libaio.h>\nint main() { io_context_t c = 0; return io_setup(1, &c); }\n"
    if subprocess.run(command, input=program, capture_output=True, text=True, check=False).returncode != 0:
        return "libaio's header or library is missing", "apt-get install libaio-dev"
    toolkit = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    if device == "cuda" and not (shutil.which("nvcc") or Path(toolkit, "bin", "nvcc").exists()):
        return "the CUDA toolkit (nvcc) is missing", "install it in the version of torch's CUDA, and set CUDA_HOME"
    return None


def _compiler() -> str:
    """Return the compiler that torch uses."""
    return shlex.split(os.environ.get("CXX") or "c++")[0]


def is_built(part: str, root: Path) -> bool:
    """Return whether a part was built and loaded, and has not changed since."""
    try:
        stamp = json.loads((root / f"{part}.built").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return stamp == _facts(part, root)


def _facts(part: str, root: Path) -> dict[str, Any]:
    """Return the content of the stamp of a built part. If any of it changes, ninja compiles again."""
    libraries = [library for name in PARTS[part].folders for library in sorted((root / name).glob("*.so"))]
    ninja = find_ninja()
    return {
        "ninja": [ninja, *_stat(Path(ninja))] if ninja else None,
        "files": {str(library.relative_to(root)): _stat(library) for library in libraries},
        "sources": {name: [version(name), *_stat(_source(name))] for name in ("deepspeed", "torch")},
    }


def _stat(path: Path) -> list[int]:
    return [path.stat().st_size, path.stat().st_mtime_ns]


def say_once(line: str) -> None:
    """Print a line on standard error, from one worker per machine."""
    if (launched() or Launched()).local_rank == 0:
        print(line, file=sys.stderr, flush=True)


def build(parts: Sequence[str], device: str, say: Say = say_once) -> None:
    """Build the missing ones of these parts for ``cpu`` or ``cuda``. ``say`` prints progress for the user.

    Several processes on one machine may call this at the same time. One builds, and the others wait for it.

    Raises:
        PartError: a part cannot be built, or there is a lock that only the user can judge.
    """
    if not parts:
        return
    if lacking := missing_tool():
        raise PartError(f"DeepSpeed's {parts[0]} cannot be used here: {lacking[0]}", hint=lacking[1])
    root = folder(device)
    missing = [part for part in parts if not is_built(part, root)]
    if not missing and not locks(parts, root):
        return
    for part in missing:
        if lacking := missing_library(part, device):
            raise PartError(f"DeepSpeed's {part} cannot be built here: {lacking[0]}", hint=lacking[1])
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _exclusive_build(root, say) as descriptor:
            for lock in locks(parts, root):
                _clear(lock, is_own_folder(root), say)
            for part in missing:
                if not is_built(part, root):  # another process may have built it while this one waited
                    _build_one(part, device, root, descriptor, say)
    except OSError as error:
        hint = f"check the folder, or set {FOLDER} to another one"
        raise PartError(f"DeepSpeed's parts cannot be built: {error}", where=str(root), hint=hint) from error


@contextmanager
def _exclusive_build(root: Path, say: Say) -> Iterator[int]:
    """Make this process the only builder. Yield the descriptor of the lock.

    The lock is released when all processes that inherit the descriptor have ended.
    """
    with (root / "rapidformer.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another process is building DeepSpeed's parts; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)  # the other build ends within BUILD_SECONDS
        yield file.fileno()


def _build_one(part: str, device: str, root: Path, descriptor: int, say: Say) -> None:
    """Build a part in a child process. No lock remains, even if the child or this process is interrupted."""
    for name in PARTS[part].folders if is_own_folder(root) else ():  # remains of a killed build or of other sources
        shutil.rmtree(root / name, ignore_errors=True)
    say(f"building DeepSpeed's {part} ({PARTS[part].takes}, once for this version) …")
    started = time.monotonic()
    log = root / f"{part}.log"
    command = [sys.executable, "-P", "-m", __name__, part, str(root)]
    path = os.pathsep.join(entry for entry in sys.path if entry)  # the import path of this process
    with log.open("wb") as output:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, FOLDER: str(root), ACCELERATOR: device, "PYTHONPATH": path},
            pass_fds=(descriptor,),  # if this process dies, the child keeps the lock and continues
            start_new_session=True,  # Ctrl-C reaches only this process, which then ends the compilers
        )
        try:
            status = child.wait()
        finally:
            _kill_session(child.pid)
            child.wait()
            for lock in (root / name / "lock" for name in PARTS[part].folders):
                if holder(lock) is None:  # our own lock, and its builder has just ended
                    lock.unlink(missing_ok=True)
    if status != 0:
        raise _failure(part, status, log)
    say(f"built DeepSpeed's {part} in {time.monotonic() - started:.0f} s")


def _kill_session(session: int) -> None:
    """Kill all processes of a session. ninja puts each compiler into a separate process group."""
    while members := [pid for pid in _processes() if _session(pid) == session]:
        for pid in members:
            with suppress(ProcessLookupError):  # already ended
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _session(pid: int) -> int | None:
    """Return the session of a process, or None if it has ended or is a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
        return None if state == "Z" else os.getsid(pid)
    except OSError:
        return None


def _processes() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").glob("[0-9]*")]


def _failure(part: str, status: int, log: Path) -> PartError:
    lines = [line.rstrip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    if status == -signal.SIGALRM:
        how = f"took longer than {BUILD_SECONDS // 60} minutes"
    elif status < 0:
        how = f"was killed by {signal.Signals(-status).name}"
    else:
        how = "failed"
    shown = "".join(f"\n    {line[:160]}" for line in lines[-12:])
    memory = status == -signal.SIGKILL or any("Killed signal" in line for line in lines)
    hint = "memory may be short: MAX_JOBS=1 runs one compiler at a time" if memory else "the file holds all of it"
    return PartError(f"the build of DeepSpeed's {part} {how}{shown and ':'}{shown}", where=str(log), hint=hint)


def locks(parts: Iterable[str], root: Path) -> list[Path]:
    """Return torch's locks: all of them in our folder, only those of these parts in a user's folder."""
    names = (
        [path.name for path in root.glob("*")] if is_own_folder(root) else [n for p in parts for n in PARTS[p].folders]
    )
    return [root / name / "lock" for name in sorted(names) if (root / name / "lock").exists()]


def holder(lock: Path) -> int | None:
    """Return the process that holds a lock of torch. It keeps the file open until the build ends."""
    try:
        lock_stat = lock.stat()
    except FileNotFoundError:
        return None
    for pid in _processes():
        with suppress(OSError):  # the process has ended, or belongs to another user
            for opened in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):  # closed in the meantime
                    if os.path.samestat(opened.stat(), lock_stat):
                        return pid
    return None


def _clear(lock: Path, in_our_folder: bool, say: Say) -> None:
    """Wait until a lock of torch is gone.

    If no process holds it, remove it from our folder, or raise for a user's folder.
    """
    began, free_since = time.monotonic(), math.inf  # ``free_since``: since when nobody has held it
    is_announced = False
    while lock.exists():
        builder, now = holder(lock), time.monotonic()
        free_since = min(free_since, now) if builder is None else math.inf
        # Do not remove it at once: a builder closes the file a moment before it removes it.
        if in_our_folder and now - free_since > OWN_LOCK_TIMEOUT:
            say(f"removed a lock that a killed build of DeepSpeed's {lock.parent.name} left: {lock}")
            lock.unlink(missing_ok=True)
        elif now - began > BUILD_SECONDS or (now - free_since > OWN_LOCK_TIMEOUT and _age(lock) > FOREIGN_LOCK_TIMEOUT):
            who = f"process {builder} does not end" if builder else "no process on this machine is building it"
            hint = "delete this file if no other machine or container is building there"
            raise PartError(f"DeepSpeed's {lock.parent.name} is locked, and {who}", where=str(lock), hint=hint)
        # In our folder, a lock without a holder is removed soon, so there is nothing to announce.
        elif not is_announced and now - began > OWN_LOCK_TIMEOUT and (builder or not in_our_folder):
            say(f"waiting for {lock} ({f'process {builder}' if builder else 'delete it if nothing is building there'})")
            is_announced = True
        time.sleep(0.1)


def _age(file: Path) -> float:
    """Return the seconds since a file was last modified, or 0 if it no longer exists."""
    return time.time() - file.stat().st_mtime if file.exists() else 0.0


def _child(part: str, root: Path) -> None:
    """Build a part, load it, and write its stamp. Runs in a child process."""
    signal.alarm(BUILD_SECONDS)  # ends the build even if the parent process is gone
    from deepspeed.accelerator import get_accelerator

    get_accelerator().create_op_builder(PARTS[part].builder).load(verbose=False)
    facts = _facts(part, root)
    for library in facts["files"]:
        sync(root / library)
    write_json(root / f"{part}.built", facts)


if __name__ == "__main__":
    _child(sys.argv[1], Path(sys.argv[2]))
