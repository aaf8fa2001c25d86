"""``rapidformer data merge``, ``inspect`` and ``verify``, and their output."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, NotRequired, TypedDict

from rich.table import Table

from rapidformer_templates.data.indexed.dataset import IndexedDataset
from rapidformer_templates.data.indexed.tools import (
    Damage,
    DataSetStatistics,
    add_sums,
    merge,
    prefixes_of,
    statistics_of,
    verify,
)
from rapidformer_templates.errors import ConfigError, DataError
from rapidformer_templates.system.files import to_json
from rapidformer_templates.system.terminal import console

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SHOWN_TOKENS = 24
"""Number of tokens per document that ``inspect --show`` prints. The printed text covers ten times this number."""


class FirstDocument(TypedDict):
    """A document that ``inspect --show`` prints: its length in tokens, its first tokens, and their text."""

    length: int
    tokens: list[int]
    text: NotRequired[str]


def merge_main(options: argparse.Namespace) -> int:
    """Merge data sets, print the result and return the exit status."""
    prefixes = prefixes_of(options.input, leave_out=options.output_prefix)
    merge(prefixes, options.output_prefix, overwrite=options.overwrite)
    facts = statistics_of(options.output_prefix)
    if options.json:
        print(to_json({"inputs": prefixes, "output": dataclasses.asdict(facts)}), end="")
    else:
        counts = f"{facts.documents:,} documents, {facts.tokens:,} tokens ({facts.dtype})"
        print(f"{facts.prefix}: {counts} of {len(prefixes)} sets")
        for prefix in prefixes:
            print(f"  {prefix}")
    return 0


def inspect_main(options: argparse.Namespace) -> int:
    """Print the contents of data sets and return the exit status."""
    from rapidformer_templates.commands.data_preprocess import is_tokenizer_named, tokenizer_of

    tokenizer = None
    if is_tokenizer_named(options):
        if not options.show:
            hint = "add --show N, or leave it out"
            raise ConfigError("a tokenizer has an effect only with --show", where="inspect", hint=hint)
        tokenizer = tokenizer_of(options)
    prefixes = prefixes_of(options.input)
    about_sets = [statistics_of(prefix) for prefix in prefixes]
    shown = {prefix: _first_documents(prefix, options.show, tokenizer) for prefix in prefixes}
    losses = {prefix: _unigram_loss(prefix, options.split) for prefix in prefixes} if options.split else {}
    if options.json:
        sets = [
            dataclasses.asdict(facts)
            | {"first": shown[facts.prefix]}
            | ({"unigram_loss": losses[facts.prefix]} if losses else {})
            for facts in about_sets
        ]
        print(to_json({"sets": sets}), end="")
        return 0
    terminal = console(piped_width=120)
    for facts in about_sets:
        terminal.print(_table(facts))
        if len(facts.shares) > 1:
            terminal.print(_histogram(facts))
        for number, document in enumerate(shown[facts.prefix]):
            more = " …" if document["length"] > SHOWN_TOKENS else ""
            print(f"document {number:,}, {document['length']:,} tokens: {' '.join(map(str, document['tokens']))}{more}")
            if tokenizer:
                print(f"  {document['text']!r}")
        if losses:
            loss = losses[facts.prefix]
            print(f"validation loss of a unigram model (split {options.split}): {loss:.4f} nats per token")
    return 0


def _unigram_loss(prefix: str, split: str) -> float:
    """Return the validation loss of a unigram model of the training part.

    A language model must beat it to have learned more than the frequencies of tokens.

    Raises:
        DataError: the training or the validation part has no document.
    """
    from rapidformer_templates.data.indexed.tools import split_sequences, split_shares, unigram_loss

    dataset = IndexedDataset(prefix)
    train, valid, _ = split_sequences(split_shares(split), len(dataset))
    if train[0] == train[1] or valid[0] == valid[1]:
        message = "the training or the validation part has no document"
        raise DataError(message, where=f"--split {split}", hint="use other shares, such as 9,1")
    return unigram_loss(dataset, train, valid)


def _first_documents(prefix: str, count: int, tokenizer: PreTrainedTokenizerFast | None) -> list[FirstDocument]:
    dataset = IndexedDataset(prefix)
    bounds = dataset.documents[: count + 1]
    documents: list[FirstDocument] = []
    for first, last in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        length = int(dataset.lengths[first:last].sum())
        start = int(dataset.pointers[first]) // dataset.dtype.itemsize
        tokens = dataset.tokens[start : start + min(length, 10 * SHOWN_TOKENS)].tolist()
        document: FirstDocument = {"length": length, "tokens": tokens[:SHOWN_TOKENS]}
        if tokenizer:
            document["text"] = str(tokenizer.decode(tokens))
        documents.append(document)
    return documents


def _table(facts: DataSetStatistics) -> Table:
    table = Table(title=facts.prefix, title_justify="left", show_header=False)
    rows = {
        "documents": f"{facts.documents:,}",
        "sequences": f"{facts.sequences:,}",
        "tokens": f"{facts.tokens:,}  ({facts.dtype})",
        "tokens per document": f"{facts.mean:,.1f} mean, {facts.shortest:,} shortest, {facts.longest:,} longest",
        "largest token": "unknown: no checksums" if facts.largest is None else f"{facts.largest:,}",
        "on the disk": f"{facts.bytes / 1e6:,.2f} MB",
    }
    for name, fact in rows.items():
        table.add_row(name, fact)
    return table


def _histogram(facts: DataSetStatistics) -> Table:
    table = Table("tokens", title="Lengths of documents", title_justify="left")
    for heading in ("documents", "share", "share of the tokens"):
        table.add_column(heading, justify="right")
    table.add_column("")
    most = max(documents for _, documents, _ in facts.shares)
    for bound, documents, tokens in facts.shares:
        table.add_row(
            f"{bound // 2:,} to {bound - 1:,}" if bound > 2 else "1",
            f"{documents:,}",
            f"{documents / facts.documents:.1%}",
            f"{tokens / facts.tokens:.1%}",
            "█" * max(round(30 * documents / most), 1),
        )
    return table


def verify_main(options: argparse.Namespace) -> int:
    """Check data sets and print the damage. Return 1 if a set is damaged, else 0."""
    damages = {prefix: _verified(prefix) for prefix in prefixes_of(options.input)}
    written = []
    if options.write_sums:
        written = [str(add_sums(prefix)) for prefix, damage in damages.items() if damage is None]
    if options.json:
        sets = [
            {
                "prefix": prefix,
                "checked": damage is not None,
                "damage": [{"file": str(part.file), "what": part.what} for part in damage or ()],
            }
            for prefix, damage in damages.items()
        ]
        print(to_json({"ok": not any(damages.values()), "sets": sets, "written": written}), end="")
    else:
        for prefix, damage in damages.items():
            _show(prefix, damage)
        for path in written:
            print(f"{path} written")
    return 1 if any(damages.values()) else 0


def _verified(prefix: str) -> list[Damage] | None:
    """Run :func:`verify` and report files that do not fit together as damage, so that other sets are checked too."""
    try:
        return verify(prefix)
    except DataError as error:
        return [Damage(Path(error.where or prefix), error.message)]


def _show(prefix: str, damage: list[Damage] | None) -> None:
    if damage is None:
        print(f"{prefix}: the two files fit together; there are no checksums, so the tokens cannot be checked")
    elif not damage:
        print(f"{prefix}: intact")
    else:
        print(f"{prefix}: damaged")
        for part in damage:
            print(f"  {part.file}: {part.what}")
        print("  help: copy the file again, or make the set again with rapidformer data preprocess")
