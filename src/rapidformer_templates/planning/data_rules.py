"""Rules about a run's data and its task, including preferences. They belong to no switch. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from rapidformer_templates.errors import ConfigError, DataError, MistakeCollector, did_you_mean
from rapidformer_templates.planning.changes import Change, add, drop, replace
from rapidformer_templates.planning.checks import Given, clash, needs
from rapidformer_templates.planning.config import RunConfig, spelling
from rapidformer_templates.planning.flag_values import Interval, mixture_of
from rapidformer_templates.planning.switch import Finding, Request, RuleList, Switch
from rapidformer_templates.planning.tasks import TASKS, TaskFacts, tasks_with

DATA_RULES = RuleList()
OURS = "[rapidformer_templates]"

OF_THE_WHOLE = {
    "group_by_length": (None, "batches of similar lengths need the lengths of all samples"),
    "max_train_samples": (None, "put the first samples into a separate file"),
    "validation_fraction": (0.1, "no share of it can be held out: name a file validation"),
    "split": ("969,30,1", "it is not divided into parts"),
    "sentence_pairs": (False, "pairs are drawn from all documents"),
}
"""Flags that act on all samples at once, with their values when off and why they do not apply to a stream."""

EVALUATING = ("eval_interval", "eval_iters", "early_stopping_patience", "metric_for_best", "keep_best", "evaluate_test")
"""Flags about evaluations."""

NOT_STREAMED = drop({"streaming": False, "shuffle_buffer": None})
STREAM = Given("streaming", instead=(NOT_STREAMED,))
QUESTIONS = Given("task", ("question_answering",), instead=())


@DATA_RULES.add("RF151", OURS, "--task causal_lm --streaming --epochs 3")
def _by_iterations(request: Request) -> Iterator[Finding]:
    """A run over a stream is counted in steps, not in epochs.

    Why: rows are counted only as they are read, but the learning rate schedule needs the number of steps in advance.
    """
    for name in request.config.training.in_epochs if request.config.data.streaming else ():
        is_length = name in ("epochs", "train_iters")
        steps = {"epochs": None, "train_iters": 1000} if is_length else {name: Interval(1000)}
        flag = spelling("train_iters" if is_length else name)
        text = f"{flag} N without --epochs" if name == "epochs" else f"{flag} N"
        by_steps = Change(text, NOT_STREAMED.cost / 2, steps, note="a number of steps")
        message = "a stream has no length, so an epoch has no number of steps"
        yield Finding(message, request.asked("streaming", name), changes=(by_steps, NOT_STREAMED))


@DATA_RULES.add("RF152", OURS, "--task sequence_classification --streaming")
def _row_by_row(request: Request) -> list[Finding]:
    """Streaming is for tasks in which each row is a sample.

    Why: the head of a classifier needs the labels of all rows, and an answer is scored over all windows of its text.
    """
    whole = Given("task", tasks_with(lambda task: not task.is_streamed), instead=())
    return clash(request, STREAM, whole, message="the data of {1} cannot be streamed")


@DATA_RULES.add("RF153", OURS, "--task causal_lm --streaming --group-by-length")
def _asks_nothing_of_the_whole(request: Request) -> Iterator[Finding]:
    """Flags that act on all samples at once cannot be used with a stream.

    Why: a stream is read from front to back, one part at a time.
    """
    config = request.config
    if not config.data.streaming:
        return
    for name, (off, why) in OF_THE_WHOLE.items():
        if config.get(name) not in (off, False):
            message = f"{spelling(name)} has no effect on a stream: {why}"
            yield Finding(message, request.asked("streaming", name), changes=(drop({name: off}), NOT_STREAMED))
    evaluation_flags = [name for name in EVALUATING if config.get(name) not in (config.default(name), False)]
    if config.training.task == "pretraining" and evaluation_flags:
        without = drop({name: config.default(name) for name in evaluation_flags} | {"metric_for_best_mode": None})
        flags = " and ".join(map(spelling, evaluation_flags))
        message = f"{flags} would do nothing: a streamed corpus has no validation and no test part"
        yield Finding(message, request.asked("streaming", *evaluation_flags), changes=(without, NOT_STREAMED))


@DATA_RULES.add("RF154", OURS, "--task causal_lm --data-dir DIR --data-name '0.7 a 0.3 b' --group-by-length")
def _mixes_whole_sets(request: Request) -> list[Finding]:
    """A mixture of data sets has its own order.

    Why: its shares are exact at any time, which batches by length or a stream would break; precomputed
    log-probabilities and the windows of question answering are numbered within one data set.
    """
    try:
        mixture = mixture_of(request.config.data.data_name)
    except DataError:
        mixture = None  # the code that reads the data reports it
    if not mixture:
        return []
    mixed = Given("data_name", instead=(replace({"data_name": mixture[0][1]}),))
    whole = (Given("streaming"), Given("group_by_length"), Given("precompute_reference"), QUESTIONS)
    return clash(request, mixed, whole, message="{1} cannot be combined with a mixture of data sets")


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


@DATA_RULES.add("RF130", OURS, "--task preference --neftune-alpha 5")
def _one_row_a_sample(request: Request) -> list[Finding]:
    """Noise on the embeddings is for samples of one row.

    Why: it is drawn by a sample's position, which a chosen and a rejected answer share, as choices do.
    """
    several = Given("task", tasks_with(lambda task: task.rows_per_sample > 1), instead=())
    if not request.config.training.neftune_alpha:
        return []
    return clash(request, Given("neftune_alpha"), several, message="{0} is for samples of one row, unlike those of {1}")


@DATA_RULES.add("RF131", OURS, "--task preference --num-experts 4")
def _one_loss(request: Request) -> Iterator[Finding]:
    """Preferences and rewards can be combined only with switches that keep the logits and add no loss.

    Why: a forward of the reference would be counted or captured as one of the trained model.
    """
    task = request.config.training.task
    for name, why in _reasons(request, "no_second_forward") if task in TWO_ROWS else ():
        message = f"--task {task} has two forwards or two answers per sample, but {name} {why}"
        yield Finding(message, (*request.asked_for(name), *request.asked("task")), switches=(name,))


@DATA_RULES.add("RF132", OURS, "--task preference --pipeline-model-parallel-size 2 --num-layers 4 --world-size 2")
def _forward_of_reference(request: Request) -> Iterator[Finding]:
    """A forward of the reference needs an engine that can run one.

    Why: a schedule of stages runs only the trained model; with --precompute-reference there is no such forward.
    """
    if _compares(request.config) and not request.config.training.precompute_reference:
        for name, why in _reasons(request, "no_second_model"):
            message = f"this run cannot compute the reference model: {name} {why}"
            flags = (*request.asked_for(name), *request.asked("preference_loss"))
            yield Finding(message, flags, switches=(name,), changes=(_PRECOMPUTE,))


@DATA_RULES.add("RF133", "[Rafailov et al., 2023]", "--task preference --load run --weights-only")
def _copy_is_the_start(request: Request) -> Iterator[Finding]:
    """The reference is the model that the run starts from.

    Why: DPO, IPO and KTO measure how far training has moved from it.
    """
    training = request.config.training
    if not _compares(request.config) or training.precompute_reference or training.load is None:
        return
    if has_frozen_copy(request.config, request.active.values()):
        message = "--load changes the model after the reference was built, so both would start from different weights"
    elif training.weights_only:
        message = "the run begins with the adapters of --load, but the reference is the model without adapters"
    else:  # the loaded run continues, and its reference is also the model without adapters
        return
    changes = (_PRECOMPUTE, drop({"load": None, "weights_only": False}))
    yield Finding(message, request.asked("load", "preference_loss"), changes=changes)


@DATA_RULES.add(
    "RF134", "[Hong et al., 2024; Meng et al., 2024]", "--task preference --preference-loss orpo --precompute-reference"
)
def _reference_is_used(request: Request) -> list[Finding]:
    """A reference is computed only for a loss that compares with it.

    Why: ORPO and SimPO use only the trained model.
    """
    compares = Given("preference_loss", COMPARED)
    if request.config.training.task != "preference":
        return []
    return needs(request, Given("precompute_reference"), compares, replace({"preference_loss": "dpo"}))


OF_LOSS = {"simpo_gamma": "simpo", "kto_desirable_weight": "kto", "kto_undesirable_weight": "kto"}
"""Flags that act only with one loss, and that loss."""


@DATA_RULES.add("RF136", OURS, "--task preference --simpo-gamma 1")
def _of_this_loss(request: Request) -> Iterator[Finding]:
    """The flags of a preference loss are given only with that loss.

    Why: with another one they would be silently ignored.
    """
    chosen = request.config.training
    for name, loss in OF_LOSS.items() if chosen.task == "preference" else ():
        message = f"--preference-loss {chosen.preference_loss} does not use {spelling(name)}, which is for {loss}"
        way = replace({"preference_loss": loss})
        yield from needs(request, Given(name), Given("preference_loss", (loss,)), way, message=message)


@DATA_RULES.add("RF135", OURS, "--task preference --preference-beta 0")
def _bet_on_something(request: Request) -> Iterator[Finding]:
    """--preference-beta is above 0.

    Why: it scales the value of a choice, and IPO divides by it.
    """
    training = request.config.training
    if training.task == "preference" and training.preference_beta <= 0:
        message = "with --preference-beta 0 no answer is better than another"
        yield Finding(message, request.asked("preference_beta"), changes=(replace({"preference_beta": 0.1}),))


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
