"""Rooms as in the source, and what their tests share in ``support``."""

import pytest

pytest.register_assert_rewrite("tests.support")
