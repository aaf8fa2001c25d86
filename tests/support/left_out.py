"""A pytest plugin that leaves out one switch: every run is planned with the switch and built without it.

Use it as ``RAPIDFORMER_LEFT_OUT=fsdp python -m pytest -p tests.support.left_out …``. ``scripts/mutations.py`` does so
for each switch. The plugin deselects tests of the covering table whose row lacks the switch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from rapidformer_templates.planning.registry import REGISTRY
from rapidformer_templates.run import configure, fit
from rapidformer_templates.run.configure import resolve_plan

NAME = os.environ["RAPIDFORMER_LEFT_OUT"]


@contextmanager
def _without(template: Any) -> Iterator[None]:
    """Give the template the configuration and the plan that it has with the switch off."""
    plan, config = template.plan, template.config
    if NAME in plan.switches:
        off = dict(REGISTRY[NAME].off)
        if NAME == "gradient-accumulation":
            off = {"micro_batch_size": plan.sizes.micro_batch * plan.sizes.accumulation}
        template.config = config.replace("left out", **off)
        template.plan = resolve_plan(type(template), template.config)
    try:
        yield
    finally:
        template.plan, template.config = plan, config


def _left_out(build: Any) -> Any:
    def build_without(template: Any, *arguments: Any) -> Any:
        with _without(template):
            return build(template, *arguments)

    return build_without


fit.build_engine = _left_out(fit.build_engine)
fit.build_order = _left_out(fit.build_order)
if NAME == "auto-strategy":  # it has chosen other switches by then, so leave out the search
    configure._with_best_layout = lambda config, environment: config


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Deselect the rows of the covering table that lack the switch."""

    def lacks_it(item: pytest.Item) -> bool:
        row = getattr(item, "callspec", None) and item.callspec.params.get("row")  # type: ignore[attr-defined]
        return bool(row) and NAME not in row

    items[:] = [item for item in items if not lacks_it(item)]
