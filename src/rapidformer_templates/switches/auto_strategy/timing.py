"""The devices that a plan is for: rates that training sustains, each measured, given, or marked as assumed.

Imports no torch.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rapidformer_templates.errors import ConfigError
from rapidformer_templates.planning.environment import DEVICE_KINDS, DEVICE_MEMORY, Environment
from rapidformer_templates.switches.auto_strategy import device_file

GB = 10**9

KERNEL_SECONDS = 2e-6
"""Seconds between two kernels on a device."""

LAUNCH_SECONDS = 5e-6
"""Seconds in which the host starts an operation of eager PyTorch. It agrees with a BERT of single samples on a V100."""

MEMORY_PASSES = 1.9
"""How often operations between two products move an operand of each through memory. Fitted."""


@dataclass(frozen=True)
class Assumed:
    """Values assumed for a device if nothing else is known.

    Attributes:
        tflops: 10^12 operations per second in large matrix products, by precision.
        attention_tflops: the same in attention kernels of 16 bits.
        multiprocessors: units that each compute a tile of a product. 0 if products do not depend on that.
        memory_bandwidth: GB/s between the device and its memory.
        intra_node, inter_node: GB/s that a worker sends to others in its node, and to other nodes.
        host_link: GB/s between the device and the memory of its host, in one direction.
        context_gb: memory of a process before it has a model: contexts, libraries, buffers of collectives.
    """

    tflops: Mapping[str, float]
    attention_tflops: float
    multiprocessors: int
    memory_bandwidth: float
    intra_node: float
    inter_node: float
    host_link: float
    context_gb: float


ASSUMED = {
    # An A100 with 80 GB in a node of Nvidia (DGX).
    "cuda": Assumed({"fp32": 17.9, "bf16": 250.0, "fp16": 250.0}, 103.0, 108, 1733.0, 225.0, 20.0, 21.3, 1.5),
    # One core of a server; workers share its memory.
    "cpu": Assumed({"fp32": 0.05, "bf16": 0.015, "fp16": 0.015}, 0.05, 0, 8.0, 2.0, 1.0, 8.0, 0.8),
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
        tflops: 10^12 operations per second in large matrix products, sustained.
        attention_tflops: the same in attention kernels.
        multiprocessors: see :class:`Assumed`.
        memory_bandwidth, intra_node, inter_node, host_link: GB/s.
        context_gb: see :class:`Assumed`.
        sources: where each value is from.
        host_gb: host memory of a node. None if it is unknown, and then not checked.
        kernel_seconds: seconds of a product or of an attention kernel in addition to its operations.
        launch_seconds: seconds in which the host starts another operation.
        activation_bandwidth: GB/s at which operations between two products process the operands of these products.
            None assumes that they move each operand ``MEMORY_PASSES`` times through memory.
        unaligned_tflops: 10^12 operations per second in batched products of 16 bits whose rows do not begin at
            multiples of 16 bytes. None means ``tflops``.
        fp8_tflops: 10^12 operations per second in large products of fp8. None if it is unknown.
        update_bandwidth: GB/s of an update. None means ``memory_bandwidth``.
        exchanges: measured exchanges of the workers of a node, by kind. Other exchanges are computed from the links.
        computation_factor, exchange_factor: see
            :class:`~rapidformer_templates.switches.auto_strategy.device_file.PrecisionRates`.
    """

    device: str
    precision: str
    memory_gb: float
    tflops: float
    attention_tflops: float
    multiprocessors: int
    memory_bandwidth: float
    intra_node: float
    inter_node: float
    host_link: float
    context_gb: float
    sources: Mapping[str, str] = field(hash=False)
    host_gb: float | None = None
    kernel_seconds: float = KERNEL_SECONDS
    launch_seconds: float = LAUNCH_SECONDS
    activation_bandwidth: float | None = None
    unaligned_tflops: float | None = None
    fp8_tflops: float | None = None
    update_bandwidth: float | None = None
    exchanges: Mapping[str, device_file.ExchangeRate] = field(default_factory=dict, hash=False)
    computation_factor: float = 1.0
    exchange_factor: float = 1.0

    def lines(self, *, offloads: bool = False) -> list[str]:
        """Return the assumptions as lines for people.

        Args:
            offloads: whether activations go to the host.
        """
        host = [f"{self.host_link:g} GB/s to the host and back ({self.sources['host_link']})"] if offloads else []
        of_node = "host memory of a node unknown and not checked (--host-memory-gb N checks it)"
        if self.host_gb is not None:
            of_node = f"host memory {self.host_gb:g} GB per node ({self.sources['host_gb']})"
        devices = "CPUs" if self.device == "cpu" else "GPUs"
        named = [f"{devices} ({self.sources['device']})"] if "device" in self.sources else []
        exchanges = [
            f"{kind} {rate.seconds * 1e6:.0f} µs + bytes / {rate.gbs:.3g} GB/s" for kind, rate in self.exchanges.items()
        ]
        measured = [f"exchanges in a node: {', '.join(exchanges)} (measured)"] if exchanges else []
        factors = (self.computation_factor, self.exchange_factor)
        of_steps = ["computation in real steps × {:.2f}, exchanges × {:.2f} (measured)".format(*factors)]
        return [
            *named,
            f"device memory {self.memory_gb:g} GB per worker ({self.sources['memory_gb']}), "
            f"{self.context_gb:g} GB of it for contexts and libraries",
            of_node,
            f"{self.tflops:g} TFLOP/s of {self.precision} products ({self.sources['tflops']}), "
            f"{self.attention_tflops:g} in attention ({self.sources['attention_tflops']}), "
            f"{self.memory_bandwidth:g} GB/s to memory ({self.sources['memory_bandwidth']})",
            f"{self.intra_node:g} GB/s per worker inside a node ({self.sources['intra_node']}), "
            f"{self.inter_node:g} GB/s between nodes ({self.sources['inter_node']})",
            *measured,
            *(of_steps if factors != (1, 1) else []),
            *host,
        ]


PRODUCT_SHARES = {7: 0.7, 8: 0.8, 9: 0.71}
"""Share of the peak of 16-bit products that large products sustain, by compute capability. Fitted.

The limit of the power lowers the clock under load, and more so on newer devices.
"""

ATTENTION_SHARES = {7: 0.25, 8: 0.33, 9: 0.19}
"""The same for attention kernels. Fitted, except for devices of compute capability 7, which were not measured."""

FP32_SHARE, MEMORY_SHARE, LINK_SHARE, NETWORK_SHARE, HOST_SHARE = 0.92, 0.85, 0.75, 0.8, 2 / 3
"""Share of a data sheet's peak that training reaches: fp32 products, memory, and links in a node, between nodes, and to
the host.

Products of fp32 units do not reach the limit of the power. cuBLAS computes large ones at more than 90 % of the peak.
"""


def find_hardware(environment: Environment, precision: str, host_memory_gb: float | None = None) -> Hardware:
    """Return the devices of this machine, or those of ``--device-kind``, ``--device-file`` and variables in ``GIVEN``.

    Args:
        host_memory_gb: host memory of a node. None measures it if the plan is for this machine.

    Raises:
        ConfigError: a variable is not a positive number, or the memory is unknown.
    """
    assumed = ASSUMED["cpu" if environment.device == "cpu" else "cuda"]
    names = ("memory_bandwidth", "intra_node", "inter_node", "host_link")
    values: dict[str, float] = {name: getattr(assumed, name) for name in names}
    values["tflops"] = assumed.tflops[precision]
    values["attention_tflops"] = min(assumed.attention_tflops, values["tflops"])
    multiprocessors, unaligned, fp8 = assumed.multiprocessors, None, None
    sources = dict.fromkeys(values, "assumed")
    if environment.device_origin:
        sources["device"] = environment.device_origin
    if environment.device_kind:
        kind = DEVICE_KINDS[environment.device_kind]
        peak: float = getattr(kind, f"{precision}_tflops")
        generation, is_tensor = kind.capability[0], peak > kind.fp32_tflops
        sustained = {
            "memory_gb": kind.memory_gb,
            "tflops": round(peak * (PRODUCT_SHARES[generation] if is_tensor else FP32_SHARE), 1),
            "attention_tflops": round(peak * (ATTENTION_SHARES[generation] if is_tensor else FP32_SHARE), 1),
            "memory_bandwidth": round(kind.memory_bandwidth * MEMORY_SHARE, 1),
            "intra_node": round(kind.link * LINK_SHARE, 1),
            "inter_node": round(kind.network * NETWORK_SHARE, 1),
            "host_link": round(kind.host_link * HOST_SHARE, 1),
        }
        multiprocessors, unaligned = kind.multiprocessors, kind.fp32_tflops * FP32_SHARE
        fp8 = kind.fp8_tflops and round(kind.fp8_tflops * PRODUCT_SHARES[generation], 1)
        values |= sustained
        sources |= dict.fromkeys(sustained, kind.source)
    rates = None
    if environment.device_file:
        file = device_file.read_device_file(environment.device_file)
        rates = file.rates_of(environment.local_world_size)
        sustained = _sustained(file, rates, environment, precision)
        multiprocessors = file.multiprocessors
        values |= sustained
        sources |= dict.fromkeys(sustained, environment.device_file)
    for name, variable in GIVEN.items():
        if variable in os.environ:
            values[name], sources[name] = _positive(variable), variable
    if "DEVICE_TFLOPS" in os.environ:
        values["attention_tflops"] = min(values["attention_tflops"], values["tflops"])
    if "memory_gb" not in values:
        values["memory_gb"], sources["memory_gb"] = _measured_gb(environment), "measured"
    sources["host_gb"] = "--host-memory-gb"
    if host_memory_gb is None and sources["memory_gb"] == "measured":
        host_memory_gb, sources["host_gb"] = round(host_bytes() / GB, 1), "measured"
    measured: dict[str, float] = {}
    if rates is not None:
        names = ("kernel_seconds", "activation_bandwidth", "computation_factor", "exchange_factor")
        measured = {name: getattr(rates.precisions[precision], name) for name in names}
        measured |= {"launch_seconds": rates.launch_seconds, "update_bandwidth": rates.update_bandwidth}
    return Hardware(
        environment.device,
        precision,
        **values,
        multiprocessors=multiprocessors,
        context_gb=assumed.context_gb,
        sources=sources,
        unaligned_tflops=unaligned,
        fp8_tflops=fp8,
        host_gb=host_memory_gb,
        exchanges=rates.exchanges if rates and GIVEN["intra_node"] not in os.environ else {},
        **measured,
    )


def _sustained(
    file: device_file.DeviceFile, rates: device_file.WorkerRates, environment: Environment, precision: str
) -> dict[str, float]:
    """Return the values of a device file that replace assumed ones.

    Raises:
        ConfigError: the file has no rates for this precision.
    """
    if precision not in rates.precisions:
        message = f"{environment.device_file} has no rates for {precision}, only for {', '.join(rates.precisions)}"
        hint = "rapidformer bench calibrate on the machine that trains measures them"
        raise ConfigError(message, where="--device-file", hint=hint)
    sustained = {
        "memory_gb": round(file.memory_gb / (environment.local_world_size if file.device == "cpu" else 1), 1),
        "tflops": rates.precisions[precision].tflops,
        "attention_tflops": rates.precisions[precision].attention_tflops,
        "memory_bandwidth": rates.memory_bandwidth,
    }
    if rates.host_link:
        sustained["host_link"] = rates.host_link
    if rates.exchanges:
        sustained["intra_node"] = rates.exchanges[device_file.ALL_GATHER].gbs
    return sustained


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
        return round(host_bytes() / GB / environment.local_world_size, 1)
    sizes: list[float] = []
    if query := shutil.which("nvidia-smi"):
        command = [query, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]  # in MiB
        answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
        sizes = [float(line) for line in answer.stdout.split() if line.replace(".", "").isdecimal()]
    if not sizes:
        hint = "rapidformer plan --auto-strategy --device-kind a100-80gb …, or DEVICE_MEMORY_GB=80, says how much"
        raise ConfigError("no GPU is visible here, so its memory is not known", where="--auto-strategy", hint=hint)
    return round(min(sizes) * 2**20 / GB, 1)


def host_bytes() -> int:
    """Memory of this machine or container."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text(encoding="ascii").strip() if limit.is_file() else "max"
    return memory if text == "max" else min(memory, int(text))
