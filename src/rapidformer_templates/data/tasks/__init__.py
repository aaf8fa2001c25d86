"""The tasks for ``--task``. Each one defines its data set, model and metrics."""

from __future__ import annotations

from rapidformer_templates.data.tasks.base import Task
from rapidformer_templates.planning.config import RunConfig
from rapidformer_templates.planning.data_rules import check_task_flags
from rapidformer_templates.planning.registry import load_object
from rapidformer_templates.planning.tasks import TASKS

__all__ = ["TASKS", "Task", "load_task"]


def load_task(config: RunConfig) -> Task:
    """Return the task that ``--task`` names.

    Raises:
        ConfigError: no task is named, the name is unknown, or a flag is set that this task does not use.
    """
    check_task_flags(config)
    assert config.training.task is not None
    kind: type[Task] = load_object(TASKS[config.training.task].implementation)
    return kind.kind_for(config)(config)
