"""Fixtures of the data tests."""

import pytest


@pytest.fixture(autouse=True)
def is_offline(offline: None) -> None:
    """Run every test offline."""
