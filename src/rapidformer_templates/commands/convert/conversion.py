"""A conversion: the keys and values that are read, the flags that they become, and what could not be converted."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import yaml

from rapidformer_templates.errors import ConfigError, RapidformerError
from rapidformer_templates.system.files import explain

Value: TypeAlias = "bool | int | float | str | list[Value] | dict[str, Value] | None"

_TRUTH = {"true": True, "yes": True, "false": False, "no": False, "none": False}


class Source:
    """A configuration that remembers which of its keys were read.

    Args:
        values: the values by key, as in the file.
        names: keys of this trainer by the key of ``TrainingArguments`` that means the same.
        defaults: values that the trainer uses if a key is absent. A key is one of ``TrainingArguments``, if ``names``
            has it.
    """

    def __init__(
        self,
        values: Mapping[str, Value],
        names: Mapping[str, str] | None = None,
        defaults: Mapping[str, Value] | None = None,
    ) -> None:
        self.values, self.names, self.defaults = values, names or {}, defaults or {}
        self._read: set[str] = set()

    def own(self, key: str) -> str:
        """Return the trainer's own name of a key."""
        return self.names.get(key, key)

    def get(self, *keys: str) -> Value:
        """Return the value of the first of these keys that has one, else a default. All of them count as read."""
        self._read.update(map(self.own, keys))
        present = (self.values.get(self.own(key)) for key in keys)
        default = next((self.defaults[key] for key in keys if key in self.defaults), None)
        return next((value for value in present if value not in (None, "")), default)

    def text(self, *keys: str) -> str | None:
        value = self.get(*keys)
        return None if value is None else str(value)

    def number(self, *keys: str) -> float | None:
        """Return a number, which may also be written as a text, such as 2e-5 in YAML 1.1.

        Raises:
            ConfigError: the value is not a finite number.
        """
        value = self.get(*keys)
        if value is None:
            return None
        try:
            number = float("nan") if isinstance(value, bool | list | dict) else float(value)
        except (ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            hint = "write the number in place of the variable" if "$" in str(value) else None
            raise ConfigError(f"{self.own(keys[0])} needs a number, not {value!r}", where=self.own(keys[0]), hint=hint)
        return number

    def whole(self, *keys: str) -> int | None:
        """Return a whole number.

        Raises:
            ConfigError: the value is not a whole number.
        """
        number = self.number(*keys)
        if number is not None and number != int(number):
            raise ConfigError(f"{self.own(keys[0])} needs a whole number, not {number}", where=self.own(keys[0]))
        return None if number is None else int(number)

    def is_on(self, *keys: str) -> bool:
        """Return whether a key is true.

        Raises:
            ConfigError: the value is neither true nor false.
        """
        value = self.get(*keys)
        truth = _TRUTH.get(value.lower()) if isinstance(value, str) else bool(value)
        if truth is None:
            raise ConfigError(f"{self.own(keys[0])} needs true or false, not {value!r}", where=self.own(keys[0]))
        return truth

    def words(self, *keys: str) -> list[str]:
        """Return a list, which may also be written as a text with commas or spaces."""
        value = self.get(*keys)
        if isinstance(value, list):
            return [str(one) for one in value]
        return [] if value is None else str(value).replace(",", " ").split()

    def unread(self) -> dict[str, Value]:
        """Return the keys that nothing has read, with their values."""
        return {key: value for key, value in self.values.items() if key not in self._read}


@dataclass(frozen=True)
class Options:
    """Facts that the user adds to a configuration.

    Attributes:
        world_size: number of workers, or None for the number in the file.
        samples: samples of an epoch, with which shares become numbers of rows or steps.
        task: the task, if the configuration does not name one.
        folders: where files that the configuration names are looked for.
    """

    world_size: int | None = None
    samples: int | None = None
    task: str | None = None
    folders: tuple[Path, ...] = (Path(),)


@dataclass(frozen=True)
class Keys:
    """Knowledge about the keys that have no flag here.

    Attributes:
        ignored: keys that do not change what is learned, or that are not needed here.
        reasons: what to do instead, for each key that would change the training.
    """

    ignored: frozenset[str]
    reasons: Mapping[str, str]


def keys(ignored: str, *reasons: tuple[str, str]) -> Keys:
    """Return :class:`Keys` from lines of names, which are separated by spaces."""
    return Keys(frozenset(ignored.split()), {name: why for names, why in reasons for name in names.split()})


@dataclass
class Result:
    """The outcome of a conversion.

    Attributes:
        flags: values of this library's flags, by field name.
        missing: settings without a counterpart, each with what to do instead.
        unknown: settings that this command does not know.
        ignored: keys that are not needed here.
        notes: differences that the flags do not show.
        workers: number of workers of the configuration.
    """

    flags: dict[str, Value] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    workers: int = 1

    def set(self, name: str, value: Value) -> None:
        """Set a flag. None leaves it at its default. A whole number of at least one loses its decimal point."""
        if value is not None:
            self.flags[name] = int(value) if isinstance(value, float) and value >= 1 and value.is_integer() else value

    def miss(self, key: str, value: Value, instead: str) -> None:
        """Name a setting that has no counterpart."""
        self.missing[f"{key}: {shown(value)}"] = instead

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def close(self, source: Source, known: Keys, prefix: str = "") -> None:
        """Name every key that was not read. A key without a value, or that is turned off, has no effect.

        Args:
            prefix: the key that contains those of the source.
        """
        for key, value in source.unread().items():
            if key in known.ignored or value in (None, False, "", "none", "no", [], {}):
                self.ignored.append(f"{prefix}{key}")
            elif key in known.reasons:
                self.miss(f"{prefix}{key}", value, known.reasons[key])
            else:
                self.unknown.append(f"{prefix}{key}: {shown(value)}")


def shown(value: Value) -> str:
    """Return a value on one line, shortened."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = " ".join(text.split())
    return text if len(text) <= 80 else f"{text[:77]}…"


def remarks(result: Result) -> list[str]:
    """Return the lines about everything that the flags do not show."""
    lines = []
    if result.missing:
        lines.append("Without a counterpart:")
        for instead in dict.fromkeys(result.missing.values()):  # settings with one reason share a line
            settings = [setting for setting, why in result.missing.items() if why == instead]
            lines += [f"  {'; '.join(settings)}", f"    {instead}"]
    for title, texts in (("Unknown to this command, and left out:", result.unknown), ("Notes:", result.notes)):
        if texts:
            lines += [title, *(f"  {text}" for text in texts)]
    if result.ignored:
        lines.append(f"Not needed here: {', '.join(sorted(result.ignored))}")
    return lines


def as_yaml(result: Result, title: str) -> str:
    """Return the text of a file for ``--config``: the flags, and then the remarks as comments.

    Args:
        title: the first line.
    """
    flags = {name.replace("_", "-"): value for name, value in result.flags.items()}
    body = yaml.safe_dump(flags, sort_keys=False, allow_unicode=True, width=1000) if flags else ""
    comments = [f"# {line}\n" for line in remarks(result)]
    return "".join([f"# {title}\n", body, *(["\n", *comments] if comments else [])])


def read_text(path: Path) -> str:
    """Return the text of a file.

    Raises:
        ConfigError: there is no such file, or it is not a text.
        RapidformerError: the file cannot be read.
    """
    if not path.is_file():
        raise ConfigError(f"the file {path} does not exist", where="FILE")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a text file: {error}", where="FILE") from error
    except OSError as error:
        what, to_do = explain(error)
        raise RapidformerError(f"{path} cannot be read: {what}", hint=to_do) from error


def mapping_of(text: str, path: Path) -> dict[str, Value]:
    """Return the keys and values of a JSON or YAML text.

    Raises:
        ConfigError: the text is neither, or it does not map keys to values.
    """
    try:
        values = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        kind = "JSON" if path.suffix == ".json" else "YAML"
        raise ConfigError(f"{path} is not {kind}: {error}", where="FILE") from error
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(f"{path} must map keys to values", where="FILE")
    return values


def read_json(file: Path) -> dict[str, Value] | None:
    """Return the mapping in a JSON file, or None if there is none."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError):
        return None
    return content if isinstance(content, dict) else None
