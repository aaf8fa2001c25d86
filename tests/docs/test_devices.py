"""docs/devices.md lists all source code that names one kind of accelerator."""

from __future__ import annotations

import re
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
