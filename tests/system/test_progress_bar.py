"""The bar on a terminal is rarely refreshed, complete at the end, and absent where nobody looks at it."""

from __future__ import annotations

import io
import sys

import pytest

from rapidformer_templates.system.terminal import ProgressBar


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


def test_nothing_where_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = terminal_of(monkeypatch)
    with ProgressBar("training", 2, show=False) as bar:
        bar.advance(1, lambda: pytest.fail("nobody sees it"))
    assert terminal.getvalue() == ""
    monkeypatch.setattr(terminal, "isatty", lambda: False)
    with ProgressBar("training", 2) as bar:
        bar.advance(1, lambda: pytest.fail("nobody sees it"))
    assert terminal.getvalue() == ""
