"""``rapidformer data preprocess``: its options and its summary."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from rapidformer_templates.data.indexed.dataset import type_for
from rapidformer_templates.data.text.encoding import EncodingRecipe
from rapidformer_templates.data.text.files import text_files
from rapidformer_templates.data.text.preprocess import TITLES, PreprocessResult, preprocess, usable_cores
from rapidformer_templates.errors import ConfigError, DataError
from rapidformer_templates.models.model_files import (
    end_token_id,
    load_tokenizer,
    padded_vocab_size,
    vocabulary_id,
    vocabulary_size,
)
from rapidformer_templates.planning.config import RunConfig, spelling
from rapidformer_templates.system.files import to_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FOLDER = frozenset({"tokenizer_path", "pretrained_model_name_or_path", "trust_remote_code"})
TOKENIZER_FLAGS = {
    "HuggingFaceTokenizer": FOLDER,
    "GPT2BPETokenizer": frozenset({"vocab_file", "merge_file"}),
    "BertWordPieceCase": frozenset({"vocab_file"}),
    "BertWordPieceLowerCase": frozenset({"vocab_file"}),
}
"""The flags that locate a tokenizer, by tokenizer type."""


def is_tokenizer_named(options: argparse.Namespace) -> bool:
    """Whether any tokenizer option is given."""
    return any(getattr(options, name) for name in ("tokenizer_type", *set().union(*TOKENIZER_FLAGS.values())))


def tokenizer_of(options: argparse.Namespace) -> PreTrainedTokenizerFast:
    """Load the tokenizer of the options. See :func:`~rapidformer_templates.models.model_files.load_tokenizer`.

    Raises:
        ConfigError: a flag belongs to another type of tokenizer.
        ModelError: a file is missing, or the type needs another kind of file.
    """
    kind = options.tokenizer_type or "HuggingFaceTokenizer"
    named = {name: value for name in set().union(*TOKENIZER_FLAGS.values()) if (value := getattr(options, name))}
    for name in sorted(named.keys() - TOKENIZER_FLAGS[kind]):
        kinds = [other for other, flags in TOKENIZER_FLAGS.items() if name in flags]
        hint = f"leave it out, or choose --tokenizer-type {' or '.join(kinds)}"
        raise ConfigError(f"{spelling(name)} has no effect on a {kind}", where=spelling(name), hint=hint)
    return load_tokenizer(RunConfig().replace("command line", tokenizer_type=kind, **named))


def main(options: argparse.Namespace) -> int:
    """Preprocess, print the summary and return the exit status."""
    files = text_files(options.input, "--input")
    keys = tuple(dict.fromkeys(options.json_keys))
    if any("/" in key for key in keys):
        raise DataError("a key with '/' cannot be part of a file name", where="--json-keys", hint="rename the key")
    tokenizer = tokenizer_of(options)
    vocabulary = vocabulary_size(tokenizer)
    recipe = EncodingRecipe(
        tokenizer.backend_tokenizer.to_str(),
        type_for(vocabulary).name,
        end_token_id(tokenizer) if options.append_eod else None,
        keys,
        sentences=options.split_sentences,
        skip=options.skip_bad_lines,
        vocabulary=vocabulary_id(tokenizer.backend_tokenizer),
        text_unit=options.text_unit,
    )
    result = preprocess(
        files,
        options.output_prefix,
        recipe,
        workers=options.workers or usable_cores(),
        chunk_size=options.chunk_size,
        backend=options.tokenizer_backend,
        check_all=options.tokenizer_check == "all",
        overwrite=options.overwrite,
    )
    if options.json:
        print(to_json(_facts(result, vocabulary)), end="")
    else:
        _show(result, vocabulary)
    return 0


def _show(result: PreprocessResult, vocabulary: int) -> None:
    for key, prefix in result.prefix.items():
        documents, tokens, empty = result.documents[key], result.tokens[key], result.empty[key]
        left_out = f"; {empty:,} empty document{'s' if empty > 1 else ''} left out" if empty else ""
        print(f"{prefix}: {documents:,} documents, {tokens:,} tokens ({result.dtype}){left_out}")
    print(f"vocabulary: {vocabulary:,} tokens, padded to {padded_vocab_size(vocabulary):,} in the model")
    equal = (
        ""
        if result.way == "whole"
        else f", same tokens as the plain one on hard texts and on {result.compared:,} of these tokens"
    )
    print(f"tokenizer: {TITLES[result.way]}{equal}")
    for note in result.notes:
        print(f"note: {note}")
    if result.skipped_file:
        print(f"{result.skipped:,} bad lines left out, listed in {result.skipped_file}:")
        for line in result.examples:
            print(f"  {line}")
    tokens, documents = sum(result.tokens.values()), sum(result.documents.values())
    seconds = result.seconds
    print(f"{seconds:.1f} s, {tokens / seconds:,.0f} tokens/s, {documents / seconds:,.0f} documents/s")


def _facts(result: PreprocessResult, vocabulary: int) -> dict[str, object]:
    return {
        "sets": [
            {
                "prefix": prefix,
                "documents": result.documents[key],
                "tokens": result.tokens[key],
                "empty": result.empty[key],
            }
            for key, prefix in result.prefix.items()
        ],
        "dtype": result.dtype,
        "vocabulary": vocabulary,
        "padded_vocabulary": padded_vocab_size(vocabulary),
        "skipped": result.skipped,
        "way": result.way,
        "compared_tokens": result.compared,
        "notes": result.notes,
        "seconds": result.seconds,
    }
