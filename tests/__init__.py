"""Rooms as in the source, and what their tests share in ``support``."""

import os

import pytest

# Models of tests are small: several threads wait for each other longer than they compute. Set before torch is imported,
# and for the processes that tests start.
os.environ["OMP_NUM_THREADS"] = "1"

pytest.register_assert_rewrite("tests.support")
