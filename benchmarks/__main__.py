"""``python -m benchmarks NAME``: evidence for docs/benchmarks.md, in a checkout of the repository."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from rapidformer_templates.errors import RapidformerError


def main(argv: Sequence[str] | None = None) -> int:
    """Answer one question.

    Returns:
        The exit status: 0; 1 if ``faults`` found a run of this library that was not the uninterrupted
        one, or what the ``planner`` predicted does not hold; 2 for a mistake in the command. A missed
        speed goal is a result, not an error.
    """
    options = _parser().parse_args(argv)
    try:
        status: int = import_module(f"benchmarks.{options.module}").main(options)
    except RapidformerError as error:
        print(error.render(), file=sys.stderr)
        return error.exit_status
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Lay this library beside its peers.")
    output = argparse.ArgumentParser(add_help=False)
    output.add_argument("--json", type=Path, metavar="FILE", help="write the result to this file")
    output.add_argument(
        "--output", type=Path, metavar="DIR", help="write NAME.json and, if there is one, NAME.png here"
    )
    commands = parser.add_subparsers(required=True, metavar="NAME", help="what to measure")
    _add_loops(commands, output)
    _add_graph(commands.add_parser("graph", parents=[output], help="ONNX Runtime and inductor beside eager"))
    _add_parts(commands, output)
    return parser


def _add(commands: Any, output: argparse.ArgumentParser, name: str, text: str) -> argparse.ArgumentParser:
    """The parser of what the module of that name measures."""
    parser: argparse.ArgumentParser = commands.add_parser(name, parents=[output], help=text)
    parser.set_defaults(module=name.replace("-", "_"))
    return parser


def _add_loops(commands: Any, output: argparse.ArgumentParser) -> None:
    """What looks at whole loops, and at what surrounds them."""
    overhead = _add(commands, output, "overhead", "milliseconds a step over a plain loop")
    overhead.add_argument("--rounds", type=_positive, default=60, help="pairs of turns a loop (default: 60)")
    overhead.add_argument("--steps", type=_positive, default=25, help="optimizer steps a turn (default: 25)")

    peers = _add(commands, output, "peers", "the demo's job beside transformers' Trainer")
    peers.add_argument("--repeats", type=_positive, default=3, help="runs of each solution (default: 3)")
    peers.add_argument("--train", type=_positive, default=2000, help="training tweets (default: 2000)")
    peers.add_argument("--held-out", type=_positive, default=1000, help="held-out tweets (default: 1000)")

    faults = _add(commands, output, "faults", "kill -9 at random moments, and go on")
    faults.add_argument("--kills", type=_positive, default=20, help="kills a solution (default: 20)")
    faults.add_argument("--seed", type=int, default=0, help="of the moments (default: 0)")
    faults.add_argument(
        "--peer",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="do the same to transformers' Trainer (default)",
    )
    faults.add_argument("--folder", type=Path, help="where to keep the runs (default: a temporary folder)")

    saving = _add(commands, output, "saving", "how fast a state is durably on the disk")
    saving.add_argument("--gigabytes", type=_size, default=1.3, help="size of the state (default: 1.3)")
    saving.add_argument("--repeats", type=_positive, default=8, help="saves in each way (default: 8)")
    saving.add_argument("--folder", type=Path, metavar="DIR", help="on the disk in question (default: temporary files)")

    reading = _add(commands, output, "reading", "how fast an indexed data set is read")
    reading.add_argument("--repeats", type=_positive, default=10, help="turns of each reader (default: 10)")
    reading.add_argument("--megatokens", type=_size, default=60, help="size of the corpus (default: 60)")
    reading.add_argument("--samples", type=_positive, default=10**8, help="in the large index (default: 10^8)")
    reading.add_argument("--folder", type=Path, metavar="DIR", help="where to make the corpus (default: temporary)")


def _add_parts(commands: Any, output: argparse.ArgumentParser) -> None:
    """What looks at one part of a step, or of the data."""
    planner = _add(commands, output, "planner", "memory that a plan predicts, beside real steps")
    planner.add_argument("--workers", type=_positive, default=4, help="most worker processes (default: 4)")

    padding = _add(commands, output, "padding", "useful tokens/s of each way to batch")
    padding.add_argument("--rounds", type=_positive, default=8, help="turns of each way (default: 8)")
    padding.add_argument("--steps", type=_positive, default=3, help="optimizer steps a turn (default: 3)")

    packing = _add(commands, output, "packing", "documents of a row apart with and without a mask")
    packing.add_argument("--rounds", type=_positive, default=10, help="steps of each way (default: 10)")
    packing.add_argument("--tokens", type=_positive, default=2048, help="of a row (default: 2048)")

    moe = _add(commands, output, "moe", "a mixture of experts beside the dense model")
    moe.add_argument("--steps", type=_positive, default=3000, help="optimizer steps of each model (default: 3000)")
    moe.add_argument("--rounds", type=_positive, default=30, help="turns of each way to compute (default: 30)")

    optimizers = _add(commands, output, "optimizers", "state, loss and time of each optimizer")
    optimizers.add_argument("--steps", type=_positive, default=300, help="of each optimizer (default: 300)")
    optimizers.add_argument("--lr", type=float, default=1e-3, help="peak learning rate (default: 1e-3)")
    optimizers.add_argument("--scale", choices=("small", "paper"), default="small", help="of the model")

    fused = _add(commands, output, "fused-loss", "memory and time with and without logits")
    for name, default, text in (
        ("vocabulary", 50257, "words"),
        ("rows", 2, "samples of a batch"),
        ("length", 512, "tokens of a sample"),
        ("hidden", 128, "hidden size, a multiple of 64"),
        ("layers", 2, "blocks"),
        ("rounds", 5, "timed steps of each way"),
    ):
        fused.add_argument(f"--{name}", type=_positive, default=default, help=f"{text} (default: {default})")
    fused.add_argument("--bf16", action="store_true", help="bf16 autocast")

    preprocess = _add(commands, output, "preprocess", "raw text to indexed data sets")
    preprocess.add_argument("--megabytes", type=_megabytes, default=100.0, help="of text (default: 100)")
    preprocess.add_argument("--workers", type=_positive, help="processes that tokenize (default: all cores)")
    preprocess.add_argument("--repeats", type=_positive, default=3, help="runs of each way (default: 3)")


def _add_graph(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--scale",
        choices=("tiny", "small", "paper"),
        default="small",
        help="small (default): BERT-base on 128 tokens; paper: on 512; tiny: for trying out",
    )
    parser.add_argument("--rounds", type=_positive, default=8, help="turns of each solution (default: 8)")
    parser.add_argument("--steps", type=_positive, default=2, help="optimizer steps a turn (default: 2)")
    parser.add_argument("--inductor", action="store_true", help="beside it torch.compile's inductor: minutes more")
    parser.add_argument("--all", action="store_true", help="also what this device is slow at")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where (default: a GPU)")
    parser.set_defaults(module="graph")


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


if __name__ == "__main__":
    sys.exit(main())
