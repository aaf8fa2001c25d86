"""The command line of the benchmarks. Imports no torch until a benchmark starts."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rapidformer_templates.errors import RapidformerError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one benchmark.

    Args:
        argv: the words after ``rapidformer bench``; by default those of this process.

    Returns:
        The exit status: 0; 1 if ``faults`` found a run of this library that was not the uninterrupted
        one; 2 for a mistake in the command. A missed speed goal is a result, not an error.
    """
    options = _parser().parse_args(argv)
    try:
        status: int = options.run(options)
    except RapidformerError as error:
        print(error.render(), file=sys.stderr)
        return error.exit_status
    return status


def _overhead(options: argparse.Namespace) -> int:
    from rapidformer_templates.bench import overhead

    return overhead.main(options)


def _peers(options: argparse.Namespace) -> int:
    from rapidformer_templates.bench import peers

    return peers.main(options)


def _faults(options: argparse.Namespace) -> int:
    from rapidformer_templates.bench import faults

    return faults.main(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rapidformer bench", description="Measure this library beside its peers.")
    output = argparse.ArgumentParser(add_help=False)
    output.add_argument("--json", type=Path, metavar="FILE", help="write the result to this file")
    output.add_argument(
        "--output", type=Path, metavar="DIR", help="write NAME.json and, if there is one, NAME.png here"
    )
    commands = parser.add_subparsers(required=True, metavar="overhead|peers|faults")

    overhead = commands.add_parser("overhead", parents=[output], help="milliseconds a step over a plain loop")
    overhead.add_argument("--rounds", type=_positive, default=60, help="pairs of turns a loop (default: 60)")
    overhead.add_argument("--steps", type=_positive, default=25, help="optimizer steps a turn (default: 25)")
    overhead.set_defaults(run=_overhead)

    peers = commands.add_parser("peers", parents=[output], help="the demo's job beside transformers' Trainer")
    peers.add_argument("--repeats", type=_positive, default=3, help="runs of each solution (default: 3)")
    peers.add_argument("--train", type=_positive, default=2000, help="training tweets (default: 2000)")
    peers.add_argument("--held-out", type=_positive, default=1000, help="held-out tweets (default: 1000)")
    peers.set_defaults(run=_peers)

    faults = commands.add_parser("faults", parents=[output], help="kill -9 at random moments, and go on")
    faults.add_argument("--kills", type=_positive, default=20, help="kills a solution (default: 20)")
    faults.add_argument("--seed", type=int, default=0, help="of the moments (default: 0)")
    faults.add_argument(
        "--peer",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="do the same to transformers' Trainer (default)",
    )
    faults.add_argument("--folder", type=Path, help="where to keep the runs (default: a temporary folder)")
    faults.set_defaults(run=_faults)
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number
