"""Tests, in the same folders as the source. ``support`` contains what they share. No test uses the network."""

import os

import pytest

# The models of the tests are small: several threads would spend more time waiting for each other than computing. Set
# this before torch is imported. Processes that tests start inherit it.
os.environ["OMP_NUM_THREADS"] = "1"

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # huggingface_hub reads it on import

pytest.register_assert_rewrite("tests.support")
