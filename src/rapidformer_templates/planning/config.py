"""RunConfig: what the user asked for, and where each value came from.

A value comes from the first of these places that has it: the command line, the YAML file of ``--config``, the script
that builds the template, the template, the flag's own default. If several flags of one ``choice`` are given, which
exclude each other, the one from the higher of these places wins. Flags are the fields of small frozen dataclasses (one
per topic, one per switch). The parsers, help and docs are derived from them. This module does not import torch.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

import yaml

from rapidformer_templates.errors import ConfigError, did_you_mean
from rapidformer_templates.planning.flag_values import Epochs, Interval
from rapidformer_templates.planning.flags import SECTIONS, DataFlags, LaunchFlags, ModelFlags, TrainingFlags


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
        own_loop: whether the user's own loop makes the steps.
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
    own_loop: bool = False

    @cached_property
    def _declared_in(self) -> Mapping[str, str]:
        groups = {name: getattr(self, name) for name in (*SECTIONS, "user")} | dict(self.switches)
        return _sections_of_fields(tuple((name, type(group)) for name, group in groups.items() if group))

    def section_of(self, name: str) -> str:
        """Return the section ('data', 'user', …) or the switch that declares the field ``name``."""
        return self._declared_in[name]

    def group_of(self, name: str) -> Any:
        """Return the dataclass of flags that has the field ``name``."""
        section = self.section_of(name)
        return self.switches[section] if section in self.switches else getattr(self, section)

    def get(self, name: str) -> Any:
        """Return the value of the field ``name`` of any section or switch."""
        return getattr(self.group_of(name), name)

    def default(self, name: str) -> Any:
        """Return the default of the field ``name``."""
        return getattr(type(self.group_of(name)), name)

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

    def checked(self, name: str, value: object, origin: str) -> object:
        """Convert ``value`` to the type of the field ``name``.

        Raises:
            ConfigError: the value has the wrong type, is not one of the choices, or is out of range.
        """
        kind: type = type(self.group_of(name))
        declared = next(f for f in dataclasses.fields(kind) if f.name == name)
        return checked_value(declared, field_types(kind)[name], value, origin)

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


COMMAND_LINE = "command line"
"""The origin of values that the user has typed."""


def spelling(name: str) -> str:
    """Return the flag of a field: ``micro_batch_size`` → ``--micro-batch-size``."""
    return "--" + name.replace("_", "-")


FLAG_OR_COMMAND = re.compile(r"(?:rapidformer|torchrun) [^;,#\n]*|--(\w[\w-]*)(?: (?!--)([^\s,;:()]+)( \()?)?")
PLAIN = re.compile(r"-?\d[\d.e-]*")


def in_code(text: str, kinds: Iterable[type]) -> str:
    """Spell the flags of a text as arguments: ``--resume`` → ``resume=True``, ``--save DIR`` → ``save="DIR"``.

    Args:
        text: a message. Commands in it are not changed.
        kinds: the dataclasses of the flags.
    """
    annotations = {f.name: field_types(kind)[f.name] for kind in kinds for f in fields_of(kind)}

    def spelled(match: re.Match[str]) -> str:
        name, value = (match[1] or "").replace("-", "_"), match[2] or ""
        rest = match[0].removeprefix(f"--{match[1]}")
        if name not in annotations:
            positive = name.removeprefix("no_")
            return f"{positive}=False{rest}" if positive in annotations else match[0]
        kind, choices, _ = value_kind(annotations[name])
        if kind is bool:
            return f"{name}=True{rest}"
        is_value = value in (choices or ()) or value[:1].isupper() or value[:1].isdigit() or match[3]
        shown = value if PLAIN.fullmatch(value) else f'"{value}"'
        return f"{name}={shown}{match[3] or ''}" if value and is_value else f"{name}{rest}"

    return re.sub(r'(=(?:"[^"]*"|[\w.-]+)) (?=\w+=)', r"\1, ", FLAG_OR_COMMAND.sub(spelled, text))


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


def settable_by_files(options: Iterable[type]) -> set[str]:
    """Return the fields that a YAML file or the plan of an earlier run may set."""
    fields = itertools.chain.from_iterable(map(dataclasses.fields, options))
    return {f.name for f in fields if f.metadata.get("in_files", True)}


def to_yaml(config: RunConfig) -> str:
    """Write the values of the command line and of its ``--config`` file as a new file for ``--config``.

    Values of the script, of the template and of other files are left out, because a new run gets them from there again.
    """
    file = f"{Path(config.launch.config).name}:" if config.launch.config else COMMAND_LINE
    settable = settable_by_files(config.kinds()) - {"config"}
    values = {
        name.replace("_", "-"): _plain(value)
        for name, value in config.items()
        if name in settable and config.origin(name).startswith((COMMAND_LINE, file))
    }
    # Other characters than those of ASCII are escaped, because a terminal may not show them.
    return yaml.safe_dump(values, sort_keys=False, width=1000) if values else ""


def _plain(value: object) -> object:
    """Convert a value to a plain type that every YAML reader supports."""
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, Interval) and value.isdecimal():
        return int(value)
    return str(value) if isinstance(value, str) else value


def _converted(kind: type, value: object) -> object:
    if kind is str and isinstance(value, list | tuple | set | Mapping):
        raise TypeError
    return kind(str(value)) if kind is int else kind(value)  # YAML reads 1e-5 as text; int("2.5") must not become 2


def _several(name: str, kind: type, value: object, origin: str) -> tuple[object, ...]:
    if isinstance(value, (bool, dict)):
        raise ConfigError(f"{name} needs at least one string, not {value!r}", where=origin)
    return tuple(kind(v) for v in (value if isinstance(value, (list, tuple)) else str(value).split()))


def checked_value(f: dataclasses.Field[object], annotation: object, value: object, origin: str) -> object:
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
        also = f"choose from {', '.join(choices)}" + (f"; {f.metadata['other']}" if f.metadata.get("other") else "")
        hint = did_you_mean(str(converted), choices, also, limit=2)
        raise ConfigError(f"{name} cannot be {converted!r}", where=origin, hint=hint)
    if isinstance(converted, int | float) and kind is not bool:
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
