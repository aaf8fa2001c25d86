"""``rapidformer data tokenizer``: trains a tokenizer on raw text and saves it as a folder for transformers.

The text is streamed. Only the table of its distinct words grows with it. The same text gives the same files.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import BertTokenizer, GPT2Tokenizer, PreTrainedTokenizerFast

from rapidformer_templates.data.indexed.writer import disk_errors
from rapidformer_templates.data.text.bad_lines import BadLines, add_by_reason, describe_skipped
from rapidformer_templates.data.text.files import TextUnit, documents, text_files
from rapidformer_templates.errors import ConfigError, DataError
from rapidformer_templates.models.model_files import padded_vocab_size, vocabulary_size
from rapidformer_templates.system.files import new_folder, to_json

END = "<|endoftext|>"
BERT_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")

ALPHABET = 1000
"""Maximum number of characters that become tokens of a wordpiece vocabulary."""

Kind = Literal["bpe", "wordpiece"]


def train(
    texts: Iterable[str], kind: Kind, vocab_size: int, *, min_frequency: int = 2, lower_case: bool = False
) -> Tokenizer:
    """Train a tokenizer on texts.

    Args:
        texts: the corpus, read one text at a time. ``wordpiece`` reads it twice.
        kind: ``bpe`` of bytes with GPT-2's splitting rule, or ``wordpiece`` with BERT's.
        vocab_size: total number of tokens. A small corpus gives fewer.
        min_frequency: minimum frequency of a pair of tokens to be merged.
        lower_case: remove case and accents (``wordpiece`` only).
    """
    trainer: trainers.Trainer
    common: dict[str, Any] = {"vocab_size": vocab_size, "min_frequency": min_frequency}
    common["show_progress"] = sys.stderr.isatty()
    if kind == "bpe":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        trainer = trainers.BpeTrainer(special_tokens=[END], initial_alphabet=alphabet, **common)
    else:
        tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lower_case)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        alphabet, inner = _characters(tokenizer, texts, min(ALPHABET, (vocab_size - len(BERT_TOKENS)) // 2))
        common |= {"special_tokens": [*BERT_TOKENS, *inner], "limit_alphabet": len(alphabet)}
        trainer = trainers.WordPieceTrainer(initial_alphabet=alphabet, **common)
    tokenizer.train_from_iterator(iter(texts), trainer)
    return tokenizer


def _characters(tokenizer: Tokenizer, texts: Iterable[str], most: int) -> tuple[list[str], list[str]]:
    """Return the most frequent characters, and the tokens of those that can occur inside a word.

    Without this list the trainer numbers the latter in an order that changes from run to run. The numbers decide
    between pairs of equal frequency.
    """
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(tokenizer.normalizer.normalize_str(text))
    for space in [character for character in counts if character.isspace()]:
        del counts[space]
    alphabet = sorted(sorted(counts, key=lambda character: (-counts[character], character))[:most])
    inside_words = {one: tokenizer.normalizer.normalize_str(f"a{one}a") for one in alphabet}
    inner = [one for one, word in inside_words.items() if len(tokenizer.pre_tokenizer.pre_tokenize_str(word)) == 1]
    return alphabet, [f"##{one}" for one in inner]


def save(tokenizer: Tokenizer, kind: Kind, folder: Path, *, lower_case: bool = False) -> PreTrainedTokenizerFast:
    """Write a tokenizer folder for transformers, with the vocabulary's own files. It gets its name when complete.

    Args:
        tokenizer: from :func:`train`, with the same ``kind`` and ``lower_case``.
        folder: the folder, which is replaced if it exists.

    Raises:
        DataError: the disk is full, or cannot be written to.
    """
    with disk_errors(folder), new_folder(folder) as temporary:
        tokenizer.model.save(str(temporary))
        fast: PreTrainedTokenizerFast
        if kind == "bpe":
            fast = GPT2Tokenizer(vocab=str(temporary / "vocab.json"), merges=str(temporary / "merges.txt"))
        else:
            fast = BertTokenizer(vocab=str(temporary / "vocab.txt"), do_lower_case=lower_case)
        fast.save_pretrained(temporary)
    return fast


def main(options: argparse.Namespace) -> int:
    """Train and save a tokenizer, print how to use it, and return the exit status."""
    kind, folder = options.type, Path(options.output)
    if options.lower_case and kind == "bpe":
        raise ConfigError("a bpe keeps the case", where="--lower-case", hint="leave it out, or choose --type wordpiece")
    least = 257 if kind == "bpe" else len(BERT_TOKENS) + 1
    if options.vocab_size < least:
        message = f"{options.vocab_size} tokens are too few for a {kind}"
        raise ConfigError(message, where="--vocab-size", hint=f"use at least {least}")
    if folder.exists() and not options.overwrite:
        raise DataError(f"{folder} exists", where="--output", hint="choose another folder, or add --overwrite")
    files = text_files(options.input, "--input")
    bad = BadLines(skip=options.skip_bad_lines)
    corpus = _Texts(files, options.json_keys, bad, options.text_unit)
    tokenizer = train(
        corpus, kind, options.vocab_size, min_frequency=options.min_frequency, lower_case=options.lower_case
    )
    if not corpus.documents:
        raise DataError("there is no document with text", where="--input", hint="check the files and --json-keys")
    size = vocabulary_size(save(tokenizer, kind, folder, lower_case=options.lower_case))
    skipped = list(dict.fromkeys(bad.skipped))  # each key reads all lines
    if options.json:
        facts = {"folder": str(folder), "vocabulary": size, "documents": corpus.documents, "skipped": skipped}
        print(to_json(facts), end="")
        return 0
    padded = f"padded to {padded_vocab_size(size):,} in a model"
    print(f"{folder}: {size:,} tokens of {corpus.documents:,} documents, {padded}")
    if size < options.vocab_size:
        print(f"note: the text has no more pairs that occur {options.min_frequency} times, so there are fewer tokens")
    if skipped:
        print(describe_skipped(add_by_reason({}, skipped)))
    print(f"use it with  --tokenizer-type HuggingFaceTokenizer --tokenizer-path {folder}")
    print(f"or with      {_files(kind, folder, lower_case=options.lower_case)}")
    return 0


class _Texts:
    """The documents of some files, with a count."""

    def __init__(self, files: Sequence[Path], keys: Sequence[str], bad: BadLines, unit: TextUnit) -> None:
        self.files, self.keys, self.bad, self.unit = files, keys, bad, unit
        self.documents = 0

    def __iter__(self) -> Iterator[str]:
        self.documents = 0
        for path in self.files:
            for key in self.keys:
                for text in documents(path, key, self.bad, self.unit, "--json-keys"):
                    self.documents += 1
                    yield text
        self.bad.raise_all()


def _files(kind: Kind, folder: Path, *, lower_case: bool) -> str:
    if kind == "bpe":
        return f"--tokenizer-type GPT2BPETokenizer --vocab-file {folder}/vocab.json --merge-file {folder}/merges.txt"
    name = "BertWordPieceLowerCase" if lower_case else "BertWordPieceCase"
    return f"--tokenizer-type {name} --vocab-file {folder}/vocab.txt"
