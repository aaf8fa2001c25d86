"""The command line of the data tools. Slow modules such as torch are imported only when a tool starts."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from rapidformer_templates.planning.flag_parser import CommandParser, dashed, positive
from rapidformer_templates.planning.registry import load_object
from rapidformer_templates.system.processes import interruptible

TOKENIZER_TYPES = ("BertWordPieceLowerCase", "BertWordPieceCase", "GPT2BPETokenizer", "HuggingFaceTokenizer")


def main(argv: Sequence[str]) -> int:
    """Run one tool.

    Args:
        argv: words after ``rapidformer data``.

    Returns:
        The exit status: 0 for success, 1 if ``verify`` found damage.

    Raises:
        RapidformerError: a mistake, or a file that cannot be used.
        Interrupted: it was asked to stop.
    """
    words = dashed(argv)
    if words[:1] == ["inspect"] and any(word.partition("=")[0] in ("--task", "--config") for word in words):
        show: Callable[[list[str]], int] = load_object("rapidformer_templates.commands.data_tools:samples_main")
        return show(words[1:])
    options = build_parser().parse_args(words)
    with interruptible("interrupted; nothing was written", "run it again: it starts from the beginning"):
        run_tool: Callable[[argparse.Namespace], int] = load_object(options.run)
        return run_tool(options)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of ``rapidformer data``."""
    parser = CommandParser(prog="rapidformer data", description="Make, join and inspect data sets.")
    commands = parser.add_subparsers(required=True, metavar="preprocess|merge|inspect|verify|tokenizer")

    preprocess = commands.add_parser("preprocess", help="convert raw text to Megatron's indexed data sets")
    _add_text(preprocess)
    text = "prefix of the output: P_KEY_document.bin and .idx"
    preprocess.add_argument("--output-prefix", required=True, metavar="P", help=text)
    preprocess.add_argument("--dataset-impl", choices=("mmap",), default="mmap", help="format of the output: mmap")
    preprocess.add_argument("--append-eod", action="store_true", help="add an end token after each document")
    preprocess.add_argument(
        "--split-sentences", action="store_true", help="one sequence per sentence, for sentence pairs"
    )
    preprocess.add_argument("--workers", type=positive, metavar="N", help="processes (default: all cores)")
    text = "documents that a worker gets at a time (1000)"
    preprocess.add_argument("--chunk-size", type=positive, default=1000, metavar="N", help=text)
    _add_tokenizer(preprocess)
    preprocess.add_argument(
        "--tokenizer-backend",
        choices=("auto", "gigatoken", "transformers"),
        default="auto",
        help="auto: gigatoken if it is installed and gives the same tokens, else transformers (default)",
    )
    text = "how much of the text the fast backend is compared with the plain one on (sample: 1 part in 64)"
    preprocess.add_argument("--tokenizer-check", choices=("sample", "all"), default="sample", help=text)
    _add_output(preprocess)
    preprocess.set_defaults(run="rapidformer_templates.commands.data_tools:preprocess_main")

    merge = commands.add_parser("merge", help="merge several indexed data sets into one")
    merge.add_argument("--input", nargs="+", required=True, metavar="P", help="prefixes in order, or folders of sets")
    merge.add_argument("--output-prefix", required=True, metavar="P", help="prefix of the new set")
    _add_output(merge)
    merge.set_defaults(run="rapidformer_templates.commands.data_tools:merge_main")

    _add_inspect(commands.add_parser)

    verify = commands.add_parser("verify", help="compare indexed data sets with their checksums")
    verify.add_argument("input", nargs="+", metavar="P", help="prefixes, or folders of sets")
    verify.add_argument("--write-sums", action="store_true", help="write checksums for sets that have none")
    _add_json(verify)
    verify.set_defaults(run="rapidformer_templates.commands.data_tools:verify_main")

    tokenizer = commands.add_parser("tokenizer", help="train a tokenizer on raw text")
    _add_text(tokenizer)
    tokenizer.add_argument("--output", required=True, metavar="DIR", help="folder that transformers can read")
    text = "bpe: byte-level, like GPT-2's (default); wordpiece: like BERT's"
    tokenizer.add_argument("--type", choices=("bpe", "wordpiece"), default="bpe", help=text)
    text = "size of the vocabulary, tokens (50257)"
    tokenizer.add_argument("--vocab-size", type=positive, default=50257, metavar="N", help=text)
    text = "least number of occurrences of a pair that is joined (2)"
    tokenizer.add_argument("--min-frequency", type=positive, default=2, metavar="N", help=text)
    tokenizer.add_argument("--lower-case", action="store_true", help="wordpiece: ignore case and accents")
    _add_output(tokenizer)
    tokenizer.set_defaults(run="rapidformer_templates.data.text.train_tokenizer:main")
    return parser


def _add_inspect(add_parser: Callable[..., CommandParser]) -> None:
    text = "show the contents of indexed data sets; with --task and the flags of a training command, show its samples"
    inspect = add_parser("inspect", help=text, description=f"{text} with the learned tokens marked.")
    inspect.add_argument("input", nargs="+", metavar="P", help="prefixes, or folders of sets")
    text = "show the first N documents, as text if a tokenizer is named"
    inspect.add_argument("--show", type=positive, default=0, metavar="N", help=text)
    text = "show the loss of a unigram model of the training part on the validation part"
    inspect.add_argument("--split", metavar="T,V,T", help=text)
    _add_tokenizer(inspect)
    _add_json(inspect)
    inspect.set_defaults(run="rapidformer_templates.commands.data_tools:inspect_main")


def _add_text(parser: argparse.ArgumentParser) -> None:
    text = "files, folders, globs: .jsonl, .txt, .parquet"
    parser.add_argument("--input", nargs="+", required=True, metavar="PATH", help=text)
    parser.add_argument("--json-keys", nargs="+", default=["text"], metavar="KEY", help="columns with text (text)")
    text = "a document of a .txt file: a paragraph between blank lines (default), a line, or the file"
    parser.add_argument("--text-unit", choices=("paragraph", "line", "file"), default="paragraph", help=text)
    parser.add_argument("--skip-bad-lines", action="store_true", help="skip lines that cannot be read, and list them")


def _add_tokenizer(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokenizer-type", choices=TOKENIZER_TYPES, help="default: HuggingFaceTokenizer")
    parser.add_argument("--vocab-file", metavar="FILE", help="vocabulary of the first three types")
    parser.add_argument("--merge-file", metavar="FILE", help="merges of GPT2BPETokenizer")
    parser.add_argument("--tokenizer-path", metavar="DIR", help="folder of a HuggingFaceTokenizer")
    parser.add_argument("--pretrained-model-name-or-path", metavar="DIR", help="folder of a model with a tokenizer")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with a model folder")


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--overwrite", action="store_true", help="replace existing files")
    _add_json(parser)


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
