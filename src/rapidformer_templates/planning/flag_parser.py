"""Reads flags: from the command line, the YAML file of ``--config`` and a script into a :class:`RunConfig`.

One parser is for training flags, with ``--help`` and ``--help-all``, and one for every other command. This module does
not import torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NoReturn

import yaml
from yaml.constructor import SafeConstructor

from rapidformer_templates.errors import ConfigError, MistakeCollector, UnknownName, alike
from rapidformer_templates.planning.config import (
    COMMAND_LINE,
    RunConfig,
    checked_value,
    field_types,
    settable_by_files,
    spelling,
    value_kind,
)
from rapidformer_templates.planning.flags import SECTIONS

SourcedValue = tuple[object, str]
"""A value and where it comes from, such as ``command line`` or ``run.yaml:3``."""


class CommandParser(argparse.ArgumentParser):
    """A parser that reports mistakes in the same form as all other commands.

    Raises:
        ConfigError: the command does not accept a word.
    """

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, hint=f"{self.prog} --help lists all options")


def positive(word: str) -> int:
    """Convert the value of a flag that counts something: its ``type`` in a :class:`CommandParser`.

    Raises:
        argparse.ArgumentTypeError: the value is not a whole number of at least 1. The parser adds the flag.
    """
    try:
        number = int(word)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"needs a whole number of at least 1, not '{word}'")
    return number


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
        self._negative_number_matcher = re.compile(r"-\.?\d")  # argparse takes -1e-4 for a flag
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


def add_flags(parser: argparse.ArgumentParser, options: type) -> None:
    """Add the flags of a dataclass to a parser. The first line of its docstring is the title of their group."""
    title = (options.__doc__ or options.__name__).strip().splitlines()[0]
    # Dataclasses with the same title share one group: all switches are in "Acceleration".
    group = next((g for g in parser._action_groups if g.title == title), None) or parser.add_argument_group(title)
    for f in dataclasses.fields(options):
        meta, (kind, choices, several) = f.metadata, value_kind(field_types(options)[f.name])
        text = meta.get("help", "").replace("%", "%%")
        has_default = f.default not in (None, False, ()) and not isinstance(f.default, dataclasses._MISSING_TYPE)
        if has_default and "(default:" not in text:
            text += f" (default: {f.default})"
        keywords: dict[str, Any] = {"dest": f.name, "default": argparse.SUPPRESS, "help": text}
        if kind is bool and f.name.startswith("no_"):
            keywords["action"] = "store_true"  # the opposite of --no-save is --save DIR
        elif kind is bool:
            keywords["action"] = argparse.BooleanOptionalAction
        else:
            # checked_value() checks types and choices, with the same messages for flags, YAML and code.
            listed = "{" + ",".join(choices) + "}" if choices else kind.__name__.upper()
            keywords["metavar"] = meta.get("metavar") or listed
            if several:
                keywords["nargs"] = "+"
            elif meta.get("bare") is not None:
                keywords |= {"nargs": "?", "const": meta["bare"]}
        group.add_argument(spelling(f.name), **keywords)
        for alias, value in meta.get("aliases", {}).items():
            same = spelling(f.name) + (f" {value}" if value else "")
            offered = (
                keywords if value is None else {"action": argparse.BooleanOptionalAction, "default": argparse.SUPPRESS}
            )
            group.add_argument(
                f"--{alias}", **offered | {"dest": alias.replace("-", "_"), "help": f"the same as {same}"}
            )


def _by_field(
    values: Mapping[str, SourcedValue], options: Iterable[type], mistakes: MistakeCollector
) -> dict[str, SourcedValue]:
    """Return the values of one source by field, after resolving aliases.

    It is a mistake if two spellings of one field have different values.
    """
    by_field = dict(values)
    flags: dict[str, str] = {name: spelling(name) for name in values}
    for f in itertools.chain.from_iterable(map(dataclasses.fields, options)):
        for alias, stands_for in f.metadata.get("aliases", {}).items():
            value, origin = by_field.pop(alias.replace("-", "_"), (None, ""))
            if value is None or (stands_for and not value):
                continue  # fp16: false requests nothing
            value = stands_for or value
            other = by_field.setdefault(f.name, (value, origin))[0]
            if str(other) != str(value):
                message = f"{flags[f.name]} and --{alias} are the same flag, but have different values"
                hint = f"leave one of them out; {spelling(f.name)} is its name"
                mistakes.errors.append(ConfigError(message, where=origin, hint=hint))
            flags.setdefault(f.name, f"--{alias}")
    return by_field


def build_parser(prog: str, switch_options: Iterable[type], user: type | None, description: str) -> FlagParser:
    """Build the parser of all flags, grouped by topic.

    Raises:
        ConfigError: one of the user's flags has the name of a library flag.
    """
    parser = FlagParser(prog, description)
    for options in (*SECTIONS.values(), *switch_options):
        add_flags(parser, options)
        parser.usual |= {f.name for f in dataclasses.fields(options) if f.metadata.get("usual")}
    if user:
        reserved = [
            spelling(f.name) for f in dataclasses.fields(user) if spelling(f.name) in parser._option_string_actions
        ]
        if reserved:
            message = f"{reserved[0]} is a flag of the library"
            raise ConfigError(message, where=user.__name__, hint="rename your own flag")
        add_flags(parser, user)
        parser.usual |= {f.name for f in dataclasses.fields(user)}
    return parser


_remembered_parser = lru_cache(maxsize=4)(build_parser)
"""The same, built once for equal arguments. Nobody may change the parser."""


def parse(
    argv: Sequence[str],
    switch_options: Mapping[str, type],
    *,
    prog: str = "rapidformer",
    description: str = "",
    user: type | None = None,
    in_code: Mapping[str, SourcedValue] | None = None,
    mistakes: MistakeCollector | None = None,
) -> RunConfig:
    """Read flags into a :class:`RunConfig`.

    Args:
        argv: the command line without the program's name.
        switch_options: the options dataclass of each switch, by the switch's name.
        user: a dataclass of flags that the user's template declares.
        in_code: values given in the user's script, each with its location.
        mistakes: collects the mistakes in place of an error. Values that are wrong are then left out of the result.

    Raises:
        ConfigError: a flag or key is unknown, or a value has the wrong type or is out of range. With several mistakes
            the error names all of them.
    """
    collector = MistakeCollector() if mistakes is None else mistakes
    parser = _remembered_parser(prog, tuple(switch_options.values()), user, description)
    options = [*SECTIONS.values(), *switch_options.values(), *([user] if user else [])]
    script = _by_field(in_code or {}, options, collector)
    words = {name: (value, COMMAND_LINE) for name, value in parse_words(parser, argv, collector).items()}
    command_line = _by_field(words, options, collector)
    path = command_line.get("config", script.get("config", (None, "")))[0]
    file: dict[str, SourcedValue] = {}
    if path:
        with collector.collect():
            file = _by_field(read_yaml(str(path), parser, collector), options, collector)
    for name in sorted(file.keys() - settable_by_files(options)):
        hint = f"give {spelling(name)} on the command line if you trust the source of the code"
        message = f"a file cannot set {name}, which runs code"
        collector.errors.append(ConfigError(message, where=file.pop(name)[1], hint=hint))
    values, replaced = _merged((script, file, command_line), choices(options))
    remaining = dict(values)

    def build(kind: type) -> Any:
        chosen = {}
        for f in dataclasses.fields(kind):
            if f.name in remaining:
                value, origin = remaining.pop(f.name)
                with collector.collect():
                    chosen[f.name] = checked_value(f, field_types(kind)[f.name], value, origin)
        return kind(**chosen)

    config = RunConfig(
        **{name: build(kind) for name, kind in SECTIONS.items()},
        switches={name: build(kind) for name, kind in switch_options.items()},
        user=build(user) if user else None,
        origins={name: origin for name, (_, origin) in values.items()},
        replaced=replaced,
    )
    accepted = [spelling(f.name) for f in itertools.chain.from_iterable(map(dataclasses.fields, options))]
    for name, (_, origin) in remaining.items():
        near = flag_hint(name, accepted, as_code)
        collector.errors.append(UnknownName(f"unknown flag '{name}'", where=origin, hint=near))
    if mistakes is None:
        collector.raise_all()
    return config


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
    except (yaml.YAMLError, UnicodeDecodeError, OSError, RecursionError) as error:
        raise ConfigError(f"{file} is not YAML: {error}", where="--config") from error
    return document


def split(argv: Sequence[str], options: type) -> tuple[Any, list[str]]:
    """Return the flags of one dataclass, and the other words of the command line.

    Raises:
        ConfigError: a value has the wrong type or is out of range.
    """
    parser = argparse.ArgumentParser(
        add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS, exit_on_error=False
    )
    add_flags(parser, options)
    try:
        namespace, rest = parser.parse_known_args(dashed(argv))
    except argparse.ArgumentError as error:
        raise ConfigError(str(error), hint="rapidformer --help-all lists every flag") from error
    fields = {f.name: f for f in dataclasses.fields(options)}
    mistakes = MistakeCollector()
    words = {name: (value, COMMAND_LINE) for name, value in vars(namespace).items()}
    values = {}
    for name, word in _by_field(words, [options], mistakes).items():
        with mistakes.collect():
            values[name] = checked_value(fields[name], field_types(options)[name], *word)
    mistakes.raise_all()
    return options(**values), rest


def choices(options: Iterable[type]) -> dict[str, set[str]]:
    """Map each field of a choice to the other fields that it excludes."""
    members: dict[str, set[str]] = {}
    for f in itertools.chain.from_iterable(map(dataclasses.fields, options)):
        if choice := f.metadata.get("choice"):
            members.setdefault(choice, set()).add(f.name)
    return {name: names - {name} for names in members.values() for name in names}


def _merged(
    sources: Iterable[Mapping[str, SourcedValue]], excluding: Mapping[str, set[str]]
) -> tuple[dict[str, SourcedValue], tuple[str, ...]]:
    """Merge the values of several places, from lowest to highest. Also return a line for each replaced choice."""
    values: dict[str, SourcedValue] = {}
    lines = []
    for source in sources:
        for name, (value, origin) in source.items():
            if value in (None, False):
                continue  # turned off: nothing is chosen
            for other in sorted(excluding.get(name, set()) & values.keys() - source.keys()):
                old, earlier = values.pop(other)
                if old not in (None, False):
                    lines.append(f"{_shown(name, value)} ({origin}) replaces {_shown(other, old)} ({earlier})")
        values.update(source)
    return values, tuple(lines)


def _shown(name: str, value: object) -> str:
    return spelling(name) if value is True else f"{spelling(name)} {value}"


def dashed(argv: Sequence[str]) -> list[str]:
    """Spell ``--micro_batch_size=4`` as ``--micro-batch-size=4``. Values do not change."""
    spelled = []
    for word in argv:
        name, equals, value = word.partition("=")
        spelled.append(name.replace("_", "-") + equals + value if word.startswith("--") else word)
    return spelled


def parse_words(parser: argparse.ArgumentParser, words: Sequence[str], mistakes: MistakeCollector) -> dict[str, object]:
    """Return the values of the command line by name. Unknown flags and flags without their value are collected.

    Args:
        parser: a parser that does not exit on errors.
    """
    words = dashed(words)
    while True:
        try:
            namespace, unknown = parser.parse_known_args(words)
            break
        except argparse.ArgumentError as error:  # about one flag: the others can still be read
            names = (error.argument_name or "").split("/")
            mistakes.errors.append(ConfigError(str(error), hint=_list_of_flags(parser)))
            words = _without(words, names)
    # The words after an unknown flag are taken for its values.
    positional = list(itertools.takewhile(lambda word: not _FLAG.match(word), unknown))
    if positional:
        more = f", and {len(positional) - 1} more" if len(positional) > 1 else ""
        mistakes.errors.append(UnknownName(f"unexpected argument '{positional[0]}'{more}", hint=_list_of_flags(parser)))
    known = [name for action in parser._actions for name in action.option_strings]
    for name in dict.fromkeys(word.split("=")[0] for word in unknown if _FLAG.match(word)):
        hint = flag_hint(name, known) or _list_of_flags(parser)
        mistakes.errors.append(UnknownName(f"unknown flag {name}", where=COMMAND_LINE, hint=hint))
    return vars(namespace)


def _without(words: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the words of a command line without the flags with these names and their values."""
    rest, is_named = [], False
    for word in words:
        if _FLAG.match(word):
            is_named = word.partition("=")[0] in names
        if not is_named:
            rest.append(word)
    return rest


def _list_of_flags(parser: argparse.ArgumentParser) -> str:
    return f"{parser.prog} {'--help-all' if isinstance(parser, FlagParser) else '--help'} lists every flag"


_FLAG = re.compile("--|-[A-Za-z]")


SIMILAR = 0.75
"""How similar two names must be to suggest one for the other: ``tf31`` and ``tf32``, but not ``bf16`` and ``tf32``."""


@cache
def equivalents() -> dict[str, tuple[str, str]]:
    """Return (flags, note) of each flag of another trainer in ``peers.toml``, by its name with underscores.

    The flags are this library's equivalent, with a value if the name implies one (``--mixed-precision bf16``).
    """
    table = tomllib.loads(Path(__file__).with_name("peers.toml").read_text(encoding="utf-8"))
    rows = ((names.split(), flags, "".join(note)) for names, flags, *note in table["equivalents"])
    return {name.replace("-", "_"): (flags, note) for names, flags, note in rows for name in names}


def as_yaml(flags: str) -> str:
    """Return flags as in a file: ``mixed_precision: bf16``."""
    return ", ".join(f"{name}: {value}" if value else name for name, value in _pairs(flags))


def as_code(flags: str) -> str:
    """Return flags as in a script: ``mixed_precision="bf16"``."""
    return ", ".join(f'{name}="{value}"' if value else name for name, value in _pairs(flags))


def _pairs(flags: str) -> list[tuple[str, str]]:
    """Return (field, value) of each flag."""
    pairs = re.findall(r"--(\S+)(?: (?!--)(\S+))?", flags)
    return [(name.replace("-", "_"), value) for name, value in pairs]


def flag_hint(word: str, known: Iterable[str], spelled: Callable[[str], str] = str) -> str | None:
    """Return a hint for an unknown name: its equivalent here, or the known flag with the closest spelling.

    Args:
        word: the name, with or without its dashes.
        known: the known flags, with their dashes.
        spelled: formats flags as the source of the name does. By default, as a command line.
    """
    name = word.lstrip("-").replace("-", "_").lower()
    if name in equivalents():
        here, note = equivalents()[name]
        return " ".join(filter(None, (here and f"did you mean {spelled(here)}?", note)))
    flags = {flag.lstrip("-").replace("-", "_"): flag for flag in known}
    near = alike(name, flags, cutoff=SIMILAR)
    return f"did you mean {spelled(flags[near[0]])}?" if near else None
