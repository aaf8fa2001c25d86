"""The comparison of the overhead of two checkouts. The test checks what is measured, and never how long it took."""

from __future__ import annotations

import re

import pytest

from scripts.compare_overhead import main
from tests.support.manual import ROOT


@pytest.mark.longer
def test_each_loop_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(ROOT), "--rounds", "1", "--steps", "2"]) == 0
    line = r"{} +\d+\.\d+ ms per step, [+-]\d+\.\d+ over the plain loop\n"
    assert re.fullmatch("".join(map(line.format, ("plain", "older", "this"))), capsys.readouterr().out)
