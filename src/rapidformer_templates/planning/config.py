"""RunConfig: what the user asked for, and where each value came from.

A value comes from the first of these places that has it: the command line, the YAML file of ``--config``, the script
that builds the template, the template, the flag's own default. If several flags of one ``choice`` are given, which
exclude each other, the one from the higher of these places wins. Flags are the fields of small frozen dataclasses (one
per topic, one per switch). Parsing, help and docs are derived from them. This module does not import torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

import yaml

from rapidformer_templates.errors import ConfigError, MistakeCollector, UnknownName, did_you_mean
from rapidformer_templates.planning.flag_parser import FlagParser
from rapidformer_templates.planning.flags import SECTIONS, DataFlags, LaunchFlags, ModelFlags, TrainingFlags
from rapidformer_templates.planning.intervals import Epochs, Interval
from rapidformer_templates.planning.peers import as_code, flag_hint
from rapidformer_templates.planning.yaml_file import SourcedValue, read_yaml


@dataclass(frozen=True)
class RunConfig:
    """Everything that the user asked for.

    Attributes:
        launch, model, data, training: the flags by topic.
        switches: the options of each acceleration switch, by the switch's name.
        user: the flags that the user's template declares, or None.
        origins: the origin of each value that is not a default, by field name.
        replaced: lines about values that a flag of the same choice from a higher place has replaced.
        chosen: lines about values that were determined automatically.
    """

    launch: LaunchFlags = field(default_factory=LaunchFlags)
    model: ModelFlags = field(default_factory=ModelFlags)
    data: DataFlags = field(default_factory=DataFlags)
    training: TrainingFlags = field(default_factory=TrainingFlags)
    switches: Mapping[str, Any] = field(default_factory=dict)
    user: Any = None
    origins: Mapping[str, str] = field(default_factory=dict)
    replaced: tuple[str, ...] = ()
    chosen: tuple[str, ...] = ()

    @cached_property
    def _declared_in(self) -> Mapping[str, str]:
        groups = {name: getattr(self, name) for name in (*SECTIONS, "user")} | dict(self.switches)
        return _sections_of_fields(tuple((name, type(group)) for name, group in groups.items() if group))

    def section_of(self, name: str) -> str:
        """Return the section ('data', 'user', …) or the switch that declares the field ``name``."""
        return self._declared_in[name]

    def get(self, name: str) -> Any:
        """Return the value of the field ``name`` of any section or switch."""
        section = self.section_of(name)
        return getattr(self.switches[section] if section in self.switches else getattr(self, section), name)

    def origin(self, name: str) -> str:
        return self.origins.get(name, "default")

    def replace(self, origin: str, **values: object) -> RunConfig:
        """Return a copy with other values for the named fields, which came from ``origin``."""
        sections: dict[str, Any] = {}
        switches = dict(self.switches)
        for name, value in values.items():
            section = self.section_of(name)
            if section in switches:
                switches[section] = dataclasses.replace(switches[section], **{name: value})
            else:
                base = sections.get(section, getattr(self, section))
                sections[section] = dataclasses.replace(base, **{name: value})
        origins = {**self.origins, **dict.fromkeys(values, origin)}
        return dataclasses.replace(self, **sections, switches=switches, origins=origins)

    def checked(self, name: str, value: object, origin: str) -> Any:
        """Convert ``value`` to the type of the field ``name``.

        Raises:
            ConfigError: the value has the wrong type, is not one of the choices, or is out of range.
        """
        section = self.section_of(name)
        options: Any = self.switches[section] if section in self.switches else getattr(self, section)
        kind: type = type(options)
        declared = next(f for f in dataclasses.fields(kind) if f.name == name)
        return _checked(declared, field_types(kind)[name], value, origin)

    def kinds(self) -> tuple[type, ...]:
        """Return the dataclasses of flags, section by section."""
        groups = [*(getattr(self, section) for section in SECTIONS), *self.switches.values()]
        return tuple(type(group) for group in ([*groups, self.user] if self.user is not None else groups))

    def fields(self) -> Iterable[dataclasses.Field[object]]:
        """Yield the declarations of all fields, section by section."""
        for kind in self.kinds():
            yield from fields_of(kind)

    def items(self) -> Iterable[tuple[str, object]]:
        """Return all (field name, value) pairs, section by section."""
        return ((f.name, self.get(f.name)) for f in self.fields())


def spelling(name: str) -> str:
    """Return the flag of a field: ``micro_batch_size`` → ``--micro-batch-size``."""
    return "--" + name.replace("_", "-")


@cache
def fields_of(options: type) -> tuple[dataclasses.Field[object], ...]:
    """Return the fields of a flags dataclass, cached. A search for suggestions reads them many thousands of times."""
    return dataclasses.fields(options)


@cache
def _sections_of_fields(kinds: tuple[tuple[str, type], ...]) -> Mapping[str, str]:
    """Map each field to the section or the switch that declares it."""
    fields = [(f.name, name) for name, kind in kinds for f in fields_of(kind)]
    return dict(reversed(fields))  # if two declare the same name, the first wins


@cache
def field_types(options: type) -> Mapping[str, object]:
    """Return the annotated type of each field of a flags dataclass. Choices from a table are a ``Literal``, too."""
    listed = {f.name: f.metadata.get("choices") for f in fields_of(options)}
    hints = typing.get_type_hints(options)
    return hints | {name: Literal[choices] for name, choices in listed.items() if choices}


def value_kind(annotation: object) -> tuple[type, tuple[str, ...] | None, bool]:
    """Return (scalar type, choices, takes several values) for an annotation such as ``Literal['a'] | None``."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        annotation = next(a for a in typing.get_args(annotation) if a is not type(None))
    if typing.get_origin(annotation) is Literal:
        choices = typing.get_args(annotation)
        return type(choices[0]), choices, False
    if typing.get_origin(annotation) is tuple:
        return typing.get_args(annotation)[0], None, True
    assert isinstance(annotation, type)
    return annotation, None, False


def _expected(kind: type) -> str:
    return getattr(kind, "expected", None) or f"a value of type {kind.__name__}"


def subset_of_flags(options: type, *names: str, **defaults: object) -> type:
    """Make a dataclass with some of the flags of another one, for a command that needs only these.

    Args:
        defaults: the command's own defaults, by field name.
    """
    types = field_types(options)
    fields = [
        (f.name, types[f.name], field(default=defaults.get(f.name, f.default), metadata=f.metadata))
        for f in dataclasses.fields(options)
        if f.name in names
    ]
    return dataclasses.make_dataclass(options.__name__, fields, frozen=True, namespace={"__doc__": options.__doc__})


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
            # _checked() checks types and choices, with the same messages for flags, YAML and code.
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
            raise ConfigError(
                f"{reserved[0]} is a flag of the library", where=user.__name__, hint="rename your own flag"
            )
        add_flags(parser, user)
        parser.usual |= {f.name for f in dataclasses.fields(user)}
    return parser


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
    parser = build_parser(prog, switch_options.values(), user, description)
    options = [*SECTIONS.values(), *switch_options.values(), *([user] if user else [])]
    script = _by_field(in_code or {}, options, collector)
    words = {name: (value, "command line") for name, value in parse_words(parser, argv, collector).items()}
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
    config = dataclasses.replace(_assemble(values, switch_options, user, collector), replaced=replaced)
    if mistakes is None:
        collector.raise_all()
    return config


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
    words = {name: (value, "command line") for name, value in vars(namespace).items()}
    values = {}
    for name, word in _by_field(words, [options], mistakes).items():
        with mistakes.collect():
            values[name] = _checked(fields[name], field_types(options)[name], *word)
    mistakes.raise_all()
    return options(**values), rest


def settable_by_files(options: Iterable[type]) -> set[str]:
    """Return the fields that a YAML file or the plan of an earlier run may set."""
    fields = itertools.chain.from_iterable(map(dataclasses.fields, options))
    return {f.name for f in fields if f.metadata.get("in_files", True)}


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
    mistakes.errors += _unknown_words(unknown, parser)
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


def check_values(values: Mapping[str, object], options: Iterable[type], mistakes: MistakeCollector) -> None:
    """Collect each value of the command line that has the wrong type or is out of range."""
    for kind in options:
        for f in dataclasses.fields(kind):
            if f.name in values:
                with mistakes.collect():
                    _checked(f, field_types(kind)[f.name], values[f.name], "command line")


def _unknown_words(words: Sequence[str], parser: argparse.ArgumentParser) -> Iterator[ConfigError]:
    """Yield an error for each unknown flag. The words after an unknown flag are taken for its values."""
    positional = list(itertools.takewhile(lambda word: not _FLAG.match(word), words))
    if positional:
        more = f", and {len(positional) - 1} more" if len(positional) > 1 else ""
        yield UnknownName(f"unexpected argument '{positional[0]}'{more}", hint=_list_of_flags(parser))
    known = [name for action in parser._actions for name in action.option_strings]
    for name in dict.fromkeys(word.split("=")[0] for word in words if _FLAG.match(word)):
        hint = flag_hint(name, known) or _list_of_flags(parser)
        yield UnknownName(f"unknown flag {name}", where="command line", hint=hint)


def _list_of_flags(parser: argparse.ArgumentParser) -> str:
    return f"{parser.prog} {'--help-all' if isinstance(parser, FlagParser) else '--help'} lists every flag"


_FLAG = re.compile("--|-[A-Za-z]")


def to_yaml(config: RunConfig) -> str:
    """Write the values of the command line and of its ``--config`` file as a new file for ``--config``.

    Values of the script, of the template and of other files are left out, because a new run gets them from there again.
    """
    file = f"{Path(config.launch.config).name}:" if config.launch.config else "command line"
    settable = settable_by_files(config.kinds()) - {"config"}
    values = {
        name.replace("_", "-"): _plain(value)
        for name, value in config.items()
        if name in settable and config.origin(name).startswith(("command line", file))
    }
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=1000) if values else ""


def _plain(value: object) -> object:
    """Convert a value to a plain type that every YAML reader supports."""
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, Interval) and value.isdecimal():
        return int(value)
    return str(value) if isinstance(value, str) else value


def _assemble(
    values: Mapping[str, SourcedValue],
    switch_options: Mapping[str, type],
    user: type | None,
    mistakes: MistakeCollector,
) -> RunConfig:
    remaining = dict(values)

    def build(options: type) -> Any:
        chosen = {}
        for f in dataclasses.fields(options):
            if f.name in remaining:
                value, origin = remaining.pop(f.name)
                with mistakes.collect():
                    chosen[f.name] = _checked(f, field_types(options)[f.name], value, origin)
        return options(**chosen)

    sections = {name: build(options) for name, options in SECTIONS.items()}
    switches = {name: build(options) for name, options in switch_options.items()}
    user_values = build(user) if user else None
    options = (*SECTIONS.values(), *switch_options.values(), *([user] if user else []))
    accepted = [spelling(f.name) for f in itertools.chain.from_iterable(map(dataclasses.fields, options))]
    for name, (_, origin) in remaining.items():
        hint = flag_hint(name, accepted, as_code)
        mistakes.errors.append(UnknownName(f"unknown flag '{name}'", where=origin, hint=hint))
    return RunConfig(
        **sections, switches=switches, user=user_values, origins={n: origin for n, (_, origin) in values.items()}
    )


def _converted(kind: type, value: object) -> Any:
    if kind is str and isinstance(value, list | tuple | set | Mapping):
        raise TypeError
    return kind(str(value)) if kind is int else kind(value)  # YAML reads 1e-5 as text; int("2.5") must not become 2


def _several(name: str, kind: type, value: object, origin: str) -> tuple[object, ...]:
    if isinstance(value, (bool, dict)):
        raise ConfigError(f"{name} needs at least one string, not {value!r}", where=origin)
    return tuple(kind(v) for v in (value if isinstance(value, (list, tuple)) else str(value).split()))


def _checked(f: dataclasses.Field[object], annotation: object, value: object, origin: str) -> Any:
    """Convert ``value`` to the type of its field.

    Raises:
        ConfigError: the value has the wrong type, is not one of the choices, or is out of range.
    """
    kind, choices, several = value_kind(annotation)
    name = spelling(f.name)
    if value is None:
        return None
    if several:
        return _several(name, kind, value, origin)
    bare = f.metadata.get("bare")
    if bare is not None and isinstance(value, bool):
        return kind(bare) if value else f.default
    if kind is bool and not isinstance(value, bool):
        raise ConfigError(f"{name} must be true or false, not {value!r}", where=origin)
    if kind is not bool and isinstance(value, bool):
        raise ConfigError(f"{name} needs {_expected(kind)}, not {value!r}", where=origin)
    if Epochs in typing.get_args(annotation) and str(value).strip()[-1:].isalpha():
        kind = Epochs
    try:
        converted = _converted(kind, value)
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(f"{name} needs {_expected(kind)}, not {value!r}", where=origin) from None
    if choices and converted not in choices and converted != bare:
        hint = did_you_mean(str(converted), choices, f"choose from {', '.join(choices)}")
        raise ConfigError(f"{name} cannot be {converted!r}", where=origin, hint=hint)
    if kind in (int, float):
        _check_range(f, converted, origin)
    return converted


def _check_range(f: dataclasses.Field[object], value: float, origin: str) -> None:
    name, minimum, maximum = spelling(f.name), f.metadata.get("minimum"), f.metadata.get("maximum")
    if isinstance(value, float) and math.isinf(value):
        raise ConfigError(f"{name} must be a finite number, not {value}", where=origin)
    if minimum is not None and not value >= minimum:
        raise ConfigError(f"{name} must be at least {minimum}, not {value}", where=origin)
    if maximum is not None and not value <= maximum:
        raise ConfigError(f"{name} must be at most {maximum}, not {value}", where=origin)
