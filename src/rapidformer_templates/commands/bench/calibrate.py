"""``bench calibrate``: measures the rates that predicted seconds depend on, and writes them to a device file."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from rapidformer_templates.commands.bench.least_squares import fit_line
from rapidformer_templates.commands.bench.output import progress
from rapidformer_templates.errors import ConfigError
from rapidformer_templates.planning.environment import kind_of
from rapidformer_templates.switches.auto_strategy.device_file import (
    DeviceFile,
    ExchangeRate,
    PrecisionRates,
    WorkerRates,
)
from rapidformer_templates.switches.auto_strategy.step_seconds import UPDATE_TRAFFIC, tile_flops
from rapidformer_templates.switches.auto_strategy.timing import GB
from rapidformer_templates.switches.auto_strategy.trace import Product
from rapidformer_templates.system import launch
from rapidformer_templates.system.terminal import console

if TYPE_CHECKING:
    from rapidformer_templates.commands.bench.calibrate_worker import Measurements

WORKER = "rapidformer_templates.commands.bench.calibrate_worker"


def main(options: argparse.Namespace) -> int:
    """Measure, write the file and print its rates. Return the exit status.

    Raises:
        RapidformerError: there are fewer devices than workers, or a worker failed.
    """
    kind = kind_of(options.device)
    device = calibrate(kind, options.workers or _worker_counts(kind), options.seconds)
    device.write(options.output)
    console(piped_width=120).print(rates_table(device))
    print(f"written to {options.output}: rapidformer plan --auto-strategy --device-file {options.output} …")
    return 0


def _worker_counts(kind: str) -> list[int]:
    if kind == "cpu":
        return [1, 2, 4]
    import torch

    count = torch.accelerator.device_count()
    return [2**power for power in range(count.bit_length())]


def calibrate(kind: str, counts: Sequence[int], seconds: float) -> DeviceFile:
    """Measure with each number of workers.

    Args:
        kind: torch's name of the type of device.
        seconds: time of each of about 50 measurements of single operations.

    Raises:
        RapidformerError: see :func:`main`.
    """
    if kind != "cpu":
        import torch

        if max(counts) > (devices := torch.accelerator.device_count()):
            raise ConfigError(f"{max(counts)} workers need as many devices, but there are {devices}", where="--workers")
    rates: list[WorkerRates] = []
    with progress("calibrate", len(counts)) as advance, tempfile.TemporaryDirectory(prefix="rf-") as folder:
        for count in sorted(counts):
            launch.run_workers([sys.executable, "-m", WORKER, kind, str(seconds), folder], count)
            files = [Path(folder, f"{rank}.json") for rank in range(count)]
            measured: list[Measurements] = [read_measurements(file.read_text(encoding="utf-8")) for file in files]
            first = measured[0]
            sizes = first.memory_gb, first.compute_capability, first.multiprocessors
            device = DeviceFile(kind, first.name, *sizes, rates=(fit_rates(measured),))
            rates.append(with_factors(device, measured, Path(folder, "device.json")))
            advance(f"{count} worker{'s' * (count > 1)}")
    return replace(device, rates=tuple(rates))


def with_factors(device: DeviceFile, measured: Sequence[Measurements], file: Path) -> WorkerRates:
    """Return the rates of a device with the factors of steps that its workers have measured.

    Args:
        device: a device with the rates of these workers only.
        file: a place to write it to.
    """
    from rapidformer_templates.commands.bench.reference_steps import fit_factors, predict_steps

    (rates,) = device.rates
    device.write(file)
    precisions = {}
    for name, narrow in rates.precisions.items():
        slowest = {layout: max(each.steps[name][layout] for each in measured) for layout in measured[0].steps[name]}
        computation, exchanges = fit_factors(predict_steps(file, device.device, name, rates.workers), slowest)
        precisions[name] = replace(narrow, computation_factor=computation, exchange_factor=exchanges)
    return replace(rates, precisions=precisions)


def read_measurements(text: str) -> Measurements:
    """Return the measurements that a worker wrote."""
    from rapidformer_templates.commands.bench.calibrate_worker import Measurements

    return Measurements(**json.loads(text))


def fit_rates(measured: Sequence[Measurements]) -> WorkerRates:
    """Return the rates of workers that measured at the same time. Their seconds are averaged."""
    first = measured[0]

    def mean(values: Sequence[Sequence[float]]) -> tuple[float, float]:
        return values[0][0], statistics.mean(value[-1] for value in values)

    precisions = {}
    for name in first.products:
        products = []
        for of_workers in zip(*(each.products[name] for each in measured), strict=True):
            rows, inner, columns, _ = of_workers[0]
            product = Product(1, rows, inner, columns, 1, 0, 2 * rows * inner * columns)
            products.append((tile_flops(product, first.multiprocessors), mean(of_workers)[1]))
        delay, per_operation = fit_line(products)
        attention = [mean(values) for values in zip(*(each.attention[name] for each in measured), strict=True)]
        between = [mean(values) for values in zip(*(each.activations[name] for each in measured), strict=True)]
        precisions[name] = PrecisionRates(
            tflops=1 / per_operation / 1e12,
            kernel_seconds=delay,
            attention_tflops=1 / fit_line(attention)[1] / 1e12,
            activation_bandwidth=1 / fit_line(between)[1] / GB,
        )
    exchanges = {}
    for kind in first.exchanges:
        sizes = [mean(values) for values in zip(*(each.exchanges[kind] for each in measured), strict=True)]
        delay, per_byte = fit_line(sizes)
        exchanges[kind] = ExchangeRate(delay, 1 / per_byte / GB)
    copied, copy_seconds = mean([each.copy for each in measured])
    updated, update_seconds = mean([each.update for each in measured])
    to_host = [each.to_host for each in measured if each.to_host]
    return WorkerRates(
        workers=len(measured),
        precisions=precisions,
        memory_bandwidth=copied / copy_seconds / GB,
        update_bandwidth=UPDATE_TRAFFIC * updated / update_seconds / GB,
        launch_seconds=statistics.mean(each.launch_seconds for each in measured),
        host_link=to_host[0][0] / mean(to_host)[1] / GB if to_host else None,
        exchanges=exchanges,
    )


def rates_table(device: DeviceFile) -> Table:
    """Return a table of the rates, with a column for each number of workers."""
    title = f"Rates of each worker on {device.name}"
    table = Table("rate", *(f"{rates.workers} workers" for rates in device.rates), title=title, title_justify="left")

    def add(name: str, values: Sequence[str]) -> None:
        table.add_row(name, *values)

    rates = device.rates
    for name in rates[0].precisions:
        narrow = [each.precisions[name] for each in rates]
        add(
            f"products in {name}",
            [f"{each.kernel_seconds * 1e6:.0f} µs, {each.tflops:.3g} TFLOP/s" for each in narrow],
        )
        add(f"attention in {name}", [f"{each.attention_tflops:.3g} TFLOP/s" for each in narrow])
        add(f"other operations in {name}", [f"{each.activation_bandwidth:.3g} GB/s" for each in narrow])
        add(
            f"real steps in {name}",
            [f"computation × {each.computation_factor:.2f}, exchanges × {each.exchange_factor:.2f}" for each in narrow],
        )
    add("memory", [f"{each.memory_bandwidth:.3g} GB/s" for each in rates])
    add("update", [f"{each.update_bandwidth:.3g} GB/s" for each in rates])
    add("start of an operation", [f"{each.launch_seconds * 1e6:.1f} µs" for each in rates])
    for kind in rates[-1].exchanges:
        measured = [each.exchanges.get(kind) for each in rates]
        add(kind, [f"{each.seconds * 1e6:.0f} µs, {each.gbs:.3g} GB/s" if each else "" for each in measured])
    return table
