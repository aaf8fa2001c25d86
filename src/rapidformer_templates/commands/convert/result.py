"""The converted flags, and what could not be converted."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from rapidformer_templates.commands.convert.source import Source, Value


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
            self.flags[name] = int(value) if isinstance(value, float) and value >= 1 and value == int(value) else value

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
    lines += _listed("Unknown to this command, and left out:", result.unknown)
    lines += _listed("Notes:", result.notes)
    if result.ignored:
        lines.append(f"Not needed here: {', '.join(sorted(result.ignored))}")
    return lines


def _listed(title: str, lines: Iterable[str]) -> list[str]:
    indented = [f"  {line}" for line in lines]
    return [title, *indented] if indented else []


def as_yaml(result: Result, title: str) -> str:
    """Return the text of a file for ``--config``: the flags, and then the remarks as comments.

    Args:
        title: the first line.
    """
    flags = {name.replace("_", "-"): value for name, value in result.flags.items()}
    body = yaml.safe_dump(flags, sort_keys=False, allow_unicode=True, width=1000) if flags else ""
    comments = [f"# {line}\n" for line in remarks(result)]
    return "".join([f"# {title}\n", body, *(["\n", *comments] if comments else [])])
