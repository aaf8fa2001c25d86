"""``scripts/gpu_check.py`` without a GPU: its parts, their time limits, and the results of stopped parts."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts/gpu_check.py"


@pytest.fixture(scope="module")
def check() -> Any:
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_check"] = module
    spec.loader.exec_module(module)
    return module


def test_a_part_that_takes_too_long_is_ended_and_keeps_what_it_wrote(check: Any, tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    code = f"import time; open({str(result)!r}, 'w').write('[1]'); print('begun', flush=True); time.sleep(60)"
    found = check.run(check.Part("slow", ["-c", code], 5, result), 5)
    assert found["status"] == "stopped after 5 s"
    assert found["result"] == [1]
    assert "begun" in found["output"]
    assert found["seconds"] < 30


def test_results_are_kept_part_by_part(check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = check.Part("good", ["-c", "print('fine')"], 60)
    bad = check.Part("bad", ["-c", "raise SystemExit(3)"], 60)
    monkeypatch.setattr(check, "parts", lambda *arguments, **keywords: [good, bad])
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--output", str(tmp_path), "--device", "cpu", "--tiny"])
    assert check.main() == 1
    written = json.loads((tmp_path / "gpu_check.json").read_text())["parts"]
    assert {name: part["status"] for name, part in written.items()} == {"good": "ok", "bad": "exit status 3"}


def test_a_profile_is_recorded(check: Any, tmp_path: Path) -> None:
    check.record("tiny", "cpu", tmp_path)
    found = json.loads((tmp_path / "run/profile/summary.json").read_text())
    assert found["steps"] == 8
    assert found["operators_ms"] > 0
