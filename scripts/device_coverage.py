"""List the statements for accelerators that the rehearsal runs, and those that it never reaches.

``python scripts/device_coverage.py`` runs ``pytest -m accelerator`` on tests/rehearsal. For each file it prints how
many such statements there are, how many ran, and the text of those that did not. docs/devices.md has the table.

A statement counts if it calls torch's interface to accelerators or ours (``system/accelerator.py``), or if it is in a
branch for devices other than a CPU. Each statement reports when it is first executed: an import hook inserts a call
before it. This also works in autograd's threads, which Python's own tracing does not reach.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src/rapidformer_templates"
FOLDER = "RAPIDFORMER_DEVICE_COVERAGE"
CALLS = ("accelerator.", "torch.accelerator.", "torch.Stream", "torch.Event")
METHODS = ("record_stream", "wait_stream", "wait_event", "pin_memory")
HOST = ("== 'cpu'", "== HOST.type")
APART = ("!= 'cpu'", "is_asynchronous(", "is_apart")


def _calls_a_device(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    name = ast.unparse(node.func)
    return name.startswith(CALLS) or name.rpartition(".")[2] in METHODS


def _is_apart(test: ast.expr) -> bool | None:
    """Return True if a condition holds only on an accelerator, False if it holds only on a CPU, and None otherwise."""
    text = ast.unparse(test)
    if any(sign in text for sign in APART):
        return not text.startswith("not ")
    return False if any(sign in text for sign in HOST) and not isinstance(test, ast.BoolOp) else None


class _Marks(ast.NodeTransformer):
    """Inserts a call before each statement that counts. ``lines`` are the line numbers of these statements."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lines: list[int] = []

    def _marked(self, body: list[ast.stmt], *, all_count: bool) -> list[ast.stmt]:
        found: list[ast.stmt] = []
        for statement in body:
            if self._counts(statement) or (all_count and not isinstance(statement, ast.If | ast.With)):
                self.lines.append(statement.lineno)
                call = ast.parse(f"__import__('sys').modules['{HOOK}'].ran({self.name!r}, {statement.lineno})").body
                found += [ast.copy_location(node, statement) for node in call]
            found.append(self._inside(statement, all_count=all_count))
        return found

    def _counts(self, statement: ast.stmt) -> bool:
        """Whether the statement itself calls a device. Statements nested in it are not considered."""
        own = [
            child
            for child in ast.iter_child_nodes(statement)
            if not isinstance(child, ast.stmt | ast.ExceptHandler) and not isinstance(statement, ast.FunctionDef)
        ]
        return any(_calls_a_device(node) for child in own for node in ast.walk(child))

    def _inside(self, statement: ast.stmt, *, all_count: bool) -> ast.stmt:
        in_function = all_count or (self.name == "system/accelerator.py" and isinstance(statement, ast.FunctionDef))
        apart = _is_apart(statement.test) if isinstance(statement, ast.If) else None
        for part, counts in (("body", apart is True), ("orelse", apart is False), ("finalbody", False)):
            nested = getattr(statement, part, None)
            if nested and isinstance(nested, list):
                first = _docstring(statement) if part == "body" else []
                setattr(statement, part, first + self._marked(nested[len(first) :], all_count=counts or in_function))
        for handler in getattr(statement, "handlers", []):
            handler.body = self._marked(handler.body, all_count=in_function)
        return statement


def _docstring(node: ast.AST) -> list[ast.stmt]:
    documented = isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None
    return node.body[:1] if documented else []  # type: ignore[attr-defined]


def marked(name: str, text: str) -> tuple[ast.Module, list[int]]:
    """Return a module of the library with inserted calls, and the line numbers of the marked statements."""
    tree, marks = ast.parse(text), _Marks(name)
    head = [node for node in tree.body if isinstance(node, ast.Expr | ast.ImportFrom) and node.lineno < 40]
    rest = [node for node in tree.body if node not in head]
    tree.body = head + marks._marked(rest, all_count=False)
    return ast.fix_missing_locations(tree), marks.lines


HOOK = "device_coverage_hook"
_seen: set[tuple[str, int]] = set()


def ran(name: str, line: int) -> None:
    """Record that a statement was executed."""
    if (name, line) not in _seen:
        _seen.add((name, line))
        with open(Path(os.environ[FOLDER]) / str(os.getpid()), "a") as file:
            file.write(f"{name}:{line}\n")


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        path = Path(self.get_filename(fullname))
        tree, _ = marked(path.relative_to(SOURCE).as_posix(), path.read_text(encoding="utf-8"))
        return compile(tree, str(path), "exec")


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith("rapidformer_templates.") or "examples" in fullname:
            return None
        found = importlib.machinery.PathFinder.find_spec(fullname, path)
        if found is not None and isinstance(found.loader, importlib.machinery.SourceFileLoader):
            found.loader = _Loader(fullname, found.loader.path)
        return found


def install() -> None:
    """Install the import hook, so that modules imported later report their statements."""
    sys.modules[HOOK] = sys.modules[__name__]
    sys.meta_path.insert(0, _Finder())


def statements() -> Iterator[tuple[str, int, str]]:
    """Yield (file, line, text) of all statements that count."""
    for path in sorted(SOURCE.rglob("*.py")):
        if "commands/" not in path.as_posix():
            text, name = path.read_text(encoding="utf-8"), path.relative_to(SOURCE).as_posix()
            lines = text.splitlines()
            yield from ((name, line, lines[line - 1].strip()) for line in marked(name, text)[1])


def main() -> int:
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as site:
        # Every Python process that is started from here installs the hook first.
        start = f"import sys\nsys.path.insert(0, {str(ROOT / 'scripts')!r})\nimport device_coverage\n"
        (Path(site) / "sitecustomize.py").write_text(start + "device_coverage.install()\n")
        paths = os.pathsep.join([site, str(ROOT / "src"), str(ROOT)])
        environment = {**os.environ, FOLDER: folder, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "pytest", "-m", "accelerator", "-q", "-p", "no:cacheprovider"]
        where = sys.argv[1:] or [str(ROOT / "tests/rehearsal" / name) for name in ("test_runs.py", "test_faults.py")]
        subprocess.run([*command, *where], env=environment, cwd=ROOT, check=False)
        seen = {line for file in Path(folder).iterdir() for line in file.read_text().splitlines()}
    everything = list(statements())
    never = [(name, line, text) for name, line, text in everything if f"{name}:{line}" not in seen]
    print(f"{len(everything) - len(never)} of {len(everything)} statements ran; these never did:")
    for name, line, text in never:
        print(f"{name}:{line}: {text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
