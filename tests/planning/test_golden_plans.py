"""Plans of 66 commands equal the reviewed file."""

from __future__ import annotations

import json

from tests.support import golden_plans


def test_plans_are_unchanged() -> None:
    """After a change that plans should show, run ``python -m tests.support.golden_plans`` and read the difference."""
    golden = json.loads(golden_plans.FILE.read_text(encoding="utf-8"))
    plans = dict(golden_plans.plans())
    assert plans.keys() == golden.keys()
    assert {name for name in plans if plans[name] != golden[name]} == set()
    assert sum("engine" not in plan for plan in plans.values()) <= 5
