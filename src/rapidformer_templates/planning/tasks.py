"""The tasks of ``--task``, one record of ``tasks.toml`` each, and the metrics of a run, with their directions.

The flag's values, the rules, the metrics that a plan knows, and the task of a saved model are derived from these
records. Imports no torch, because plans use it, too.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from rapidformer_templates.planning.config import RunConfig


@dataclass(frozen=True, kw_only=True)
class TaskFacts:
    """A task. No field has a default, so that a new task answers every question.

    Attributes:
        name: the value of ``--task``.
        implementation: ``module:Class``. It is imported on use, so that packages for metrics are loaded only when
            needed.
        own_flags: flags that act in this task and not in all others. Tasks without them refuse them.
        data_flags: flags that the task's own ``build_data`` reads and those of other tasks do not. A user's own
            ``build_data`` may read any flag.
        metrics: the names of the metrics that its ``compute_metrics`` returns.
        predicts_tokens: whether its loss is the log-likelihood of tokens of the vocabulary, from which a perplexity can
            be computed.
        is_smoothed: whether its loss is a cross-entropy over classes or tokens. With sentence pairs, it is a sum of two
            losses.
        compares_answers: whether a sample is a pair of answers.
        rows_per_sample: number of rows that a sample has in a batch. If only the data know it, a plan assumes this one.
        rows_are_samples: whether each row of its data is one sample.
        is_streamed: whether it makes samples row by row. Other tasks know their labels only after reading all rows.
        has_lengths: whether its samples have one length each, and integer labels that a row of padding can do without.
        continues_text: whether its model continues a text.
        model_classes: ends of the names of transformers classes of models that are for this task.
        hub_pipeline: the hub's name of the task, or None: an empty text in the file.
        input_columns: the columns that its predictions read, by flag, with their usual names. A column without names
            is optional.
    """

    name: str
    implementation: str
    own_flags: tuple[str, ...]
    data_flags: tuple[str, ...]
    metrics: tuple[str, ...]
    predicts_tokens: bool
    is_smoothed: bool
    compares_answers: bool
    rows_per_sample: int
    rows_are_samples: bool
    is_streamed: bool
    has_lengths: bool
    continues_text: bool
    model_classes: tuple[str, ...]
    hub_pipeline: str | None
    input_columns: Mapping[str, tuple[str, ...]]


_TABLE: dict[str, Any] = tomllib.loads(Path(__file__).with_name("tasks.toml").read_text(encoding="utf-8"))
_LISTS: dict[str, tuple[str, ...]] = {}


def _expanded(words: Iterable[str]) -> tuple[str, ...]:
    """Return words, with the words of a list in place of its name."""
    return tuple(each for word in words for each in _LISTS.get(word, (word,)))


for _name, _words in _TABLE["lists"].items():
    _LISTS[_name] = _expanded(_words)

TEXT_COLUMNS = _LISTS["TEXT"]
"""Columns that are searched for a text if ``--text-column`` is not given."""

PAIRS: Mapping[str, str] = _TABLE["pairs"]
"""Names of first texts, mapped to the names of their second texts."""

WORD_COLUMNS, SOURCE_COLUMNS = _LISTS["WORDS"], _LISTS["SOURCES"]
MESSAGES = "messages"
"""The usual column of conversations."""

CHAT_COLUMNS = (MESSAGES, "conversations")
PROMPTS = {"prompt": ("completion",), "instruction": ("output", "response")}
"""Prompt columns, mapped to the usual names of their answer columns."""

PROMPT_COLUMNS = _LISTS["PROMPTS"]
"""Columns that are searched for a text to continue, or a conversation to answer."""

CONTEXT_COLUMNS = _LISTS["CONTEXTS"]
"""Columns that are searched for the text that comes before choices."""


def _record(name: str, facts: Mapping[str, Any]) -> TaskFacts:
    columns = {flag: _expanded(names) for flag, names in facts["input_columns"].items()}
    values = {field: _expanded(value) if isinstance(value, list) else value for field, value in facts.items()}
    return TaskFacts(name=name, **values | {"hub_pipeline": facts["hub_pipeline"] or None, "input_columns": columns})


TASKS: Mapping[str, TaskFacts] = {name: _record(name, facts) for name, facts in _TABLE["tasks"].items()}
"""The tasks by the value of ``--task``."""

METRICS_OF_PROBLEM: Mapping[str, tuple[str, ...]] = {
    "single_label_classification": TASKS["sequence_classification"].metrics,
    "multi_label_classification": ("f1", "f1_macro", "exact_match"),
    "regression": ("mse", "mae", "pearson"),
}
"""The metrics of sequence classification by the type of its labels. Without ``--problem-type``, the data decide."""


def tasks_with(condition: Callable[[TaskFacts], bool]) -> tuple[str, ...]:
    """Return the names of the tasks whose record fulfils a condition."""
    return tuple(name for name, record in TASKS.items() if condition(record))


Direction = Literal["min", "max"]

_METRICS: dict[str, list[str]] = _TABLE["metrics"]
_KNOWN: Mapping[str, Direction] = {**dict.fromkeys(_METRICS["min"], "min"), **dict.fromkeys(_METRICS["max"], "max")}


def metric_name(of: str, metric: str) -> str:
    """Return the name of a metric of an evaluated set. The unnamed validation part has no prefix.

    >>> metric_name("", "eval_loss"), metric_name("hard", "eval_loss"), metric_name("test", "f1")
    ('eval_loss', 'hard/loss', 'test/f1')
    """
    return f"{of}/{metric.removeprefix('eval_')}" if of else metric


def direction_of(name: str) -> Direction | None:
    """Return whether the lowest or the highest value of a metric is the best, by the end of its name. None if unknown.

    >>> direction_of("eval_wer"), direction_of("f1_macro"), direction_of("accuracy_drop")
    ('min', 'max', None)
    """
    words = re.findall(r"[a-z0-9]+", name.lower())
    while words and words[-1] in _METRICS["qualifiers"]:
        words.pop()
    ends = ["_".join(words[i:]) for i in range(len(words))]
    ending = next((end for end in ends if end in _KNOWN), None)
    if ending is None or (set(_METRICS["turned"]).intersection(words) and ending != ends[0]):
        return None
    return _KNOWN[ending]


def metrics_of(config: RunConfig, *, of_task: bool = True, own_loss: bool = False) -> tuple[str, ...]:
    """Return the names of the results of an evaluation without a ``compute_metrics`` of the user.

    Args:
        of_task: whether the task's metrics are computed, as for the task's own data.
        own_loss: whether the user overrides ``compute_loss``, which may be another one than that of the task.
    """
    task = TASKS.get(config.training.task or "")
    # A perplexity is meaningful if the loss is the log-likelihood of a token and nothing is added to it.
    likelihood = task is not None and task.predicts_tokens and not (config.data.sentence_pairs or own_loss)
    names = ("eval_loss", "perplexity") if likelihood else ("eval_loss",)
    if task is None or not of_task:
        return names
    if task.name == "preference":
        return (*names, *preference_metrics(is_unpaired=config.training.preference_loss == "kto"))
    if task.name == "sequence_classification":
        problem = config.data.problem_type  # None if only the data decide it
        groups = METRICS_OF_PROBLEM.values() if problem is None else (METRICS_OF_PROBLEM[problem],)
        return (*names, *dict.fromkeys(name for metrics in groups for name in metrics))
    return (*names, *task.metrics)


def preference_metrics(*, is_unpaired: bool) -> tuple[str, ...]:
    """Return the metrics of preferences. If each answer is judged separately, there is no accuracy of a choice."""
    return TASKS["preference"].metrics[: 3 if is_unpaired else 4]
