"""The tasks, and the data flags that each of them uses. Does not import torch, because plans use it, too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rapidformer_templates.errors import ConfigError, MistakeCollector, did_you_mean
from rapidformer_templates.planning.config import RunConfig, spelling

TASKS = {
    "sequence_classification": "rapidformer_templates.data.tasks.sequence_classification:SequenceClassification",
    "token_classification": "rapidformer_templates.data.tasks.token_classification:TokenClassification",
    "question_answering": "rapidformer_templates.data.tasks.question_answering:QuestionAnswering",
    "masked_lm": "rapidformer_templates.data.tasks.masked_lm:MaskedLM",
    "causal_lm": "rapidformer_templates.data.tasks.causal_lm:CausalLM",
    "seq2seq_lm": "rapidformer_templates.data.tasks.seq2seq_lm:Seq2SeqLM",
    "preference": "rapidformer_templates.data.tasks.preference:Preference",
    "reward": "rapidformer_templates.data.tasks.preference:Reward",
    "pretraining": "rapidformer_templates.data.tasks.pretraining:Pretraining",
}
"""The class of each task. It is imported on use, so that packages for metrics are loaded only when needed."""

FLAGS_OF = {
    "mask_prob": ("masked_lm", "pretraining"),
    "whole_word_mask": ("masked_lm", "pretraining"),
    "sentence_pairs": ("pretraining",),
    "short_seq_prob": ("pretraining",),
    "mean_span_length": ("pretraining",),
    "keep_documents_apart": ("pretraining",),
    "problem_type": ("sequence_classification",),
    "new_head": ("sequence_classification", "token_classification", "reward"),
    "preference_loss": ("preference",),
    "preference_beta": ("preference",),
    "simpo_gamma": ("preference",),
    "kto_desirable_weight": ("preference",),
    "kto_undesirable_weight": ("preference",),
    "precompute_reference": ("preference",),
}
"""Flags that act in some tasks only. Other tasks refuse them."""

_FINE_TUNING = tuple(task for task in TASKS if task != "pretraining")

READ_BY = {
    "data_path": ("pretraining",),
    "split": ("pretraining",),
    "data_impl": ("pretraining",),
    "data_cache_dir": ("pretraining",),
    "text_unit": ("pretraining",),
    "data_dir": _FINE_TUNING,
    "data_name": _FINE_TUNING,
    "data_config": _FINE_TUNING,
    "data_split": _FINE_TUNING,
    "validation_fraction": _FINE_TUNING,
    "max_train_samples": _FINE_TUNING,
    "max_eval_samples": _FINE_TUNING,
    "eval_data_name": _FINE_TUNING,
    "label_column": tuple(task for task in _FINE_TUNING if task not in ("masked_lm", "preference", "reward")),
    "pair_column": ("sequence_classification", "question_answering"),
}
"""Flags that the ``build_data`` of some tasks reads. A user's own ``build_data`` may read any flag."""


METRICS_OF = {
    "sequence_classification": ("accuracy", "f1", "matthews"),
    "token_classification": ("precision", "recall", "f1", "accuracy"),
    "question_answering": ("exact_match", "f1"),
    "masked_lm": ("token_accuracy",),
    "causal_lm": ("token_accuracy",),
    "seq2seq_lm": ("rouge_l", "exact_match"),
    "preference": ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"),
    "reward": ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"),
    "pretraining": ("token_accuracy",),
}
"""The names of the metrics that the ``compute_metrics`` of each task returns."""

METRICS_OF_PROBLEM = {
    "single_label_classification": METRICS_OF["sequence_classification"],
    "multi_label_classification": ("f1", "f1_macro", "exact_match"),
    "regression": ("mse", "mae", "pearson"),
}
"""The metrics of sequence classification by the type of its labels. Without ``--problem-type``, the data decide."""

SMOOTHED = tuple(task for task in TASKS if task not in ("question_answering", "preference", "reward"))
"""Tasks whose loss is a cross-entropy over classes or tokens. With sentence pairs, it is a sum of two losses."""

_LANGUAGE = ("masked_lm", "causal_lm", "seq2seq_lm", "pretraining")


def metrics_of(config: RunConfig, *, of_task: bool = True) -> tuple[str, ...]:
    """Return the names of the results of an evaluation without a ``compute_metrics`` of the user.

    Args:
        of_task: whether the task's metrics are computed, as for the task's own data.
    """
    task = config.training.task
    # A perplexity is meaningful if the loss is the log-likelihood of a token and nothing is added to it.
    likelihood = task in _LANGUAGE and not config.data.sentence_pairs
    task_metrics = _task_metrics(config) if of_task else ()
    return ("eval_loss", *(("perplexity",) if likelihood else ()), *task_metrics)


def _task_metrics(config: RunConfig) -> tuple[str, ...]:
    """Return the task's metrics. If only the data decide the problem type of sequence classification, return all."""
    if config.training.task == "preference":
        return preference_metrics(is_unpaired=config.training.preference_loss == "kto")
    if config.training.task != "sequence_classification":
        return METRICS_OF.get(config.training.task or "", ())
    problem = config.data.problem_type
    groups = METRICS_OF_PROBLEM.values() if problem is None else (METRICS_OF_PROBLEM[problem],)
    return tuple(dict.fromkeys(name for names in groups for name in names))


def preference_metrics(*, is_unpaired: bool) -> tuple[str, ...]:
    """Return the metrics of preferences. If each answer is judged separately, there is no accuracy of a choice."""
    return METRICS_OF["preference"][: 3 if is_unpaired else 4]


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
    _refuse(config, name, FLAGS_OF)
    if config.model.new_head and not config.model.pretrained_model_name_or_path:
        hint = "leave out --new-head: every head of a model from scratch is new"
        raise ConfigError("no pretrained model is given whose head could be replaced", where="--new-head", hint=hint)


def check_data_flags(config: RunConfig) -> None:
    """Check that the task's own ``build_data`` reads each given data flag.

    Raises:
        ConfigError: it does not read one of them.
    """
    assert config.training.task is not None
    _refuse(config, config.training.task, READ_BY)


def _refuse(config: RunConfig, name: str, table: Mapping[str, Sequence[str]]) -> None:
    mistakes = MistakeCollector()
    for flag, tasks in table.items():
        if name not in tasks and config.origin(flag) != "default":
            hint = f"leave it out; it is for {' and '.join(tasks) if len(tasks) < 4 else 'fine-tuning'}"
            where = f"{spelling(flag)} ({config.origin(flag)})"
            message = f"the task {name} does not use {spelling(flag)}"
            mistakes.errors.append(ConfigError(message, where=where, hint=hint))
    mistakes.raise_all()


def sample_flags(config: RunConfig) -> dict[str, Any]:
    """Return the flags of the task that its samples depend on, as plain values for a checkpoint."""
    names = [name for name, tasks in FLAGS_OF.items() if config.training.task in tasks]
    values = {spelling(name): config.get(name) for name in names}
    if not config.model.new_head:  # older checkpoints do not have this flag
        values.pop("--new-head", None)
    return values
