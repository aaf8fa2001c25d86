"""Facts about the machines of a run, for the resolver, and the GPUs of plans for other machines.

Most facts are detected without importing torch.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from rapidformer_templates.errors import ConfigError, did_you_mean

DEVICES = ("cpu", "cuda", "xpu", "mps", "npu", "hpu", "mlu", "musa", "mtia", "maia")
"""torch's names of the device types that it or a plugin supports. AMD GPUs are ``cuda``."""

DEVICE_ALIASES = {
    "gpu": "cuda", "nvidia": "cuda", "amd": "cuda", "rocm": "cuda", "hip": "cuda", "metal": "mps", "apple": "mps",
    "intel": "xpu", "ascend": "npu", "gaudi": "hpu",
}  # fmt: skip
"""Other names of devices, and torch's names."""

AMPERE = (8, 0)
"""The first compute capability with bf16 and tf32 units."""

OPTIONAL_PACKAGES = (
    "apex", "bitsandbytes", "deepspeed", "fairscale", "flash_attn", "liger_kernel", "mlflow", "onnx", "onnxruntime",
    "onnxscript", "peft", "tensorboard", "torch_xla", "torchao", "trackio", "triton", "tvm", "wandb",
)  # fmt: skip


@dataclass(frozen=True)
class Environment:
    """Facts about the template, the workers and their devices.

    Attributes:
        template: the library's template that the user's class derives from, or None.
        template_origin: where that was decided, such as ``train.py:8``.
        world_size: number of workers.
        local_world_size: number of workers on one node.
        device: torch's name of the device type: ``cpu``, ``cuda``, ``xpu`` …
        compute_capability: compute capability of Nvidia's GPU, such as ``(8, 0)``, or None without one.
        accelerator: torch's name of the accelerator type that this machine can use, or None.
        packages: torch and the optional packages that can be imported, with their versions.
        cxx: the C++ compiler that torch's inductor would call, or None.
        device_origin: what specified the devices, or None for those of this machine.
        device_kind: the key in ``DEVICE_KINDS`` if the plan is for another machine.
        device_file: the file with measured rates of the devices, if one was named.
        notes: remarks about variables that the plan does not follow.
    """

    template: str | None = "Trainer"
    template_origin: str = "default"
    world_size: int = 1
    local_world_size: int = 1
    device: str = "cpu"
    compute_capability: tuple[int, int] | None = None
    accelerator: str | None = None
    packages: Mapping[str, str] = field(default_factory=dict)
    cxx: str | None = "g++"
    device_origin: str | None = None
    device_kind: str | None = None
    device_file: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def has_device(self) -> bool:
        """Whether this machine has devices of that type."""
        return self.device == "cpu" or self.device == self.accelerator or self.compute_capability is not None

    @property
    def white_box(self) -> bool:
        """Whether the user's code decides the template, and not the command line."""
        return ".py:" in self.template_origin or self.template_origin == "in code"


def installed_packages() -> dict[str, str]:
    """Return torch and the optional packages that are installed, with their versions.

    The package ``onnxruntime`` supports CPUs only, so ``+cpu`` is added to its version, as in torch's versions.
    ``onnxruntime-gpu`` installs the same module. ``apex`` counts only if it is Nvidia's: the package with that name in
    the public index is something else and has no ``apex.optimizers``.
    """
    versions = {}
    for name in ("torch", *OPTIONAL_PACKAGES):
        if importlib.util.find_spec(name) is None:
            continue
        if name == "apex" and importlib.util.find_spec("apex.optimizers") is None:
            continue
        version = versions_of([name]).get(name)
        versions[name] = "unknown" if version is None else version + "+cpu" * (name == "onnxruntime")
    return versions


@cache
def version_of_package(name: str) -> str:
    """Return the version of an installed package, cached.

    Every run reads many of them, and each read takes milliseconds.

    Raises:
        PackageNotFoundError: the package has no version metadata.
    """
    return importlib.metadata.version(name)


def versions_of(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of Python and of those of the packages that are installed."""
    versions = {"python": platform.python_version()}
    for name in packages:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = version_of_package(name)
    return versions


def torch_build() -> str | None:
    """Return the part after the ``+`` of torch's version, such as ``cpu``. None without torch."""
    try:
        return version_of_package("torch").partition("+")[2]
    except importlib.metadata.PackageNotFoundError:
        return None


def version_of(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version, for comparisons."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def find_cxx() -> str | None:
    """Return the C++ compiler that torch's inductor would call: that of ``CXX``, or the system's."""
    return shutil.which(os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++"))


@cache
def compile_backends() -> tuple[str, ...] | None:
    """Return every backend of torch.compile, or None without torch.

    Unlike the rest of this module, it imports torch.
    """
    if importlib.util.find_spec("torch") is None:
        return None
    from torch._dynamo import list_backends

    return tuple(list_backends(exclude_tags=()))


@cache
def detect_gpu() -> tuple[int, int] | None:
    """Return the compute capability of the first visible GPU, or None if torch would see none."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return None
    if torch_build() == "cpu":  # on a machine without torch, only the driver decides
        return None
    query = shutil.which("nvidia-smi")
    if query is None:
        return None
    command = [query, "--query-gpu=compute_cap", "--format=csv,noheader"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    first = answer.stdout.strip().splitlines()[:1]
    if answer.returncode != 0 or not first:
        return None
    major, _, minor = first[0].partition(".")
    return int(major), int(minor or 0)


@cache
def detect_accelerator() -> str | None:
    """Return torch's name of the accelerator that this machine can use, or None.

    Importing torch takes a second. So it is imported only if its build, the system or a package shows that there may be
    an accelerator that is not Nvidia's. If torch is already imported, it is always queried.
    """
    if detect_gpu() is not None:
        return "cuda"
    if "torch" not in sys.modules:
        build = torch_build()
        plugins = importlib.metadata.entry_points(group="torch.backends")  # those that torch imports, as torch_npu
        if build is None or not (build.startswith(("rocm", "xpu")) or sys.platform == "darwin" or plugins):
            return None
    import torch

    device = torch.accelerator.current_accelerator(check_available=True)
    return None if device is None else device.type


def ask_torch_if_needed(device: str) -> None:
    """Import torch before the first :func:`detect` of a run, which uses every device that torch sees.

    Without torch, a GPU is overlooked if there is no ``nvidia-smi``. Torch is not needed if the run uses the CPU, if
    the driver reports a GPU, or if torch is built for CPUs. :func:`detect_accelerator` queries torch for other
    accelerators.
    """
    if device == "cpu" or detect_gpu() is not None:
        return
    if torch_build() not in (None, "cpu"):
        import torch  # noqa: F401


def no_device(kind: str) -> str:
    """Return the message for a requested device type that torch cannot use here."""
    return f"--device {kind} asks for {'a GPU' if kind == 'cuda' else 'an accelerator'}, but torch can use none here"


def kind_of(device: str) -> str:
    """Return torch's name of the device type that ``--device`` selects.

    Raises:
        ConfigError: torch does not know such a type.
    """
    if device == "auto":
        return detect_accelerator() or "cpu"
    kind, _, number = device.partition(":")
    if number:
        hint = f"--device {kind}; CUDA_VISIBLE_DEVICES and similar variables choose among several"
        message = f"'{device}' is a single device, but --device takes a kind of device"
        raise ConfigError(message, where="--device", hint=hint)
    if kind in DEVICES or kind == detect_accelerator():
        return kind
    names = ("auto", *DEVICES)
    near = f"did you mean {DEVICE_ALIASES[kind]}?" if kind in DEVICE_ALIASES else did_you_mean(kind, names)
    hint = near or f"there are: {', '.join(names)}"
    raise ConfigError(f"'{device}' is not a kind of device that torch knows here", where="--device", hint=hint)


@dataclass(frozen=True)
class Launched:
    """The place of a worker among its peers.

    Attributes:
        rank, local_rank: its rank among all workers and on its node, from 0.
        world, local_world: number of all workers and of those on its node.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1


LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
"""Variables that a launcher such as torchrun sets for each worker."""

TASKS_OF_OTHERS = {"srun": "SLURM_STEP_NUM_TASKS", "mpirun": "OMPI_COMM_WORLD_SIZE", "mpiexec": "PMI_SIZE"}
"""Launchers that do not set them, and their variables with the number of processes."""


def launched() -> Launched | None:
    """Return the place of this process that its launcher has set. None without both ``RANK`` and ``WORLD_SIZE``.

    Raises:
        ConfigError: the variables are not numbers, or contradict each other.
    """
    texts = {name: text for name in LAUNCHED if (text := os.environ.get(name, "").strip())}
    if not {"RANK", "WORLD_SIZE"} <= texts.keys():
        return None
    texts = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": texts["WORLD_SIZE"], **texts}
    try:
        place = Launched(*(int(texts[name]) for name in LAUNCHED))
    except ValueError:
        place = Launched(world=0)
    ranks = range(place.world)
    if place.rank in ranks and place.local_rank in range(place.local_world) and place.local_world <= place.world:
        return place
    message = "no launcher sets " + " ".join(f"{name}={os.environ[name]}" for name in LAUNCHED if name in os.environ)
    hint = "ranks count from 0 to WORLD_SIZE - 1; to train alone: unset RANK WORLD_SIZE"
    raise ConfigError(message, where="the environment", hint=hint)


def ignored_variables() -> tuple[str, ...]:
    """Return notes about variables of launchers that do not make this process a worker."""
    if launched() is not None:
        return ()
    notes = []
    if left := [name for name in LAUNCHED if name in os.environ]:
        notes.append(f"{', '.join(left)}: ignored, because only RANK and WORLD_SIZE together make a worker")
    for launcher, name in TASKS_OF_OTHERS.items():
        count = os.environ.get(name, "")
        if count.isdecimal() and int(count) > 1:
            notes.append(f"{launcher} has started {count} processes, and each trains alone: torchrun connects workers")
    return tuple(notes)


def detect(
    template: str | None,
    template_origin: str,
    *,
    device: str = "auto",
    world_size: int | None = None,
    local_world_size: int | None = None,
) -> Environment:
    """Return the environment of this machine.

    Args:
        device: the value of ``--device``: ``auto``, or torch's name of a device type.
        world_size: number of workers. The default comes from :func:`launched`, or is 1.
        local_world_size: number of workers on one node, with a similar default.

    Raises:
        ConfigError: the device type does not exist, or the variables of a launcher contradict each other.
    """
    kind, place = kind_of(device), launched()
    workers = world_size or (place.world if place else 1)
    local = local_world_size or (place.local_world if place else workers)
    return Environment(
        template=template,
        template_origin=template_origin,
        world_size=workers,
        local_world_size=local,
        device=kind,
        compute_capability=detect_gpu() if kind == "cuda" else None,
        accelerator=None if kind == "cpu" else detect_accelerator(),
        packages=installed_packages(),
        cxx=find_cxx(),
        notes=ignored_variables(),
    )


DEVICE_MEMORY = "DEVICE_MEMORY_GB"
"""Environment variable with the memory of a device, in 10^9 bytes."""


@dataclass(frozen=True)
class DeviceKind:
    """The data sheet of a GPU. Peaks are for dense products.

    Attributes:
        source: the document.
        capability: its compute capability.
        memory_gb: its memory in 10^9 bytes.
        fp32_tflops, bf16_tflops, fp16_tflops: 10^12 operations per second in matrix products.
        fp8_tflops: the same in fp8. None without units for it.
        memory_bandwidth: GB/s.
        link: GB/s to other GPUs in its node, in one direction.
        network: GB/s of its share of the node's network, in one direction. Nvidia's own nodes (DGX) have this much.
        host_link: GB/s of its PCI Express link, in one direction.
        multiprocessors: number of its streaming multiprocessors.
    """

    source: str
    capability: tuple[int, int]
    memory_gb: float
    fp32_tflops: float
    bf16_tflops: float
    fp16_tflops: float
    memory_bandwidth: float
    link: float
    network: float
    host_link: float
    multiprocessors: int
    fp8_tflops: float | None = None


_KINDS: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("device_kinds.toml").read_text("utf-8"))
DEVICE_KINDS = {
    name: DeviceKind(**facts | {"capability": tuple(facts["capability"])}) for name, facts in _KINDS.items()
}
