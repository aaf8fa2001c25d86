"""The mistakes of scripts/mistakes.py, and that each changed line of scripts/mutations.toml fails a test."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.mistakes import CASES, Case, Outcome, main, prepare, problems_of
from scripts.mutations import LINES, with_line

LIGHT = [case for case in CASES if not case.needs_torch]

PROGRAM = """
import contextlib, io, json, sys
from rapidformer_templates.commands.main import main

outcomes = []
for words in json.loads(sys.argv[1]):
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        status = main(words)
    outcomes.append((status, text.getvalue(), "torch" in sys.modules))
print(json.dumps(outcomes))
"""
"""Make one mistake after the other in one process, and print the status, the output, and whether torch is imported."""


def test_mistakes_without_torch_import_no_torch(tmp_path: Path) -> None:
    prepare(tmp_path)
    words = json.dumps([shlex.split(case.command) for case in LIGHT])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, words], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stdout)
    found = {
        case.command: problems_of(case, Outcome(status, output, 0.0, 0.0)) + (["torch is imported"] if torch else [])
        for case, (status, output, torch) in zip(LIGHT, outcomes, strict=True)
    }
    assert {command: problems for command, problems in found.items() if problems} == {}


def test_the_script_measures_each_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scripts.mistakes.CASES", (LIGHT[0], Case("flag", "doctr", "not in the output")))
    assert main(["--only", "flag", "--json", str(tmp_path / "out.json")]) == 1
    outcomes = json.loads((tmp_path / "out.json").read_text())
    assert [len(outcome["problems"]) for outcome in outcomes] == [0, 1]
    assert all(outcome["processor"] > 0 for outcome in outcomes)
    assert "2 mistakes. Without torch: at most" in capsys.readouterr().out


@pytest.mark.parametrize("name", LINES)
def test_a_changed_line_fails_a_test(name: str) -> None:
    failed = with_line(LINES[name])
    assert failed is not None
    assert failed.startswith(LINES[name].tests), failed
