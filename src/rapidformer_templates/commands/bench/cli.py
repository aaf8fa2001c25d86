"""The command line of the benchmarks. torch is imported only when a benchmark starts."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from rapidformer_templates.errors import ConfigError, Explained
from rapidformer_templates.planning.flag_parser import CommandParser, positive

EVIDENCE = (
    "adapters", "context", "export-memory", "fault-table", "faults", "fused-loss", "graph", "layouts", "longest", "moe",
    "offload", "optimizers", "overhead", "packing", "padding", "peers", "planner", "powercut", "precision",
    "preprocess", "published-runs", "reading", "saving", "seconds", "setup-memory", "states", "streaming",
)  # fmt: skip
"""Questions that ``python -m benchmarks`` answers in a checkout of the repository."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one benchmark.

    Args:
        argv: words after ``rapidformer bench``. The default is the command line of this process.

    Returns:
        The exit status: 0 for success, 1 if a solution of a table failed, 2 for a mistake in the command. A missed
        speed goal is a result, not an error.
    """
    words = command_first(sys.argv[1:] if argv is None else argv)
    parser = build_parser()
    try:
        if words and words[0] in EVIDENCE:
            raise ConfigError(
                f"{words[0]} is evidence for docs/benchmarks.md, which comes with the repository and not with the "
                "package",
                where=f"rapidformer bench {words[0]}",
                hint=f"in the root of a checkout: python -m benchmarks {' '.join(words)}",
            )
        # Flags that `run` does not know belong to the training command that it measures.
        options, unknown = parser.parse_known_args(words)
        if unknown and options.module != "run":
            parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        options.words = unknown
        module = import_module(f"rapidformer_templates.commands.bench.{options.module}")
        status: int = module.main(options)
    except Explained as error:
        print(error.render(), file=sys.stderr)
        return error.exit_status
    return status


def command_first(words: Sequence[str]) -> list[str]:
    """Rewrite ``--table NAME …`` and ``--table=NAME …`` as ``NAME …``, because a table is a command."""
    rest, table = [], None
    remaining = iter(words)
    for word in remaining:
        name, equals, value = word.partition("=")
        if name == "--table" and table is None:
            table = value if equals else next(remaining, "")
        else:
            rest.append(word)
    return rest if table is None else [table, *rest]


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of ``rapidformer bench``."""
    parser = CommandParser(prog="rapidformer bench", description="Measure on this machine.")
    parser.add_argument("--table", dest="named", metavar="TABLE", help="the same as the name of the table")
    output = CommandParser(add_help=False)
    output.add_argument("--json", type=Path, metavar="FILE", help="write the result to this file")
    output.add_argument(
        "--output", type=Path, metavar="DIR", help="write NAME.json and, if there is one, NAME.png here"
    )
    commands = parser.add_subparsers(
        required=True, metavar="TABLE", help="what to measure; --table TABLE is the same", dest="table"
    )

    run = commands.add_parser("run", parents=[output], help="one configuration: the flags of a training command")
    run.add_argument("--turns", type=positive, default=6, help="measured turns (default: 6)")
    run.add_argument(
        "--steps-a-turn", type=positive, help="optimizer steps per turn (default: 1; on an accelerator 10)"
    )
    run.set_defaults(module="run")
    helps = {
        "partitioning": "costs and savings of each way to divide the model's state",
        "mixed-precision": "BERT in fp32 and in the narrow type",
        "parallel": "tensor and pipeline parallel layouts of a GPT",
        "mfu": "model FLOPs utilisation, compared with a loop written by hand and transformers' Trainer",
    }
    for name, text in helps.items():
        _add_table(commands.add_parser(name, parents=[output], help=text))
    _add_calibrate(commands.add_parser("calibrate", help="rates of this machine, for plan --device-file"))
    return parser


def _add_calibrate(parser: argparse.ArgumentParser) -> None:
    parser.description = "Measure how fast this machine computes and exchanges. Write a file for plan --device-file."
    parser.add_argument(
        "--output", type=Path, default=Path("device.json"), metavar="FILE", help="the file (default: device.json)"
    )
    parser.add_argument(
        "--workers", type=positive, nargs="+", metavar="N",
        help="numbers of workers to measure with (default: 1 2 4; on an accelerator powers of two up to all devices)",
    )  # fmt: skip
    parser.add_argument(
        "--seconds", type=float, default=0.2, help="time of each of about 50 measurements of operations (default: 0.2)"
    )
    parser.add_argument(
        "--device",
        default="auto",
        metavar="KIND",
        help="auto, cpu, or what torch calls the accelerator (default: auto)",
    )
    parser.set_defaults(module="calibrate")


def _add_table(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--scale",
        default="small",
        help="small (default): any machine; paper: the published model; tiny: for trying out; mfu has more of them",
    )
    parser.add_argument("--workers", type=positive, help="worker processes (default: depends on the scale)")
    parser.add_argument("--repeats", type=positive, default=3, help="runs of each solution (default: 3)")
    parser.add_argument("--steps", type=positive, default=6, help="measured turns per run (default: 6)")
    parser.add_argument(
        "--steps-a-turn", type=positive, help="optimizer steps per turn (default: 1; on an accelerator 10)"
    )
    parser.add_argument(
        "--solutions", metavar="A,B", help="solutions to measure, such as none,oss-sdp,zero-2 (default: all)"
    )
    parser.add_argument("--all", action="store_true", help="also measure what is slow on this device")
    parser.add_argument(
        "--device",
        default="auto",
        metavar="KIND",
        help="device: auto, cpu, or what torch calls the accelerator (default: the accelerator, if there are enough)",
    )
    parser.add_argument(
        "--peers", action=argparse.BooleanOptionalAction, default=True, help="also measure other libraries (default)"
    )
    parser.add_argument(
        "--folder", type=Path, metavar="DIR", help="folder on the disk to offload to (default: temporary)"
    )
    parser.set_defaults(module="measure")
