"""``bench calibrate``: measures the rates that predicted seconds depend on, and writes them to a device file.

``python -m rapidformer_templates.commands.bench.calibrate KIND SECONDS FILE`` is one of the workers that measure at the
same time, because workers on CPUs share cores and memory.

A step does more than its operations measured alone. Dropout draws random numbers, engines and gloo work on the
processor, and workers wait for each other. So the workers also train a small model, and the computation and the
exchanges of a step each get a factor.
"""

from __future__ import annotations

import argparse
import io
import itertools
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from scipy.optimize import nnls
from torch import nn
from torch.nn import functional

from rapidformer_templates.commands.bench.cli import processor
from rapidformer_templates.commands.bench.models import BenchModel
from rapidformer_templates.errors import ConfigError
from rapidformer_templates.planning.environment import detect, kind_of
from rapidformer_templates.planning.flag_parser import parse
from rapidformer_templates.planning.registry import REGISTRY
from rapidformer_templates.planning.resolve import resolve
from rapidformer_templates.switches.auto_strategy import device_file
from rapidformer_templates.switches.auto_strategy.layouts import layout_of, memory_options_of
from rapidformer_templates.switches.auto_strategy.model_of_flags import Subject
from rapidformer_templates.switches.auto_strategy.search import Search
from rapidformer_templates.switches.auto_strategy.step_seconds import UPDATE_TRAFFIC, Timing, tile_flops
from rapidformer_templates.switches.auto_strategy.timing import GB, find_hardware, host_bytes
from rapidformer_templates.switches.auto_strategy.trace import Product
from rapidformer_templates.system import accelerator, launch
from rapidformer_templates.system.terminal import print_lines
from rapidformer_templates.system.workers import Workers, all_gather, join, reduce_scatter

if TYPE_CHECKING:
    from rapidformer_templates.engines.contract import StepResult

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

PRODUCTS = {
    "cpu": ((128, 128, 128), (384, 192, 576), (384, 192, 2048), (512, 512, 512), (1024, 512, 1024)),
    "gpu": ((2048, 1024, 4096), (4096, 4096, 4096), (8192, 5120, 15360), (8192, 8192, 8192), (16384, 4096, 16384)),
}
"""Rows, inner size and columns of the measured products."""

ATTENTION = {
    "cpu": ((2, 4, 128, 32), (4, 8, 128, 32), (2, 8, 256, 64)),
    "gpu": ((4, 32, 2048, 128), (2, 32, 4096, 128), (1, 32, 8192, 128)),
}
"""Samples, heads, tokens and width of a head of the measured attention kernels."""

HIDDEN = {"cpu": ((512, 128), (384, 192), (512, 512)), "gpu": ((8192, 4096), (8192, 8192))}
"""Tokens and hidden size of the operations between products."""

SIZES = {"cpu": (2**12, 2**16, 2**20, 2**23), "gpu": (2**14, 2**20, 2**24, 2**28)}
"""Bytes of the measured exchanges. The largest one is also copied."""

PARAMETERS = {"cpu": (64, 2**15), "gpu": (64, 2**23)}
"""Number of parameter tensors of the measured update, and the elements of each."""

OPERAND_BYTES = 2**27
"""Bytes of the operands that a measurement takes in turn, so that they come from memory as in training."""

REFERENCE = {
    "cpu": BenchModel("gpt", 8, 192, 8, 2048, 128, micro_batch=2, dropout=0.1),
    "gpu": BenchModel("gpt", 8, 2048, 16, 32000, 1024, micro_batch=2, dropout=0.1),
}
"""The model that is trained. A step of two micro batches takes a fraction of a second."""

WARMUP, STEPS = 3, 5
"""Steps that do not count, and steps that do."""

LARGEST_GROUP = 8
"""Workers of a tensor group or of a pipeline. More groups are replicas."""


def main(options: argparse.Namespace) -> int:
    """Measure and write the file. Return the exit status.

    Raises:
        RapidformerError: there are fewer devices than workers, or a worker failed.
    """
    kind = kind_of(options.device)
    powers = 3 if kind == "cpu" else torch.accelerator.device_count().bit_length()
    device = calibrate(kind, options.workers or [2**power for power in range(powers)], options.seconds)
    device.write(options.output)
    print(f"written to {options.output}: rapidformer plan --auto-strategy --device-file {options.output} …")
    return 0


def calibrate(kind: str, counts: Sequence[int], seconds: float) -> device_file.DeviceFile:
    """Measure with each number of workers.

    Args:
        kind: torch's name of the type of device.
        seconds: time of each of about 50 measurements of single operations.

    Raises:
        RapidformerError: see :func:`main`.
    """
    if kind != "cpu" and max(counts) > (devices := torch.accelerator.device_count()):
        raise ConfigError(f"{max(counts)} workers need as many devices, but there are {devices}", where="--workers")
    with tempfile.TemporaryDirectory(prefix="rf-") as folder:
        measured = []
        for count in sorted(counts):
            print_lines(f"measuring with {count} worker{'s' * (count > 1)}")
            file = str(Path(folder, f"{count}.json"))
            launch.run_workers([sys.executable, "-m", __name__, kind, str(seconds), file], count)
            measured.append(device_file.read_device_file(file))
    return replace(measured[0], rates=tuple(rates for device in measured for rates in device.rates))


# Fits.


def fit_parts(parts: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Return the factors, at least 0, of two parts of measured seconds whose sum is closest to the measurements.

    Args:
        parts: both parts of each measurement, divided by the measured seconds. So the relative errors count.
    """
    matrix = np.array(list(parts))
    scale = np.maximum(matrix.max(axis=0), 1e-300)  # columns of the same size have small rounding errors
    factors, _ = nnls(matrix / scale, np.ones(len(matrix)))
    return float(factors[0] / scale[0]), float(factors[1] / scale[1])


def fit_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the delay, at least 0, and the seconds per unit that fit pairs of an amount and its seconds."""
    delay, per_unit = fit_parts((1 / seconds, amount / seconds) for amount, seconds in points)
    if per_unit > 0:
        return delay, per_unit
    return fit_parts((0.0, amount / seconds) for amount, seconds in points)  # faster if it is larger: there is no delay


def fit_factors(predicted: Sequence[Timing], measured: Sequence[float]) -> tuple[float, float]:
    """Return the factors of computation and of exchanges with which the predictions of layouts fit their seconds."""
    pairs = list(zip(predicted, measured, strict=True))
    parts = (((timing.total - timing.communication) / by, timing.communication / by) for timing, by in pairs)
    computation, exchanges = fit_parts(parts)
    return computation, exchanges if any(timing.communication for timing in predicted) else 1.0


# In a worker.


class Stopwatch:
    """Measures the mean seconds of an operation while all workers run it.

    Args:
        seconds: time of each measurement.
    """

    def __init__(self, workers: Workers, seconds: float) -> None:
        self.workers, self._seconds = workers, seconds
        self.sizes = "cpu" if workers.device.type == "cpu" else "gpu"

    def time(self, run: Callable[[], object]) -> float:
        """Return the mean seconds of ``run`` over all workers. All of them run it equally often."""
        self._run(run, 2)
        calls = max(2.0, self._seconds / self._run(run, 1))
        fewest = int(self.workers.gather_numbers(calls).min())
        return float(self.workers.gather_numbers(self._run(run, fewest)).mean())

    def _run(self, run: Callable[[], object], calls: int) -> float:
        """Return the mean seconds of ``calls`` calls."""
        begin = time.perf_counter()
        for _ in range(calls):
            run()
        accelerator.synchronize(self.workers.device)
        return (time.perf_counter() - begin) / calls


def measure(watch: Stopwatch) -> device_file.DeviceFile:
    """Measure the rates of these workers."""
    workers, device, sizes = watch.workers, watch.workers.device, watch.sizes
    precisions, host_link = ["fp32", "bf16"], None
    large = torch.zeros(SIZES[sizes][-1], dtype=torch.uint8, device=device)
    other = torch.empty_like(large)
    facts = device_file.DeviceFile("cpu", processor(), round(host_bytes() / 1e9, 1), None, 0, ())
    if device.type != "cpu":
        module = torch.get_device_module(device)
        properties, name = module.get_device_properties(device), module.get_device_name(device)
        facts = device_file.DeviceFile(device.type, name, round(properties.total_memory / 1e9, 1), None, 0, ())
        host = torch.empty(large.shape, dtype=large.dtype, pin_memory=True)
        host_link = large.nbytes / watch.time(lambda: host.copy_(large, non_blocking=True)) / GB
        precisions += ["fp16"]
    if device.type == "cuda" and torch.version.hip is None:
        capability = torch.cuda.get_device_capability(device)
        facts = replace(facts, compute_capability=capability, multiprocessors=properties.multi_processor_count)
        precisions = ["fp32", "fp16"] if capability < (8, 0) else precisions  # older ones only emulate bf16
    rates = device_file.WorkerRates(
        workers=workers.world,
        precisions={name: _precision_rates(watch, name, facts.multiprocessors) for name in precisions},
        memory_bandwidth=2 * large.nbytes / watch.time(lambda: other.copy_(large)) / GB,
        update_bandwidth=_update_bandwidth(watch),
        launch_seconds=_launch_seconds(watch),
        host_link=host_link,
        exchanges={kind: _exchange_rate(watch, kind) for kind in device_file.EXCHANGES} if workers.world > 1 else {},
    )
    return replace(facts, rates=(rates,))


def _precision_rates(watch: Stopwatch, name: str, multiprocessors: int) -> device_file.PrecisionRates:
    dtype, products, attention, between = DTYPES[name], [], [], []
    for rows, inner, columns in PRODUCTS[watch.sizes]:
        product = Product(1, rows, inner, columns, 1, 0, 2 * rows * inner * columns)
        seconds = _in_turn(watch, torch.matmul, ((rows, inner), (inner, columns)), dtype, trained=False)
        products.append((tile_flops(product, multiprocessors), seconds))
    for shape in ATTENTION[watch.sizes]:
        samples, heads, tokens, width = shape
        # 4 operations per score and element in the forward, 10 in the backward. The causal mask halves them.
        operations = 7.0 * samples * heads * tokens**2 * width
        attention.append((operations, _in_turn(watch, _attend, (shape, shape, shape), dtype, trained=True)))
    for tokens, hidden in HIDDEN[watch.sizes]:
        run = partial(_between, [nn.LayerNorm(hidden, device=watch.workers.device) for _ in range(2)])
        moved = float(BETWEEN * 3 * tokens * hidden * dtype.itemsize)
        between.append((moved, _in_turn(watch, run, ((tokens, hidden), (tokens, 4 * hidden)), dtype, trained=True)))
    delay, per_operation = fit_line(products)
    attention_tflops, bandwidth = 1 / fit_line(attention)[1] / 1e12, 1 / fit_line(between)[1] / GB
    return device_file.PrecisionRates(1 / per_operation / 1e12, delay, attention_tflops, bandwidth)


def _in_turn(
    watch: Stopwatch, run: Callable[..., object], shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, trained: bool
) -> float:
    """Return the seconds of ``run`` with random tensors of these shapes, which takes other tensors each time."""
    make = partial(torch.randn, device=watch.workers.device, dtype=dtype, requires_grad=trained)
    count = math.ceil(OPERAND_BYTES / (sum(math.prod(shape) for shape in shapes) * dtype.itemsize))
    operands = itertools.cycle([[make(shape) for shape in shapes] for _ in range(count)])
    return watch.time(lambda: run(*next(operands)))


BETWEEN = 18
"""Hidden states that the products of a block read and write in the forward. The backward moves twice as many.

The products of queries, keys and values move 1 + 3, the output of attention 1 + 1, and the MLP 1 + 4 and 4 + 1. The
attention kernel moves 2.
"""


def _between(norms: Sequence[nn.Module], states: torch.Tensor, wide: torch.Tensor) -> None:
    """Run the operations of a block between its products: norms, sums, dropout and an activation."""
    first = states
    for norm in norms:
        with torch.autocast(states.device.type, states.dtype, enabled=states.dtype != torch.float32):
            first = first + functional.dropout(norm(first).to(states.dtype), 0.1)
    (first.sum() + functional.gelu(wide, approximate="tanh").sum()).backward()


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    functional.scaled_dot_product_attention(query, key, value, is_causal=True).sum().backward()


def _update_bandwidth(watch: Stopwatch) -> float:
    """Return the GB/s of clipping and AdamW, for the bytes that the planner assumes."""
    count, elements = PARAMETERS[watch.sizes]
    parameters = [nn.Parameter(torch.zeros(elements, device=watch.workers.device)) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.AdamW(parameters)

    def update() -> None:
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()

    return UPDATE_TRAFFIC * count * elements / watch.time(update) / GB


def _launch_seconds(watch: Stopwatch) -> float:
    """Return the seconds of an operation on a tensor of one element, with its backward."""
    one, chain = torch.zeros(1, device=watch.workers.device, requires_grad=True), 32

    def launches() -> None:
        value = one
        for _ in range(chain):
            value = value + one
        value.backward()

    return watch.time(launches) / (2 * chain)


def _exchange_rate(watch: Stopwatch, kind: str) -> device_file.ExchangeRate:
    device, world = watch.workers.device, watch.workers.world
    points = []
    for size in SIZES[watch.sizes]:
        elements = size // 4 // world * world
        whole, share = torch.zeros(elements, device=device), torch.zeros(elements // world, device=device)
        other = torch.zeros_like(whole)
        run: dict[str, Callable[[], object]] = {
            device_file.ALL_REDUCE: partial(dist.all_reduce, whole),
            device_file.ALL_GATHER: partial(all_gather, whole, share),
            device_file.REDUCE_SCATTER: partial(reduce_scatter, share, whole),
            device_file.ALL_TO_ALL: partial(dist.all_to_all_single, other, whole),
            device_file.SEND: partial(_pass_on, whole, other, watch.workers),
        }
        sent = {device_file.ALL_REDUCE: 2 * (world - 1) / world, device_file.SEND: 1.0}.get(kind, (world - 1) / world)
        points.append((sent * whole.nbytes, watch.time(run[kind])))
    delay, per_byte = fit_line(points)
    return device_file.ExchangeRate(delay, 1 / per_byte / GB)


def _pass_on(tensor: torch.Tensor, received: torch.Tensor, workers: Workers) -> None:
    """Send a tensor to the next worker and receive one from the previous worker."""
    rank, world = workers.rank, workers.world
    sending = dist.P2POp(dist.isend, tensor, (rank + 1) % world)
    for work in dist.batch_isend_irecv([sending, dist.P2POp(dist.irecv, received, (rank - 1) % world)]):
        work.wait()


# The steps of the reference model.


def reference_flags(device: str, precision: str, workers: int) -> list[list[str]]:
    """Return the flags of the layouts in which the reference model is trained."""
    model, together = REFERENCE["cpu" if device == "cpu" else "gpu"], math.gcd(workers, LARGEST_GROUP)
    own = f"--device {device} --micro-batch-size {model.micro_batch} --train-iters {WARMUP + STEPS} --lr 1e-4 --no-save"
    own += f" --mixed-precision {precision}" if precision != "fp32" else ""
    layouts = [("", workers)]  # flags and number of replicas
    if workers > 1:
        layouts += [
            ("--fsdp-memory-optimization", workers),
            (f"--tensor-model-parallel-size {together}", workers // together),
            (f"--pipeline-model-parallel-size {together}", workers // together),
        ]
    return [f"{own} {flags} --global-batch-size {2 * model.micro_batch * copies}".split() for flags, copies in layouts]


def train(watch: Stopwatch, words: Sequence[str]) -> float:
    """Train the reference model and return the median seconds of a step of the slowest worker."""
    device, ends = watch.workers.device, list[float]()

    class Timed(REFERENCE[watch.sizes].job(samples=64)):  # type: ignore[misc]
        def on_step_end(self, step: int, result: StepResult) -> None:
            accelerator.synchronize(device)
            ends.append(time.perf_counter())

    shown = io.StringIO()  # what a run prints is not part of the calibration
    with redirect_stdout(shown), redirect_stderr(shown):
        Timed(words).fit()
    median = statistics.median(b - a for a, b in zip(ends[WARMUP - 1 :], ends[WARMUP:], strict=False))
    return float(watch.workers.gather_numbers(median).max())


def predict_steps(file: str, device: str, precision: str, workers: int) -> list[Timing]:
    """Return what the planner predicts for a step of each layout, with the rates of a device file."""
    model, timings = REFERENCE["cpu" if device == "cpu" else "gpu"], []
    for words in reference_flags(device, precision, workers):
        config = REGISTRY.complete(parse(words, REGISTRY.options()))
        machine = replace(detect("Trainer", "calibrate", device=device, world_size=workers), device_file=file)
        plan = resolve(config, machine)
        subject = Subject(config, plan, gpu=device != "cpu", source=model)
        search = Search(config, machine, subject, find_hardware(machine, precision))
        timings.append(search.predict(layout_of(plan), memory_options_of(plan, subject.shapes.width)).timing)
    return timings


def work(kind: str, seconds: float, file: Path) -> None:
    """Measure as one of the workers. Rank 0 writes a device file with the rates of these workers."""
    with join(kind) as workers:
        watch = Stopwatch(workers, seconds)
        device = measure(watch)
        (rates,) = device.rates
        steps = {
            name: [train(watch, words) for words in reference_flags(kind, name, workers.world)]
            for name in rates.precisions
        }
    if workers.is_main:
        device.write(file)  # with factors of 1
        factored = {}
        for name, own in rates.precisions.items():
            factors = fit_factors(predict_steps(str(file), kind, name, rates.workers), steps[name])
            factored[name] = replace(own, computation_factor=factors[0], exchange_factor=factors[1])
        replace(device, rates=(replace(rates, precisions=factored),)).write(file)


if __name__ == "__main__":
    work(sys.argv[1], float(sys.argv[2]), Path(sys.argv[3]))
