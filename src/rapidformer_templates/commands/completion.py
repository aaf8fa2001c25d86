"""Completion of flags: ``rapidformer completion`` for shells, and ``rapidformer schema`` for editors.

``completion`` prints a shell script that completes commands, flags, choices and files, with shtab. ``schema`` prints
the JSON schema of ``--config`` YAML files, with which editors complete and check them. It is generated from the
declarations of the flags and accepts the same values. Rules about several values are not in the schema. ``rapidformer
plan`` checks them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence

import shtab

from rapidformer_templates.planning.config import field_types, settable_by_files, value_kind
from rapidformer_templates.planning.flag_parser import CommandParser
from rapidformer_templates.planning.flag_parser import build_parser as flags_parser
from rapidformer_templates.planning.flag_values import Interval, TrackerNames
from rapidformer_templates.planning.flags import SECTIONS
from rapidformer_templates.planning.registry import switch_options

FILES, FOLDERS = ("FILE", "CSV", "PATH", "P"), ("DIR", "FOLDER", "RUN", "RUN|FOLDER")
"""Placeholders of values that are files or folders."""

NUMBER = r"^\s*[-+]?\.?[0-9]"
"""The beginning of a text that is a number, perhaps with a unit."""
SCALAR = ["string", "number"]
"""JSON types of a text value. A name may look like a number."""

Schema = dict[str, object]
"""A JSON schema, or a part of one."""


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
    about = 'Print a script that completes commands and flags. bash: eval "$(rapidformer completion bash)"'
    parser = CommandParser(prog="rapidformer completion", description=about)
    parser.add_argument("shell", choices=shtab.SUPPORTED_SHELLS, help="the shell")
    return parser


def whole_parser() -> argparse.ArgumentParser:
    """Return one parser with every command and its flags. It is for completion only."""
    from rapidformer_templates.commands.main import OTHERS, REFERENCE
    from rapidformer_templates.commands.plan import PlanFlags

    options = [*switch_options().values()]
    parser = flags_parser("rapidformer", options, None, "")
    commands = parser.add_subparsers(parser_class=argparse.ArgumentParser)
    for name, home in {**REFERENCE, **OTHERS}.items():
        command = flags_parser("rapidformer plan", options, PlanFlags, "") if name == "plan" else home.build_parser()
        # The existing parser of the command replaces the one that argparse creates.
        commands.add_parser(name, help=command.description or name)
        commands.choices[name] = command
    _complete_values(parser)
    return parser


def _complete_values(parser: argparse.ArgumentParser) -> None:
    """Tell shtab which values are files or folders, and the choices that flags check elsewhere."""
    for action in parser._actions:
        placeholder = str(action.metavar)
        if isinstance(action.choices, dict):  # the parsers of the commands by name
            for command in action.choices.values():
                _complete_values(command)
        elif placeholder in (*FILES, *FOLDERS):
            action.complete = shtab.FILE if placeholder in FILES else shtab.DIRECTORY  # type: ignore[attr-defined]
        elif placeholder.startswith("{") or "|" in placeholder:
            action.choices = placeholder.strip("{}").replace("|", ",").split(",")


def schema_main(argv: Sequence[str]) -> int:
    """Print the schema.

    Args:
        argv: words after ``rapidformer schema``.
    """
    schema_parser().parse_args(argv)
    print(rendered())
    return 0


def schema_parser() -> argparse.ArgumentParser:
    """Return the parser of ``rapidformer schema``."""
    about = "Print the JSON schema of the YAML files of --config, by which editors complete and check them."
    return CommandParser(prog="rapidformer schema", description=about)


def rendered() -> str:
    """Return the schema as the text of a file."""
    return json.dumps(yaml_schema(), indent=1, ensure_ascii=False)


def yaml_schema() -> Schema:
    """Return the schema of a ``--config`` YAML file."""
    keys: Schema = {}
    kinds = (*SECTIONS.values(), *switch_options().values())
    settable = settable_by_files(kinds) - {"config"}
    for options in kinds:
        for field in dataclasses.fields(options):
            if field.name in settable:
                name, meta = field.name.replace("_", "-"), field.metadata
                value = _value(field_types(options)[field.name], field) | {"description": meta.get("help", "")}
                default = field.default
                if isinstance(default, (bool, int, float, str)) and default != "":
                    value["default"] = default
                keys[name] = value
                for alias, stands_for in meta.get("aliases", {}).items():
                    same = f"the same as {name}" + (f": {stands_for}" if stands_for else "")
                    keys[alias] = ({"type": ["boolean", "null"]} if stands_for else value) | {"description": same}
    dashed_keys = [key for key in keys if "-" in key]
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Flags of rapidformer",
        "type": ["object", "null"],
        "properties": keys,
        "patternProperties": {f"^{k.replace('-', '[-_]')}$": {"$ref": f"#/properties/{k}"} for k in dashed_keys},
        "additionalProperties": False,
    }


def _value(annotation: object, field: dataclasses.Field[object]) -> Schema:
    """Return the schema of a value: its type, choices and bounds. An empty value is the default."""
    kind, choices, several = value_kind(annotation)
    bare = field.metadata.get("bare")
    kinds = ["null", *(["boolean"] if bare is not None or kind is bool else [])]
    if choices:
        logical = [True, False] if bare is not None else []
        return {"enum": list(dict.fromkeys([*choices, *([bare] if bare else []), *logical, None]))}
    if kind in (int, float, Interval):
        # YAML 1.1 reads 1e-5 as a text. Intervals and epochs have a unit, which only the parser checks.
        value: Schema = {"type": [*kinds, "number" if kind is float else "integer", "string"], "pattern": NUMBER}
        bounds = {name: field.metadata.get(name) for name in ("minimum", "maximum")}
        value |= {name: bound for name, bound in bounds.items() if bound is not None}
        return value | ({"exclusiveMinimum": 0} if kind is Interval else {})
    if several or kind is TrackerNames:
        items = ["string"] if kind is TrackerNames else SCALAR
        return {"type": [*kinds, *items, "array"], "items": {"type": items}}
    return {"type": kinds if kind is bool else [*kinds, *SCALAR]}
