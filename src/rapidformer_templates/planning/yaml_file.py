"""Reads the YAML file of ``--config``: values by field, each with its line. Does not import torch."""

from __future__ import annotations

import argparse
from pathlib import Path

import yaml
from yaml.constructor import SafeConstructor

from rapidformer_templates.errors import ConfigError, MistakeCollector, UnknownName
from rapidformer_templates.planning.peers import as_yaml, flag_hint

SourcedValue = tuple[object, str]
"""A value and where it comes from, such as ``command line`` or ``run.yaml:3``."""


def read_yaml(path: str, parser: argparse.ArgumentParser, mistakes: MistakeCollector) -> dict[str, SourcedValue]:
    """Read the flags of a YAML file, each with its line. Unknown keys and keys that occur twice are collected.

    Raises:
        ConfigError: the file does not exist, or does not map flags to values.
    """
    file = Path(path)
    document = _compose(file)
    if document is None:
        return {}
    if not isinstance(document, yaml.MappingNode):
        raise ConfigError(f"{path} must map flags to values", where=f"{path}:1", hint="write 'lr: 3.0e-5'")
    # A key is a field or its alias. --no-tf32 is spelled "tf32: false".
    fields = {action.dest: action.dest for action in parser._actions}
    for action in parser._actions:
        names = (option.lstrip("-").replace("-", "_") for option in action.option_strings)
        fields |= {name: action.dest for name in names if not name.startswith("no_")}
    values: dict[str, SourcedValue] = {}
    places: dict[str, str] = {}
    for key_node, value_node in document.value:
        where = f"{file.name}:{key_node.start_mark.line + 1}"
        name = str(key_node.value).replace("-", "_")
        with mistakes.collect():
            if name not in fields:
                hint = flag_hint(name, ("--" + key.replace("_", "-") for key in fields), as_yaml)
                raise UnknownName(f"unknown key '{key_node.value}'", where=where, hint=hint)
            if name == "config":
                raise ConfigError("a configuration file cannot name another", where=where)
            if name in places:
                hint = f"it is also in {places[name]}; keep one of the two lines"
                raise ConfigError(f"the key '{key_node.value}' is there twice", where=where, hint=hint)
            places[name] = where
            try:
                value = SafeConstructor().construct_document(value_node)
            except yaml.MarkedYAMLError as error:
                raise ConfigError(f"the value cannot be read: {error.problem}", where=where) from error
            if value is not None:
                values[fields[name]] = (value, where)
    return values


def _compose(file: Path) -> yaml.Node | None:
    if not file.is_file():
        raise ConfigError(f"the configuration file {file} does not exist", where="--config")
    try:
        document: yaml.Node | None = yaml.compose(file.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        has_tab = "'\\t'" in str(error.problem)
        hint = "indent with spaces, not with tabs" if has_tab else "write one 'key: value' per line"
        raise ConfigError(f"{file} is not YAML: {error.problem}", where=f"{file.name}{line}", hint=hint) from error
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"{file} is not YAML: {error}", where="--config") from error
    return document
