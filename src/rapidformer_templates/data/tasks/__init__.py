"""The tasks of the black box: what a data set, a model and a metric are for each ``--task``."""

from __future__ import annotations

import importlib

from rapidformer_templates.data.tasks.base import Task
from rapidformer_templates.planning.config import RunConfig
from rapidformer_templates.planning.tasks import TASKS, check_task_flags

__all__ = ["TASKS", "Task", "load_task"]


def load_task(config: RunConfig) -> Task:
    """The task that ``--task`` names.

    Raises:
        ConfigError: no task is named, one that is not there, or a flag is given that it has no use for.
    """
    check_task_flags(config)
    assert config.training.task is not None
    module, _, kind = TASKS[config.training.task].partition(":")
    task: Task = getattr(importlib.import_module(module), kind)(config)
    return task
