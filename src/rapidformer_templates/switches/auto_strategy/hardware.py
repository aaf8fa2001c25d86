"""The devices that a plan is for: memory, rates and bandwidths. Each value is measured, given, or marked as assumed.

Imports no torch.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rapidformer_templates.errors import ConfigError
from rapidformer_templates.planning.environment import DEVICE_KINDS, DEVICE_MEMORY, Environment

GB = 10**9


@dataclass(frozen=True)
class Assumed:
    """Values assumed for a device if nothing else is known.

    Attributes:
        tflops: 10^12 operations per second in matrix products, as reached in training, by precision.
        memory_bandwidth: GB/s between the device and its memory.
        intra_node, inter_node: GB/s that a worker sends to others in its node, and to other nodes.
        host_link: GB/s between the device and the memory of its host, in one direction.
        context_gb: memory of a process before it has a model: contexts, libraries, buffers of collectives.
    """

    tflops: Mapping[str, float]
    memory_bandwidth: float
    intra_node: float
    inter_node: float
    host_link: float
    context_gb: float


ASSUMED = {
    # An A100: 45 % of 312 TFLOP/s in 16 bits and 80 % of 19.5 in fp32; 80 % of 2 TB/s; NVLink 3; 200 Gbit/s per GPU;
    # two thirds of the 32 GB/s of PCIe 4 with 16 lanes.
    "cuda": Assumed({"fp32": 15.6, "bf16": 140.0, "fp16": 140.0}, 1600.0, 200.0, 20.0, 21.3, 1.5),
    # One core of a server; workers share its memory.
    "cpu": Assumed({"fp32": 0.05, "bf16": 0.015, "fp16": 0.015}, 8.0, 2.0, 1.0, 8.0, 0.8),
}

GIVEN = {
    "memory_gb": DEVICE_MEMORY,
    "tflops": "DEVICE_TFLOPS",
    "memory_bandwidth": "DEVICE_BANDWIDTH_GBS",
    "intra_node": "INTRA_NODE_GBS",
    "inter_node": "INTER_NODE_GBS",
    "host_link": "HOST_LINK_GBS",
}
"""Environment variables for values that are otherwise measured or assumed."""


@dataclass(frozen=True)
class Hardware:
    """One worker's device and its connections.

    Attributes:
        device: ``cpu``, or torch's name of the accelerator.
        precision: precision that ``tflops`` applies to.
        memory_gb: device memory that this worker may use, 10^9 bytes.
        tflops: 10^12 operations per second in matrix products, sustained.
        memory_bandwidth, intra_node, inter_node, host_link: GB/s.
        context_gb: see :class:`Assumed`.
        sources: where each value is from.
    """

    device: str
    precision: str
    memory_gb: float
    tflops: float
    memory_bandwidth: float
    intra_node: float
    inter_node: float
    host_link: float
    context_gb: float
    sources: Mapping[str, str]

    def lines(self, *, offloads: bool = False) -> list[str]:
        """Return the assumptions as lines for people.

        Args:
            offloads: whether activations go to the host.
        """
        host = [f"{self.host_link:g} GB/s to the host and back ({self.sources['host_link']})"] if offloads else []
        named = [f"GPUs ({self.sources['device']})"] if "device" in self.sources else []
        return [
            *named,
            f"device memory {self.memory_gb:g} GB per worker ({self.sources['memory_gb']}), "
            f"{self.context_gb:g} GB of it for contexts and libraries",
            f"{self.tflops:g} TFLOP/s of {self.precision} products ({self.sources['tflops']}), "
            f"{self.memory_bandwidth:g} GB/s to memory ({self.sources['memory_bandwidth']})",
            f"{self.intra_node:g} GB/s per worker inside a node ({self.sources['intra_node']}), "
            f"{self.inter_node:g} GB/s between nodes ({self.sources['inter_node']})",
            *host,
        ]


TENSOR_SHARE, FP32_SHARE, MEMORY_SHARE, LINK_SHARE = 0.45, 0.8, 0.8, 2 / 3
"""Share of a data sheet's peak that training reaches: 16-bit products, fp32 products, memory, links in a node."""


def find_hardware(environment: Environment, precision: str) -> Hardware:
    """Return the devices of this machine, or those that ``--device-kind`` or the variables in ``GIVEN`` describe.

    Raises:
        ConfigError: a variable is not a positive number, or the memory is unknown.
    """
    assumed = ASSUMED["cpu" if environment.device == "cpu" else "cuda"]
    values: dict[str, float] = {
        "tflops": assumed.tflops[precision],
        "memory_bandwidth": assumed.memory_bandwidth,
        "intra_node": assumed.intra_node,
        "inter_node": assumed.inter_node,
        "host_link": assumed.host_link,
    }
    sources = dict.fromkeys(values, "assumed")
    if environment.device_origin:
        sources["device"] = environment.device_origin
    if environment.device_kind:
        kind = DEVICE_KINDS[environment.device_kind]
        peak: float = getattr(kind, f"{precision}_tflops")
        sustained = {
            "memory_gb": kind.memory_gb,
            "tflops": round(peak * (FP32_SHARE if peak == kind.fp32_tflops else TENSOR_SHARE), 1),
            "memory_bandwidth": round(kind.memory_bandwidth * MEMORY_SHARE, 1),
            "intra_node": round(kind.link * LINK_SHARE, 1),
            "host_link": round(kind.host_link * LINK_SHARE, 1),
        }
        values |= sustained
        sources |= dict.fromkeys(sustained, kind.source)
    for name, variable in GIVEN.items():
        if variable in os.environ:
            values[name], sources[name] = _positive(variable), variable
    if "memory_gb" not in values:
        values["memory_gb"], sources["memory_gb"] = _measured_gb(environment), "measured"
    return Hardware(environment.device, precision, **values, context_gb=assumed.context_gb, sources=sources)


def _positive(variable: str) -> float:
    text = os.environ[variable]
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if value <= 0:
        raise ConfigError(f"{variable} must be a positive number, not '{text}'", where="environment")
    return value


def _measured_gb(environment: Environment) -> float:
    """Memory of the smallest visible GPU, or a worker's share of the memory of this machine or container, in GB."""
    if environment.device == "cpu":
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        limit = Path("/sys/fs/cgroup/memory.max")
        text = limit.read_text(encoding="ascii").strip() if limit.is_file() else "max"
        memory = memory if text == "max" else min(memory, int(text))
        return round(memory / GB / environment.local_world_size, 1)
    sizes: list[float] = []
    if query := shutil.which("nvidia-smi"):
        command = [query, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]  # in MiB
        answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
        sizes = [float(line) for line in answer.stdout.split() if line.replace(".", "").isdecimal()]
    if not sizes:
        raise ConfigError(
            "no GPU is visible here, so its memory is not known",
            where="--auto-strategy",
            hint="rapidformer plan --auto-strategy --device-kind a100-80gb …, or DEVICE_MEMORY_GB=80, says how much",
        )
    return round(min(sizes) * 2**20 / GB, 1)
