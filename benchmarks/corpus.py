"""Real text that machines have: sources of Python packages, and Debian's WordNet glosses where they are installed."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from rapidformer_templates.errors import DataError

WORDNET = Path("/usr/share/wordnet")
LONGEST = 800_000
"""Characters of the longest document: tables that programs wrote are longer, and no text."""


def write_corpus(path: Path, megabytes: float) -> None:
    """Write JSON lines with ``text`` and ``id``; the same on the same machine, and a smaller one begins a larger one.

    Args:
        path: the file.
        megabytes: its size, to within one document.

    Raises:
        DataError: the machine has less text.
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
    """(name, text), glosses and sources in turn, so that a smaller corpus has both kinds."""
    glosses = _glosses()
    for name, text in _sources():
        yield name, text
        for _, gloss in zip(range(50), glosses, strict=False):
            yield gloss


def _glosses() -> Iterator[tuple[str, str]]:
    """WordNet's definitions: behind the bar in the lines of its data files."""
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
                continue  # a test of other encodings
            if text.strip() and len(text) <= LONGEST:
                yield str(path.relative_to(root)), text
