"""``scripts/gpu_check.py`` without a GPU: its parts, their time limits, and the results of stopped parts."""

import json
import sys
from pathlib import Path

import pytest

from scripts import gpu_check


def test_a_part_that_takes_too_long_is_ended_and_keeps_what_it_wrote(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    code = f"import time; open({str(result)!r}, 'w').write('[1]'); print('begun', flush=True); time.sleep(60)"
    found = gpu_check.run(gpu_check.Part("slow", ["-c", code], 5, result), 5)
    assert found["status"] == "stopped after 5 s"
    assert found["result"] == [1]
    assert "begun" in found["output"]
    assert found["seconds"] < 30


def test_results_are_kept_part_by_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = gpu_check.Part("good", ["-c", "print('fine')"], 60)
    bad = gpu_check.Part("bad", ["-c", "raise SystemExit(3)"], 60)
    monkeypatch.setattr(gpu_check, "parts", lambda *arguments, **keywords: [good, bad])
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--output", str(tmp_path), "--device", "cpu", "--tiny"])
    assert gpu_check.main() == 1
    written = json.loads((tmp_path / "gpu_check.json").read_text())["parts"]
    assert {name: part["status"] for name, part in written.items()} == {"good": "ok", "bad": "exit status 3"}


def test_a_profile_is_recorded(tmp_path: Path) -> None:
    gpu_check.record("tiny", "cpu", tmp_path)
    found = json.loads((tmp_path / "run/profile/summary.json").read_text())
    assert found["steps"] == 8
    assert found["operators_ms"] > 0
