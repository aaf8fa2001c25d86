"""Tables and progress bars print brackets in texts unchanged."""

from __future__ import annotations

import ast
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from rich.table import Table

from rapidformer_templates.commands.main import main
from rapidformer_templates.switches.auto_strategy import command
from rapidformer_templates.switches.auto_strategy.layouts import Layout
from rapidformer_templates.switches.auto_strategy.results import Rejected, SearchResult
from rapidformer_templates.switches.auto_strategy.whole_training import ModelTotals
from rapidformer_templates.system.terminal import console
from tests.support.lines import FLAGS, Line

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


def _ascii_output(monkeypatch: pytest.MonkeyPatch, *words: str) -> str:
    """Return what a command prints on a terminal that knows only ASCII."""
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", terminal)
        assert main(list(words)) == 0
    terminal.flush()
    printed = terminal.buffer.getvalue()  # type: ignore[attr-defined]
    return str(printed, "ascii")


@pytest.mark.parametrize(
    ("words", "printed"),
    [
        (["--help"], "rapidformer --task TASK \\u2026 "),
        (["switches"], "\\u00d7"),
        (["plan", "--model-type", "gpt2", "--device", "cpu"], "1 = tensor 1 \\u00d7 pipeline 1"),
    ],
)
def test_characters_that_a_terminal_lacks_are_escaped(
    words: list[str], printed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert printed in _ascii_output(monkeypatch, *words)


def test_what_programs_read_stays_readable(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    assert json.loads(_ascii_output(monkeypatch, "schema")) == json.loads(capsys.readouterr().out)
    text = _ascii_output(monkeypatch, "plan", "--yaml", "--model-type", "gpt2", "--data-dir", "Übung 🙂")
    assert yaml.safe_load(text)["data-dir"] == "Übung 🙂"


def test_a_script_prints_its_results_on_such_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict")
    monkeypatch.setattr(sys, "stdout", terminal)
    Line([*FLAGS, "--train-iters", "1", "--no-save"])
    print("a ± 1")
    terminal.flush()
    assert terminal.buffer.getvalue() == b"a \\u00b1 1\n"  # type: ignore[attr-defined]


LONG = "a" * 300


@pytest.mark.parametrize(
    "words",
    [
        ["--task", "causal_lm", "--lr", "1", "--train-iters", "1", "--model-type", "gpt2", "--save", LONG],
        ["--task", "causal_lm", "--pretrained-model-name-or-path", LONG],
        ["--config", LONG],
        ["--user-script", LONG],
        ["evaluate", LONG],
    ],
)
def test_a_name_that_is_too_long_is_named(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert f"a path of 300 characters is too long for this file system: {'a' * 40}…" in capsys.readouterr().err


def test_a_script_names_it_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py"])
    with pytest.raises(SystemExit) as ended:
        Line.main(epochs=1, lr=0.1, save=LONG)
    assert ended.value.code == 2
    assert "a path of 300 characters is too long" in capsys.readouterr().err
