"""Command lines of commands that have their own parser."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from rapidformer_templates.errors import ConfigError, MistakeCollector
from rapidformer_templates.planning.config import add_flags, check_values, parse_words
from rapidformer_templates.run.saved_model import SavedModel, find_saved
from rapidformer_templates.system import launch, program


class Parser(argparse.ArgumentParser):
    """A parser that reports mistakes in the same form as all other commands.

    Raises:
        ConfigError: the command does not accept a word.
    """

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, hint=f"{self.prog} --help lists all options")


def parser_of_saved(name: str, description: str, options: Iterable[type]) -> argparse.ArgumentParser:
    """Return the parser of a command that uses a saved model.

    Args:
        name: name of the command.
        options: dataclasses with the command's flags.
    """
    parser = Parser(
        prog=f"rapidformer {name}",
        description=description,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        exit_on_error=False,
    )
    parser.add_argument("run", metavar="RUN|FOLDER", help="run folder with its export/, or a transformers folder")
    for option in options:
        add_flags(parser, option)
    return parser


Values = dict[str, Any]
"""Values of flags, by field name."""


def words_of_saved(
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    options: Iterable[type],
    check: Callable[[Values], None] = lambda values: None,
) -> tuple[SavedModel, Values]:
    """Return the saved model, and the values of the command line.

    Args:
        argv: words after the name of the command. The default is the command line of this process.
        options: dataclasses with the command's flags.
        check: the command's own check of the values.

    Raises:
        RapidformerError: the mistakes of the command, all at once.
    """
    mistakes = MistakeCollector()
    values = parse_words(parser, sys.argv[1:] if argv is None else argv, mistakes)
    path = values.pop("run")
    check_values(values, options, mistakes)
    saved = None
    with mistakes.collect():
        saved = find_saved(path)
    with mistakes.collect():
        check(values)
    mistakes.raise_all()
    assert saved is not None
    return saved, values


def in_workers(count: int | None, port: int | None, check: Callable[[], object], body: Callable[[], int]) -> int:
    """Run the body of a command in this process, or in several workers that run the whole command again.

    Args:
        check: finds mistakes before the workers start.

    Returns:
        The exit status.
    """
    if launch.is_worker():
        return launch.report_errors(body)
    if (count or 1) == 1:
        return body()
    check()
    launch.run_workers(program.command(), count or 1, port)
    return 0
