"""DeepSpeed's compiled parts: built once, before the workers start, in a separate folder.

DeepSpeed compiles a part when a worker first uses it. A compile that is killed leaves a file ``lock``, and torch's
loader waits for that file forever. So the parts of a run are built before its workers start, in a child process, under
a lock that the kernel releases when its process dies. This module imports neither torch nor deepspeed.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import importlib.util
import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from rapidformer_templates.errors import RapidformerError
from rapidformer_templates.planning.config import RunConfig
from rapidformer_templates.planning.environment import Launched, launched
from rapidformer_templates.planning.plan import Plan
from rapidformer_templates.system.files import user_cache
from rapidformer_templates.system.replaced_functions import patch_function

ENGINE = "rapidformer_templates.switches.zero.engine:DeepSpeedEngine"
INSTALL = "pip install 'rapidformer_templates[deepspeed]'"
FOLDER = "TORCH_EXTENSIONS_DIR"  # where torch looks for compiled parts
ACCELERATOR = "DS_ACCELERATOR"  # DeepSpeed's device, which also decides how a part is compiled

BUILD_SECONDS = 1800
"""The time limit of a build in seconds. A process that waits for another one's build waits no longer."""
LOCK_SECONDS = 10.0
"""A lock of torch that is older than this is stale: workers hold one for less than a second to load a built part."""


class PartError(RapidformerError):
    """A run needs a compiled part that cannot be built or loaded on this machine."""


# DeepSpeed's shm_comm is missing here on purpose: see :func:`leave_out_shm_comm`.
PARTS = {"cpu_adam": ("CPUAdamBuilder", ("cpu_adam",)), "async_io": ("AsyncIOBuilder", ("async_io", "pin_memory"))}
"""Each part with DeepSpeed's builder and its subfolders."""


def prepare(config: RunConfig | None, plan: Plan) -> None:
    """Build the parts that the plan needs, and set DeepSpeed's environment variables. Children inherit the variables.

    It runs before the workers start, and again in each worker, where it takes a few milliseconds.

    Raises:
        PartError: a part is needed and cannot be built.
    """
    if plan.engine == ENGINE:
        export(plan.device)
        build(needed_parts(plan.engine_options.offload), plan.device)


def needed_parts(offload: Literal["cpu", "nvme"] | None) -> tuple[str, ...]:
    """Return the parts that a run needs. ZeRO without offload needs none, because the optimizer is torch's."""
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

        patch_function(cpuinfo, "get_cpu_info", cache(lambda ask: ask()))


def export(device: str) -> None:
    """Set the environment variables that point this process and its children to the parts.

    An accelerator that the user has set stays.
    """
    os.environ[FOLDER] = str(folder(device))
    os.environ.setdefault(ACCELERATOR, device)
    ninja = find_ninja()
    if ninja and ninja != shutil.which("ninja"):  # torch searches PATH only
        os.environ["PATH"] = os.pathsep.join([str(Path(ninja).parent), os.environ.get("PATH", os.defpath)])


def folder(device: str) -> Path:
    """Return the folder of the parts. It is inside the user's ``TORCH_EXTENSIONS_DIR``, or else in the user's cache.

    Its name depends on everything that affects a compiled part: versions, device, paths and the instruction sets of the
    processor, because machines may share home folders.

    Raises:
        PartError: DeepSpeed or torch is not installed.
    """
    specs = {name: importlib.util.find_spec(name) for name in ("deepspeed", "torch")}
    for name, spec in specs.items():
        if spec is None:
            raise PartError(f"{name} is not installed", hint=INSTALL)
    processor = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    flags = next((line for line in processor if line.startswith(("flags", "Features"))), "")
    facts = [*(str(Path(spec.origin or "")) for spec in specs.values() if spec), flags]
    digest = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:8]
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    name = f"deepspeed-{version('deepspeed')}-torch-{version('torch')}-{python}-{device}-{digest}"
    base = Path(os.environ.get(FOLDER) or user_cache() / "deepspeed")
    return base if base.name == name else base / name


def find_ninja() -> str | None:
    """Return the path of ninja in this Python environment, even if it is not active. Otherwise search PATH.

    Another version of ninja would recompile what this one has built.
    """
    return shutil.which("ninja", path=sysconfig.get_path("scripts")) or shutil.which("ninja")


def problems(part: str, device: str = "cpu") -> str | None:
    """Return why a part cannot be built here and what to do about it, or None. Takes at most 0.1 s."""
    compiler = shlex.split(os.environ.get("CXX") or "c++")[0]  # as torch chooses it
    if importlib.util.find_spec("deepspeed") is None:
        return f"deepspeed is not installed: {INSTALL}"
    if shutil.which(compiler) is None:
        return f"no C++ compiler ({compiler}) on PATH: apt-get install g++"
    if find_ninja() is None:
        return "no ninja on PATH: pip install ninja"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return "Python's C headers (Python.h) are missing: apt-get install python3-dev"
    if part == "async_io":
        # A program that uses libaio must link, with the search paths of the compiler.
        program = "#include <libaio.h>\nint main() { io_context_t c = 0; return io_setup(1, &c); }\n"
        command = [compiler, "-x", "c++", "-", "-laio", "-o", os.devnull]
        if subprocess.run(command, input=program, capture_output=True, text=True, check=False).returncode:
            return "libaio's header or library is missing: apt-get install libaio-dev"
        toolkit = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
        if device == "cuda" and not (shutil.which("nvcc") or Path(toolkit, "bin", "nvcc").exists()):
            return "the CUDA toolkit (nvcc) is missing: install it in the version of torch's CUDA, and set CUDA_HOME"
    return None


def is_built(part: str, root: Path) -> bool:
    """Return whether a part was built and loaded, and nothing has changed since for which ninja would compile again."""
    specs = [importlib.util.find_spec(name) for name in ("deepspeed", "torch")]
    libraries = [library for name in PARTS[part][1] for library in (root / name).glob("*.so")]
    sources = [*(spec.origin for spec in specs if spec), find_ninja(), *libraries]
    try:
        built = (root / f"{part}.built").stat().st_mtime_ns
        return bool(libraries) and all(os.stat(source).st_mtime_ns <= built for source in sources if source)
    except OSError:
        return False


def say_once(line: str) -> None:
    """Print a line on standard error, from one worker per machine."""
    if (launched() or Launched()).local_rank == 0:
        print(line, file=sys.stderr, flush=True)


def build(parts: Sequence[str], device: str, say: Callable[[str], None] = say_once) -> None:
    """Build the missing ones of these parts for ``cpu`` or ``cuda``. ``say`` prints progress for the user.

    Several processes on one machine may call this at the same time. One builds, and the others wait for it.

    Raises:
        PartError: a part cannot be built.
    """
    if not parts:
        return
    root = folder(device)
    missing = [part for part in parts if not is_built(part, root)]
    for part in missing:
        if reason := problems(part, device):
            raise PartError(f"DeepSpeed's {part} cannot be built here: {reason}")
    if not missing and not [*root.glob("*/lock")]:
        return
    try:
        root.mkdir(parents=True, exist_ok=True)
        with (root / "rapidformer.lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say("another process is building DeepSpeed's parts; waiting for it")
                fcntl.flock(file, fcntl.LOCK_EX)
            for part in missing:
                if not is_built(part, root):  # another process may have built it while this one waited
                    _build_one(part, device, root, file.fileno(), say)
            for lock in root.glob("*/lock"):
                _clear(lock, say)
    except OSError as error:
        hint = f"check the folder, or set {FOLDER} to another one"
        raise PartError(f"DeepSpeed's parts cannot be built: {error}", where=str(root), hint=hint) from error


def _build_one(part: str, device: str, root: Path, descriptor: int, say: Callable[[str], None]) -> None:
    """Build a part in a child process. If this process dies, the child keeps the lock and continues."""
    for name in PARTS[part][1]:  # remains of a killed build or of other sources
        shutil.rmtree(root / name, ignore_errors=True)
    say(f"building DeepSpeed's {part} (it takes minutes, once for this version) …")
    started, log = time.monotonic(), root / f"{part}.log"
    path = os.pathsep.join(entry for entry in sys.path if entry)  # the import path of this process
    with log.open("wb") as output:
        child = subprocess.run(
            [sys.executable, "-P", "-m", __name__, part, str(root)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, FOLDER: str(root), ACCELERATOR: device, "PYTHONPATH": path},
            pass_fds=(descriptor,),
            check=False,
        )
    if child.returncode == 0:
        return say(f"built DeepSpeed's {part} in {time.monotonic() - started:.0f} s")
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()][-12:]
    how = f"was killed by {signal.Signals(-child.returncode).name}" if child.returncode < 0 else "failed"
    hint = "the file holds all of it; if memory was short: MAX_JOBS=1 runs one compiler at a time"
    shown = "".join(f"\n    {line.rstrip()[:160]}" for line in lines)
    raise PartError(f"the build of DeepSpeed's {part} {how}{shown and ':'}{shown}", where=str(log), hint=hint)


def _clear(lock: Path, say: Callable[[str], None]) -> None:
    """Wait until a worker of another run has loaded its part, or remove the lock that a killed one has left."""
    with suppress(FileNotFoundError):
        while time.time() - lock.stat().st_mtime < LOCK_SECONDS:
            time.sleep(0.1)
        lock.unlink()
        say(f"removed a lock that a killed process left: {lock}")


if __name__ == "__main__":  # the child process: build a part, load it, and write its stamp
    _, name_of_part, root_folder = sys.argv
    signal.alarm(BUILD_SECONDS)  # ends the build even if the parent process is gone
    from deepspeed.accelerator import get_accelerator

    get_accelerator().create_op_builder(PARTS[name_of_part][0]).load(verbose=False)
    os.sync()  # the library first: a power loss must not leave half of it behind the stamp
    Path(root_folder, f"{name_of_part}.built").touch()
