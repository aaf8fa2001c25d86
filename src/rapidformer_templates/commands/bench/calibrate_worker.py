"""The worker of ``bench calibrate``: measures products, other operations and exchanges together with all workers.

Every measurement runs for a fixed time on all workers at once, because workers on CPUs share cores and memory.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from rapidformer_templates.commands.bench.output import processor
from rapidformer_templates.commands.bench.reference_steps import measure_steps
from rapidformer_templates.switches.auto_strategy.device_file import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    REDUCE_SCATTER,
    SEND,
)
from rapidformer_templates.switches.auto_strategy.timing import host_bytes
from rapidformer_templates.system import accelerator
from rapidformer_templates.system.workers import Workers, all_gather, join, reduce_scatter

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

PRODUCTS = {
    "cpu": (
        (128, 128, 128), (256, 128, 512), (512, 512, 128), (384, 192, 576), (384, 192, 2048), (512, 512, 512),
        (1024, 512, 1024),
    ),
    "gpu": (
        (2048, 1024, 4096), (4096, 4096, 4096), (8192, 4096, 4096), (8192, 5120, 15360), (8192, 8192, 8192),
        (16384, 4096, 16384),
    ),
}  # fmt: skip
"""Rows, inner size and columns of the measured products."""

ATTENTION = {
    "cpu": ((2, 4, 128, 32), (4, 8, 128, 32), (2, 8, 256, 64)),
    "gpu": ((4, 32, 2048, 128), (2, 32, 4096, 128), (1, 32, 8192, 128)),
}
"""Samples, heads, tokens and width of a head of the measured attention kernels."""

HIDDEN = {"cpu": ((512, 128), (384, 192), (512, 512)), "gpu": ((8192, 4096), (8192, 8192))}
"""Tokens and hidden size of the operations between products."""

SIZES = {"cpu": (2**12, 2**16, 2**20, 2**23), "gpu": (2**14, 2**20, 2**24, 2**28)}
"""Bytes of the measured exchanges."""

OPERAND_BYTES = 2**27
"""Bytes of the operands that a measurement takes in turn, so that they come from memory as in training."""

PARAMETERS = {"cpu": (64, 2**15), "gpu": (64, 2**23)}
"""Number of parameter tensors of the measured update, and the elements of each."""


@dataclass
class Measurements:
    """The seconds that one worker measured, and facts about its device.

    Attributes:
        name, memory_gb, compute_capability, multiprocessors: see :class:`DeviceFile`.
        products: rows, inner size, columns and seconds of matrix products, by precision.
        attention: operations and seconds of a forward and a backward of attention, by precision.
        activations: bytes of the operands of products, and the seconds of the operations between them, by precision.
        exchanges: bytes that a worker sends, and seconds, by kind.
        copy, to_host: bytes and seconds. ``to_host`` is None if the device is the host.
        update: parameters and seconds.
        launch_seconds: seconds of an operation on a tensor of one element, with its backward.
        steps: seconds of a step of the reference model, by precision and layout.
    """

    name: str
    memory_gb: float
    compute_capability: tuple[int, int] | None = None
    multiprocessors: int = 0
    products: dict[str, list[tuple[int, int, int, float]]] = field(default_factory=dict)
    attention: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    activations: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    exchanges: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    copy: tuple[float, float] = (0.0, 0.0)
    update: tuple[float, float] = (0.0, 0.0)
    to_host: tuple[float, float] | None = None
    launch_seconds: float = 0.0
    steps: dict[str, dict[str, float]] = field(default_factory=dict)


class Stopwatch:
    """Measures the mean seconds of an operation while all workers run it.

    Args:
        seconds: time of each measurement.
    """

    def __init__(self, workers: Workers, seconds: float) -> None:
        self.workers, self._seconds = workers, seconds

    def time(self, run: Callable[[], object], *, is_exchange: bool = False) -> float:
        """Return the mean seconds of ``run``. All workers run an exchange equally often."""
        device = self.workers.device
        for _ in range(2):
            run()
        accelerator.synchronize(device)
        begin = time.perf_counter()
        run()
        accelerator.synchronize(device)
        calls = torch.tensor(max(2.0, self._seconds / (time.perf_counter() - begin)), device=device)
        if self.workers.world > 1:
            dist.all_reduce(calls, dist.ReduceOp.MIN if is_exchange else dist.ReduceOp.MAX)
        count, may_stop_early = int(calls), device.type == "cpu" and not is_exchange
        done, begin = 0, time.perf_counter()
        while done < count:
            run()
            done += 1
            if may_stop_early and time.perf_counter() - begin >= self._seconds:
                break
        accelerator.synchronize(device)
        return (time.perf_counter() - begin) / done


def describe(device: torch.device) -> Measurements:
    """Return the facts about a device, without measurements."""
    if device.type == "cpu":
        return Measurements(processor(), round(host_bytes() / 1e9, 1))
    memory = torch.get_device_module(device).get_device_properties(device).total_memory
    name = torch.get_device_module(device).get_device_name(device)
    measurements = Measurements(name, round(memory / 1e9, 1))
    if device.type == "cuda" and torch.version.hip is None:
        measurements.compute_capability = torch.cuda.get_device_capability(device)
        measurements.multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    return measurements


def precisions_of(device: torch.device) -> list[str]:
    """Return the precisions that a device computes well."""
    if device.type == "cpu":
        return ["fp32", "bf16"]
    is_older = device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False)
    return ["fp32", "fp16"] if is_older else ["fp32", "bf16", "fp16"]


def measure(workers: Workers, seconds: float) -> Measurements:
    """Measure everything on this worker.

    Args:
        seconds: time of each measurement.
    """
    measurements, watch, device = describe(workers.device), Stopwatch(workers, seconds), workers.device
    for name in precisions_of(device):
        _measure_precision(measurements, watch, name)
    sizes = "cpu" if device.type == "cpu" else "gpu"
    large = torch.zeros(SIZES[sizes][-1], dtype=torch.uint8, device=device)
    other = torch.empty_like(large)
    measurements.copy = 2.0 * large.nbytes, watch.time(lambda: other.copy_(large))
    if device.type != "cpu":
        host = torch.empty(large.shape, dtype=large.dtype, pin_memory=True)
        measurements.to_host = float(large.nbytes), watch.time(lambda: host.copy_(large, non_blocking=True))
    count, elements = PARAMETERS[sizes]
    parameters = [nn.Parameter(torch.zeros(elements, device=device)) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.AdamW(parameters)

    def update() -> None:
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()

    measurements.update = float(count * elements), watch.time(update)
    one = torch.zeros(1, device=device, requires_grad=True)
    chain = 32

    def launches() -> None:
        value = one
        for _ in range(chain):
            value = value + one
        value.backward()

    measurements.launch_seconds = watch.time(launches) / (2 * chain)
    if workers.world > 1:
        measurements.exchanges = {
            kind: _exchange_times(kind, watch) for kind in (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, SEND)
        }
    return measurements


def _measure_precision(measurements: Measurements, watch: Stopwatch, name: str) -> None:
    device, dtype = watch.workers.device, DTYPES[name]
    sizes = "cpu" if device.type == "cpu" else "gpu"
    measurements.products[name], measurements.attention[name], measurements.activations[name] = [], [], []
    for rows, inner, columns in PRODUCTS[sizes]:
        shapes = (rows, inner), (inner, columns)
        seconds = watch.time(_in_turn(torch.matmul, shapes, device, dtype))
        measurements.products[name].append((rows, inner, columns, seconds))
    for samples, heads, tokens, width in ATTENTION[sizes]:
        shape = samples, heads, tokens, width
        seconds = watch.time(_in_turn(_attend, (shape, shape, shape), device, dtype, is_trained=True))
        # 4 operations per score and element in the forward, 10 in the backward. The causal mask halves them.
        measurements.attention[name].append((7.0 * samples * heads * tokens**2 * width, seconds))
    for tokens, hidden in HIDDEN[sizes]:
        between = Between(hidden).to(device)
        shapes = (tokens, hidden), (tokens, 4 * hidden)
        moved = Between.OPERANDS * 3 * tokens * hidden * dtype.itemsize
        seconds = watch.time(_in_turn(between.forward_and_backward, shapes, device, dtype, is_trained=True))
        measurements.activations[name].append((float(moved), seconds))


def _in_turn(
    run: Callable[..., object],
    shapes: Sequence[tuple[int, ...]],
    device: torch.device,
    dtype: torch.dtype,
    *,
    is_trained: bool = False,
) -> Callable[[], object]:
    """Return a call of ``run`` with random tensors of these shapes, which takes other tensors each time."""
    size = sum(math.prod(shape) for shape in shapes) * dtype.itemsize
    operands = itertools.cycle([
        [torch.randn(shape, device=device, dtype=dtype, requires_grad=is_trained) for shape in shapes]
        for _ in range(math.ceil(OPERAND_BYTES / size))
    ])  # fmt: skip
    return lambda: run(*next(operands))


class Between(nn.Module):
    """The operations of a transformer block between its products: norms, sums, dropout and an activation."""

    OPERANDS = 18
    """Hidden states that the products of a block read and write in the forward. The backward moves twice as many.

    The products of queries, keys and values move 1 + 3, the output of attention 1 + 1, and the MLP 1 + 4 and 4 + 1. The
    attention kernel moves 2.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(hidden) for _ in range(2)])

    def forward(self, states: torch.Tensor, wide: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for norm in self.norms:
            with torch.autocast(states.device.type, states.dtype, enabled=states.dtype != torch.float32):
                states = states + functional.dropout(norm(states).to(states.dtype), 0.1)
        return states, functional.gelu(wide, approximate="tanh")

    def forward_and_backward(self, states: torch.Tensor, wide: torch.Tensor) -> None:
        first, second = self(states, wide)
        (first.sum() + second.sum()).backward()


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    functional.scaled_dot_product_attention(query, key, value, is_causal=True).sum().backward()


def _exchange_times(kind: str, watch: Stopwatch) -> list[tuple[float, float]]:
    """Return bytes that a worker sends, and seconds, for several sizes."""
    workers = watch.workers
    device, world = workers.device, workers.world
    times = []
    for size in SIZES["cpu" if device.type == "cpu" else "gpu"]:
        elements = size // 4 // world * world
        whole, share = torch.zeros(elements, device=device), torch.zeros(elements // world, device=device)
        other = torch.zeros_like(whole)

        run: dict[str, Callable[[], object]] = {
            ALL_REDUCE: partial(dist.all_reduce, whole),
            ALL_GATHER: partial(all_gather, whole, share),
            REDUCE_SCATTER: partial(reduce_scatter, share, whole),
            ALL_TO_ALL: partial(dist.all_to_all_single, other, whole),
            SEND: partial(_pass_on, whole, other, workers),
        }
        sent = {ALL_REDUCE: 2 * (world - 1) / world, SEND: 1.0}.get(kind, (world - 1) / world)
        times.append((sent * whole.nbytes, watch.time(run[kind], is_exchange=True)))
    return times


def _pass_on(tensor: torch.Tensor, received: torch.Tensor, workers: Workers) -> None:
    """Send a tensor to the next worker and receive one from the previous worker."""
    rank, world = workers.rank, workers.world
    sending = dist.P2POp(dist.isend, tensor, (rank + 1) % world)
    for work in dist.batch_isend_irecv([sending, dist.P2POp(dist.irecv, received, (rank - 1) % world)]):
        work.wait()


def main() -> None:
    """``python -m … DEVICE SECONDS FOLDER``: one of the workers. It writes its measurements to the folder."""
    kind, seconds, folder = sys.argv[1:]
    with join(kind) as workers:
        measurements = measure(workers, float(seconds))
        measurements.steps = measure_steps(kind, precisions_of(workers.device), workers.world)
        Path(folder, f"{workers.rank}.json").write_text(json.dumps(asdict(measurements)), encoding="utf-8")


if __name__ == "__main__":
    main()
