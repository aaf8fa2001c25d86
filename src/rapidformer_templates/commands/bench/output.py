"""The output of every benchmark: a printed table, and files with JSON and a picture."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import RenderableType

from rapidformer_templates.planning.environment import versions_of
from rapidformer_templates.system.terminal import console

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PACKAGES = (
    "rapidformer_templates", "torch", "transformers", "accelerate", "deepspeed", "fairscale", "lightning-fabric",
    "numpy",
)  # fmt: skip
"""Packages on which a measurement may depend."""


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


def add_output_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that :func:`put_out` reads."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result to this file")
    text = "write NAME.json and, if there is one, NAME.png here"
    parser.add_argument("--output", type=Path, metavar="DIR", help=text)


def put_out(
    options: argparse.Namespace,
    name: str,
    result: Mapping[str, object],
    table: RenderableType,
    notes: Sequence[str] = (),
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
    machine = {"system": platform.system(), "processor": processor(), "cores": os.cpu_count()}
    document = {"benchmark": name, "machine": machine, "versions": versions_of(PACKAGES), **result, "notes": [*notes]}
    for file in filter(None, [options.json, options.output and options.output / f"{name}.json"]):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if options.output and draw:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 4), layout="constrained")
        draw(figure.subplots())
        figure.savefig(options.output / f"{name}.png", dpi=120)
