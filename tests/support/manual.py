"""The pages of the manual and the commands on them."""

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
RECIPES = sorted(path.stem for path in (ROOT / "examples/recipes").glob("*.py"))
"""The names of the scripts that ``rapidformer new recipe`` copies."""
PAGES = sorted([*ROOT.glob("*.md"), ROOT / "benchmarks/README.md", *(ROOT / "docs").rglob("*.md")])


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> Iterator[str]:
    """Yield the fenced blocks of a language, including those inside lists."""
    text = page.read_text(encoding="utf-8")
    for indent, block in re.findall(rf"^( *)```{language}\n(.*?)^ *```", text, flags=re.M | re.S):
        yield re.sub(rf"^{indent}", "", block, flags=re.M)


def commands(page: Path) -> Iterator[str]:
    """Yield the commands of the shell blocks, one per line. In ``console`` blocks these are the lines with a prompt."""
    typed = [line for block in blocks(page, "bash") for line in _lines(block)]
    shown = [line for block in blocks(page, "console") for line in _lines(block)]
    yield from (line.removeprefix("$ ") for line in typed if line.strip())
    yield from (line.removeprefix("$ ") for line in shown if line.startswith("$ "))


def _lines(block: str) -> list[str]:
    return block.replace("\\\n", " ").splitlines()


def steps(page: Path) -> Iterator[tuple[str, str]]:
    """Yield what a reader of a page runs, in its order: ("bash", a command) or ("python", a block)."""
    text = page.read_text(encoding="utf-8")
    for indent, language, block in re.findall(r"^( *)```(bash|console|python)\n(.*?)^ *```", text, flags=re.M | re.S):
        dedented = re.sub(rf"^{indent}", "", block, flags=re.M)
        if language == "python":
            yield language, dedented
            continue
        for line in _lines(dedented):
            if line.startswith("$ ") or (language == "bash" and line.strip()):
                yield "bash", line.removeprefix("$ ").strip()
