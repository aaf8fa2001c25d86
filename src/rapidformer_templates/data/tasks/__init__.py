"""The tasks for ``--task``. Each one defines its data set, model and metrics."""

from __future__ import annotations

import importlib

from rapidformer_templates.data.tasks.base import Task
from rapidformer_templates.planning.config import RunConfig
from rapidformer_templates.planning.tasks import TASKS, check_task_flags

__all__ = ["TASKS", "Task", "load_task"]


def load_task(config: RunConfig) -> Task:
    """Return the task that ``--task`` names.

    Raises:
        ConfigError: no task is named, the name is unknown, or a flag is set that this task does not use.
    """
    check_task_flags(config)
    assert config.training.task is not None
    module, _, kind = TASKS[config.training.task].partition(":")
    task: Task = getattr(importlib.import_module(module), kind)(config)
    return task
