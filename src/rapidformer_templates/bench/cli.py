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
        one, a solution of ``partitioning`` failed, or what the ``planner`` predicted does not hold; 2 for a
        mistake in the command. A missed speed goal is a result, not an error.
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


def _saving(options: argparse.Namespace) -> int:
    from rapidformer_templates.bench import saving

    return saving.main(options)


def _partitioning(options: argparse.Namespace) -> int:
    from rapidformer_templates.bench import partitioning

    return partitioning.main(options)


def _planner(options: argparse.Namespace) -> int:
    from rapidformer_templates.bench import planner

    return planner.main(options)


def _padding(options: argparse.Namespace) -> int:
    from rapidformer_templates.bench import padding

    return padding.main(options)


def _reading(options: argparse.Namespace) -> int:
    from rapidformer_templates.bench import reading

    return reading.main(options)


def _preprocess(options: argparse.Namespace) -> int:
    from rapidformer_templates.bench import preprocess

    return preprocess.main(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rapidformer bench", description="Measure this library beside its peers.")
    output = argparse.ArgumentParser(add_help=False)
    output.add_argument("--json", type=Path, metavar="FILE", help="write the result to this file")
    output.add_argument(
        "--output", type=Path, metavar="DIR", help="write NAME.json and, if there is one, NAME.png here"
    )
    commands = parser.add_subparsers(
        required=True, metavar="overhead|peers|faults|saving|partitioning|planner|preprocess|reading|padding"
    )

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

    saving = commands.add_parser("saving", parents=[output], help="how fast a state is durably on the disk")
    saving.add_argument("--gigabytes", type=_size, default=1.3, help="size of the state (default: 1.3)")
    saving.add_argument("--repeats", type=_positive, default=8, help="saves in each way (default: 8)")
    saving.add_argument("--folder", type=Path, metavar="DIR", help="on the disk in question (default: temporary files)")
    saving.set_defaults(run=_saving)

    reading = commands.add_parser("reading", parents=[output], help="how fast an indexed data set is read")
    reading.add_argument("--repeats", type=_positive, default=10, help="turns of each reader (default: 10)")
    reading.add_argument("--megatokens", type=_size, default=60, help="size of the corpus (default: 60)")
    reading.add_argument("--samples", type=_positive, default=10**8, help="in the large index (default: 10^8)")
    reading.add_argument("--folder", type=Path, metavar="DIR", help="where to make the corpus (default: temporary)")
    reading.set_defaults(run=_reading)

    _add_partitioning(commands.add_parser("partitioning", parents=[output], help="speed and memory of each solution"))

    planner = commands.add_parser("planner", parents=[output], help="memory that a plan predicts, beside real steps")
    planner.add_argument("--workers", type=_positive, default=4, help="most worker processes (default: 4)")
    planner.set_defaults(run=_planner)

    padding = commands.add_parser("padding", parents=[output], help="useful tokens/s of each way to batch")
    padding.add_argument("--rounds", type=_positive, default=8, help="turns of each way (default: 8)")
    padding.add_argument("--steps", type=_positive, default=3, help="optimizer steps a turn (default: 3)")
    padding.set_defaults(run=_padding)

    preprocess = commands.add_parser("preprocess", parents=[output], help="raw text to indexed data sets")
    preprocess.add_argument("--megabytes", type=_megabytes, default=100.0, help="of text (default: 100)")
    preprocess.add_argument("--workers", type=_positive, help="processes that tokenize (default: all cores)")
    preprocess.add_argument("--repeats", type=_positive, default=3, help="runs of each way (default: 3)")
    preprocess.set_defaults(run=_preprocess)
    return parser


def _add_partitioning(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--scale",
        choices=("tiny", "small", "paper"),
        default="small",
        help="small (default): any machine; paper: the published model on 4 GPUs; tiny: for trying out",
    )
    parser.add_argument("--workers", type=_positive, help="worker processes (default: 2; paper: 4)")
    parser.add_argument("--repeats", type=_positive, default=3, help="runs of each solution (default: 3)")
    parser.add_argument("--steps", type=_positive, default=6, help="measured steps a run (default: 6)")
    parser.add_argument("--solutions", metavar="A,B", help="which, such as none,oss-sdp,zero-2 (default: all)")
    parser.add_argument("--all", action="store_true", help="also what this device is slow at")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where (default: GPUs)")
    parser.add_argument(
        "--peers", action=argparse.BooleanOptionalAction, default=True, help="accelerate beside it (default)"
    )
    parser.add_argument("--folder", type=Path, metavar="DIR", help="on the disk to offload to (default: temporary)")
    parser.set_defaults(run=_partitioning)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def _megabytes(text: str) -> float:
    number = float(text)
    if not 0 < number <= 10_000:
        raise argparse.ArgumentTypeError("must be between 0 and 10000")
    return number


def _size(text: str) -> float:
    number = float(text)
    if not 0 < number < 1000:
        raise argparse.ArgumentTypeError("must be between 0 and 1000")
    return number
