"""List what the tests promise, and which file tests each promise: now, and at an earlier commit.

    python scripts/promises.py            the promises of this checkout
    python scripts/promises.py 657a334    compare with a commit: where each promise was, and which are gone or new

A promise is a test function. Its name states the promise, and its docstring gives details. A renamed test appears as
gone and as new.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
Held = dict[str, list[str]]
"""Test files by promise."""


def files_of(commit: str | None) -> Iterator[tuple[str, str]]:
    """Yield (path, text) of the test files of a commit, or of the working tree."""
    if commit is None:
        for path in sorted((ROOT / "tests").rglob("test_*.py")):
            yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
        return
    for path in _git("ls-tree", "-r", "--name-only", commit, "tests").splitlines():
        if Path(path).name.startswith("test_") and path.endswith(".py"):
            yield path, _git("show", f"{commit}:{path}")


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def promises(commit: str | None = None) -> Held:
    """Return the promises of a commit, or of the working tree."""
    held: Held = defaultdict(list)
    for path, text in files_of(commit):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                held[sentence(node)].append(path)
    return held


def sentence(test: ast.FunctionDef) -> str:
    """Turn ``test_a_run_resumes`` into ``a run resumes``."""
    return test.name.removeprefix("test_").replace("_", " ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", nargs="?", help="an earlier commit to compare with")
    commit = parser.parse_args().commit
    now = promises()
    before = promises(commit) if commit else now
    for promise in sorted(before | now):
        was, is_now = before.get(promise, []), now.get(promise, [])
        print(f"{promise}: {', '.join(was) or 'new'}" + (f" → {', '.join(is_now) or 'GONE'}" if commit else ""))
    print(f"\n{len(now)} promises", end="")
    if commit:
        gone, new = before.keys() - now.keys(), now.keys() - before.keys()
        print(f"; at {commit} {len(before)}: {len(gone)} gone, {len(new)} new")
    else:
        print()


if __name__ == "__main__":
    main()
