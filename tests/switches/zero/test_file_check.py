"""DeepSpeed itself checks a file: in a child process, once, and only where it is needed."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from rapidformer_templates.errors import ConfigError
from rapidformer_templates.planning.resolve import resolve
from rapidformer_templates.switches.zero import declaration, file_check
from rapidformer_templates.switches.zero.file_check import deepspeed_problems
from rapidformer_templates.system import launch
from tests.support.messages import Says
from tests.support.requests import GPUS, config_of, on

MISSPELT: dict[str, Any] = {"zero_optimization": {"stage": 2, "overlap_com": True}}


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The commands of the child processes that a test starts. DeepSpeed is not imported in this process."""
    started: list[Any] = []
    run = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda *words, **options: started.append(words) or run(*words, **options))
    monkeypatch.delitem(sys.modules, "deepspeed", raising=False)
    file_check._ask_deepspeed.cache_clear()
    return started


@pytest.mark.deepspeed
@pytest.mark.slow
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs the deepspeed extra")
def test_one_child_checks_a_file(children: list[Any]) -> None:
    message = "no such key: zero_optimization.overlap_com; did you mean zero_optimization.overlap_comm?"
    for _ in range(2):
        assert deepspeed_problems(MISSPELT) == (("zero_optimization.overlap_com", message),)
    assert len(children) == 1
    assert "deepspeed" not in sys.modules


@pytest.mark.parametrize(("name", "value"), [("RANK", "1"), (launch.CHECKED, "1")])
def test_a_worker_starts_no_child(name: str, value: str, children: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    assert deepspeed_problems(MISSPELT) == ()
    assert children == []


def test_what_a_plan_reads_itself_needs_no_child(children: list[Any]) -> None:
    plain = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    content: dict[str, Any] = {"zero_optimization": plain, "bf16": {"enabled": "auto"}, "gradient_clipping": 0.5}
    assert deepspeed_problems(content) == ()
    assert children == []


def test_without_deepspeed_a_note_says_what_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (file_check, declaration):
        monkeypatch.setattr(module, "find_spec", lambda name: None)
    flags = '--deepspeed-config {"zero_optimization":{"overlap_com":true}} --zero-2-memory-optimization'
    plan = resolve(config_of(flags), on(GPUS, world_size=2, local_world_size=2))
    name = "the JSON of --deepspeed-config"
    assert f"{name}: only DeepSpeed knows its inner keys, and it is not installed here" in plan.notes


def test_a_deepspeed_that_does_not_import_is_an_error(
    children: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says
) -> None:
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed/__init__.py").write_text("raise ImportError('libfoo.so: undefined symbol')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with says(ConfigError):
        deepspeed_problems(MISSPELT)
