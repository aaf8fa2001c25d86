"""A DeepSpeed file: its values, and the line of each. Does not import torch."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import yaml

from rapidformer_templates.errors import ConfigError

if TYPE_CHECKING:
    from rapidformer_templates.planning.switch import Request

Json: TypeAlias = "Mapping[str, Json] | list[Json] | str | int | float | bool | None"
Section: TypeAlias = Mapping[str, Json]

AUTO = "auto"
"""A value that is filled from the flags, or from the model."""

INLINE = "the JSON of --deepspeed-config"

COMMENT = re.compile(r'("(?:\\.|[^"\\])*")|//[^\n]*|#[^\n]*|/\*.*?\*/', re.DOTALL)

RENAMED = {
    "zero_optimization.aio": "aio",
    "zero_optimization.param_persistence_threshold": "zero_optimization.stage3_param_persistence_threshold",
    "zero_optimization.prefetch_bucket_size": "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.max_live_parameters": "zero_optimization.stage3_max_live_parameters",
    "zero_optimization.max_reuse_distance": "zero_optimization.stage3_max_reuse_distance",
    "aio.thread_count": "aio.intra_op_parallelism",
}
"""Keys of the guide, and the key at which the installed DeepSpeed looks for the value."""


@dataclass(frozen=True)
class DeepSpeedFile:
    """The content of a file, with line numbers.

    Attributes:
        name: its name in messages.
        content: its values.
        lines: the line of each key, by its path with dots.
        renamed: keys that are read at another path than the file's: new path → the file's.
    """

    name: str
    content: Section
    lines: Mapping[str, int] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)

    def where(self, path: str) -> str:
        """Return the location of a key, or of the section where it would be: ``ds.json:12``."""
        while path and path not in self.lines:
            path = self.renamed.get(path, path.rpartition(".")[0])
        line = self.lines.get(path)
        return self.name if line is None or self.name == INLINE else f"{self.name}:{line}"


def read(text: str) -> DeepSpeedFile:
    """Read a DeepSpeed file, or JSON in its place, and rename its keys as in the installed DeepSpeed.

    Raises:
        ConfigError: the file does not exist or is not a JSON object, or it has a key twice.
    """
    inline = text.lstrip().startswith("{")
    name = INLINE if inline else Path(text).name
    if not inline and not Path(text).is_file():
        raise ConfigError(f"the DeepSpeed file {text} does not exist", where="--deepspeed-config")
    try:
        return _parse(name, text if inline else Path(text).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{name} is not JSON: {reason}", where="--deepspeed-config") from error
    except RecursionError:
        raise ConfigError(f"{name} has too many nested sections", where="--deepspeed-config") from None


@lru_cache(maxsize=16)  # the rules read it many times
def _parse(name: str, text: str) -> DeepSpeedFile:
    # DeepSpeed reads its files with hjson. Real files have comments and trailing commas, which YAML accepts as well.
    plain = COMMENT.sub(lambda match: match[1] or "\n" * match[0].count("\n"), text)  # keeps the line numbers
    lines: dict[str, int] = {}
    content = _value(name, yaml.compose(plain.replace("\t", " "), yaml.SafeLoader), "", lines)
    if not isinstance(content, dict):
        raise ConfigError(f"{name} does not hold a JSON object", where="--deepspeed-config")
    renamed = {}
    for old, new in RENAMED.items():
        (old_section, _, old_key), (new_section, _, new_key) = old.rpartition("."), new.rpartition(".")
        source, target = (look_up(content, path) if path else content for path in (old_section, new_section))
        if isinstance(source, dict) and isinstance(target, dict) and old_key in source and new_key not in target:
            target[new_key], renamed[new] = source.pop(old_key), old
    return DeepSpeedFile(name, content, lines, renamed)


def _value(name: str, node: yaml.Node | None, path: str, lines: dict[str, int]) -> Json:
    """Return the value of a part of a file. Add the line of each key in it to ``lines``.

    Raises:
        ConfigError: a key is there twice.
        ValueError: a value is not JSON.
    """
    if isinstance(node, yaml.MappingNode):
        section: dict[str, Json] = {}
        for key_node, inner in node.value:
            key, line = str(key_node.value), key_node.start_mark.line + 1
            inner_path = f"{path}.{key}" if path else key
            if key in section:
                hint = f"also in line {lines[inner_path]}"
                raise ConfigError(f"{name} has {inner_path} twice", where=f"{name}:{line}", hint=hint)
            lines[inner_path] = line
            section[key] = _value(name, inner, inner_path, lines)
        return section
    if isinstance(node, yaml.SequenceNode):
        return [_value(name, item, f"{path}[{index}]", lines) for index, item in enumerate(node.value)]
    if not isinstance(node, yaml.ScalarNode):
        raise ValueError("it is empty")
    if node.style:
        word: str = node.value
        return {"true": True, "false": False}.get(word.lower(), word)
    value: Json = json.loads(node.value)
    return value


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
