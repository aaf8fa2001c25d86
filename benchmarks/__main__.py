"""``python -m benchmarks NAME``: evidence for docs/benchmarks.md. Run it in the root of a repository checkout."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from rapidformer_templates.commands.bench.output import put_out
from rapidformer_templates.errors import RapidformerError

QUESTIONS = {
    "overhead": "milliseconds a step over a plain loop",
    "peers": "the demo's job beside transformers' Trainer",
    "faults": "kill -9 at random moments, and go on",
    "saving": "how fast a state is durably on the disk",
    "reading": "how fast an indexed data set is read",
    "streaming": "memory of a pass over streamed text",
    "preprocess": "raw text to indexed data sets",
    "padding": "useful tokens/s of each way to batch",
    "packing": "documents of a row apart with and without a mask",
    "graph": "ONNX Runtime and inductor beside eager",
    "planner": "memory that a plan predicts, beside real steps",
    "offload": "the same with activations on the host",
    "context": "the same of long sequences that several workers share",
    "layouts": "losses of eighteen layouts of up to eight workers, beside one process",
    "longest": "a sequence that several workers share, in memory in which one cannot hold it",
    "states": "bytes per parameter that each way to shard them takes",
    "moe": "a mixture of experts beside the dense model",
    "adapters": "LoRA, DoRA and QLoRA beside the whole model",
    "precision": "loss and bytes of 16-bit weights with fp32 masters",
    "optimizers": "state, loss and time of each optimizer",
    "fused-loss": "memory and time with and without logits",
}
"""Each question is a module that declares ``FLAGS`` and has a function ``answer``."""


def main(argv: Sequence[str] | None = None) -> int:
    """Answer one question: print its table and goals, and write the requested files.

    Returns:
        The exit status. It is 0 on success, and 2 for a mistake in the command. It is 1 if ``faults`` found a run
        of this library that differs from the uninterrupted one, if ``graph`` found a loss that differs from eager's,
        or if a prediction of the ``planner`` does not hold. A missed speed goal is a result, not an error.
    """
    words = (sys.argv[1:] if argv is None else argv) or ["--help"]
    options = build_parser(words).parse_args(words)
    try:
        found = _module(options.question).answer(options)
        put_out(options, options.question, found.figures, found.table, found.notes, found.draw)
    except RapidformerError as error:
        print(error.render(), file=sys.stderr)
        return error.exit_status
    return int(found.status)


def _module(question: str) -> Any:
    return import_module(f"benchmarks.{question.replace('-', '_')}")


def build_parser(asked: Collection[str] = tuple(QUESTIONS)) -> argparse.ArgumentParser:
    """Build the parser with the flags of the selected questions. Other questions are not imported."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Lay this library beside its peers.")
    output = argparse.ArgumentParser(add_help=False)
    output.add_argument("--json", type=Path, metavar="FILE", help="write the result to this file")
    output.add_argument("--output", type=Path, metavar="DIR", help="write NAME.json and, where there is one, NAME.png")
    commands = parser.add_subparsers(required=True, metavar="NAME", help="what to measure", dest="question")
    for question, text in QUESTIONS.items():
        command = commands.add_parser(question, parents=[output], help=text, description=text)
        for flag in _module(question).FLAGS if question in asked else ():
            flag.add(command)
    return parser


if __name__ == "__main__":
    sys.exit(main())
