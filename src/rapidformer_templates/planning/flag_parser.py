"""The parsers: that of training flags, with ``--help`` and ``--help-all``, and that of every other command."""

from __future__ import annotations

import argparse
from typing import NoReturn

from rapidformer_templates.errors import ConfigError


class CommandParser(argparse.ArgumentParser):
    """A parser that reports mistakes in the same form as all other commands.

    Raises:
        ConfigError: the command does not accept a word.
    """

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, hint=f"{self.prog} --help lists all options")


class FlagParser(argparse.ArgumentParser):
    """A parser of many flags. It raises ``argparse.ArgumentError`` instead of ending the program.

    Attributes:
        usual: names of the fields whose flags ``--help`` shows.
    """

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(
            prog=prog,
            usage=f"{prog} [flags]",
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
            exit_on_error=False,
            add_help=False,
        )
        self.usual: set[str] = set()
        self.add_argument("-h", "--help", action=_PrintHelp, nargs=0, help="show the usual flags")
        self.add_argument("--help-all", action=_PrintHelp, nargs=0, help="show every flag")

    def format_usual_help(self) -> str:
        """Return the help text with the usual flags only, by topic. Topics without them are left out."""
        texts = {action: action.help for action in self._actions}
        self.epilog = f"These are the usual flags. {self.prog} --help-all lists all of them."
        for action in self._actions:
            action.help = action.help if action.dest in self.usual else argparse.SUPPRESS
        try:
            return self.format_help()
        finally:
            self.epilog = None
            for action, text in texts.items():
                action.help = text


class _PrintHelp(argparse.Action):
    """Prints a help text and ends the program."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        assert isinstance(parser, FlagParser)
        print(parser.format_help() if option_string == "--help-all" else parser.format_usual_help())
        parser.exit()
