"""Rules about a run's data and its task, including preferences. They belong to no switch. Does not import torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from rapidformer_templates.errors import ConfigError, DataError, MistakeCollector, did_you_mean
from rapidformer_templates.planning.config import RunConfig, spelling
from rapidformer_templates.planning.flag_values import Interval, mixture_of
from rapidformer_templates.planning.flags import TrainingFlags
from rapidformer_templates.planning.switch import (
    Change,
    Example,
    Finding,
    Request,
    RuleList,
    Switch,
    add,
    drop,
    replace,
)
from rapidformer_templates.planning.tasks import TASKS, TaskFacts, tasks_with

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
        text = f"{flag} N without --epochs" if name == "epochs" else f"{flag} N"
        by_steps = Change(text, NOT_STREAMED.cost / 2, steps, note="a number of steps")
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


DEFAULTS = {field.name: field.default for field in dataclasses.fields(TrainingFlags)}
TWO_ROWS = tasks_with(lambda task: task.compares_answers)
COMPARED = ("dpo", "ipo", "kto")
"""Losses that compare the model with a reference."""


def _compares(config: RunConfig) -> bool:
    training = config.training
    return training.task == "preference" and training.preference_loss in COMPARED


def has_frozen_copy(config: RunConfig, switches: Iterable[Switch]) -> bool:
    """Return whether the reference is a second copy of the model. ``switches`` are the active ones."""
    keeps_base = any(switch.keeps_base for switch in switches)
    return _compares(config) and not config.training.precompute_reference and not keeps_base


def rows_per_sample(config: RunConfig) -> int:
    """Return the number of rows that each sample has in a batch: two if two answers are compared."""
    training = config.training
    is_unpaired = training.task == "preference" and training.preference_loss == "kto"
    return 1 if training.task is None or is_unpaired else TASKS[training.task].rows_per_sample


def _reasons(request: Request, field: str) -> list[tuple[str, str]]:
    """Return the active switches that have a reason in this field, with the reason."""
    named = [(name, getattr(switch, field)) for name, switch in request.active.items()]
    return [(name, why) for name, why in named if why]


_PRECOMPUTE = add({"precompute_reference": True}, "the model itself, before its first step")


@DATA_RULES.add(
    "RF130",
    "Noise on the embeddings is for samples of one row.",
    "it is drawn by a sample's position, which a chosen and a rejected answer share, as choices do",
    "[rapidformer_templates]",
    Example("--task preference --neftune-alpha 5"),
    refusal="Noise on the embeddings in preference training and with several choices.",
)
def _one_row_a_sample(request: Request) -> list[Finding]:
    training = request.config.training
    task = TASKS[training.task] if training.task else None
    if task is None or task.rows_per_sample == 1 or not training.neftune_alpha:
        return []
    rows = "two answers" if task.compares_answers else "choices"
    message = f"--neftune-alpha is for samples of one row, not for the {rows} of --task {task.name}"
    return [Finding(message, request.asked("neftune_alpha", "task"), changes=(drop({"neftune_alpha": None}),))]


@DATA_RULES.add(
    "RF131",
    "Preferences and rewards can be combined only with switches that keep the logits and add no loss.",
    "a forward of the reference would be counted or captured as one of the trained model",
    "[rapidformer_templates]",
    Example("--task preference --num-experts 4"),
    refusal="Preferences or rewards together with a switch that replaces the logits or adds to the loss.",
)
def _one_loss(request: Request) -> list[Finding]:
    if request.config.training.task not in TWO_ROWS:
        return []
    return [
        Finding(
            f"--task {request.config.training.task} has two forwards or two answers per sample, but {name} {why}",
            (*request.asked_for(name), *request.asked("task")),
            switches=(name,),
        )
        for name, why in _reasons(request, "no_second_forward")
    ]


@DATA_RULES.add(
    "RF132",
    "A forward of the reference needs an engine that can run one.",
    "a schedule of stages runs only the trained model; with --precompute-reference there is no such forward",
    "[rapidformer_templates]",
    Example("--task preference --pipeline-model-parallel-size 2 --num-layers 4 --world-size 2"),
    refusal="A second forward for the reference under an engine that cannot run one, such as a pipeline.",
)
def _forward_of_reference(request: Request) -> list[Finding]:
    if not _compares(request.config) or request.config.training.precompute_reference:
        return []
    return [
        Finding(
            f"this run cannot compute the reference model: {name} {why}",
            (*request.asked_for(name), *request.asked("preference_loss")),
            switches=(name,),
            changes=(_PRECOMPUTE,),
        )
        for name, why in _reasons(request, "no_second_model")
    ]


@DATA_RULES.add(
    "RF133",
    "The reference is the model that the run starts from.",
    "DPO, IPO and KTO measure how far training has moved from it",
    "[Rafailov et al., 2023]",
    Example("--task preference --load run --weights-only"),
    refusal="Preference training that continues from a model which its reference would not be.",
)
def _copy_is_the_start(request: Request) -> list[Finding]:
    training = request.config.training
    if not _compares(request.config) or training.precompute_reference or training.load is None:
        return []
    if has_frozen_copy(request.config, request.active.values()):
        message = "--load changes the model after the reference was built, so both would start from different weights"
    elif training.weights_only:
        message = "the run begins with the adapters of --load, but the reference is the model without adapters"
    else:  # the loaded run continues, and its reference is also the model without adapters
        return []
    changes = (_PRECOMPUTE, drop({"load": None, "weights_only": False}))
    return [Finding(message, request.asked("load", "preference_loss"), changes=changes)]


@DATA_RULES.add(
    "RF134",
    "A reference is computed only for a loss that compares with it.",
    "ORPO and SimPO use only the trained model",
    "[Hong et al., 2024; Meng et al., 2024]",
    Example("--task preference --preference-loss orpo --precompute-reference"),
    refusal="--precompute-reference for a loss without a reference.",
)
def _reference_is_used(request: Request) -> list[Finding]:
    training = request.config.training
    if not training.precompute_reference or training.task != "preference" or _compares(request.config):
        return []
    message = f"--preference-loss {training.preference_loss} does not use a reference"
    changes = (drop({"precompute_reference": False}), replace({"preference_loss": "dpo"}))
    return [Finding(message, request.asked("precompute_reference", "preference_loss"), changes=changes)]


OF_LOSS = {"simpo_gamma": "simpo", "kto_desirable_weight": "kto", "kto_undesirable_weight": "kto"}
"""Flags that act only with one loss, and that loss."""


@DATA_RULES.add(
    "RF136",
    "The flags of a preference loss are given only with that loss.",
    "with another one they would be silently ignored",
    "[rapidformer_templates]",
    Example("--task preference --simpo-gamma 1"),
    refusal="A flag of one preference loss together with another loss.",
)
def _of_this_loss(request: Request) -> list[Finding]:
    training = request.config.training
    if training.task != "preference":
        return []
    return [
        Finding(
            f"--preference-loss {training.preference_loss} does not use {spelling(name)}, which is for {loss}",
            request.asked(name, "preference_loss"),
            changes=(drop({name: DEFAULTS[name]}), replace({"preference_loss": loss})),
        )
        for name, loss in OF_LOSS.items()
        if loss != training.preference_loss and request.config.get(name) != DEFAULTS[name]
    ]


@DATA_RULES.add(
    "RF135",
    "--preference-beta is above 0.",
    "it scales the value of a choice, and IPO divides by it",
    "[rapidformer_templates]",
    Example("--task preference --preference-beta 0"),
    refusal="A --preference-beta of 0 or less.",
)
def _bet_on_something(request: Request) -> list[Finding]:
    training = request.config.training
    if training.task != "preference" or training.preference_beta > 0:
        return []
    message = "with --preference-beta 0 no answer is better than another"
    changes = (replace({"preference_beta": 0.1}),)
    return [Finding(message, request.asked("preference_beta"), changes=changes)]


def check_task_flags(config: RunConfig) -> None:
    """Check that the task exists and uses each given flag that is only for some tasks.

    Raises:
        ConfigError: the task is missing or unknown, or it does not use a given flag.
    """
    name = config.training.task
    if name is None:
        raise ConfigError("no task is named", where="--task", hint=f"choose from {', '.join(TASKS)}")
    if name not in TASKS:
        hint = did_you_mean(name, TASKS, f"choose from {', '.join(TASKS)}")
        raise ConfigError(f"there is no task '{name}'", where="--task", hint=hint)
    _refuse_unused(config, lambda task: task.own_flags)
    if config.model.new_head and not config.model.pretrained_model_name_or_path:
        hint = "leave out --new-head: every head of a model from scratch is new"
        raise ConfigError("no pretrained model is given whose head could be replaced", where="--new-head", hint=hint)


def check_data_flags(config: RunConfig) -> None:
    """Check that the task's own ``build_data`` reads each given data flag.

    Raises:
        ConfigError: it does not read one of them.
    """
    _refuse_unused(config, lambda task: task.data_flags)


def _refuse_unused(config: RunConfig, flags_of: Callable[[TaskFacts], Sequence[str]]) -> None:
    """Raise a :class:`ConfigError` for the given flags that other tasks use and this one does not."""
    name = config.training.task
    assert name is not None
    mistakes = MistakeCollector()
    corpora_first = sorted(TASKS.values(), key=lambda task: task.name != "pretraining")
    flags = dict.fromkeys(flag for task in corpora_first for flag in flags_of(task))
    for flag in flags:
        if flag not in flags_of(TASKS[name]) and config.origin(flag) != "default":
            tasks = [task.name for task in TASKS.values() if flag in flags_of(task)]
            hint = f"leave it out; it is for {' and '.join(tasks) if len(tasks) < 4 else 'fine-tuning'}"
            where = f"{spelling(flag)} ({config.origin(flag)})"
            message = f"the task {name} does not use {spelling(flag)}"
            mistakes.errors.append(ConfigError(message, where=where, hint=hint))
    mistakes.raise_all()


def sample_flags(config: RunConfig) -> dict[str, object]:
    """Return the flags of the task that its samples depend on, as plain values for a checkpoint."""
    task = TASKS.get(config.training.task or "")
    values = {spelling(name): config.get(name) for name in (task.own_flags if task else ())}
    if not config.model.new_head:  # older checkpoints do not have this flag
        values.pop("--new-head", None)
    return values
