"""The wording of pages, docstrings, comments and messages, and the script that checks it."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest

from scripts import prose
from scripts.prose import Kind, Pattern, Sentence

PATTERNS = prose.rules().patterns
FOLDERS: dict[str, list[Path]] = defaultdict(list)
for _path in prose.files_in(prose.checkout()):
    FOLDERS["/".join(_path.relative_to(prose.ROOT).parts[:-1][:3]) or "."].append(_path)


@pytest.mark.parametrize("folder", FOLDERS)
def test_texts_have_no_findings(folder: str) -> None:
    found = [str(finding) for path in FOLDERS[folder] for finding in prose.findings(path)]
    assert found == [], "python scripts/prose.py lists them"


def test_every_kind_of_text_is_checked() -> None:
    assert {
        "docs",
        "docs/how-to",
        "examples",
        "src/rapidformer_templates/run",
        "benchmarks",
        "scripts",
    } <= FOLDERS.keys()
    top = {path.name for path in FOLDERS["."]}
    assert {"README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "Makefile", "pyproject.toml"} <= top
    assert len(prose.sentences(prose.ROOT / "README.md")) > 40


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern.name)
def test_a_pattern_finds_its_example_and_accepts_the_rewritten_one(pattern: Pattern) -> None:
    assert pattern.search(_sentence(pattern.example))
    assert [other.name for other in PATTERNS if other.search(_sentence(pattern.rewritten))] == []
    assert all(exception.reason for exception in pattern.exceptions)


def _sentence(text: str, kind: Kind = "text") -> Sentence:
    return Sentence(prose.ROOT / "page.md", 1, text, kind)


def test_an_exception_covers_only_what_it_overlaps() -> None:
    pattern = next(pattern for pattern in PATTERNS if pattern.name == "is no X")
    assert pattern.search(_sentence("The file is no longer there.")) is None
    assert pattern.search(_sentence("The file is no longer there, and a folder is no file.")) == "is no file"


def test_a_pattern_skips_the_kinds_that_it_names() -> None:
    pattern = next(pattern for pattern in PATTERNS if pattern.name == "opens with What")
    assert pattern.search(_sentence("What each worker holds")) is not None
    assert pattern.search(_sentence("What each worker holds", "heading")) is None


def _read(tmp_path: Path, name: str, text: str) -> list[tuple[int, str, Kind]]:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return [(sentence.line, sentence.text, sentence.kind) for sentence in prose.sentences(path)]


def test_sentences_of_a_page(tmp_path: Path) -> None:
    page = (
        "# How it works\n\nRun `make\ncheck` first. It is [quick and\nquiet](page.md#x).\n- Then commit the change.\n"
        "  Push it at last.\n\n```bash\nwhich is no text\n```\n\n| a b c | `x` and more |\n|---|---|\n"
    )
    assert _read(tmp_path, "page.md", page) == [
        (1, "How it works", "heading"),
        (3, "Run `x` first.", "text"),
        (4, "It is quick and quiet.", "text"),
        (6, "Then commit the change.", "text"),
        (7, "Push it at last.", "text"),
        (13, "a b c", "cell"),
        (13, "`x` and more", "cell"),
    ]


def test_sentences_of_a_module(tmp_path: Path) -> None:
    module = (
        '"""Read the file.\n\nArgs:\n    name: name of\n        the file.\n"""\n\n'
        'raise ValueError(f"cannot read {name!r}: "\n                 "it is damaged")  # the reader says\n'
        '# so, too\nx = """import os\nwhich = \'is no text at all\'\n"""\n'
    )
    assert sorted(_read(tmp_path, "module.py", module)) == [
        (1, "Read the file.", "docstring"),
        (4, "name of the file.", "docstring"),
        (8, "cannot read `x`: it is damaged", "string"),
        (9, "the reader says so, too", "comment"),
    ]


def test_sentences_of_other_files(tmp_path: Path) -> None:
    assert _read(tmp_path, "ci.yaml", "# Run it\n# every week.\nname: x y z  # not the name\n") == [
        (1, "Run it every week.", "comment"),
        (3, "not the name", "comment"),
    ]
    cells = [
        {"cell_type": "markdown", "source": ["A cell with text."]},
        {"cell_type": "code", "source": ["# a comment of code\n", "x = 1"]},
        {"cell_type": "code", "source": ["!pip install this or that"]},
    ]
    texts = [text for _, text, _ in _read(tmp_path, "n.ipynb", json.dumps({"cells": cells}))]
    assert texts == ["A cell with text.", "a comment of code"]


def test_long_sentences_are_found_in_pages(tmp_path: Path) -> None:
    page, module = tmp_path / "page.md", tmp_path / "module.py"
    page.write_text("Short words only. " * 10 + "Long " + "word " * 50 + "end.", encoding="utf-8")
    assert [finding.pattern for finding in prose.findings(page)] == ["long sentence"]
    page.write_text(("Long " + "word " * 20 + "end. ") * 3, encoding="utf-8")
    assert [(finding.pattern, finding.phrase) for finding in prose.findings(page)] == [
        ("long page", "22.0 words per sentence")
    ]
    module.write_text(f'"""{page.read_text(encoding="utf-8")}"""\n', encoding="utf-8")
    assert prose.findings(module) == []


def test_the_command_prints_place_phrase_and_better_wording(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Title\n\nThe rest is fine.\nA run goes on after a crash.\n", encoding="utf-8")
    assert prose.main([str(tmp_path)]) == 1
    shown = capsys.readouterr()
    assert shown.out == f"{page}:4: [go on] 'goes on' → continue, resume | A run goes on after a crash.\n"
    assert shown.err == "1 findings in 1 files\n"
    page.write_text("A run resumes after a crash.\n", encoding="utf-8")
    assert prose.main([str(page)]) == 0
    assert prose.main(["--lengths", str(page)]) == 0
    assert capsys.readouterr().out == f"  6.0  {page}\n"
