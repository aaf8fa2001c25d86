"""Completion of flags: ``rapidformer completion`` for shells, and ``rapidformer schema`` for editors.

``completion`` prints a shell script that completes commands, flags, choices and files, with shtab. ``schema`` prints
the JSON schema of ``--config`` YAML files, with which editors complete and check them. It is generated from the
declarations of the flags and accepts the same values. Rules about several values are not in the schema. ``rapidformer
plan`` checks them.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from typing import get_args

import shtab

from rapidformer_templates.errors import ConfigError
from rapidformer_templates.planning.config import field_types, settable_by_files, value_kind
from rapidformer_templates.planning.flag_parser import CommandParser, dashed
from rapidformer_templates.planning.flag_parser import build_parser as flags_parser
from rapidformer_templates.planning.flag_values import TRACKERS, Epochs, Interval, TrackerNames
from rapidformer_templates.planning.flags import SECTIONS
from rapidformer_templates.planning.registry import REGISTRY, switch_options

COMPLETED = {
    "FILE": shtab.FILE, "CSV": shtab.FILE, "PATH": shtab.FILE, "P": shtab.FILE, "DIR": shtab.DIRECTORY,
    "FOLDER": shtab.DIRECTORY, "RUN": shtab.DIRECTORY, "RUN|FOLDER": shtab.DIRECTORY,
}  # fmt: skip
"""Placeholders for values in the help, and how a shell completes them."""
DEVICES = ("auto", "cpu", "cuda", "xpu", "mps", "npu")

_DIGITS = r"[0-9]+(_[0-9]+)*"
_NUMBER = rf"({_DIGITS}\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?"
_SCALAR = ["string", "number"]
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
    commands.choices["explain"]._actions[-1].choices = [rule.code for rule in REGISTRY.all_rules]
    for action in _actions(parser):
        placeholder = str(action.metavar)
        if action.choices:
            continue
        if placeholder in COMPLETED:
            action.complete = COMPLETED[placeholder]  # type: ignore[attr-defined]
        elif placeholder.startswith("{") or "|" in placeholder:  # flags check their choices elsewhere
            action.choices = re.split("[,|]", placeholder.strip("{}"))
        elif placeholder == "DEVICE":
            action.choices = DEVICES
    return parser


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the actions of a parser and of its commands."""
    for action in parser._actions:
        yield action
        if isinstance(action.choices, dict):  # the parsers of the commands by name
            yield from itertools.chain.from_iterable(map(_actions, action.choices.values()))


def schema_main(argv: Sequence[str]) -> int:
    """Print the schema.

    Args:
        argv: words after ``rapidformer schema``.

    Raises:
        ConfigError: the script of ``--user-script`` cannot be used, or declares no flags.
    """
    options = schema_parser().parse_args(dashed(argv))
    script_flags: type | None = None
    if options.user_script:
        from rapidformer_templates.run.scripts import capture_template

        words = ["--device", "cpu"]
        script_flags = capture_template(options.user_script, words, lambda template: type(template).Flags)
        if script_flags is None:
            message = f"{options.user_script} does not declare any flags"
            raise ConfigError(message, where="--user-script", hint="rapidformer schema")
    print(rendered(script_flags))
    return 0


def schema_parser() -> argparse.ArgumentParser:
    """Return the parser of ``rapidformer schema``."""
    about = "Print the JSON schema of the YAML files of --config, by which editors complete and check them."
    parser = CommandParser(prog="rapidformer schema", description=about)
    parser.add_argument("--user-script", metavar="FILE", help="with the flags that this script declares")
    return parser


def rendered(script_flags: type | None = None) -> str:
    """Return the schema as the text of a file."""
    return json.dumps(yaml_schema(script_flags), indent=1, ensure_ascii=False)


def yaml_schema(script_flags: type | None = None) -> Schema:
    """Return the schema of a ``--config`` YAML file.

    Args:
        script_flags: a dataclass with the user's flags.
    """
    keys: Schema = {}
    kinds = (*SECTIONS.values(), *switch_options().values(), *([script_flags] if script_flags else []))
    settable = settable_by_files(kinds) - {"config"}
    for options in kinds:
        for field in dataclasses.fields(options):
            if field.name in settable:
                name, meta = field.name.replace("_", "-"), field.metadata
                value = _value(field_types(options)[field.name], field) | {"description": meta.get("help", "")}
                default = field.default
                if isinstance(default, (bool, int, float, str)) and default != "":
                    value["default"] = default
                spellings: Schema = {name: value}
                for alias, stands_for in meta.get("aliases", {}).items():
                    same = f"the same as {name}" + (f": {stands_for}" if stands_for else "")
                    spellings[alias] = ({"type": ["boolean", "null"]} if stands_for else value) | {"description": same}
                keys |= spellings
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
    """Return the schema of a value, which accepts the same as ``config._checked``. An empty value is the default."""
    kind, choices, several = value_kind(annotation)
    meta = field.metadata
    bare = meta.get("bare")
    kinds = ["null", *(["boolean"] if bare is not None or kind is bool else [])]
    if choices:
        logical = [True, False] if bare is not None else []
        return {"enum": list(dict.fromkeys([*choices, *([bare] if bare else []), *logical, None]))}
    if several:
        return {"type": [*kinds, *_SCALAR, "array"], "items": {"type": _SCALAR}}
    if kind in (int, float):
        number = _number(kind, kinds, meta.get("minimum"), meta.get("maximum"))
        if Epochs not in get_args(annotation):
            return number
        return number | {"pattern": rf"({number['pattern']})|(^\s*{_NUMBER}\s*[Ee][Pp][Oo][Cc][Hh][Ss]?\s*$)"}
    if kind is Interval:
        pattern = rf"^\s*{_NUMBER}\s*[A-Za-z]*\s*$"
        return {"type": [*kinds, "string", "integer"], "exclusiveMinimum": 0, "pattern": pattern}
    if kind is TrackerNames:
        one = f"({'|'.join(map(_any_case, TRACKERS))})"
        alone = f"{_any_case('all')}|{_any_case('none')}"
        return {
            "type": [*kinds, "string", "array"],
            "pattern": rf"^\s*({alone}|{one}(\s*,\s*{one})*)\s*$",
            "items": {"type": "string", "pattern": rf"^\s*({alone}|{one})\s*$"},
        }
    return {"type": kinds if kind is bool else [*kinds, *_SCALAR]}


def _any_case(word: str) -> str:
    """Return a pattern that matches a word in any case, because patterns of JSON schemas have no flags."""
    return "".join(f"[{letter.upper()}{letter}]" for letter in word)


def _number(kind: type, kinds: list[str], minimum: float | None, maximum: float | None) -> Schema:
    """Return the schema of a number, which may also be a string.

    Files are read as YAML 1.1, which reads 1e-5 as a string. Newer versions read it as a number.
    """
    form = _DIGITS if kind is int else _NUMBER
    sign = "[-+]?" if minimum is None or minimum < 0 else "[+]?"
    types = [*kinds, "integer" if kind is int else "number", "string"]
    value: Schema = {"type": types, "pattern": rf"^\s*{sign}{form}\s*$"}
    bounds = {"minimum": minimum, "maximum": maximum}
    return value | {name: bound for name, bound in bounds.items() if bound is not None}
