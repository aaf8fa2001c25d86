"""The comparison of the setup of two checkouts. The test checks what is measured, and never how much it was."""

from __future__ import annotations

import re

import pytest

from scripts.compare_setup import main
from tests.support.manual import ROOT


@pytest.mark.longer
@pytest.mark.distributed
def test_both_checkouts_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--width", "64", "--blocks", "2", "--rounds", "1"]
    assert main([str(ROOT), *sizes, "--engines", "fsdp", "--weights", "pretrained"]) == 0
    change = r"[\d.,]+ -> [\d.,]+ {} \([\d.]+\)"
    parts = "; ".join(map(change.format, ("MB", "s", "s of the processor")))
    assert re.fullmatch(f"fsdp, pretrained: {parts}\n", capsys.readouterr().out)
