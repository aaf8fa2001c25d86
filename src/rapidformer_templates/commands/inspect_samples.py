"""``rapidformer data inspect --task …``: the first training samples, with the tokens that a run would learn marked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rapidformer_templates.errors import ConfigError, MistakeCollector, counted
from rapidformer_templates.models.model_files import check_model_files, check_tokenizer_files
from rapidformer_templates.planning.data_rules import check_data_flags
from rapidformer_templates.planning.flag_parser import parse
from rapidformer_templates.planning.flags import flag
from rapidformer_templates.planning.registry import REGISTRY
from rapidformer_templates.planning.tasks import tasks_with
from rapidformer_templates.run import configure
from rapidformer_templates.run.early_checks import check_data
from rapidformer_templates.system.terminal import console

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from rapidformer_templates.data.types import Sample

PROG = "rapidformer data inspect --task TASK"
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


def main(argv: Sequence[str]) -> int:
    """Print samples of the training part as a run would learn them, and return the exit status.

    Args:
        argv: the flags of a training command.

    Raises:
        RapidformerError: the flags or the data cannot be used.
    """
    config = parse(argv, REGISTRY.options(), prog=PROG, description=__doc__ or "", user=InspectFlags)
    config, _ = configure.complete_black_box(config)
    shown = tasks_with(lambda task: task.name == "causal_lm" or task.compares_answers)
    if config.training.task not in shown:
        message = f"the learned tokens of {config.training.task or 'no task'} cannot be shown"
        raise ConfigError(message, where="--task", hint=f"tasks are {', '.join(shown)}")
    mistakes = MistakeCollector()
    for check in (check_data_flags, check_model_files, check_tokenizer_files, check_data):
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
