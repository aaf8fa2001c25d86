"""Private names of other packages: each is in one table, is used, and exists."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from rapidformer_templates.commands import private_names as private_names_module
from rapidformer_templates.commands.private_names import PrivateName, has, missing, private_names

SOURCE = Path(private_names_module.__file__).parents[1]
FILES = [path for path in sorted(SOURCE.rglob("*.py")) if path != Path(private_names_module.__file__)]
PACKAGES = sorted({entry.package for entry in private_names()})
OF_PYTHON = {
    "_exit": "os",  # documented
    "_getframe": "sys",  # documented
    "_current_frames": "sys",  # documented
    "_fields": "collections.namedtuple",  # documented
    "_actions": "argparse",
    "_action_groups": "argparse",
    "_option_string_actions": "argparse",
    "_MISSING_TYPE": "dataclasses",
}
LISTED = {name for entry in private_names() for name in (*re.split("[.:]", entry.owner), *entry.names)}


def _own_names() -> set[str]:
    """Return every private name that our own source defines."""
    own: set[str] = set()
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                    own.add(name)
                case ast.Attribute(attr=name, value=ast.Name(id="self" | "cls"), ctx=ast.Store()):
                    own.add(name)
    return own


def _foreign(path: Path) -> Iterator[tuple[str, int]]:
    """Yield private names that a file uses from elsewhere, with their lines."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.ImportFrom(module=str(module), names=names):
                yield from ((part, node.lineno) for part in module.split("."))
                yield from ((alias.name, node.lineno) for alias in names)
            case ast.Import(names=names):
                yield from ((part, node.lineno) for alias in names for part in alias.name.split("."))
            case ast.Attribute(attr=name):
                yield name, node.lineno
            case ast.Call(func=ast.Name(id="getattr" | "hasattr" | "setattr" | "patch_function"), args=args):
                yield from (
                    (a.value, a.lineno) for a in args if isinstance(a, ast.Constant) and isinstance(a.value, str)
                )


def _is_private(name: str) -> bool:
    return re.fullmatch(r"_(?!rapidformer)[A-Za-z]\w*", name) is not None


@pytest.mark.slow
def test_what_is_private_elsewhere_stands_in_the_table() -> None:
    known = _own_names() | LISTED | set(OF_PYTHON)
    places = [(name, f"{path}:{line}") for path in FILES for name, line in _foreign(path)]
    assert [f"{place}: {name}" for name, place in places if _is_private(name) and name not in known] == []


def test_what_stands_in_the_table_is_used() -> None:
    words = {word for path in FILES for word in re.findall(r"\w+", path.read_text(encoding="utf-8"))}
    renamed = {"_CHECKPOINT_PREFIX", "FSDP_WRAPPED_MODULE"}  # these are recognised by their values
    unused = [name for entry in private_names() for name in entry.names if name not in words | renamed]
    assert unused == []


@pytest.mark.parametrize("package", PACKAGES)
def test_is_there(package: str) -> None:
    pytest.importorskip(package)
    assert [f"{entry.owner} has no {name}: without it, {entry.without}" for name, entry in missing(package)] == []


def test_wrappers_are_called_as_we_take_them_to_be() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_PREFIX
    from torch.distributed.fsdp._common_utils import FSDP_WRAPPED_MODULE

    from rapidformer_templates.models.blocks import canonical_name

    assert canonical_name(f"a.{_CHECKPOINT_PREFIX}{FSDP_WRAPPED_MODULE}.weight") == "a.weight"


class TestMissing:
    def test_name_that_is_gone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        entry = PrivateName("torch.nn:Module", ("_parameters", "_no_such_thing"), "a test", "nothing")
        monkeypatch.setattr(private_names_module, "private_names", lambda: (entry,))
        assert [name for name, _ in missing("torch")] == ["_no_such_thing"]

    @pytest.mark.parametrize("owner", ["torch.no_such_module", "torch.nn:NoSuchClass", "torch.ops.no_such_space"])
    def test_owner_that_is_gone(self, owner: str) -> None:
        assert not has(owner, "_parameters")

    def test_module_of_a_package_that_is_not_installed(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        package = ModuleType("needing")
        package.__path__ = [str(tmp_path)]
        (tmp_path / "part.py").write_text("import not_installed_anywhere\n")
        monkeypatch.setitem(sys.modules, "needing", package)
        entry = PrivateName("needing.part", ("_x",), "", "")
        monkeypatch.setattr(private_names_module, "private_names", lambda: (entry,))
        assert list(missing("needing")) == []
