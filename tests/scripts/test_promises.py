"""The list of promises of this checkout and of its newest commit."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("promises", ROOT / "scripts/promises.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_a_promise_is_listed_with_its_file(script: ModuleType) -> None:
    assert script.promises()["a promise is listed with its file"] == ["tests/scripts/test_promises.py"]


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / ".git").exists() or shutil.which("git") is None, reason="needs a clone")
def test_those_of_a_commit_are_read_from_it(script: ModuleType) -> None:
    found = script.promises("HEAD")
    assert found["rooms import downwards"] == ["tests/test_architecture.py"]
    assert len(found) > 1000
