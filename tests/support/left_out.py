"""A pytest plugin that leaves out one switch: every run is planned with the switch and built without it.

Use it as ``RAPIDFORMER_LEFT_OUT=fsdp python -m pytest -p tests.support.left_out …``. ``scripts/mutations.py`` does so
for each switch. The plugin deselects tests of the covering table whose row lacks the switch.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest

from rapidformer_templates.planning.registry import REGISTRY
from rapidformer_templates.run import fit
from rapidformer_templates.run.configure import resolve_plan
from rapidformer_templates.run.run import Run
from rapidformer_templates.switches.auto_strategy import command

NAME = os.environ["RAPIDFORMER_LEFT_OUT"]


@contextmanager
def _without(run: Run) -> Iterator[None]:
    """Give the run and its template the configuration and the plan that they have with the switch off."""
    template: Any = run.hooks
    plan, config = run.plan, run.config
    if NAME in plan.switches:
        off = dict(REGISTRY[NAME].off)
        if NAME == "gradient-accumulation":
            off = {"micro_batch_size": plan.sizes.micro_batch * plan.sizes.accumulation}
        run.config = template.config = config.replace("left out", **off)
        run.plan = template.plan = resolve_plan(type(template), run.config)
    try:
        yield
    finally:
        run.plan, run.config = template.plan, template.config = plan, config


def _left_out(build: Any) -> Any:
    def build_without(run: Run, *arguments: Any) -> Any:
        with _without(run):
            return build(run, *arguments)

    return build_without


fit.build_engine = _left_out(fit.build_engine)
fit.build_order = _left_out(fit.build_order)
if NAME == "auto-strategy":  # it has chosen other switches by then, so leave out the search
    mock.patch.object(command, "best_layout", return_value={}).start()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Deselect the rows of the covering table that lack the switch."""

    def lacks_it(item: pytest.Item) -> bool:
        row = getattr(item, "callspec", None) and item.callspec.params.get("row")  # type: ignore[attr-defined]
        return bool(row) and NAME not in row

    items[:] = [item for item in items if not lacks_it(item)]
