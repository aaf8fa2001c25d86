"""``python -m benchmarks NAME``: evidence for docs/benchmarks.md. Run it in the root of a repository checkout."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Sequence
from importlib import import_module
from typing import Any

from rapidformer_templates.commands.bench.cli import add_output_flags, put_out
from rapidformer_templates.errors import RapidformerError

QUESTIONS = {
    "partitioning": ("tables", "costs and savings of each way to divide the model's state"),
    "mixed-precision": ("tables", "BERT in fp32 and in a 16-bit type"),
    "parallel": ("tables", "tensor and pipeline parallel layouts of a GPT"),
    "two-levels": ("tables", "FSDP inside tensor-parallel groups, compared with torch's recipe"),
    "graph": ("tables", "ONNX Runtime and inductor, compared with eager"),
    "mfu": ("tables", "model FLOPs utilisation, compared with a loop by hand and transformers' Trainer"),
    "overhead": ("overhead", "time that a loop adds to a plain PyTorch loop, in milliseconds per step"),
    "peers": ("peers", "the demo's job, compared with transformers' Trainer"),
    "faults": ("faults", "kill -9 at random moments, then resume"),
    "fault-table": ("faults", "faults of one worker or of all: what is printed, and whether a run continues"),
    "saving": ("saving", "speed of writing a checkpoint to the disk, including the flush"),
    "reading": ("reading", "speed of reading an indexed data set"),
    "streaming": ("streaming", "memory of one pass over streamed text"),
    "preprocess": ("preprocess", "speed of preprocessing raw text into an indexed data set"),
    "padding": ("padding", "useful tokens per second of each way to batch"),
    "packing": ("packing", "packed documents, separated with and without a mask"),
    "planner": ("planner", "predicted memory of a plan, compared with real steps"),
    "seconds": ("seconds", "predicted seconds of a step on this machine, compared with real steps"),
    "published-runs": ("published_runs", "predicted seconds of a step, compared with published measurements"),
    "offload": ("context", "predicted and measured memory with activations on the host"),
    "adapters": ("small_gpt", "LoRA, DoRA and QLoRA, compared with full fine-tuning"),
    "context": ("context", "predicted and measured memory of long sequences, divided over several workers"),
    "ring": ("ring", "attention over a divided sequence, in a ring with flash kernels and without"),
    "setup-memory": ("setup_memory", "memory of building a model that is larger than a worker, under each engine"),
    "moe": ("moe", "a mixture of experts, compared with the dense model"),
    "precision": ("small_gpt", "loss and bytes of 16-bit weights with fp32 masters"),
    "fp8": ("small_gpt", "loss, speed and memory of products in fp8, compared with bf16"),
    "optimizers": ("small_gpt", "state, loss and time of each optimizer"),
    "fused-loss": ("small_gpt", "memory and time of a step, with and without the logits of all tokens"),
}
"""The module of each question, and what it measures. A module has a function that ``asks`` marks for each question."""


def main(argv: Sequence[str] | None = None) -> int:
    """Answer one question: print its table and goals, and write the requested files.

    Returns:
        The exit status. It is 0 on success and 2 for a mistake in the command. It is 1 if something of this library
        failed: a solution of a table, a killed run, or a prediction of the ``planner``. A missed speed goal is a
        result, not an error.
    """
    words = (sys.argv[1:] if argv is None else argv) or ["--help"]
    options = build_parser(words).parse_args(words)
    try:
        found = answer_to(options.question)(options)
        put_out(options, options.question, found.figures, found.table, found.notes, found.draw)
    except RapidformerError as error:
        print(error.render(), file=sys.stderr)
        return error.exit_status
    return int(found.status)


def answer_to(question: str) -> Any:
    """Return the function that answers a question: that of its name, or ``answer``."""
    module = import_module(f"benchmarks.{QUESTIONS[question][0]}")
    return getattr(module, question.replace("-", "_"), None) or module.answer


def build_parser(asked: Collection[str] = tuple(QUESTIONS)) -> argparse.ArgumentParser:
    """Build the parser with the flags of the selected questions. Other questions are not imported."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Compare this library with its peers.")
    commands = parser.add_subparsers(required=True, metavar="NAME", help="what to measure", dest="question")
    for question, (_, text) in QUESTIONS.items():
        command = commands.add_parser(question, help=text, description=text)
        add_output_flags(command)
        for flag in answer_to(question).flags if question in asked else ():
            flag.add(command)
    return parser


if __name__ == "__main__":
    sys.exit(main())
