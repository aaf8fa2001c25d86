"""DeepSpeed's compiled parts: built ahead of the workers, in a folder of our own, and never waited for in vain.

DeepSpeed compiles a part when a worker first uses it; a compile that is killed leaves a file ``lock``, on which torch's
loader waits for ever. So a run's parts are built before its workers start, each in a child process, under a lock that
the kernel takes from a dead process. Imports neither torch nor deepspeed.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rapidformer_templates.errors import RapidformerError
from rapidformer_templates.planning.plan import Plan
from rapidformer_templates.switches.zero import build_tools
from rapidformer_templates.system.files import sync, write_json
from rapidformer_templates.system.replaced_functions import install

ENGINE = "rapidformer_templates.switches.zero.engine:DeepSpeedEngine"
FOLDER = "TORCH_EXTENSIONS_DIR"  # where torch looks for compiled parts
ACCELERATOR = "DS_ACCELERATOR"  # DeepSpeed's device, which also decides how a part is compiled

BUILD_SECONDS = 1800
"""After this long a build has failed; also the longest that anything here waits for another process."""
GRACE_SECONDS = 3.0
"""How long a lock in our folder may belong to nobody who can be seen; to load a part takes less than a second."""
DOUBT_SECONDS = 900.0
"""The same in a folder of the user's, where the builder may sit on another machine; a build takes less than this."""

Say = Callable[[str], None]


class PartError(RapidformerError):
    """A compiled part that a run needs and that cannot be built or loaded here."""


@dataclass(frozen=True)
class Part:
    """A compiled part: DeepSpeed's builder, sub-folders that it fills, switches that need it, time taken (2 cores)."""

    builder: str
    folders: tuple[str, ...]
    serves: tuple[str, ...]
    takes: str


# DeepSpeed's shm_comm is not among them: see :func:`leave_out_shm_comm`.
PARTS = {
    "cpu_adam": Part("CPUAdamBuilder", ("cpu_adam",), ("cpu-offload", "nvme-offload"), "about a minute"),
    "async_io": Part("AsyncIOBuilder", ("async_io", "pin_memory"), ("nvme-offload",), "about five minutes"),
}


def prepare(plan: Plan) -> None:
    """Before workers start, and again in each worker: build what the plan needs, and tell DeepSpeed where it lies.

    Sets environment variables, which children inherit. Where all is built it takes some milliseconds.

    Raises:
        PartError: a part is needed and cannot be built.
    """
    if plan.engine == ENGINE:
        export(plan.device)
        build(needed_parts(plan.engine_options.get("offload")), plan.device)


def needed_parts(offload: str | None) -> tuple[str, ...]:
    """The parts that a run needs, for ``offload`` None, ``cpu`` or ``nvme:DIR``; the same on a CPU and a GPU.

    ZeRO without offload needs none: the optimizer is torch's.
    """
    if offload is None:
        return ()
    return ("cpu_adam", "async_io") if offload.startswith("nvme:") else ("cpu_adam",)


def leave_out_shm_comm() -> None:
    """In a worker on a CPU, before DeepSpeed's communication starts: no shared-memory all-reduce.

    DeepSpeed would compile it on first use (half a minute). Only its tensor-parallel layers call it; training goes
    through gloo with it and without it.
    """
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def ask_processor_once() -> None:
    """In a worker: DeepSpeed asks py-cpuinfo for the processor up to three times, a second of processor time each."""
    with suppress(ImportError):
        import cpuinfo

        install(cpuinfo, "get_cpu_info", _ask_once)


@cache
def _ask_once(ask: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    return ask()


def export(device: str) -> Path:
    """Tell this process and its children where the parts lie; returns that folder.

    A folder or accelerator that the user has set is left as it is.
    """
    root = folder(device)
    os.environ[FOLDER] = str(root)
    os.environ.setdefault(ACCELERATOR, device)
    ninja = build_tools.find_ninja()
    if ninja and ninja != shutil.which("ninja"):  # torch looks for it on PATH only
        os.environ["PATH"] = os.pathsep.join([str(Path(ninja).parent), os.environ.get("PATH", os.defpath)])
    return root


def folder(device: str) -> Path:
    """``TORCH_EXTENSIONS_DIR`` if the user has set it, else our own; PartError without DeepSpeed or torch."""
    given = os.environ.get(FOLDER)
    return Path(given) if given and not is_ours(Path(given)) else _our_root() / _key(device)


def is_ours(root: Path) -> bool:
    """Whether a folder of parts is one that we made, and not the user's."""
    return root.parent == _our_root()


def _our_root() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rapidformer_templates" / "deepspeed"


def _key(device: str) -> str:
    """Changes with all that a compiled part depends on: versions, device, headers' places, the processor."""
    try:
        versions = [version(name) for name in ("deepspeed", "torch")]
    except PackageNotFoundError as error:
        raise PartError(f"{error.name} is not installed", hint=build_tools.INSTALL) from error
    facts = [str(_source(name)) for name in ("deepspeed", "torch")] + [_processor()]
    digest = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:8]
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    return f"deepspeed-{versions[0]}-torch-{versions[1]}-{python}-{device}-{digest}"


def _source(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    return Path(spec.origin or "") if spec else Path()


def _processor() -> str:
    """Its instruction sets: parts are compiled for this very processor, and homes may be shared."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def is_built(part: str, root: Path) -> bool:
    """Whether a part was built and loaded, and nothing of it has changed since."""
    try:
        told = json.loads((root / f"{part}.built").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return told == _facts(part, root)


def _facts(part: str, root: Path) -> dict[str, Any]:
    """What the stamp of a built part holds: ninja compiles anew when one of these changes."""
    libraries = [library for name in PARTS[part].folders for library in sorted((root / name).glob("*.so"))]
    ninja = build_tools.find_ninja()
    return {
        "ninja": [ninja, *_stat(Path(ninja))] if ninja else None,
        "files": {str(library.relative_to(root)): _stat(library) for library in libraries},
        "sources": {name: [version(name), *_stat(_source(name))] for name in ("deepspeed", "torch")},
    }


def _stat(path: Path) -> list[int]:
    return [path.stat().st_size, path.stat().st_mtime_ns]


def say_once(line: str) -> None:
    """A line on standard error, from one worker of each machine."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(line, file=sys.stderr, flush=True)


def build(parts: Sequence[str], device: str, say: Say = say_once) -> None:
    """Build what is missing of these parts for ``cpu`` or ``cuda``; ``say`` takes the lines for people.

    Processes on one machine may call this at once: one builds, the others wait for it.

    Raises:
        PartError: a part cannot be built, or a lock is in the way that only the user can judge.
    """
    if not parts:
        return
    if lacking := build_tools.missing_tool():
        raise PartError(f"DeepSpeed's {parts[0]} cannot be used here: {lacking[0]}", hint=lacking[1])
    root = folder(device)
    missing = [part for part in parts if not is_built(part, root)]
    if not missing and not locks(parts, root):
        return
    for part in missing:
        if lacking := build_tools.missing_library(part, device):
            raise PartError(f"DeepSpeed's {part} cannot be built here: {lacking[0]}", hint=lacking[1])
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _alone(root, say) as descriptor:
            for lock in locks(parts, root):
                _clear(lock, is_ours(root), say)
            for part in missing:
                if not is_built(part, root):  # a process that was here before us may have built it
                    _build_one(part, device, root, descriptor, say)
    except OSError as error:
        hint = f"check the folder, or set {FOLDER} to another one"
        raise PartError(f"DeepSpeed's parts cannot be built: {error}", where=str(root), hint=hint) from error


@contextmanager
def _alone(root: Path, say: Say) -> Iterator[int]:
    """Alone among builders; gives the descriptor of the lock, which ends with all processes that inherit it."""
    with (root / "rapidformer.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another process is building DeepSpeed's parts; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)  # it ends after BUILD_SECONDS at the latest
        yield file.fileno()


def _build_one(part: str, device: str, root: Path, descriptor: int, say: Say) -> None:
    """Build a part in a child process, and leave no lock behind, however the child or we end."""
    for name in PARTS[part].folders if is_ours(root) else ():  # left by a build that was killed, or of other sources
        shutil.rmtree(root / name, ignore_errors=True)
    say(f"building DeepSpeed's {part} ({PARTS[part].takes}, once for this version) …")
    started = time.monotonic()
    log = root / f"{part}.log"
    command = [sys.executable, "-P", "-m", __name__, part, device, str(root)]
    path = os.pathsep.join(entry for entry in sys.path if entry)  # the packages that this process would import
    with log.open("wb") as output:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, FOLDER: str(root), ACCELERATOR: device, "PYTHONPATH": path},
            pass_fds=(descriptor,),  # if we die, the child builds on, and nobody builds beside it
            start_new_session=True,  # a Ctrl-C reaches us alone, and we end the compilers, too
        )
        try:
            status = child.wait()
        finally:
            _end(child.pid)
            child.wait()
            for lock in (root / name / "lock" for name in PARTS[part].folders):
                if holder(lock) is None:  # ours, and we have just ended its builder
                    lock.unlink(missing_ok=True)
    if status != 0:
        raise _failure(part, status, log)
    say(f"built DeepSpeed's {part} in {time.monotonic() - started:.0f} s")


def _end(session: int) -> None:
    """End a child and all that it started; ninja gives each compiler a process group of its own."""
    while members := [pid for pid in _processes() if _session(pid) == session]:
        for pid in members:
            with suppress(ProcessLookupError):  # it has ended by itself
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _session(pid: int) -> int | None:
    """The session of a process, None if it has ended or is only not yet reaped."""
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
    """Torch's locks in our folder, or of these parts in a folder of the user's."""
    names = [path.name for path in root.glob("*")] if is_ours(root) else [n for p in parts for n in PARTS[p].folders]
    return [root / name / "lock" for name in sorted(names) if (root / name / "lock").exists()]


def holder(lock: Path) -> int | None:
    """The process that holds a lock of torch: it keeps the file open until it has built."""
    try:
        wanted = lock.stat()
    except FileNotFoundError:
        return None
    for pid in _processes():
        with suppress(OSError):  # the process has ended, or is another user's
            for opened in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):  # closed in the meantime
                    if os.path.samestat(opened.stat(), wanted):
                        return pid
    return None


def _clear(lock: Path, ours: bool, say: Say) -> None:
    """Wait until a lock of torch is gone; one that nobody holds is removed from our folder, and refused elsewhere."""
    began, held, told = time.monotonic(), time.monotonic(), False  # ``held``: when a holder was last seen
    while lock.exists():
        builder, now = holder(lock), time.monotonic()
        held = now if builder is not None else held
        # Not at once: a builder closes the file a moment before it removes it.
        if ours and now - held > GRACE_SECONDS:
            say(f"removed a lock that a killed build of DeepSpeed's {lock.parent.name} left: {lock}")
            lock.unlink(missing_ok=True)
        elif now - began > BUILD_SECONDS or (now - held > GRACE_SECONDS and _age(lock) > DOUBT_SECONDS):
            who = f"process {builder} does not end" if builder else "no process on this machine is building it"
            hint = "delete this file if no other machine or container is building there"
            raise PartError(f"DeepSpeed's {lock.parent.name} is locked, and {who}", where=str(lock), hint=hint)
        elif not told and now - began > GRACE_SECONDS:
            say(f"waiting for {lock} ({f'process {builder}' if builder else 'delete it if nothing is building there'})")
            told = True
        time.sleep(0.1)


def _age(file: Path) -> float:
    """Seconds since a file was made; 0 for one that is gone."""
    return time.time() - file.stat().st_mtime if file.exists() else 0.0


def _child(part: str, device: str, root: Path) -> None:
    """In a process of its own: build a part, load it, and leave a stamp that says so."""
    signal.alarm(BUILD_SECONDS)  # also when our parent is gone
    from deepspeed.accelerator import get_accelerator

    get_accelerator().create_op_builder(PARTS[part].builder).load(verbose=False)
    facts = _facts(part, root)
    for library in facts["files"]:
        sync(root / library)
    write_json(root / f"{part}.built", facts)


if __name__ == "__main__":
    _child(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
