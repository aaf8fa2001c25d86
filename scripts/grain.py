"""Measure the grain of the package: how large its functions and modules are, and how well they are typed.

    python scripts/grain.py                     measure src/rapidformer_templates
    python scripts/grain.py --by-room           the same for each room, as a table
    python scripts/grain.py FOLDER …            measure other packages next to each other

Code lines are lines without blanks, comments and docstrings. A private function that is used once may be
clearer as a part of its caller. ``Any`` counts uses in annotations and casts. A sideways import is an import from one
switch into another. A pinned fact is an attribute that a module of torch gets from outside of its class.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import statistics
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

PACKAGE = Path(__file__).resolve().parents[1] / "src/rapidformer_templates"
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.ENCODING,
}
FOLDERS_OF_ROOMS = {"commands", "data", "engines", "planning", "run", "switches"}
"""Rooms whose folders are measured separately in the table by room."""


@dataclass
class Module:
    """A module of a package, parsed.

    Attributes:
        place: its path in the package.
        code: the numbers of its code lines.
    """

    place: Path
    source: str
    tree: ast.Module
    code: set[int]

    @property
    def room(self) -> str:
        """Its folder, or its folder in a large room."""
        parts = self.place.parts
        deep = len(parts) > 2 and parts[0] in FOLDERS_OF_ROOMS
        return "/".join(parts[:2]) if deep else parts[0]


@dataclass
class Grain:
    """The figures of a package or of one of its rooms."""

    code_lines: int = 0
    modules: int = 0
    bodies: list[int] = field(default_factory=list)
    """Code lines in the body of each function."""
    used_once: int = 0
    any_types: int = 0
    repeated_classes: int = 0
    sideways: int = 0
    pinned: int = 0

    def rows(self) -> Iterator[tuple[str, float]]:
        """Yield (name, value) of each figure."""
        yield "code lines", self.code_lines
        yield "modules", self.modules
        yield "functions", len(self.bodies)
        yield "body of a function, median lines", statistics.median(self.bodies) if self.bodies else 0
        yield "functions with a body of one line", sum(length <= 1 for length in self.bodies)
        yield "private functions used once", self.used_once
        yield "Any", self.any_types
        yield "class names that exist twice or more", self.repeated_classes
        yield "imports from one switch into another", self.sideways
        yield "facts pinned on modules", self.pinned


def modules_of(package: Path) -> list[Module]:
    """Parse the modules of a package."""
    modules = []
    for path in sorted(package.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
        modules.append(Module(path.relative_to(package), source, tree, _code_lines(source, tree)))
    return modules


def _code_lines(source: str, tree: ast.Module) -> set[int]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts: set[int] = set()
    for node in ast.walk(tree):
        for statement in node.body if isinstance(node, documented) else ():
            is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
            if is_text and statement.end_lineno:
                texts.update(range(statement.lineno, statement.end_lineno + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return lines - texts


def measure(package: str, modules: Sequence[Module], everything: Sequence[Module]) -> Grain:
    """Measure some modules of a package.

    Args:
        package: name of the package.
        everything: all of its modules, in which uses are counted.
    """
    grain = Grain()
    words = Counter(word for module in everything for word in re.findall(r"\b[A-Za-z_]\w*", module.source))
    private = Counter(name for module in everything for name in _private_functions(module))
    classes = Counter(node.name for module in everything for node in _of_kind(module, ast.ClassDef))
    repeated: set[str] = set()
    for module in modules:
        grain.code_lines += len(module.code)
        grain.modules += bool(module.code)
        grain.bodies += _bodies(module)
        grain.used_once += sum(words[name] - private[name] == 1 for name in set(_private_functions(module)))
        grain.any_types += sum(node.id == "Any" for node in _of_kind(module, ast.Name))
        repeated |= {node.name for node in _of_kind(module, ast.ClassDef) if classes[node.name] > 1}
        grain.sideways += len(set(_sideways_imports(package, module)))
        grain.pinned += len(set(_pinned(module)))
    grain.repeated_classes = len(repeated)
    return grain


Node = TypeVar("Node", bound=ast.AST)


def _of_kind(module: Module, kind: type[Node]) -> Iterator[Node]:
    return (node for node in ast.walk(module.tree) if isinstance(node, kind))


def _functions(module: Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    yield from _of_kind(module, ast.FunctionDef)
    yield from _of_kind(module, ast.AsyncFunctionDef)


def _private_functions(module: Module) -> Iterator[str]:
    return (node.name for node in _functions(module) if node.name.startswith("_") and not node.name.startswith("__"))


def _bodies(module: Module) -> Iterator[int]:
    for function in _functions(module):
        body = [s for s in function.body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
        first = body[0].lineno if body else 1
        yield len(module.code & set(range(first, (function.end_lineno or 0) + 1))) if body else 0


def _sideways_imports(package: str, module: Module) -> Iterator[str]:
    """Yield the other switches whose modules a switch imports."""
    parts = module.place.parts
    if len(parts) < 2 or parts[0] != "switches":
        return
    for node in _of_kind(module, ast.ImportFrom):
        imported = re.match(rf"{package}\.switches\.(\w+)", node.module or "")
        if imported and imported[1] not in (parts[1].removesuffix(".py"), "registry"):
            yield imported[1]


def _pinned(module: Module) -> Iterator[str]:
    """Yield the names that are written into the attributes of a module: ``vars(model)["name"] = …`` and the like."""
    for node in _of_kind(module, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Subscript) and _is_vars(target.value):
                yield ast.unparse(target.slice)
    for call in _of_kind(module, ast.Call):
        method = call.func
        if isinstance(method, ast.Attribute) and method.attr == "setdefault" and _is_vars(method.value):
            yield ast.unparse(call.args[0])
    for function in _functions(module):
        given = {arg.arg for arg in function.args.args if arg.annotation and "Module" in ast.unparse(arg.annotation)}
        yield from (name for owner, name in _attributes_set(function) if owner in given and name != "'forward'")


def _attributes_set(function: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield (name of a variable, attribute of it that a function sets)."""
    for node in ast.walk(function):
        for target in node.targets if isinstance(node, ast.Assign) else ():
            if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
                yield target.value.id, repr(target.attr)


def _is_vars(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "vars"


def _table(titles: Iterable[str], grains: Sequence[Grain]) -> Iterator[str]:
    names = [name for name, _ in Grain().rows()]
    width = max(map(len, names))
    yield " ".join([" " * width, *(f"{title[:24]:>24}" for title in titles)])
    for row, name in enumerate(names):
        values = [list(grain.rows())[row][1] for grain in grains]
        yield " ".join([f"{name:{width}}", *(f"{value:>24,}" for value in values)])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measure the size of functions and modules, and their types.")
    parser.add_argument("packages", nargs="*", type=Path, default=[PACKAGE], help="folders of packages")
    parser.add_argument("--by-room", action="store_true", help="print one line for each room")
    options = parser.parse_args(argv)
    parsed = [(package.name, modules_of(package)) for package in options.packages]
    if not options.by_room:
        grains = [measure(name, modules, modules) for name, modules in parsed]
        print("\n".join(_table([name for name, _ in parsed], grains)))
        return 0
    print(f"{'room':36} {'code lines':>10} {'modules':>8} {'functions':>9} {'used once':>9} {'Any':>6}")
    for name, modules in parsed:
        for room in sorted({module.room for module in modules}):
            grain = measure(name, [module for module in modules if module.room == room], modules)
            sizes = f"{grain.code_lines:10,} {grain.modules:8} {len(grain.bodies):9} {grain.used_once:9}"
            print(f"{room:36} {sizes} {grain.any_types:6}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
