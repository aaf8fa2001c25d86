"""What the tests of data stand on."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def is_offline(offline: None) -> None:
    """In each of them."""
