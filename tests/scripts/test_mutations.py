"""Each changed line of ``scripts/mutations.toml`` fails a test of the default suite."""

from __future__ import annotations

import pytest

from scripts.mutations import LINES, with_line


@pytest.mark.parametrize("name", LINES)
def test_a_changed_line_fails_a_test(name: str) -> None:
    failed = with_line(LINES[name])
    assert failed is not None
    assert failed.startswith(LINES[name].tests), failed
