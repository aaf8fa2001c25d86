"""The output of every benchmark: a printed table, files with JSON and a picture, and a progress bar."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from rapidformer_templates.planning.environment import versions_of
from rapidformer_templates.system.terminal import console

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PACKAGES = (
    "rapidformer_templates",
    "torch",
    "transformers",
    "accelerate",
    "deepspeed",
    "fairscale",
    "lightning-fabric",
    "numpy",
)
"""Packages on which a measurement may depend."""


def machine() -> dict[str, str | int | None]:
    return {"system": platform.system(), "processor": processor(), "cores": os.cpu_count()}


def processor() -> str:
    """Return the name of the processor if the system reports it, else the machine type."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def spread(values: Sequence[float]) -> float:
    """Return the standard deviation, or 0 for a single value."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def in_short(why: str) -> str:
    """Return the line of an error text that says what is wrong. The JSON has the whole text."""
    lines = why.splitlines()
    return next((line for line in lines if line.startswith("error")), lines[-1])


def put_out(
    options: argparse.Namespace,
    name: str,
    result: Mapping[str, object],
    table: RenderableType,
    notes: list[str],
    draw: Callable[[Axes], None] | None = None,
) -> None:
    """Print the table and the notes, and write the requested files.

    Args:
        options: options of the command line, with ``json`` and ``output``.
        name: name of the benchmark and of its files.
        result: figures of the benchmark. The machine and the versions are added to them.
        notes: lines below the table, such as goals and absent solutions.
        draw: function that draws the picture.
    """
    console(piped_width=120).print(table)
    for note in notes:
        print(note)
    document = {"benchmark": name, "machine": machine(), "versions": versions_of(PACKAGES), **result, "notes": notes}
    files = [options.json] if options.json else []
    if options.output:
        files.append(options.output / f"{name}.json")
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if options.output and draw:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 4), layout="constrained")
        draw(figure.subplots())
        figure.savefig(options.output / f"{name}.png", dpi=120)


Advance = Callable[[str], None]
"""Reports that one more part is done. Its argument is the text next to the bar."""


@contextmanager
def progress(title: str, parts: int) -> Iterator[Advance]:
    """Show a progress bar on standard error, if that is a terminal.

    The bar is drawn only when it advances. A thread that redraws it would disturb the measurement.
    """
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[text]}", markup=False),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console(on_stderr=True), auto_refresh=False) as bar:
        task = bar.add_task(title, total=parts, text="")

        def advance(text: str) -> None:
            bar.update(task, advance=1, text=text, refresh=True)

        yield advance
