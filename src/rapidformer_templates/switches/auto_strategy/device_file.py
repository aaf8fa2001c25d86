"""Measured rates of a device, as a file: ``rapidformer bench calibrate`` writes it and ``plan --device-file`` reads it.

Imports no torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from rapidformer_templates.errors import ConfigError
from rapidformer_templates.system.files import JSON_ERRORS, write_json

FORMAT = "rapidformer device 2"


EXCHANGES = ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, SEND = (
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send",
)  # fmt: skip
"""Kinds of exchanges that are measured. ``send`` is one tensor to the next worker."""


@dataclass(frozen=True)
class ExchangeRate:
    """An exchange between the workers of a node takes ``seconds``, and its bytes travel at ``gbs`` GB/s.

    A worker of n sends (n - 1) / n of the bytes of all shares in an all-gather, a reduce-scatter or an all-to-all, and
    twice as much in an all-reduce.
    """

    seconds: float
    gbs: float


@dataclass(frozen=True)
class PrecisionRates:
    """Rates that depend on the precision.

    Attributes:
        tflops: 10^12 operations per second in matrix products.
        kernel_seconds: seconds that a matrix product takes in addition to its operations.
        attention_tflops: 10^12 operations per second in attention kernels.
        activation_bandwidth: GB/s at which the operations between two products process the operands of these products.
        computation_factor, exchange_factor: seconds of the computation and of the exchanges of real steps, divided by
            those that follow from the other rates.
    """

    tflops: float
    kernel_seconds: float
    attention_tflops: float
    activation_bandwidth: float
    computation_factor: float = 1.0
    exchange_factor: float = 1.0


@dataclass(frozen=True)
class WorkerRates:
    """Rates of each worker while all workers of a node compute.

    Attributes:
        workers: number of these workers.
        precisions: rates by name of the precision.
        memory_bandwidth: GB/s that a copy reads and writes.
        update_bandwidth: GB/s that an update reads and writes, if it moves as many bytes as the planner assumes.
        launch_seconds: seconds in which the host starts an operation.
        host_link: GB/s of a copy to the host. None if the device is the host.
        exchanges: rates by kind. Empty for a single worker.
    """

    workers: int
    precisions: Mapping[str, PrecisionRates]
    memory_bandwidth: float
    update_bandwidth: float
    launch_seconds: float
    host_link: float | None = None
    exchanges: Mapping[str, ExchangeRate] = field(default_factory=dict)


@dataclass(frozen=True)
class DeviceFile:
    """The measured devices of a machine.

    Attributes:
        device: ``cpu``, or torch's name of the accelerator.
        name: name of the processor or of the GPU.
        memory_gb: memory in 10^9 bytes: of one GPU, or of the host, which all workers on CPUs share.
        compute_capability: compute capability of Nvidia's GPU.
        multiprocessors: multiprocessors of the GPU. 0 for other devices.
        rates: rates by number of workers.
    """

    device: str
    name: str
    memory_gb: float
    compute_capability: tuple[int, int] | None
    multiprocessors: int
    rates: tuple[WorkerRates, ...]

    def rates_of(self, workers: int) -> WorkerRates:
        """Return the rates that were measured with the closest number of workers."""
        return min(self.rates, key=lambda rates: abs(math.log(rates.workers / workers)))

    def write(self, file: Path) -> None:
        """Write the file. A missing folder is created."""
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, {"format": FORMAT, **asdict(self)})


Record = TypeVar("Record", ExchangeRate, PrecisionRates, WorkerRates, DeviceFile)


def read_device_file(file: str) -> DeviceFile:
    """Read a device file.

    Raises:
        ConfigError: the file cannot be read, is not a device file, or a value is missing or cannot be used.
    """
    try:
        document = json.loads(Path(file).read_text(encoding="utf-8"))
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise ValueError(f"its 'format' is not '{FORMAT}'")
        return _device_of(document)
    except JSON_ERRORS as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else getattr(error, "strerror", None) or error
        hint = "rapidformer bench calibrate --output FILE writes a device file"
        raise ConfigError(f"cannot use {file}: {reason}", where="--device-file", hint=hint) from None


def _device_of(document: Mapping[str, Any]) -> DeviceFile:
    capability, rates = document["compute_capability"], []
    for record in document["rates"]:
        precisions = {name: _record(PrecisionRates, record["precisions"][name]) for name in record["precisions"]}
        exchanges = {kind: _record(ExchangeRate, record["exchanges"][kind]) for kind in record["exchanges"]}
        rates.append(_record(WorkerRates, record | {"precisions": precisions, "exchanges": exchanges}))
    facts = {name: value for name, value in document.items() if name != "format"}
    facts |= {"compute_capability": capability and tuple(capability), "rates": tuple(rates)}
    return _record(DeviceFile, facts)


def _record(kind: type[Record], values: Mapping[str, Any]) -> Record:
    """Return a record. A number that is not one, or that is negative, is a ValueError."""
    for each in fields(kind):
        value = values[each.name]
        is_number = isinstance(value, int | float) and 0 <= value < math.inf
        if each.type in ("int", "float") and not is_number:
            raise ValueError(f"'{each.name}' is {value}, not a positive number")
    return kind(**values)
