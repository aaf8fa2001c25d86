"""The command line of the benchmarks. torch is imported only when a benchmark starts."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from rapidformer_templates.commands.bench.output import add_output_flags
from rapidformer_templates.errors import ConfigError, Explained
from rapidformer_templates.planning.flag_parser import CommandParser, positive

COMMANDS = ("run", "mfu", "calibrate")
SCALES = ("tiny", "small", "bert-base", "gpt-124m", "paper")
"""Names of the models of ``bench mfu``."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one benchmark.

    Args:
        argv: words after ``rapidformer bench``. The default is the command line of this process.

    Returns:
        The exit status: 0 for success, or that of the error. It is 2 for a mistake in the command.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    parser = build_parser()
    try:
        if words and not words[0].startswith("-") and words[0] not in COMMANDS:
            hint = f"in the root of a checkout of the repository: python -m benchmarks {' '.join(words)}"
            message = f"rapidformer bench has {', '.join(COMMANDS)}, and no {words[0]}"
            raise ConfigError(message, where="rapidformer bench", hint=hint)
        # Flags that `run` and `mfu` do not know belong to the training command that they measure.
        options, rest = parser.parse_known_args(words)
        if rest and options.module != "run":
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        options.words = rest
        status: int = import_module(f"rapidformer_templates.commands.bench.{options.module}").main(options)
    except Explained as error:
        print(error.render(), file=sys.stderr)
        return error.exit_status
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
