"""The tasks of the black box: what a data set, a model and a metric are for each ``--task``."""

from __future__ import annotations

import difflib
import importlib

from rapidformer_templates.config import RunConfig, spelling
from rapidformer_templates.data.tasks.base import Task
from rapidformer_templates.errors import ConfigError

__all__ = ["TASKS", "Task", "load_task"]

TASKS = {
    "sequence_classification": "rapidformer_templates.data.tasks.sequence_classification:SequenceClassification",
    "token_classification": "rapidformer_templates.data.tasks.token_classification:TokenClassification",
    "question_answering": "rapidformer_templates.data.tasks.question_answering:QuestionAnswering",
    "masked_lm": "rapidformer_templates.data.tasks.masked_lm:MaskedLM",
    "causal_lm": "rapidformer_templates.data.tasks.causal_lm:CausalLM",
    "seq2seq_lm": "rapidformer_templates.data.tasks.seq2seq_lm:Seq2SeqLM",
    "pretraining": "rapidformer_templates.data.tasks.pretraining:Pretraining",
}
"""Where the class of each task is; imported on use, so that metrics' packages are loaded only when needed."""

FLAGS_OF = {
    "mask_prob": ("masked_lm", "pretraining"),
    "whole_word_mask": ("masked_lm", "pretraining"),
    "sentence_pairs": ("pretraining",),
    "short_seq_prob": ("pretraining",),
    "mean_span_length": ("pretraining",),
}
"""Flags that act in some tasks only; given with another one, they are refused."""


def load_task(config: RunConfig) -> Task:
    """The task that ``--task`` names.

    Raises:
        ConfigError: no task is named, one that is not there, or a flag is given that it has no use for.
    """
    name = config.training.task
    if name is None:
        raise ConfigError("no task is named", where="--task", hint=f"choose from {', '.join(TASKS)}")
    if name not in TASKS:
        near = difflib.get_close_matches(name, TASKS, n=1)
        hint = (f"did you mean {near[0]}? " if near else "") + f"choose from {', '.join(TASKS)}"
        raise ConfigError(f"there is no task '{name}'", where="--task", hint=hint)
    for flag, tasks in FLAGS_OF.items():
        if name not in tasks and config.origin(flag) != "default":
            hint = f"leave it out; it is for {' and '.join(tasks)}"
            raise ConfigError(f"the task {name} has no use for {spelling(flag)}", where=config.origin(flag), hint=hint)
    module, _, kind = TASKS[name].partition(":")
    task: Task = getattr(importlib.import_module(module), kind)(config)
    return task
