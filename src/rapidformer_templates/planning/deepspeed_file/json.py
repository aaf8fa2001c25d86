"""The text of a DeepSpeed file: its values, and the line of each. Does not import torch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rapidformer_templates.errors import ConfigError

INLINE = "the JSON of --deepspeed-config"

# DeepSpeed reads its files with hjson, and real files contain comments and trailing commas.
LENIENT = re.compile(r'("(?:\\.|[^"\\])*")|//[^\n]*|#[^\n]*|/\*.*?\*/', re.DOTALL)
LAST_COMMA = re.compile(r'("(?:\\.|[^"\\])*")|,(?=\s*[}\]])')
TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|[{}\[\]:,]|\n')


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
    content: Mapping[str, Any]
    lines: Mapping[str, int] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)

    def where(self, path: str) -> str:
        """Return the location of a key, or of the section where it would be: ``ds.json:12``."""
        while path and path not in self.lines:
            path = self.renamed.get(path, path.rpartition(".")[0])
        line = self.lines.get(path)
        return self.name if line is None or self.name == INLINE else f"{self.name}:{line}"


def parse(text: str) -> DeepSpeedFile:
    """Parse a DeepSpeed file, or JSON in its place.

    Raises:
        ConfigError: the file does not exist or is not a JSON object, or it has a key twice.
    """
    inline = text.lstrip().startswith("{")
    name = INLINE if inline else Path(text).name
    if not inline and not Path(text).is_file():
        raise ConfigError(f"the DeepSpeed file {text} does not exist", where="--deepspeed-config")
    try:
        plain = _plain(text if inline else Path(text).read_text(encoding="utf-8"))
        content = json.loads(plain)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name} is not JSON: {error}", where="--deepspeed-config") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{name} does not hold a JSON object", where="--deepspeed-config")
    lines: dict[str, int] = {}
    for path, line in _keys(plain):
        if path in lines:
            raise ConfigError(f"{name} has {path} twice", where=f"{name}:{line}", hint=f"also in line {lines[path]}")
        lines[path] = line
    return DeepSpeedFile(name, content, lines)


def _plain(text: str) -> str:
    """Remove comments and trailing commas from the text. Line numbers do not change."""
    text = LENIENT.sub(lambda match: match[1] or "\n" * match[0].count("\n"), text)
    return LAST_COMMA.sub(lambda match: match[1] or "", text)


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
