"""The mutations of ``scripts/mutations.py`` still fit the source. The script itself takes an hour."""

from __future__ import annotations

import ast

import pytest

from rapidformer_templates.planning.registry import REGISTRY
from scripts.mutations import ELSEWHERE, LINES, ROOT
from tests.support import covering

SOURCE = ROOT / "src/rapidformer_templates"


@pytest.mark.parametrize("name", LINES)
def test_a_line_occurs_once_and_its_replacement_is_python(name: str) -> None:
    line = LINES[name]
    text = (SOURCE / line.file).read_text(encoding="utf-8")
    assert text.count(line.line) == 1
    ast.parse(text.replace(line.line, line.instead))
    assert all((ROOT / path).exists() for path in line.tests)


def test_every_switch_has_tests_that_run_without_it() -> None:
    covered = {name for row in covering.table()["rows"] for name in row}
    assert [switch.name for switch in REGISTRY.switches if switch.name not in covered | ELSEWHERE.keys()] == []
