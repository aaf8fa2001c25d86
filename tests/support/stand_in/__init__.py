"""``standin``: a device that no code can take for a CPU, to rehearse code that is written for accelerators.

It uses torch's PrivateUse1. The host cannot access its memory. Its streams work in separate threads, as late as
:func:`late` sets. Each read by the host is counted, with the line that caused it. Values come from the CPU's kernels.
``runtime.h`` contains the machine, ``operations.cpp`` the operations that torch calls, and ``device.cpp`` the
registration with torch.
"""

import fcntl
import functools
import hashlib
import importlib.util
import os
import shutil
import sysconfig
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import cpp_extension

from rapidformer_templates.planning import environment

HERE = Path(__file__).parent
SOURCES = ("device.cpp", "operations.cpp", "process_group.cpp", "runtime.cpp")
NAME = "standin"
LIBRARY = "stand_in_device"
DEVICES = 4


@functools.cache
def kind() -> str:
    """Return the accelerator for rehearsals: a real one if torch can use one on this machine, else the stand-in."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return NAME if found is None else found.type


def count() -> int:
    """Return the number of devices of this kind."""
    return DEVICES if kind() == NAME else torch.accelerator.device_count()


def missing(*, devices: int = 1, any_kind: bool = False) -> dict[str, Any]:
    """Return arguments for ``skipif`` that say what a test lacks on this machine.

    Args:
        devices: number of devices that the test needs.
        any_kind: whether a real accelerator is enough. Late streams, counted reads, faults and equal bits need the
            stand-in.
    """
    if kind() == NAME:
        built = shutil.which("c++") and shutil.which("ninja")
        return {
            "condition": not built,
            "reason": "the stand-in device is built with a C++ compiler and ninja: apt install g++ ninja-build",
        }
    if any_kind:
        return {"condition": count() < devices, "reason": f"needs {devices} devices {kind()}, there are {count()}"}
    return {"condition": True, "reason": f"needs the stand-in: a device {kind()} is neither late nor wrong on purpose"}


@functools.cache
def load() -> ModuleType:
    """Build the device and register it with torch. It is built once for each version of its sources and of torch.

    Raises:
        RuntimeError: the device cannot be built.
    """
    spec = importlib.util.spec_from_file_location(LIBRARY, _built())
    assert spec is not None
    assert spec.loader is not None
    native: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(native)
    environment.detect_accelerator.cache_clear()
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _device_module(native))
    dist.Backend.register_backend(NAME, functools.partial(_group, native), devices=[NAME])
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    return native


def _built() -> Path:
    """Return the path of the library. The first process builds it, and the others wait."""
    sources = [*map(HERE.joinpath, SOURCES), HERE / "runtime.h"]
    content = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:12]
    kept = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "rapidformer-stand-in"
    kept.mkdir(parents=True, exist_ok=True)
    library = kept / f"{content}-torch-{torch.__version__}-{sysconfig.get_config_var('SOABI')}.so"
    with open(kept / "lock", "w") as lock, tempfile.TemporaryDirectory(dir=kept) as folder:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the system releases the lock when a process dies
        if not library.exists():
            cpp_extension.load(
                LIBRARY,
                [str(source) for source in sources[:-1]],
                extra_cflags=["-O1", "-g0", "-std=c++20", "-DUSE_C10D_GLOO"],
                build_directory=folder,
                is_python_module=False,
                is_standalone=False,
            )
            os.replace(Path(folder) / f"{LIBRARY}.so", library)
    return library


def _group(native: Any, store: Any, rank: int, size: int, timeout: Any) -> Any:
    return native.Group(dist.ProcessGroupGloo(store, rank, size, timeout=timeout))


def _device_module(native: Any) -> ModuleType:
    """Return the module that torch calls ``torch.standin``."""
    module: Any = ModuleType(f"torch.{NAME}")
    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module.device_count = lambda: DEVICES
    module.current_device = native.current_device
    module.set_device = lambda device: native.set_device(_index(device))
    module.synchronize = lambda device=None: native.synchronize(_index(device))
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.default_generators = [native.default_generator(index) for index in range(DEVICES)]
    module.get_rng_state = lambda device=None: module.default_generators[_index(device)].get_state()
    module.set_rng_state = lambda state, device=None: module.default_generators[_index(device)].set_state(state)
    module.manual_seed = lambda seed: module.default_generators[_index(None)].manual_seed(seed)
    module.manual_seed_all = lambda seed: [generator.manual_seed(seed) for generator in module.default_generators]
    module._is_in_bad_fork = lambda: False
    module.memory_allocated = lambda device=None: native.figures(_index(device))[0]
    module.max_memory_allocated = lambda device=None: native.figures(_index(device))[1]
    module.reset_peak_memory_stats = lambda device=None: native.reset_peak(_index(device))
    module.empty_cache = lambda: None
    module.Stream, module.Event = torch.Stream, torch.Event
    module.stream = lambda stream: stream or nullcontext()
    module.current_stream = lambda device=None: torch.accelerator.current_stream(_index(device))
    return module


def _index(device: Any) -> int:
    if device is None:
        return int(torch.accelerator.current_device_index())
    return device if isinstance(device, int) else torch.device(device).index or 0


@contextmanager
def late(*, main: float = 0.0, side: float = 0.0) -> Iterator[None]:
    """Delay each piece of work on a stream: ``main`` seconds on default streams, ``side`` seconds on others."""
    native = load()
    native.set_lateness(main, side)
    try:
        yield
    finally:
        try:
            torch.accelerator.synchronize()  # raises errors that have occurred meanwhile
        finally:
            native.set_lateness(0.0, 0.0)


@contextmanager
def host_reads() -> Iterator[list[str]]:
    """Record what the host reads from the device as ``what: file:line``. The host waits for the device at each read."""
    native = load()
    found: list[str] = []

    def note(what: str) -> None:
        stack = [frame for frame in traceback.extract_stack() if "/torch/" not in frame.filename][:-1]
        where = f"{stack[-1].filename}:{stack[-1].lineno}" if stack else "a thread of autograd"
        found.append(f"{what}: {where}")

    native.on_host_read(note)
    try:
        yield found
    finally:
        native.on_host_read(None)
