"""Fixtures of the data tests."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def is_offline(offline: None) -> None:
    """Run every test offline."""
