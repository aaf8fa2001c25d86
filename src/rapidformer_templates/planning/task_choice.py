"""The flags and the metrics of a run's task. Does not import torch, because plans use it, too."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rapidformer_templates.errors import ConfigError, MistakeCollector, did_you_mean
from rapidformer_templates.planning.config import RunConfig, spelling
from rapidformer_templates.planning.tasks import METRICS_OF_PROBLEM, TASKS, TaskFacts


def metrics_of(config: RunConfig, *, of_task: bool = True) -> tuple[str, ...]:
    """Return the names of the results of an evaluation without a ``compute_metrics`` of the user.

    Args:
        of_task: whether the task's metrics are computed, as for the task's own data.
    """
    task = TASKS.get(config.training.task or "")
    # A perplexity is meaningful if the loss is the log-likelihood of a token and nothing is added to it.
    likelihood = task is not None and task.predicts_tokens and not config.data.sentence_pairs
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
