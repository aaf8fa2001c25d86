"""Tables and progress bars print brackets in texts unchanged."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.table import Table

from rapidformer_templates.commands.main import main
from rapidformer_templates.switches.auto_strategy import command
from rapidformer_templates.switches.auto_strategy.layouts import Layout
from rapidformer_templates.switches.auto_strategy.results import Rejected, SearchResult
from rapidformer_templates.switches.auto_strategy.whole_training import ModelTotals
from rapidformer_templates.system.terminal import console

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "src").rglob("*.py"))
BRACKETS = "pip install 'x[deepspeed]' [red] :smile: [/]"


def _markup_in(path: Path) -> Iterator[str]:
    """Yield each place that may interpret markup: another console, a text column, or rich's own print."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module == "rich":
            yield f"{path.name}:{node.lineno} imports rich.{node.names[0].name}"
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func).rpartition(".")[2]
        off = any(k.arg == "markup" and ast.unparse(k.value) == "False" for k in node.keywords)
        if (name in ("Console", "TextColumn") and not off) or name in ("from_markup", "render_markup"):
            yield f"{path.name}:{node.lineno} {name}"


def test_every_console_and_text_column_leaves_brackets_alone() -> None:
    assert [place for path in FILES for place in _markup_in(path)] == []


@pytest.mark.parametrize("line", ["Console(stderr=True)", "TextColumn('{task.description}')", "from rich import print"])
def test_a_new_place_would_be_noticed(line: str, tmp_path: Path) -> None:
    (tmp_path / "new.py").write_text(line)
    assert len(list(_markup_in(tmp_path / "new.py"))) == 1


def test_tables_print_brackets(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("[heading]", title=f"title {BRACKETS}")
    table.add_row(f"cell {BRACKETS}")
    console(piped_width=100).print(table, f"text {BRACKETS}")
    text = capsys.readouterr().out
    assert [f"{place} {BRACKETS}" in text for place in ("title", "cell", "text")] == [True, True, True]
    assert "[heading]" in text


def test_the_search_shows_why_a_package_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    result = SearchResult((), (Rejected(Layout(), f"a package is missing: {BRACKETS}"),), ModelTotals(1, 1, True, True))
    command.show_rejected(result, console(piped_width=140))
    assert BRACKETS in capsys.readouterr().out


def test_a_plan_shows_paths_with_brackets(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--task", "causal_lm", "--device", "cpu", "--data-dir", "runs[old]", "--save", "a/[b]"]) == 0
    text = capsys.readouterr().out
    assert "runs[old]" in text
    assert "a/[b]" in text
