"""The mistakes of scripts/mistakes.py are answered, without torch where they do not need it."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

from scripts.mistakes import CASES, Outcome, prepare, problems_of

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
