"""A DeepSpeed file: its values with their lines, the keys that it may have (``keys.toml``), and its mistakes.

DeepSpeed itself checks the sections that it reads: ``switches/zero/file_check.py``. Does not import torch.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from rapidformer_templates.errors import ConfigError, did_you_mean
from rapidformer_templates.planning.optimizers import DEEPSPEED_TYPES

if TYPE_CHECKING:
    from rapidformer_templates.planning.switch import Request

Json: TypeAlias = "Mapping[str, Json] | list[Json] | str | int | float | bool | None"
Section: TypeAlias = Mapping[str, Json]

AUTO = "auto"
"""A value that is filled from the flags, or from the model."""

INLINE = "the JSON of --deepspeed-config"

# DeepSpeed reads its files with hjson, and real files contain comments and trailing commas.
COMMENT = re.compile(r'("(?:\\.|[^"\\])*")|//[^\n]*|#[^\n]*|/\*.*?\*/', re.DOTALL)
LAST_COMMA = re.compile(r'("(?:\\.|[^"\\])*")|,(?=\s*[}\]])')


@dataclass(frozen=True)
class DeepSpeedFile:
    """The content of a file.

    Attributes:
        name: its name in messages.
        content: its values.
        text: its text without comments, or empty if it has no lines.
        renamed: keys that are read at another path than the file's: new path → the file's.
    """

    name: str
    content: Section
    text: str = ""
    renamed: Mapping[str, str] = field(default_factory=dict)

    def where(self, path: str) -> str:
        """Return the location of a key, or of the section where it would be: ``ds.json:12``."""
        end = 0
        for key in self.renamed.get(path, path).split("."):
            if match := re.compile(rf'"{re.escape(key)}"\s*:').search(self.text, end):
                end = match.end()
        return f"{self.name}:{self.text.count(chr(10), 0, end) + 1}" if end else self.name


def read(text: str) -> DeepSpeedFile:
    """Read a DeepSpeed file, or JSON in its place, and rename its keys as in the installed DeepSpeed.

    Raises:
        ConfigError: the file does not exist or is not a JSON object, or it has a key twice.
    """
    inline = text.lstrip().startswith("{")
    name = INLINE if inline else Path(text).name
    if not inline and not Path(text).is_file():
        raise ConfigError(f"the DeepSpeed file {text} does not exist", where="--deepspeed-config")

    def section(pairs: list[tuple[str, Json]]) -> Section:
        keys = [key for key, _ in pairs]
        if twice := [key for key in keys if keys.count(key) > 1]:
            raise ConfigError(f"{name} has {twice[0]} twice in a section", where="--deepspeed-config")
        words = {"true": True, "false": False}
        return {key: words.get(value.lower(), value) if isinstance(value, str) else value for key, value in pairs}

    try:
        written = text if inline else Path(text).read_text(encoding="utf-8")
        plain = COMMENT.sub(lambda match: match[1] or "\n" * match[0].count("\n"), written)  # keeps the line numbers
        plain = LAST_COMMA.sub(lambda match: match[1] or "", plain)
        content = json.loads(plain, object_pairs_hook=section)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{name} is not JSON: {error}", where="--deepspeed-config") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{name} does not hold a JSON object", where="--deepspeed-config")
    renamed = {}
    for old, new in key_table().renamed.items():
        (old_section, _, old_key), (new_section, _, new_key) = old.rpartition("."), new.rpartition(".")
        source, target = (look_up(content, path) if path else content for path in (old_section, new_section))
        if isinstance(source, dict) and isinstance(target, dict) and old_key in source and new_key not in target:
            target[new_key], renamed[new] = source.pop(old_key), old
    return DeepSpeedFile(name, content, "" if inline else plain, renamed)


def whole(value: Json) -> Json:
    """Convert ``2e8``, which JSON reads as a float, to an integer."""
    return int(value) if isinstance(value, float) and math.isfinite(value) and value.is_integer() else value


def file_of(request: Request) -> DeepSpeedFile:
    """Return the file of a request, or an empty one if there is none."""
    text = request.config.get("deepspeed_config")
    # merge_file() has already checked that the file exists. A plan of switches alone has no file.
    has_file = text is not None and (text.lstrip().startswith("{") or Path(text).is_file())
    return read(text) if has_file else DeepSpeedFile(str(text), {})


def look_up(content: Section, path: str) -> Json:
    """Return the value at a path with dots, or None if it is missing or ``"auto"``."""
    value: Json = content
    for key in path.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return None
        value = value[key]
    return None if value == AUTO else value


def section_at(content: Section, path: str) -> Section:
    """Return the section at a path with dots. It is empty if it is missing or not a section."""
    section = look_up(content, path)
    return section if isinstance(section, Mapping) else {}


def type_of(content: Section, section: str) -> str:
    """Return the ``type`` of a section, or an empty string."""
    return str(section_at(content, section).get("type") or "")


def leaves(content: Section, path: str = "") -> Iterator[tuple[str, Json]]:
    """Yield (path, value) of every value inside sections."""
    for key, value in content.items():
        key_path = f"{path}.{key}" if path else key
        if isinstance(value, Mapping):
            yield from leaves(value, key_path)
        else:
            yield key_path, value


def is_neutral(value: Json) -> bool:
    """Return whether a value changes nothing: off, ``"auto"``, or a section of such values."""
    if isinstance(value, Mapping):
        return value.get("enabled") is False or all(is_neutral(inner) for inner in value.values())
    return value is None or value is False or value == AUTO


def shown(value: Json) -> str:
    """Return a value as a file spells it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


Problem = tuple[str, str]
"""(path of a key, what is wrong with it)."""

SECTIONS = (
    "zero_optimization", "fp16", "bf16", "aio", "scheduler", "scheduler.params", "optimizer", "optimizer.params",
)  # fmt: skip
OPTIMIZERS = {kind.lower(): name for kind, name in DEEPSPEED_TYPES.items()}
"""Optimizer types of DeepSpeed, with the flag's value that makes the same update."""


@dataclass(frozen=True)
class KeyTable:
    """How each key of a DeepSpeed file is handled.

    Attributes:
        own: top-level keys that are flags, or that the library implements itself in the same way.
        passed: top-level keys that are passed to DeepSpeed.
        of_optimizer: keys of the section ``optimizer``.
        noted: keys that request what happens anyway, with a line for the plan.
        refused: top-level keys that would do nothing, or replace a part of the library, with what to do instead.
        only: keys with the only value that fits the library, and why.
        choices: keys with their possible values.
        entries: keys with the flags that they are.
        renamed: keys of the guide, with the key at which the installed DeepSpeed looks for the value.
    """

    own: list[str]
    passed: list[str]
    of_optimizer: list[str]
    noted: Mapping[str, str]
    refused: Mapping[str, str]
    only: Mapping[str, Mapping[str, Json]]
    choices: Mapping[str, list[Json]]
    entries: Mapping[str, str]
    renamed: Mapping[str, str]

    @property
    def top(self) -> set[str]:
        """All top-level keys that are known."""
        return {*self.own, *self.passed, *self.refused, *self.noted, *(path for path in self.only if "." not in path)}


@cache
def key_table() -> KeyTable:
    """Read the table."""
    return KeyTable(**tomllib.loads(Path(__file__).with_name("keys.toml").read_text(encoding="utf-8")))


def unknown_keys(file: DeepSpeedFile) -> Iterator[Problem]:
    """Yield keys that neither DeepSpeed nor the library knows, as far as DeepSpeed itself is not needed to tell."""
    table = key_table()
    yield from unknown_in(file.content, "", dict.fromkeys(table.top, ""), deep=False)
    yield from unknown_in(section_at(file.content, "optimizer"), "optimizer.", dict.fromkeys(table.of_optimizer, ""))
    for path in SECTIONS:
        value = look_up(file.content, path)
        if value is not None and not isinstance(value, Mapping):
            yield path, f"{path} must be a section, not {value!r}"


def unknown_in(
    section: Mapping[str, Json], above: str, known: Mapping[str, str], *, deep: bool = True
) -> Iterator[Problem]:
    """Yield the keys of a section that are not known or deprecated.

    Args:
        above: the path of the section, with a dot at its end.
        known: the paths of known keys. Each deprecated key has its replacement.
        deep: whether to look into inner sections.
    """
    for key, value in section.items():
        path = f"{above}{key}"
        if path not in known:
            hint = did_you_mean(path, sorted(known), cutoff=0.75)
            yield path, f"no such key: {path}" + (f"; {hint}" if hint else "")
        elif known[path] and not is_neutral(value):
            yield path, f"{path} is deprecated in DeepSpeed: write {above}{known[path]}"
        elif deep and isinstance(value, Mapping):
            yield from unknown_in(value, f"{path}.", known)


def idle_keys(file: DeepSpeedFile) -> Iterator[Problem]:
    """Yield known keys that would do nothing here, or something else than the library does."""
    content, table = file.content, key_table()
    for key, hint in table.refused.items():
        if not is_neutral(value := content.get(key)):
            yield key, f"{file.name} has {'a section ' * isinstance(value, Mapping)}{key}: {hint}"
    for path, entry in table.only.items():
        value = look_up(content, path)
        if value is not None and value != entry.get("value"):
            yield path, f"{path} = {shown(value)} is not possible: {entry['why']}"
    choices_by_path: dict[str, Sequence[Json]] = {**table.choices, "optimizer.type": [*OPTIMIZERS]}
    for path, choices in choices_by_path.items():
        value, names = look_up(content, path), [str(choice) for choice in choices]
        if value is not None and value not in choices and str(value).lower() not in names:
            yield path, f"{path} = {shown(value)} is not possible: choose from {', '.join(names)}"
    yield from _idle_options(content)


def _idle_options(content: Section) -> Iterator[Problem]:
    """Yield options that exclude others, or that the library does not have."""
    kind = type_of(content, "optimizer") or "AdamW"  # the guide's default
    if look_up(content, "optimizer.params.adam_w_mode") is False and kind.lower() != "adam":
        yield "optimizer.params.adam_w_mode", f"optimizer.params.adam_w_mode = false needs the type Adam, not {kind}"
    betas = look_up(content, "optimizer.params.betas")
    if betas is not None and not (isinstance(betas, list) and len(betas) == 2):
        yield "optimizer.params.betas", f"optimizer.params.betas must be two numbers, not {betas!r}"
    if type_of(content, "scheduler") == "OneCycle" and look_up(content, "scheduler.params.cycle_momentum") is not False:
        why = "the optimizer sets the betas; DeepSpeed would move them with the learning rate"
        yield "scheduler.params.cycle_momentum", f"scheduler.params.cycle_momentum must be false: {why}"
    devices = [look_up(content, f"zero_optimization.offload_{what}.device") for what in ("optimizer", "param")]
    if devices[0] in (None, "none") and devices[1] not in (None, "none"):
        path = "zero_optimization.offload_param"
        yield path, f"{path} needs offload_optimizer: parameters leave the device after the optimizer state"
