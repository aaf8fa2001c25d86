"""Consoles for tables and progress bars, without markup, because texts of users contain brackets."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def console(*, piped_width: int | None = None, on_stderr: bool = False, plain: bool = False) -> Console:
    """Return a console without rich's markup, which would swallow ``[deepspeed]``, and without its emojis.

    Args:
        piped_width: columns of an output that is not a terminal. By default rich uses ``COLUMNS``, or 80.
        on_stderr: print to standard error.
        plain: print text in a notebook as well, where rich shows HTML.
    """
    from rich.console import Console

    terminal = Console(stderr=on_stderr, markup=False, emoji=False, force_jupyter=False if plain else None)
    if piped_width is not None and not terminal.is_terminal:
        terminal.width = piped_width
    return terminal
