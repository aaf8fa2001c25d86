"""Real text found on most machines: sources and docstrings of Python, and WordNet glosses on Debian."""

from __future__ import annotations

import ast
import json
import sysconfig
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from rapidformer_templates.data.collate import Ragged, TokenizedSamples
from rapidformer_templates.errors import DataError

WORDNET = Path("/usr/share/wordnet")
LONGEST = 800_000
"""Maximum number of characters in a document. Longer sources are tables that programs wrote, not text."""


def write_corpus(path: Path, megabytes: float) -> None:
    """Write JSON lines with ``text`` and ``id``.

    The result is the same on the same machine, and a smaller corpus is the beginning of a larger one.

    Args:
        path: The file to write.
        megabytes: Size of the file, to within one document.

    Raises:
        DataError: The machine does not have enough text.
    """
    limit, size = round(megabytes * 1e6), 0
    with path.open("w", encoding="utf-8") as file:
        for name, text in _documents():
            line = json.dumps({"text": text, "id": name}) + "\n"
            size += file.write(line)
            if size >= limit:
                return
    raise DataError(f"this machine has {size / 1e6:.0f} MB of text", where="--megabytes", hint="ask for less")


def _documents() -> Iterator[tuple[str, str]]:
    """Yield (name, text), alternating glosses and sources, so that a smaller corpus contains both kinds."""
    glosses = _glosses()
    for name, text in _sources():
        yield name, text
        yield from islice(glosses, 50)


def _glosses() -> Iterator[tuple[str, str]]:
    """Yield the WordNet definitions, which follow the bar in the lines of its data files."""
    for path in sorted(WORDNET.glob("data.*")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
            gloss = line.partition(" | ")[2].strip()
            if gloss:
                yield f"{path.name}:{number}", gloss


def _sources() -> Iterator[tuple[str, str]]:
    for root in dict.fromkeys(sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib")):
        for path in sorted(Path(root).rglob("*.py")):
            try:
                text = path.read_text(encoding="utf-8")
            except (UnicodeDecodeError, OSError):
                continue  # such a file tests other encodings
            if text.strip() and len(text) <= LONGEST:
                yield str(path.relative_to(root)), text


def sources(size: int) -> bytes:
    """Return the beginning of the joined sources of Python's library."""
    joined = bytearray()
    for _, text in _sources():
        joined += text.encode()
        if len(joined) >= size:
            break
    return bytes(joined[:size])


def docstrings(longest: int, limit: int | None = None) -> TokenizedSamples:
    """Return the docstrings of Python's library as bytes, each truncated to ``longest``."""
    texts = (text.encode() for _, text in documented())
    return TokenizedSamples({"input_ids": Ragged(list(text[:longest]) for text in islice(texts, limit))})


def documented() -> Iterator[tuple[str, str]]:
    """Yield (name, docstring) for everything documented in Python's library, in the order of its files."""
    library = Path(sysconfig.get_path("stdlib"))
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    # The library's own packages, without site-packages and tests.
    for file in sorted(library.glob("*.py")) + sorted(library.glob("[!_st]*/*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, owners) and (text := ast.get_docstring(node)):
                yield f"{file.stem}.{node.name}" if not isinstance(node, ast.Module) else file.stem, text
