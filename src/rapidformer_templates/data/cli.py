"""The command line of the data tools. Imports no torch, and nothing else that is slow until a tool starts."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from rapidformer_templates.config import dashed
from rapidformer_templates.errors import ConfigError, RapidformerError
from rapidformer_templates.signals import interruptible

TOKENIZER_TYPES = ("BertWordPieceLowerCase", "BertWordPieceCase", "GPT2BPETokenizer", "HuggingFaceTokenizer")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one tool.

    Args:
        argv: the words after ``rapidformer data``; by default those of this process.

    Returns:
        The exit status: 0; 1 if ``verify`` found damage; 2 for a mistake or a file that cannot be used; 75 if
        it was interrupted.
    """
    words = dashed(sys.argv[1:] if argv is None else argv)
    try:
        options = _parser().parse_args(words)
        with interruptible("interrupted; nothing was written", "run it again: it starts anew"):
            status: int = options.run(options)
    except RapidformerError as error:
        print(error.render(), file=sys.stderr)
        return error.exit_status
    return status


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in the way of all other commands."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, hint=f"{self.prog} --help lists what there is")


def _preprocess(options: argparse.Namespace) -> int:
    from rapidformer_templates.data import preprocess_command

    return preprocess_command.main(options)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="rapidformer data", description="Make, join and look at data sets for pretraining.")
    commands = parser.add_subparsers(required=True, metavar="preprocess|merge|inspect|verify|tokenizer")

    preprocess = commands.add_parser("preprocess", help="raw text to Megatron's indexed data sets")
    _add_text(preprocess)
    preprocess.add_argument("--output-prefix", required=True, metavar="P", help="gives P_text_document.bin and .idx")
    preprocess.add_argument("--json-keys", nargs="+", default=["text"], metavar="KEY", help="one set each (text)")
    preprocess.add_argument("--dataset-impl", choices=("mmap",), default="mmap", help="the format: mmap")
    preprocess.add_argument("--append-eod", action="store_true", help="an end token after each document")
    preprocess.add_argument("--split-sentences", action="store_true", help="a sequence a sentence, for pairs of them")
    preprocess.add_argument("--workers", type=_positive, metavar="N", help="processes (default: all cores)")
    preprocess.add_argument(
        "--chunk-size", type=_positive, default=1000, metavar="N", help="documents a worker gets at a time (1000)"
    )
    _add_tokenizer(preprocess)
    preprocess.add_argument(
        "--tokenizer-backend",
        choices=("auto", "gigatoken", "transformers"),
        default="auto",
        help="auto: gigatoken where it is installed and proves equal, else transformers",
    )
    preprocess.add_argument(
        "--tokenizer-check",
        choices=("sample", "all"),
        default="sample",
        help="on how much of the text gigatoken is compared with transformers (sample: 1 part in 64)",
    )
    _add_output(preprocess)
    preprocess.set_defaults(run=_preprocess)
    return parser


def _add_text(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--input", nargs="+", required=True, metavar="PATH", help="files, folders, globs: .jsonl, .txt, .parquet"
    )
    parser.add_argument(
        "--skip-bad-lines", action="store_true", help="leave out lines that cannot be read, and list them"
    )


def _add_tokenizer(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokenizer-type", choices=TOKENIZER_TYPES, help="default: HuggingFaceTokenizer")
    parser.add_argument("--vocab-file", metavar="FILE", help="of the first three types")
    parser.add_argument("--merge-file", metavar="FILE", help="of GPT2BPETokenizer")
    parser.add_argument("--tokenizer-path", metavar="DIR", help="folder of a HuggingFaceTokenizer")
    parser.add_argument("--pretrained-model-name-or-path", metavar="DIR", help="the same: a model's folder")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with a model folder")


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--overwrite", action="store_true", help="replace what is there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the summary to this file")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number
