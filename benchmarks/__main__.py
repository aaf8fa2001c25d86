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
    "overhead": "time that a loop adds to a plain PyTorch loop, in milliseconds per step",
    "peers": "the demo's job, compared with transformers' Trainer",
    "faults": "kill -9 at random moments, then resume",
    "fault-table": "faults of one worker or of all: what is printed, and whether a run continues",
    "powercut": "states that a power cut may leave on the disk, and what resumes find in them",
    "saving": "speed of writing a checkpoint to the disk, including the flush",
    "reading": "speed of reading an indexed data set",
    "streaming": "memory of one pass over streamed text",
    "preprocess": "speed of preprocessing raw text into an indexed data set",
    "padding": "useful tokens per second of each way to batch",
    "packing": "packed documents, separated with and without a mask",
    "graph": "ONNX Runtime and inductor, compared with eager",
    "planner": "predicted memory of a plan, compared with real steps",
    "seconds": "predicted seconds of a step on this machine, compared with real steps",
    "published-runs": "predicted seconds of a step, compared with published measurements",
    "offload": "predicted and measured memory with activations on the host",
    "context": "predicted and measured memory of long sequences, divided over several workers",
    "layouts": "losses of eighteen layouts of up to eight workers, compared with one process",
    "longest": "a sequence that is too long for one worker, divided over several",
    "states": "bytes per parameter of each way to shard the states",
    "setup-memory": "memory of building a model that is larger than a worker, under each engine",
    "export-memory": "memory and time of an export and a merge of adapters, and of the peers",
    "moe": "a mixture of experts, compared with the dense model",
    "adapters": "LoRA, DoRA and QLoRA, compared with full fine-tuning",
    "precision": "loss and bytes of 16-bit weights with fp32 masters",
    "optimizers": "state, loss and time of each optimizer",
    "fused-loss": "memory and time of a step, with and without the logits of all tokens",
}
"""Each question is a module that declares ``FLAGS`` and has a function ``answer``."""


def main(argv: Sequence[str] | None = None) -> int:
    """Answer one question: print its table and goals, and write the requested files.

    Returns:
        The exit status. It is 0 on success and 2 for a mistake in the command. It is 1 if ``faults`` or ``fault-table``
        found a run that differs from the uninterrupted one, if ``powercut`` found a state of a run of ours that does
        not continue, if ``graph`` found a loss that differs from eager's, or if a prediction of the ``planner`` was
        wrong. A missed speed goal is a result, not an error.
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
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Compare this library with its peers.")
    output = argparse.ArgumentParser(add_help=False)
    output.add_argument("--json", type=Path, metavar="FILE", help="write the result to this file")
    output.add_argument(
        "--output", type=Path, metavar="DIR", help="write NAME.json, and NAME.png if there is a picture"
    )
    commands = parser.add_subparsers(required=True, metavar="NAME", help="what to measure", dest="question")
    for question, text in QUESTIONS.items():
        command = commands.add_parser(question, parents=[output], help=text, description=text)
        for flag in _module(question).FLAGS if question in asked else ():
            flag.add(command)
    return parser


if __name__ == "__main__":
    sys.exit(main())
