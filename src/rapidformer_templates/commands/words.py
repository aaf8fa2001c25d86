"""The words of a command that has a parser of its own."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from rapidformer_templates.errors import ConfigError
from rapidformer_templates.planning.config import add_flags, dashed
from rapidformer_templates.system import launch, program


class Parser(argparse.ArgumentParser):
    """Says what is wrong in the way of all other commands.

    Raises:
        ConfigError: a word that the command does not take.
    """

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, hint=f"{self.prog} --help lists what there is")


def words_of_saved(
    name: str, description: str, options: Iterable[type], words: Sequence[str]
) -> tuple[str, dict[str, Any]]:
    """The saved model that a command is to use, and the flags that are given, by field name.

    Args:
        name: of the command.
        options: dataclasses of the flags that it has.
        words: those after its name.

    Raises:
        ConfigError: a word that it does not take.
    """
    parser = Parser(
        prog=f"rapidformer {name}",
        description=description,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", metavar="RUN|FOLDER", help="run folder with its export/, or a folder of transformers")
    for option in options:
        add_flags(parser, option)
    given = vars(parser.parse_args(dashed(words)))
    return given.pop("run"), given


def in_workers(count: int | None, port: int | None, check: Callable[[], object], body: Callable[[], int]) -> int:
    """Run the body of a command in this process, or in each of several that run the whole command again.

    Args:
        check: what can be seen to be wrong before they start.

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
