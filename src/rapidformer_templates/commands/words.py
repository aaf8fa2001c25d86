"""The words of a command that has a parser of its own."""

from __future__ import annotations

import argparse
from typing import NoReturn

from rapidformer_templates.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """Says what is wrong in the way of all other commands.

    Raises:
        ConfigError: a word that the command does not take.
    """

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, hint=f"{self.prog} --help lists what there is")
