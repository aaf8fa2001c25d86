"""The comparison of two checkouts. The test checks what is compared, and never how much it was."""

from __future__ import annotations

import re

import pytest

from scripts.compare_older import main, numbers
from tests.support.manual import ROOT


def test_numbers_are_named_by_the_texts_of_their_row() -> None:
    rows = [{"engine": "fsdp", "weights": "random", "peak": 3, "seconds": [1.0, 2.0], "exact": True}]
    assert dict(numbers({"rows": rows, "steps": 2})) == {"rows [fsdp, random] peak": 3, "steps": 2}


@pytest.mark.longer
def test_a_benchmark_of_both_checkouts_is_compared(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(ROOT), "--turns", "1", "fused-loss", "--vocabulary", "503", "--hidden", "64", "--steps", "1"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^ways \[fused\] peak_mb: ([\d.]+) -> \1 \(1\.00 ×\)$", shown, flags=re.MULTILINE)
