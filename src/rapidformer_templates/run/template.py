"""The interface of a template where a run, an evaluation or a session begins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

from rapidformer_templates.planning.config import RunConfig
from rapidformer_templates.planning.plan import Plan
from rapidformer_templates.run.callbacks import Callback
from rapidformer_templates.run.folder import RunFolder
from rapidformer_templates.run.hooks import Hooks
from rapidformer_templates.run.run import Run
from rapidformer_templates.system.workers import Workers


class Template(Hooks, Protocol):
    """A :class:`rapidformer_templates.Trainer`, which is defined above this package and documents each member."""

    Flags: ClassVar[type | None]
    config: RunConfig
    callbacks: tuple[Callback, ...]

    @property
    def plan(self) -> Plan: ...
    @property
    def trained_plan(self) -> Plan: ...
    @property
    def reads_task_data(self) -> bool: ...
    @property
    def computes_own_metrics(self) -> bool: ...

    def override_flags(self, values: Mapping[str, Any]) -> None: ...
    def run_begins(self, run: Run) -> None: ...


def begin_run(template: Template, workers: Workers, folder: RunFolder | None = None) -> Run:
    """Return a run of a template on this worker. The template's hooks use the data and the model of this run."""
    run = Run(template.plan, template.config, template, template.callbacks, workers, folder)
    template.run_begins(run)
    return run
