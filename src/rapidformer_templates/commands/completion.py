"""``rapidformer completion``: prints a shell script that completes commands, flags, choices and files, with shtab."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import shtab

from rapidformer_templates.planning.config import field_types, value_kind
from rapidformer_templates.planning.flag_parser import CommandParser
from rapidformer_templates.planning.flag_parser import build_parser as flags_parser
from rapidformer_templates.planning.flags import SECTIONS
from rapidformer_templates.planning.registry import REGISTRY, load_object, switch_options

COMPLETED = {
    "FILE": shtab.FILE, "CSV": shtab.FILE, "PATH": shtab.FILE, "P": shtab.FILE, "DIR": shtab.DIRECTORY,
    "FOLDER": shtab.DIRECTORY, "RUN": shtab.DIRECTORY, "RUN|FOLDER": shtab.DIRECTORY,
}  # fmt: skip
"""Placeholders for values in the help, and how a shell completes them."""


def main(argv: Sequence[str]) -> int:
    """Print the completion script of a shell.

    Args:
        argv: words after ``rapidformer completion``.
    """
    options = build_parser().parse_args(argv)
    print(shtab.complete(whole_parser(), options.shell))
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of ``rapidformer completion``."""
    parser = CommandParser(
        prog="rapidformer completion",
        description='Print a script that completes commands and flags. bash: eval "$(rapidformer completion bash)"',
    )
    parser.add_argument("shell", choices=shtab.SUPPORTED_SHELLS, help="the shell")
    return parser


def whole_parser() -> argparse.ArgumentParser:
    """Return one parser with every command and its flags. It is for completion only."""
    from rapidformer_templates.commands.main import OTHERS, PlanFlags, own_parsers

    parser = _training_parser("rapidformer", [])
    commands = parser.add_subparsers(parser_class=argparse.ArgumentParser)
    parsers: dict[str, argparse.ArgumentParser] = {
        "plan": _training_parser("rapidformer plan", [PlanFlags]),
        **{name: own for name, own in own_parsers().items() if name != "plan"},
    }
    parsers["explain"]._actions[-1].choices = [rule.code for rule in REGISTRY.all_rules]
    parsers |= {name: load_object(f"{module}:build_parser")() for name, module in OTHERS.items()}
    for name, command in parsers.items():
        # The existing parser of the command replaces the one that argparse creates.
        commands.add_parser(name, help=command.description or name)
        commands.choices[name] = command
    for action in _actions(parser):
        if action.metavar in COMPLETED and not action.choices:
            action.complete = COMPLETED[str(action.metavar)]  # type: ignore[attr-defined]
    return parser


def _training_parser(prog: str, more: Sequence[type]) -> argparse.ArgumentParser:
    """Return the parser of a training command with the choices of its flags. The real parser does not have them."""
    options = [*switch_options().values(), *more]
    parser = flags_parser(prog, options, None, "")
    choices = {
        field.name: value_kind(field_types(kind)[field.name])[1] or field.metadata.get("offered", ())
        for kind in (*SECTIONS.values(), *options)
        for field in dataclasses.fields(kind)
    }
    for action in parser._actions:
        action.choices = choices.get(action.dest) or None
    return parser


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the actions of a parser and of its commands."""
    for action in parser._actions:
        yield action
        if isinstance(action.choices, dict):  # the parsers of the commands by name
            yield from itertools.chain.from_iterable(map(_actions, action.choices.values()))
