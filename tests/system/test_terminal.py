"""Tables and progress bars print brackets in texts unchanged."""

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
from rapidformer_templates.switches.auto_strategy import command, results
from rapidformer_templates.switches.auto_strategy.layouts import Layout
from rapidformer_templates.switches.auto_strategy.results import ModelTotals
from rapidformer_templates.system.terminal import ProgressBar, console
from tests.support.lines import FLAGS, Line
from tests.support.messages import Says

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


def test_tables_print_brackets(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("[heading]", title=f"title {BRACKETS}")
    table.add_row(f"cell {BRACKETS}")
    console(piped_width=100).print(table, f"text {BRACKETS}")
    text = capsys.readouterr().out
    assert [f"{place} {BRACKETS}" in text for place in ("title", "cell", "text")] == [True, True, True]
    assert "[heading]" in text


def test_the_search_shows_why_a_package_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    rejected = (results.Rejected(Layout(), f"a package is missing: {BRACKETS}"),)
    result = results.SearchResult((), rejected, ModelTotals(1, 1, True, True))
    command.show_rejected(result, console(piped_width=140))
    assert BRACKETS in capsys.readouterr().out


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


def test_a_name_that_is_too_long_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], says: Says
) -> None:
    for words in (
        "--task causal_lm --lr 1 --train-iters 1 --model-type gpt2 --save", "--config", "--user-script", "evaluate",
        "--task causal_lm --pretrained-model-name-or-path",
    ):  # fmt: skip
        says.command(f"rapidformer {words} {LONG}")
    monkeypatch.setattr(sys, "argv", ["train.py"])
    with pytest.raises(SystemExit, match="2"):
        Line.main(epochs=1, lr=0.1, save=LONG)
    says.text(capsys.readouterr().err)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def terminal_of(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Replace standard error from here on. pytest replaces it between a fixture and its test."""
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    for name, value in {"TERM": "xterm", "COLUMNS": "160", "NO_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)
    return screen


@pytest.mark.parametrize(("counted", "shown"), [(True, "3/4"), (False, "75%")])
def test_all_that_was_done_is_shown(monkeypatch: pytest.MonkeyPatch, counted: bool, shown: str) -> None:
    terminal = terminal_of(monkeypatch)
    asked: list[int] = []
    with ProgressBar("training", 4, done=1, show_count=counted) as bar:
        for number in range(2):
            bar.advance(1, lambda number=number: str(asked.append(number)))  # type: ignore[misc]
    assert asked == []  # the steps took less time than a refresh
    assert "training" in terminal.getvalue()
    assert shown in terminal.getvalue()


def test_text_is_asked_for_when_it_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = terminal_of(monkeypatch)
    monkeypatch.setattr("rapidformer_templates.system.terminal.REFRESH_SECONDS", 0.0)
    with ProgressBar("training", 2) as bar:
        bar.advance(1, lambda: "loss 0.5")
    assert "loss 0.5" in terminal.getvalue()
    assert "1/2" in terminal.getvalue()


@pytest.mark.parametrize("is_terminal", [True, False])
def test_nothing_where_nobody_looks(monkeypatch: pytest.MonkeyPatch, is_terminal: bool) -> None:
    terminal = terminal_of(monkeypatch)
    monkeypatch.setattr(terminal, "isatty", lambda: is_terminal)
    with ProgressBar("training", 2, show=not is_terminal) as bar:
        bar.advance(1, lambda: pytest.fail("nobody sees it"))
    assert terminal.getvalue() == ""
