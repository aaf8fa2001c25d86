"""The list of promises of this checkout and of its newest commit."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from scripts.promises import promises

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_promise_is_listed_with_its_file() -> None:
    assert promises()["a promise is listed with its file"] == ["tests/scripts/test_promises.py"]


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / ".git").exists() or shutil.which("git") is None, reason="needs a clone")
def test_those_of_a_commit_are_read_from_it() -> None:
    found = promises("HEAD")
    assert found["rooms import downwards"] == ["tests/test_architecture.py"]
    assert len(found) > 1000
