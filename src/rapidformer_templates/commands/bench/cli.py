"""The command line of the benchmarks, and the output of each: a printed table, and files with JSON and a picture.

torch is imported only when a benchmark starts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from rapidformer_templates.errors import ConfigError
from rapidformer_templates.planning.environment import versions_of
from rapidformer_templates.planning.flag_parser import CommandParser, positive
from rapidformer_templates.system.terminal import console

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.console import RenderableType

COMMANDS = ("run", "mfu", "calibrate")
SCALES = ("tiny", "small", "bert-base", "gpt-124m", "paper", "llama-1.5b")
"""Names of the models of ``bench mfu``."""


def main(argv: Sequence[str]) -> int:
    """Run one benchmark, and return the exit status.

    Args:
        argv: words after ``rapidformer bench``.

    Raises:
        RapidformerError: a mistake in the command, or a run that failed.
    """
    parser = build_parser()
    if argv and not argv[0].startswith("-") and argv[0] not in COMMANDS:
        hint = f"in the root of a checkout of the repository: python -m benchmarks {' '.join(argv)}"
        message = f"rapidformer bench has {', '.join(COMMANDS)}, and no {argv[0]}"
        raise ConfigError(message, where="rapidformer bench", hint=hint)
    # Flags that `run` and `mfu` do not know belong to the training command that they measure.
    options, rest = parser.parse_known_args(argv)
    if rest and options.module != "run":
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    options.words = rest
    status: int = import_module(f"rapidformer_templates.commands.bench.{options.module}").main(options)
    return status


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of ``rapidformer bench``."""
    about = "Measure on this machine. Comparisons with other libraries come with the repository: python -m benchmarks."
    parser = CommandParser(prog="rapidformer bench", description=about)
    commands = parser.add_subparsers(required=True, metavar="NAME", help="what to measure", dest="name")
    run = commands.add_parser("run", allow_abbrev=False, help="a training command: the flags of `rapidformer`")
    text = "model FLOPs utilisation of a model of known size; more flags of training work"
    mfu = commands.add_parser("mfu", allow_abbrev=False, help=text)
    mfu.add_argument("--scale", choices=SCALES, default="small", help="the model (default: small)")
    for command in (run, mfu):
        command.add_argument("--turns", type=positive, default=6, help="measured turns (default: 6)")
        text = "optimizer steps per turn (default: 1; on an accelerator 10)"
        command.add_argument("--steps-a-turn", type=positive, help=text)
        add_output_flags(command)
        command.set_defaults(module="run")
    run.set_defaults(scale=None)
    rates = commands.add_parser("calibrate", help="rates of this machine, for plan --device-file")
    rates.description = "Measure how fast this machine computes and exchanges. Write a file for plan --device-file."
    text = "the file (default: device.json)"
    rates.add_argument("--output", type=Path, default=Path("device.json"), metavar="FILE", help=text)
    text = "numbers of workers to measure with (default: 1 2 4; on an accelerator powers of two up to all devices)"
    rates.add_argument("--workers", type=positive, nargs="+", metavar="N", help=text)
    text = "time of each of about 50 measurements of operations (default: 0.2)"
    rates.add_argument("--seconds", type=float, default=0.2, help=text)
    text = "auto, cpu, or what torch calls the accelerator (default: auto)"
    rates.add_argument("--device", default="auto", metavar="KIND", help=text)
    rates.set_defaults(module="calibrate")
    return parser


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
