"""What every benchmark puts out: a table for people, JSON and a picture for files, progress meanwhile."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

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


def versions() -> dict[str, str]:
    versions_by_package = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions_by_package[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions_by_package


def machine() -> dict[str, Any]:
    return {"system": platform.system(), "processor": _processor(), "cores": os.cpu_count()}


def _processor() -> str:
    """The name of the processor, where the system tells it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def spread(values: Sequence[float]) -> float:
    """The standard deviation; 0 of a single value."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def why_absent(module: str, package: str) -> str | None:
    """Why a peer cannot take part, or None if it can."""
    if importlib.util.find_spec(module) is None:
        return f"{package} is not installed (pip install {package})"
    return None


def in_short(why: str) -> str:
    """The line of an error text that says what is wrong; all of it is in the JSON."""
    lines = why.splitlines()
    return next((line for line in lines if line.startswith("error")), lines[-1])


def put_out(
    options: argparse.Namespace,
    name: str,
    result: dict[str, Any],
    table: RenderableType,
    notes: list[str],
    draw: Callable[[Axes], None] | None = None,
) -> None:
    """Print the table and the notes, and write the files that were asked for.

    Args:
        options: with ``json`` and ``output``, as in the command line.
        name: of the benchmark and of its files.
        result: its figures; the machine and the versions are added.
        notes: lines below the table: goals, and who is absent.
        draw: draws the picture.
    """
    console = Console()
    if not console.is_terminal:
        console.width = 120
    console.print(table)
    for note in notes:
        print(note)
    document = {"benchmark": name, "machine": machine(), "versions": versions(), **result, "notes": notes}
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
"""Tells that one more part is done, and what is next."""


@contextmanager
def progress(title: str, parts: int) -> Iterator[Advance]:
    """A progress bar on standard error, only on a terminal.

    It is drawn only when it advances: a thread that redraws it would take time from what is measured.
    """
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[text]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False) as bar:
        task = bar.add_task(title, total=parts, text="")

        def advance(text: str) -> None:
            bar.update(task, advance=1, text=text, refresh=True)

        yield advance
