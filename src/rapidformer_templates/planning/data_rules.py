"""Rules about how a run reads its data. They belong to no switch."""

from __future__ import annotations

from rapidformer_templates.errors import DataError
from rapidformer_templates.planning.changes import drop, replace
from rapidformer_templates.planning.config import spelling
from rapidformer_templates.planning.flag_values import Interval, mixture_of
from rapidformer_templates.planning.switch import Change, Example, Finding, Request, RuleList
from rapidformer_templates.planning.tasks import TASKS

DATA_RULES = RuleList()

OF_THE_WHOLE = {
    "group_by_length": (None, "batches of similar lengths need the lengths of all samples"),
    "max_train_samples": (None, "put the first samples into a separate file"),
    "validation_fraction": (0.1, "no share of it can be held out: name a file validation"),
    "split": ("969,30,1", "it is not divided into parts"),
    "sentence_pairs": (False, "pairs are drawn from all documents"),
}
"""Flags that act on all samples at once, with their values when off and why they do not apply to a stream."""

OF_EVALUATIONS = {
    "eval_interval": None,
    "eval_iters": None,
    "early_stopping_patience": None,
    "metric_for_best": None,
    "keep_best": None,
    "evaluate_test": False,
}
"""Flags about evaluations, with their values when off."""

NOT_STREAMED = drop({"streaming": False, "shuffle_buffer": None})


@DATA_RULES.add(
    "RF151",
    "A run over a stream is counted in steps, not in epochs.",
    "rows are counted only as they are read, but the learning rate schedule needs the number of steps in advance",
    "[rapidformer_templates]",
    Example("--task causal_lm --streaming --epochs 3"),
    refusal="A stream in a run whose length or intervals are given in epochs.",
)
def _by_iterations(request: Request) -> list[Finding]:
    """Refuse lengths and intervals in epochs on a stream."""
    findings = []
    for name in request.config.training.in_epochs if request.config.data.streaming else ():
        is_length = name in ("epochs", "train_iters")
        steps = {"epochs": None, "train_iters": 1000} if is_length else {name: Interval(1000)}
        flag = spelling("train_iters" if is_length else name)
        by_steps = Change(f"{flag} N", NOT_STREAMED.cost / 2, steps, note="a number of steps")
        message = "a stream has no length, so an epoch has no number of steps"
        findings.append(Finding(message, request.asked("streaming", name), changes=(by_steps, NOT_STREAMED)))
    return findings


@DATA_RULES.add(
    "RF152",
    "Streaming is for tasks in which each row is a sample.",
    "the head of a classifier needs the labels of all rows, and an answer is scored over all windows of its text",
    "[rapidformer_templates]",
    Example("--task sequence_classification --streaming"),
    refusal="A stream for a task that needs all rows in advance.",
)
def _row_by_row(request: Request) -> list[Finding]:
    task = request.config.training.task
    if not request.config.data.streaming or task is None or TASKS[task].is_streamed:
        return []
    message = f"the data of --task {task} cannot be streamed"
    return [Finding(message, request.asked("streaming", "task"), changes=(NOT_STREAMED,))]


@DATA_RULES.add(
    "RF153",
    "Flags that act on all samples at once cannot be used with a stream.",
    "a stream is read from front to back, one part at a time",
    "[rapidformer_templates]",
    Example("--task causal_lm --streaming --group-by-length"),
    refusal="A stream together with a flag that needs all samples at once.",
)
def _asks_nothing_of_the_whole(request: Request) -> list[Finding]:
    if not request.config.data.streaming:
        return []
    findings = []
    for name, (off, why) in OF_THE_WHOLE.items():
        if request.config.get(name) not in (off, False):
            message = f"{spelling(name)} has no effect on a stream: {why}"
            changes = (drop({name: off}), NOT_STREAMED)
            findings.append(Finding(message, request.asked("streaming", name), changes=changes))
    evaluation_flags = [name for name, off in OF_EVALUATIONS.items() if request.config.get(name) not in (off, False)]
    if request.config.training.task == "pretraining" and evaluation_flags:
        without = drop({name: OF_EVALUATIONS[name] for name in evaluation_flags} | {"metric_for_best_mode": None})
        flags = " and ".join(map(spelling, evaluation_flags))
        message = f"{flags} would do nothing: a streamed corpus has no validation and no test part"
        findings.append(
            Finding(message, request.asked("streaming", *evaluation_flags), changes=(without, NOT_STREAMED))
        )
    return findings


@DATA_RULES.add(
    "RF154",
    "A mixture of data sets has its own order.",
    "its shares are exact at any time, which batches by length or a stream would break; precomputed "
    "log-probabilities and the windows of question answering are numbered within one data set",
    "[rapidformer_templates]",
    Example("--task causal_lm --data-dir DIR --data-name '0.7 a 0.3 b' --group-by-length"),
    refusal="Mixtures of data sets with streams, batches by length, question answering or a precomputed reference.",
)
def _mixes_whole_sets(request: Request) -> list[Finding]:
    config = request.config
    try:
        mixture = mixture_of(config.data.data_name)
    except DataError:
        return []  # the code that reads the data reports it
    if not mixture:
        return []
    one = replace({"data_name": mixture[0][1]})
    off = {"streaming": False, "group_by_length": None, "precompute_reference": False}
    flags = [
        Finding(
            f"{spelling(name)} cannot be combined with a mixture of data sets",
            request.asked("data_name", name),
            changes=(drop({name: value}), one),
        )
        for name, value in off.items()
        if config.get(name) not in (value, False)
    ]
    if config.training.task == "question_answering":
        message = "--task question_answering takes one data set"
        flags.append(Finding(message, request.asked("data_name", "task"), changes=(one,)))
    return flags
