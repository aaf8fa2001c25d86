"""The page about mixed precision names every switch that determines the type of the weights."""

from __future__ import annotations

import re

from rapidformer_templates.planning.registry import REGISTRY
from tests.support.manual import ROOT


def test_each_engine_is_in_the_row_of_what_it_keeps() -> None:
    page = (ROOT / "docs/mixed-precision.md").read_text(encoding="utf-8")
    found = {}
    for line in page.splitlines():
        names, _, kept = line.removeprefix("| ").partition(" | ")
        if line.startswith("| `") and re.match(r"16 bits|fp32", kept):
            found |= dict.fromkeys(re.findall(r"`([a-z0-9-]+)`", names), kept)
    for switch in REGISTRY.switches:
        if switch.master_weights:
            assert found.pop(switch.name).startswith("16 bits;"), switch.name
        elif switch.master_weights is False:
            assert found.pop(switch.name).startswith("fp32, under every engine"), switch.name
        elif switch.name.startswith("zero-"):
            assert "by DeepSpeed" in found.pop(switch.name), switch.name
        elif switch.engine:
            assert found.pop(switch.name).startswith("fp32; cast"), switch.name
    assert not found
