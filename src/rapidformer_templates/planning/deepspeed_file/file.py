"""A DeepSpeed file: its values, and the line of each. Does not import torch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from rapidformer_templates.errors import ConfigError

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
TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|[{}\[\]:,]|\n')

ZERO_STAGE_3 = ("param_persistence_threshold", "prefetch_bucket_size", "max_live_parameters", "max_reuse_distance")
"""Keys of ``zero_optimization`` that are also read without the prefix ``stage3_``."""


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
        written = text if inline else Path(text).read_text(encoding="utf-8")
        plain = COMMENT.sub(lambda match: match[1] or "\n" * match[0].count("\n"), written)  # keeps the line numbers
        plain = LAST_COMMA.sub(lambda match: match[1] or "", plain)
        content = _booleans(json.loads(plain))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name} is not JSON: {error}", where="--deepspeed-config") from error
    except RecursionError:
        raise ConfigError(f"{name} has too many nested sections", where="--deepspeed-config") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{name} does not hold a JSON object", where="--deepspeed-config")
    lines: dict[str, int] = {}
    for path, line in _keys(plain):
        if path in lines:
            raise ConfigError(f"{name} has {path} twice", where=f"{name}:{line}", hint=f"also in line {lines[path]}")
        lines[path] = line
    return DeepSpeedFile(name, content, lines, _rename(content))


def _booleans(value: Json) -> Json:
    """Replace ``"true"`` and ``"false"`` with booleans in the file's values."""
    if isinstance(value, dict):
        return {key: _booleans(inner) for key, inner in value.items()}
    return {"true": True, "false": False}.get(value.lower(), value) if isinstance(value, str) else value


def _keys(text: str) -> Iterator[tuple[str, int]]:
    """Yield (path with dots, line) of every key of valid JSON, except keys inside lists."""
    path: list[str] = []
    line, word, lists = 1, "", 0
    for token in TOKEN.findall(text):
        if token == "\n":
            line += 1
        elif token in "[]":
            lists += 1 if token == "[" else -1
        elif token == "{":
            path.append("")
        elif token == "}":
            path.pop()
        elif token == ":":
            path[-1] = json.loads(word)
            if not lists:
                yield ".".join(path), line
        else:
            word = token


def _rename(content: dict[str, Json]) -> dict[str, str]:
    """Rename keys of the guide in place. Return the path of each in the file, by its path in the content."""
    renamed = {}
    zero = content.get("zero_optimization")
    if isinstance(zero, dict):
        if "aio" in zero and "aio" not in content:
            content["aio"], renamed["aio"] = zero.pop("aio"), "zero_optimization.aio"
        for name in [name for name in zero if name in ZERO_STAGE_3]:
            zero[f"stage3_{name}"] = zero.pop(name)
            renamed[f"zero_optimization.stage3_{name}"] = f"zero_optimization.{name}"
    aio = content.get("aio")
    if isinstance(aio, dict) and "thread_count" in aio:
        aio["intra_op_parallelism"] = aio.pop("thread_count")
        renamed["aio.intra_op_parallelism"] = f"{renamed.get('aio', 'aio')}.thread_count"
    return renamed


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
