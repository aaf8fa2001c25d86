"""docs/devices.md lists all source code that names one kind of accelerator, and all that no rehearsal runs."""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src/rapidformer_templates"
MODULE = "system/accelerator.py"
ROW = re.compile(r"^\| `([\w/]+\.py)` \| (\d+) \| \S.* \|$", re.MULTILINE)


def test_lines_that_name_cuda_are_listed_with_a_reason() -> None:
    table = (ROOT / "docs/devices.md").read_text(encoding="utf-8").partition("## Where `cuda` is named")[2]
    listed = {name: int(count) for name, count in ROW.findall(table)}
    names = {
        path.relative_to(SOURCE).as_posix(): sum("cuda" in line for line in path.read_text("utf-8").splitlines())
        for path in SOURCE.rglob("*.py")
        if "commands/examples" not in path.as_posix()
    }
    names.pop(MODULE)
    assert listed == {name: count for name, count in names.items() if count}


def _device_statements() -> list[tuple[str, str]]:
    """Return (file, text) of the statements that scripts/device_coverage.py watches."""
    spec = importlib.util.spec_from_file_location("device_coverage", ROOT / "scripts/device_coverage.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return [(name, text) for name, _, text in script.statements()]


def test_statements_that_the_rehearsal_never_runs_are_listed_as_they_stand() -> None:
    part = (ROOT / "docs/devices.md").read_text(encoding="utf-8").partition("## What the rehearsal runs")[2]
    part = part.partition("\n## ")[0]
    counts = re.search(r"(\d+) of the (\d+) statements", part)
    assert counts is not None
    ran, total = map(int, counts.groups())
    there = _device_statements()
    listed = re.findall(r"^\| `([\w/]+\.py)` \| `([^`]+)` \| \S.* \|$", part, re.MULTILINE)
    assert len(there) == total
    assert len(listed) == total - ran
    assert not Counter(listed) - Counter(there)
