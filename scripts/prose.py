"""Find phrases that readers stumble over, in pages, docstrings, comments and messages.

    python scripts/prose.py                     check the whole checkout
    python scripts/prose.py docs README.md      check these files and folders
    python scripts/prose.py --lengths           print the mean sentence length of each page

Each finding is one line: file and line, the phrase, the better wording, the sentence. Exits with status 1 if there is
one. The phrases are in scripts/prose.toml. If a finding is wrong, add an exception with a reason there.
tests/docs/test_prose.py runs the same check in ``make check``.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import sys
import tokenize
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(__file__).with_suffix(".toml")
PLACES = (".ci", ".github", "benchmarks", "docker", "docs", "examples", "scripts", "src", "tests")
"""Folders of the checkout that are checked, with the files of its root."""
QUOTES = ROOT / "tests/docs/test_prose.py"
"""The file that quotes phrases to avoid. It is not checked."""
PAGES = "*.md"
COMMENTED = {".cff", ".cpu", ".cuda", ".sbatch", ".sh", ".toml", ".txt", ".yaml", ".yml"}
"""Endings of files whose comments are checked. A file without an ending counts if it is in :data:`SCRIPTS`."""
SCRIPTS = {"Makefile", ".dockerignore", ".gitignore", "run"}
ENTRY = re.compile(r"\s+(?:[-*] |[\w*.`, ]+(?: \([^)]*\))?: )|\s*(?:Args|Attributes|Raises|Returns|Yields):$")
"""Beginning of an item of a docstring: of a list, or of a section such as ``Args``."""
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
TEXTS = (*DOCUMENTED, ast.JoinedStr, ast.Constant)
"""Nodes of a syntax tree that can contain text."""
FEWEST_WORDS = 3
"""Shorter texts are names and labels, not sentences."""

Kind = Literal["text", "cell", "heading", "docstring", "comment", "string"]


@dataclass(frozen=True)
class Sentence:
    """One sentence of a file, with each span of code replaced by ``x`` in backticks."""

    file: Path
    line: int
    text: str
    kind: Kind

    @property
    def words(self) -> int:
        return len(self.text.split())


@dataclass(frozen=True)
class Allowed:
    """An exception of a pattern: a regular expression of wording that reads well, and the reason."""

    text: str
    reason: str


@dataclass(frozen=True)
class Pattern:
    """A phrase to avoid.

    Attributes:
        name: short name, shown with each finding.
        find: regular expression of the phrase within one sentence.
        better: the wording to use instead.
        example: a sentence that the pattern finds.
        rewritten: the example in plain English. No pattern finds anything in it.
        skip: kinds of sentences that the pattern does not read.
        exceptions: wording that the pattern matches and that is right.
    """

    name: str
    find: str
    better: str
    example: str
    rewritten: str
    skip: tuple[Kind, ...] = ()
    exceptions: tuple[Allowed, ...] = ()

    def search(self, sentence: Sentence) -> str | None:
        """Return the first phrase in the sentence that no exception covers."""
        if sentence.kind in self.skip:
            return None
        for match in re.finditer(self.find, sentence.text):
            if not any(_covers(exception.text, sentence.text, match) for exception in self.exceptions):
                return match[0]
        return None


def _covers(exception: str, text: str, match: re.Match[str]) -> bool:
    found = re.finditer(exception, text)
    return any(other.start() < match.end() and match.start() < other.end() for other in found)


def _shown(path: Path) -> str:
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


@dataclass(frozen=True)
class Finding:
    """A sentence with a phrase to avoid, or a page whose sentences are too long."""

    sentence: Sentence
    pattern: str
    phrase: str
    better: str

    def __str__(self) -> str:
        place = f"{_shown(self.sentence.file)}:{self.sentence.line}"
        return f"{place}: [{self.pattern}] '{self.phrase}' → {self.better} | {self.sentence.text[:160]}"


@dataclass(frozen=True)
class Rules:
    """The contents of prose.toml.

    Attributes:
        mean_words: highest mean number of words of the sentences of a page.
        most_words: highest number of words of one sentence of a page.
        patterns: the phrases to avoid.
    """

    mean_words: int
    most_words: int
    patterns: tuple[Pattern, ...]


@cache
def rules() -> Rules:
    """Read prose.toml."""
    data = tomllib.loads(DATA.read_text(encoding="utf-8"))
    patterns = []
    for entry in data["pattern"]:
        skip, exceptions = tuple(entry.pop("skip", ())), entry.pop("exceptions", ())
        allowed = tuple(Allowed(**exception) for exception in exceptions)
        patterns.append(Pattern(**entry, skip=skip, exceptions=allowed))
    return Rules(data["mean_words"], data["most_words"], tuple(patterns))


def files_in(places: Iterable[Path]) -> Iterator[Path]:
    """Yield the files below the places that contain text for readers. Links are skipped: their targets are read."""
    for place in places:
        for path in sorted(place.rglob("*")) if place.is_dir() else [place]:
            if path.is_file() and not path.is_symlink() and _reader(path) and not _is_left_out(path):
                yield path


def _is_left_out(path: Path) -> bool:
    return path == QUOTES or any(part == "__pycache__" or part.endswith(".egg-info") for part in path.parts)


def checkout() -> list[Path]:
    """Return the places of the checkout that are checked by default."""
    return [*sorted(path for path in ROOT.iterdir() if path.is_file()), *(ROOT / name for name in PLACES)]


def sentences(path: Path) -> list[Sentence]:
    """Return the sentences of a file in order."""
    reader = _reader(path)
    assert reader is not None, f"{path} has no known format"
    blocks = reader(path.read_text(encoding="utf-8"))
    return [Sentence(path, *rest) for line, text, kind in blocks for rest in _split(line, text, kind)]


def findings(path: Path) -> list[Finding]:
    """Return what to change in a file: phrases and, in a page, the length of sentences."""
    everything = sentences(path)
    phrases = [
        Finding(sentence, pattern.name, phrase, pattern.better)
        for sentence in everything
        for pattern in rules().patterns
        if (phrase := pattern.search(sentence))
    ]
    return [*phrases, *(_too_long(path, everything) if path.match(PAGES) else ())]


def _too_long(page: Path, everything: Sequence[Sentence]) -> Iterator[Finding]:
    mean, most = rules().mean_words, rules().most_words
    if mean_length(everything) > mean:
        phrase = f"{mean_length(everything):.1f} words per sentence"
        yield Finding(Sentence(page, 1, f"{page.name} as a whole", "text"), "long page", phrase, f"at most {mean}")
    for sentence in everything:
        if sentence.kind == "text" and sentence.words > most:
            yield Finding(sentence, "long sentence", f"{sentence.words} words", f"at most {most}, or a list")


def mean_length(everything: Sequence[Sentence]) -> float:
    """Return the mean number of words of the sentences in paragraphs and lists. Tables and headings do not count."""
    lengths = [sentence.words for sentence in everything if sentence.kind == "text"]
    return sum(lengths) / len(lengths) if lengths else 0.0


Block = tuple[int, str, Kind]
"""First line, text, kind. A block is a paragraph, a list item, a table cell, a docstring, a comment, or a string."""


Reader = Callable[[str], Iterator[Block]]


def _reader(path: Path) -> Reader | None:
    """Return the function that reads files of this format, or None if they have no text for readers."""
    if path.suffix == ".md":
        return _markdown
    if path.suffix == ".py":
        return _python
    if path.suffix == ".ipynb":
        return _notebook
    return _comments if path.suffix in COMMENTED or path.name in SCRIPTS else None


def _split(line: int, text: str, kind: Kind) -> Iterator[tuple[int, str, Kind]]:
    """Yield (line, sentence, kind) of a block."""
    text = re.sub(r"``[^`]*``|`[^`]*`", lambda code: "`x`" + "\n" * code[0].count("\n"), text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"<[a-z/!][^>]*>", "", text)
    begin = 0
    for end in [*(match.start() for match in re.finditer(r"(?<=[.!?])\s+(?=[A-Z`*\"'(\[])", text)), len(text)]:
        part = text[begin:end]
        first = line + text[:begin].count("\n") + part[: len(part) - len(part.lstrip())].count("\n")
        words = " ".join(part.split()).strip("|*-# ")
        if len(words.split()) >= FEWEST_WORDS:
            yield first, words, kind
        begin = end


def _markdown(text: str) -> Iterator[Block]:
    """Yield the paragraphs, list items, headings and table cells of a page, without its blocks of code."""
    fenced = False
    start, block = 1, list[str]()
    for number, line in enumerate([*text.splitlines(), ""], 1):
        stripped = line.strip()
        fence = stripped.startswith("```")
        fenced ^= fence
        alone = fence or fenced or not stripped or stripped.startswith(("#", "|"))
        if block and (alone or re.match(r"(?:[-*]|\d+\.) ", stripped)):
            yield start, "\n".join(block), "text"
            block = []
        if alone:
            if not fenced and stripped.startswith("#"):
                yield number, stripped.lstrip("# "), "heading"
            elif not fenced and stripped.startswith("|"):
                yield from ((number, cell, "cell") for cell in re.split(r"(?<!\\)\|", stripped))
            continue
        if not block:
            start = number
        block.append(re.sub(r"^(?:[-*]|\d+\.) ", "", stripped) if not block else line)


def _python(source: str) -> Iterator[Block]:
    """Yield the docstrings, strings and comments of a module."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, TEXTS)]
    inner = set[int]()
    for node in nodes:
        if isinstance(node, DOCUMENTED) and isinstance(first := node.body[0] if node.body else None, ast.Expr):
            if isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
                inner.add(id(first.value))
                yield from _paragraphs(first.value.lineno, first.value.value)
        elif isinstance(node, ast.JoinedStr):
            inner.update(id(value) for value in node.values)
            parts = [str(value.value) if isinstance(value, ast.Constant) else "`x`" for value in node.values]
            yield node.lineno, "".join(parts), "string"
    for node in nodes:
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or id(node) in inner:
            continue
        if not _is_program(node.value):
            yield node.lineno, node.value, "heading" if node.value.startswith("#") else "string"
    yield from _tokenized_comments(source)


def _is_program(text: str) -> bool:
    """Whether a string of several lines is Python, such as a script that a test runs."""
    if "\n" not in text:
        return False
    try:
        ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    return True


def _paragraphs(line: int, docstring: str) -> Iterator[Block]:
    """Yield the paragraphs of a docstring, with each entry of its Args, Attributes and lists apart."""
    start, block = line, list[str]()
    for number, text in enumerate([*docstring.splitlines(), ""], line):
        entry = ENTRY.match(text)
        if block and (not text.strip() or entry):
            yield start, "\n".join(block), "docstring"
            block = []
        if text.strip():
            start = number if not block else start
            block.append(text[entry.end() :] if entry else text)


def _tokenized_comments(source: str) -> Iterator[Block]:
    """Yield the comments of a module."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = (token for token in tokens if token.type == tokenize.COMMENT)
    yield from _joined((t.start[0], t.string.lstrip("#").strip(), not t.line[: t.start[1]].strip()) for t in comments)


def _comments(text: str) -> Iterator[Block]:
    """Yield the comments of a YAML, TOML, shell or similar file."""
    lines = ((n, line, re.search(r"(?:^|\s)#+ (.*)$", line)) for n, line in enumerate(text.splitlines(), 1))
    yield from _joined((n, match[1], line.strip().startswith("#")) for n, line, match in lines if match)


def _joined(comments: Iterable[tuple[int, str, bool]]) -> Iterator[Block]:
    """Join comments on lines below each other.

    Args:
        comments: the line, the text, and whether the line has nothing else.
    """
    start, block, last = 0, list[str](), -1
    for line, text, is_alone in comments:
        if block and not (line == last + 1 and is_alone):
            yield start, "\n".join(block), "comment"
            block = []
        start = start if block else line
        block.append(text)
        last = line
    if block:
        yield start, "\n".join(block), "comment"


def _notebook(text: str) -> Iterator[Block]:
    """Yield the text of a notebook's cells. Lines are counted inside each cell."""
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            yield from _markdown(source)
        elif cell["cell_type"] == "code" and not source.lstrip().startswith(("!", "%")):
            yield from _python(source)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("places", nargs="*", type=lambda name: Path(name).resolve(), metavar="FILE")
    parser.add_argument("--lengths", action="store_true", help="print the mean sentence length of each page")
    asked = parser.parse_args(argv)
    files = list(files_in(asked.places or checkout()))
    if asked.lengths:
        pages = [(mean_length(sentences(path)), _shown(path)) for path in files if path.match(PAGES)]
        print("\n".join(f"{mean:5.1f}  {path}" for mean, path in sorted(pages, reverse=True)))
        return 0
    found = [finding for path in files for finding in findings(path)]
    for finding in found:
        print(finding)
    print(f"{len(found)} findings in {len(files)} files", file=sys.stderr)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
