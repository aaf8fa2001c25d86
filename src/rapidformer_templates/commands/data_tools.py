"""The tools of ``rapidformer data`` for indexed data sets, and ``inspect --task`` for the samples of a run."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table

from rapidformer_templates.data.indexed import tools
from rapidformer_templates.data.indexed.dataset import IndexedDataset, type_for
from rapidformer_templates.data.text.encoding import EncodingRecipe
from rapidformer_templates.data.text.files import text_files
from rapidformer_templates.data.text.preprocess import TITLES, PreprocessResult, preprocess, usable_cores
from rapidformer_templates.errors import ConfigError, DataError, MistakeCollector, counted
from rapidformer_templates.models import model_files
from rapidformer_templates.planning.config import COMMAND_LINE, RunConfig, spelling
from rapidformer_templates.planning.data_rules import check_data_flags
from rapidformer_templates.planning.flag_parser import parse
from rapidformer_templates.planning.flags import flag
from rapidformer_templates.planning.registry import REGISTRY
from rapidformer_templates.planning.tasks import tasks_with
from rapidformer_templates.run import configure
from rapidformer_templates.run.early_checks import check_data
from rapidformer_templates.system.files import to_json
from rapidformer_templates.system.terminal import console

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from rapidformer_templates.data.types import Sample

SHOWN_TOKENS = 24
"""Number of tokens per document that ``inspect --show`` prints. The printed text covers ten times this number."""

FOLDER = frozenset({"tokenizer_path", "pretrained_model_name_or_path", "trust_remote_code"})
TOKENIZER_FLAGS = {
    "HuggingFaceTokenizer": FOLDER,
    "GPT2BPETokenizer": frozenset({"vocab_file", "merge_file"}),
    "BertWordPieceCase": frozenset({"vocab_file"}),
    "BertWordPieceLowerCase": frozenset({"vocab_file"}),
}
"""The flags that locate a tokenizer, by tokenizer type."""


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
    return model_files.load_tokenizer(RunConfig().replace(COMMAND_LINE, tokenizer_type=kind, **named))


def preprocess_main(options: argparse.Namespace) -> int:
    """Preprocess, print the summary and return the exit status."""
    files = text_files(options.input, "--input")
    keys = tuple(dict.fromkeys(options.json_keys))
    if any("/" in key for key in keys):
        raise DataError("a key with '/' cannot be part of a file name", where="--json-keys", hint="rename the key")
    tokenizer = tokenizer_of(options)
    vocabulary = model_files.vocabulary_size(tokenizer)
    recipe = EncodingRecipe(
        tokenizer.backend_tokenizer.to_str(),
        type_for(vocabulary).name,
        model_files.end_token_id(tokenizer) if options.append_eod else None,
        keys,
        sentences=options.split_sentences,
        skip=options.skip_bad_lines,
        vocabulary=model_files.vocabulary_id(tokenizer.backend_tokenizer),
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
    if not options.json:
        _show_preprocessed(result, vocabulary)
        return 0
    counts = {"documents": result.documents, "tokens": result.tokens, "empty": result.empty}
    facts = {
        "sets": [
            {"prefix": prefix, **{name: count[key] for name, count in counts.items()}}
            for key, prefix in result.prefix.items()
        ],
        "dtype": result.dtype,
        "vocabulary": vocabulary,
        "padded_vocabulary": model_files.padded_vocab_size(vocabulary),
        "skipped": result.skipped,
        "way": result.way,
        "compared_tokens": result.compared,
        "notes": result.notes,
        "seconds": result.seconds,
    }
    print(to_json(facts), end="")
    return 0


def _show_preprocessed(result: PreprocessResult, vocabulary: int) -> None:
    for key, prefix in result.prefix.items():
        documents, tokens, empty = result.documents[key], result.tokens[key], result.empty[key]
        left_out = f"; {counted(empty, 'empty document')} left out" if empty else ""
        print(f"{prefix}: {documents:,} documents, {tokens:,} tokens ({result.dtype}){left_out}")
    print(f"vocabulary: {vocabulary:,} tokens, padded to {model_files.padded_vocab_size(vocabulary):,} in the model")
    equal = f", same tokens as the plain one on hard texts and on {result.compared:,} of these tokens"
    equal = "" if result.way == "whole" else equal
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


FirstDocument = dict[str, Any]
"""A document that ``inspect --show`` prints: its ``length`` in tokens, its first ``tokens``, and their ``text``."""


def merge_main(options: argparse.Namespace) -> int:
    """Merge data sets, print the result and return the exit status."""
    prefixes = tools.prefixes_of(options.input, leave_out=options.output_prefix)
    tools.merge(prefixes, options.output_prefix, overwrite=options.overwrite)
    facts = tools.statistics_of(options.output_prefix)
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
    tokenizer = None
    if any(getattr(options, name) for name in ("tokenizer_type", *set().union(*TOKENIZER_FLAGS.values()))):
        if not options.show:
            hint = "add --show N, or leave it out"
            raise ConfigError("a tokenizer has an effect only with --show", where="inspect", hint=hint)
        tokenizer = tokenizer_of(options)
    prefixes = tools.prefixes_of(options.input)
    about_sets = [tools.statistics_of(prefix) for prefix in prefixes]
    shown = {prefix: _first_documents(prefix, options.show, tokenizer) for prefix in prefixes}
    losses = {prefix: _unigram_loss(prefix, options.split) for prefix in prefixes} if options.split else {}
    if options.json:
        sets = [dataclasses.asdict(facts) | {"first": shown[facts.prefix]} for facts in about_sets]
        for entry in sets if losses else ():
            entry["unigram_loss"] = losses[entry["prefix"]]
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
    dataset = IndexedDataset(prefix)
    train, valid, _ = tools.split_sequences(tools.split_shares(split), len(dataset))
    if train[0] == train[1] or valid[0] == valid[1]:
        message = "the training or the validation part has no document"
        raise DataError(message, where=f"--split {split}", hint="use other shares, such as 9,1")
    return tools.unigram_loss(dataset, train, valid)


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


def _table(facts: tools.DataSetStatistics) -> Table:
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


def _histogram(facts: tools.DataSetStatistics) -> Table:
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
    damages: dict[str, list[tools.Damage] | None] = {}
    for prefix in tools.prefixes_of(options.input):
        try:
            damages[prefix] = tools.verify(prefix)
        except DataError as error:  # its files do not fit together, but the other sets are checked, too
            damages[prefix] = [tools.Damage(error.where or prefix, error.message)]
    written = []
    if options.write_sums:
        written = [str(tools.add_sums(prefix)) for prefix, damage in damages.items() if damage is None]
    if options.json:
        sets = [
            {
                "prefix": prefix,
                "checked": damage is not None,
                "damage": [dataclasses.asdict(part) for part in damage or ()],
            }
            for prefix, damage in damages.items()
        ]
        print(to_json({"ok": not any(damages.values()), "sets": sets, "written": written}), end="")
    else:
        for prefix, damage in damages.items():
            if damage is None:
                print(f"{prefix}: the two files fit together; there are no checksums, so the tokens cannot be checked")
            elif not damage:
                print(f"{prefix}: intact")
            else:
                print(f"{prefix}: damaged")
                for place in damage:
                    print(f"  {place.file}: {place.what}")
                print("  help: copy the file again, or make the set again with rapidformer data preprocess")
        for path in written:
            print(f"{path} written")
    return 1 if any(damages.values()) else 0


SAMPLES_PROG = "rapidformer data inspect --task TASK"
SAMPLES_DESCRIPTION = "Show the first training samples, with the tokens that a run would learn marked."
MARKS = "⟦", "⟧"
"""Around learned tokens where there are no colours."""

BETWEEN = f"\n{'─' * 40}\n"
"""Between the samples of a packed row."""

ROWS = {"": "", "rejected_": " (rejected)", "kl_": " (an answer to another prompt, for the drift of KTO)"}
"""The rows of a sample, by the prefix of their fields."""


@dataclass(frozen=True)
class InspectFlags:
    """Inspect"""

    show: int = flag(3, "number of samples to print", metavar="N", minimum=1)


def samples_main(argv: Sequence[str]) -> int:
    """Print samples of the training part as a run would learn them, and return the exit status.

    Args:
        argv: the flags of a training command.

    Raises:
        RapidformerError: the flags or the data cannot be used.
    """
    config = parse(argv, REGISTRY.options(), prog=SAMPLES_PROG, description=SAMPLES_DESCRIPTION, user=InspectFlags)
    config, _ = configure.complete_black_box(config)
    shown = tasks_with(lambda task: task.name == "causal_lm" or task.compares_answers)
    if config.training.task not in shown:
        message = f"the learned tokens of {config.training.task or 'no task'} cannot be shown"
        raise ConfigError(message, where="--task", hint=f"tasks are {', '.join(shown)}")
    mistakes = MistakeCollector()
    for check in (check_data_flags, model_files.check_model_files, model_files.check_tokenizer_files, check_data):
        mistakes.run(check, config)
    mistakes.raise_all()

    from rapidformer_templates.data.collate import TokenizedSamples
    from rapidformer_templates.data.tasks import load_task
    from rapidformer_templates.data.text.bad_lines import add_by_reason, describe_skipped

    task = load_task(config)
    train = task.build_data().train
    assert train is not None
    count = config.user.show
    terminal = console()
    if isinstance(train, TokenizedSamples):
        count = min(count, len(train))
        names = [name for name in train.fields if name.endswith("input_ids")]
        tokens = sum(int(train.rows_of(name).lengths.sum()) for name in names)
        learned = sum(int(_learned(sample, name.removesuffix("input_ids")).sum()) for sample in train for name in names)
        share = f"{learned:,} of them learned ({learned / tokens:.1%})"
        terminal.print(f"{counted(len(train), 'sample')}, {tokens:,} tokens, {share}", highlight=False, soft_wrap=True)
    for note in [*task.notes, *([describe_skipped(add_by_reason({}, task.bad.skipped))] if task.bad.skipped else [])]:
        terminal.print(f"note: {note}", highlight=False, soft_wrap=True)
    for index in range(count):
        _print_sample(index + 1, train[index], task.tokenizer)
    return 0


def _print_sample(number: int, sample: Sample, tokenizer: PreTrainedTokenizerFast) -> None:
    from rich.text import Text

    terminal = console()
    has_colours = terminal.color_system is not None and not terminal.no_color
    for prefix, what in ROWS.items():
        if f"{prefix}input_ids" not in sample:
            continue
        ids, learned = sample[f"{prefix}input_ids"], _learned(sample, prefix)
        head = f"\nsample {number}{what}: {counted(len(ids), 'token')}, {int(learned.sum()):,} learned\n"
        text = Text().append(head, "bold")
        starts = np.flatnonzero(sample.get("position_ids", np.arange(len(ids))) == 0)[1:]
        for part, first in zip(np.split(ids, starts), [0, *starts], strict=True):
            text.append(BETWEEN if first else "")
            for piece, is_learned in _pieces(tokenizer, part, learned[first : first + len(part)]):
                marked = piece.join(MARKS) if is_learned and not has_colours else piece
                text.append(marked, "green" if is_learned else "dim")
        terminal.print(text, soft_wrap=True)


def _learned(sample: Mapping[str, np.ndarray], prefix: str) -> np.ndarray:
    """Return whether each token of a row is learned. Without labels all are but the first."""
    from rapidformer_templates.data.collate import IGNORED

    ids = sample[f"{prefix}input_ids"]
    learned: np.ndarray = sample.get(f"{prefix}labels", np.append(IGNORED, ids[1:])) != IGNORED
    return learned


def _pieces(tokenizer: PreTrainedTokenizerFast, ids: np.ndarray, learned: np.ndarray) -> Iterator[tuple[str, bool]]:
    """Yield the text of each run of tokens that are learned or not. Some decoders need the text before it."""
    before = ""
    for stop in [*np.flatnonzero(np.diff(learned)) + 1, len(ids)]:
        text = str(tokenizer.decode(ids[:stop], skip_special_tokens=False, clean_up_tokenization_spaces=False))
        yield text[len(before) :], bool(learned[stop - 1])
        before = text
