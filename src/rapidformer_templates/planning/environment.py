"""What the resolver may know of the place where a run is to happen; found without importing torch, where it can be."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

from rapidformer_templates.errors import ConfigError, did_you_mean

DEVICES = ("cpu", "cuda", "xpu", "mps", "npu", "hpu", "mlu", "musa", "mtia", "maia")
"""What torch calls the devices that it or a package beside it knows; AMD's call themselves ``cuda``."""

OPTIONAL_PACKAGES = (
    "apex",
    "bitsandbytes",
    "deepspeed",
    "fairscale",
    "flash_attn",
    "liger_kernel",
    "mlflow",
    "onnx",
    "onnxruntime",
    "onnxscript",
    "peft",
    "tensorboard",
    "torch_xla",
    "torchao",
    "trackio",
    "triton",
    "tvm",
    "wandb",
)


@dataclass(frozen=True)
class Environment:
    """Facts about the template, the workers and their devices.

    Attributes:
        template: the library's template that the user's class derives from, or None.
        template_origin: where that was decided, such as ``train.py:8``.
        world_size: number of workers.
        local_world_size: workers on one node.
        device: what torch calls the kind of device: ``cpu``, ``cuda``, ``xpu`` …
        compute_capability: of Nvidia's GPU, such as ``(8, 0)``; None where there is none.
        accelerator: what torch calls the kind of accelerator that it can use here, or None.
        packages: optional packages that can be imported, with their versions.
        cxx: the C++ compiler that torch's inductor would call; None where there is none.
        device_origin: what says which devices those are; None where these are the ones of this machine.
        device_kind: the key of ``DEVICE_KINDS`` of a machine that is not here.
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

    @property
    def has_device(self) -> bool:
        """Whether devices of that kind can be seen from here."""
        return self.device == "cpu" or self.device == self.accelerator or self.compute_capability is not None

    @property
    def white_box(self) -> bool:
        """Whether the user's own code decides the template, and not the command line."""
        return ".py:" in self.template_origin or self.template_origin == "in code"


def installed_packages() -> dict[str, str]:
    """The optional packages that are installed, with their versions.

    The package ``onnxruntime`` computes on CPUs only, and so its version ends in ``+cpu``, as torch's does;
    ``onnxruntime-gpu`` brings the same module. ``apex`` counts only when it is Nvidia's: the package of that
    name in the public index is something else and has no ``apex.optimizers``.
    """
    versions = {}
    for name in OPTIONAL_PACKAGES:
        if importlib.util.find_spec(name) is None:
            continue
        if name == "apex" and importlib.util.find_spec("apex.optimizers") is None:
            continue
        try:
            versions[name] = version_of_package(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "unknown"
        else:
            versions[name] += "+cpu" if name == "onnxruntime" else ""
    return versions


@cache
def version_of_package(name: str) -> str:
    """The version of an installed package. Every run asks for many of them, and reading one takes milliseconds.

    Raises:
        PackageNotFoundError: nothing says which version it is.
    """
    return importlib.metadata.version(name)


def version_of(version: str) -> tuple[int, ...]:
    """The first two numbers of a version, to compare it by."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def find_cxx() -> str | None:
    """The C++ compiler that torch's inductor would call: that of ``CXX``, else the system's."""
    return shutil.which(os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++"))


@cache
def compile_backends() -> tuple[str, ...] | None:
    """Every backend of torch.compile, or None where there is no torch. Unlike the rest, it imports torch."""
    if importlib.util.find_spec("torch") is None:
        return None
    from torch._dynamo import list_backends

    return tuple(list_backends(exclude_tags=()))


@cache
def detect_gpu() -> tuple[int, int] | None:
    """The compute capability of the first visible GPU, or None where torch would see none."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return None
    try:
        if importlib.metadata.version("torch").endswith("+cpu"):
            return None
    except importlib.metadata.PackageNotFoundError:
        pass  # planning on a machine without torch: the driver alone decides
    query = shutil.which("nvidia-smi")
    if query is None:
        return None
    answer = subprocess.run(
        [query, "--query-gpu=compute_cap", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    first = answer.stdout.strip().splitlines()[:1]
    if answer.returncode != 0 or not first:
        return None
    major, _, minor = first[0].partition(".")
    return int(major), int(minor or 0)


@cache
def detect_accelerator() -> str | None:
    """What torch calls the accelerator that it can use here, or None.

    torch itself is asked, which takes a second to import, only if it is imported already or its build, the system or a
    package says that there may be another kind than Nvidia's.
    """
    if detect_gpu() is not None:
        return "cuda"
    if "torch" not in sys.modules and not _may_have_another_kind():
        return None
    import torch

    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None else found.type


def ask_torch_if_needed(device: str) -> None:
    """Import torch before the first :func:`detect` of a run, which uses every device that torch sees.

    Without torch a GPU is overlooked if there is no ``nvidia-smi``. Torch is not needed if the run uses the CPU, if the
    driver names a GPU, or if torch is built for CPUs. :func:`detect_accelerator` asks torch for other accelerators.
    """
    if device == "cpu" or detect_gpu() is not None or _is_for_cpus():
        return
    import torch  # noqa: F401


def _is_for_cpus() -> bool:
    """Whether torch is built for CPUs alone, or is not there."""
    try:
        return importlib.metadata.version("torch").endswith("+cpu")
    except importlib.metadata.PackageNotFoundError:
        return True


def _may_have_another_kind() -> bool:
    try:
        build = importlib.metadata.version("torch").partition("+")[2]
    except importlib.metadata.PackageNotFoundError:
        return False
    packages = importlib.metadata.entry_points(group="torch.backends")  # which torch imports, such as torch_npu
    return build.startswith(("rocm", "xpu")) or sys.platform == "darwin" or bool(packages)


def no_device(kind: str) -> str:
    """What to say where a kind of device is asked for and torch can use none."""
    return f"--device {kind} asks for {'a GPU' if kind == 'cuda' else 'an accelerator'}, and torch can use none here"


def kind_of(device: str) -> str:
    """What torch calls the kind of device that ``--device`` means.

    Raises:
        ConfigError: torch cannot know such a one.
    """
    if device == "auto":
        return detect_accelerator() or "cpu"
    kind, _, number = device.partition(":")
    if number:
        hint = f"--device {kind}; CUDA_VISIBLE_DEVICES and its like choose among several"
        raise ConfigError(f"'{device}' is one device, and a kind of them is asked for", where="--device", hint=hint)
    if kind in DEVICES or kind == detect_accelerator():
        return kind
    known = ("auto", *DEVICES)
    hint = did_you_mean(kind, known) or f"there are: {', '.join(known)}"
    raise ConfigError(f"'{device}' is no kind of device that torch knows here", where="--device", hint=hint)


def detect(
    template: str | None,
    template_origin: str,
    *,
    device: str = "auto",
    world_size: int | None = None,
    local_world_size: int | None = None,
) -> Environment:
    """The environment of this machine.

    Args:
        device: from ``--device``: ``auto``, or what torch calls a kind of device.
        world_size: number of workers; by default that of torchrun's environment, else 1.
        local_world_size: workers on one node; likewise.

    Raises:
        ConfigError: there is no such kind of device.
    """
    kind = kind_of(device)
    workers = world_size or int(os.environ.get("WORLD_SIZE", "1"))
    local = local_world_size or int(os.environ.get("LOCAL_WORLD_SIZE", str(workers)))
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
    )
