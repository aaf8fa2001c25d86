"""GPUs by name, for plans of other machines. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

DEVICE_MEMORY = "DEVICE_MEMORY_GB"
"""Environment variable with the memory of a device, in 10^9 bytes."""

DeviceKindName = Literal[
    "v100-32gb",
    "a10-24gb",
    "a100-40gb",
    "a100-80gb",
    "rtx-4090-24gb",
    "l4-24gb",
    "l40s-48gb",
    "h100-80gb",
    "h200-141gb",
]


@dataclass(frozen=True)
class DeviceKind:
    """The data sheet of a GPU. Peaks are for dense products.

    Attributes:
        source: the document.
        capability: its compute capability.
        memory_gb: its memory in 10^9 bytes.
        fp32_tflops, bf16_tflops, fp16_tflops: 10^12 operations per second in matrix products.
        memory_bandwidth: GB/s.
        link: GB/s to other GPUs in its node, in one direction.
        host_link: GB/s of its PCI Express link, in one direction.
    """

    source: str
    capability: tuple[int, int]
    memory_gb: float
    fp32_tflops: float
    bf16_tflops: float
    fp16_tflops: float
    memory_bandwidth: float
    link: float
    host_link: float


DEVICE_KINDS: dict[str, DeviceKind] = {
    # It has no bf16 units. bf16 runs at the rate of fp32.
    "v100-32gb": DeviceKind("NVIDIA V100 data sheet, SXM2", (7, 0), 32, 15.7, 15.7, 125, 900, 150, 16),
    "a10-24gb": DeviceKind("NVIDIA A10 data sheet", (8, 6), 24, 31.2, 125, 125, 600, 32, 32),
    "a100-40gb": DeviceKind("NVIDIA A100 data sheet, SXM", (8, 0), 40, 19.5, 312, 312, 1555, 300, 32),
    "a100-80gb": DeviceKind("NVIDIA A100 data sheet, SXM", (8, 0), 80, 19.5, 312, 312, 2039, 300, 32),
    "rtx-4090-24gb": DeviceKind("NVIDIA Ada architecture paper", (8, 9), 24, 82.6, 165.2, 165.2, 1008, 32, 32),
    "l4-24gb": DeviceKind("NVIDIA L4 data sheet", (8, 9), 24, 30.3, 121, 121, 300, 32, 32),
    "l40s-48gb": DeviceKind("NVIDIA L40S data sheet", (8, 9), 48, 91.6, 362, 362, 864, 32, 32),
    "h100-80gb": DeviceKind("NVIDIA H100 data sheet, SXM", (9, 0), 80, 67, 989, 989, 3350, 450, 64),
    "h200-141gb": DeviceKind("NVIDIA H200 data sheet, SXM", (9, 0), 141, 67, 989, 989, 4800, 450, 64),
}

assert tuple(DEVICE_KINDS) == get_args(DeviceKindName)
