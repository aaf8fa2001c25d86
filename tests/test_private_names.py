"""Names of other packages that are not part of a public interface: each is in one table, is used, and exists.

A name in the table ``support/private_names.toml`` may disappear in the next version of its package. Every other name
that the library uses is public. The dependencies have no upper bounds, because a bound would also refuse versions that
still have the names. Instead, these tests look for each name in the installed packages.
"""

import ast
import functools
import importlib
import inspect
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import rapidformer_templates

SOURCE = Path(rapidformer_templates.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
TABLE = tomllib.loads((Path(__file__).parent / "support/private_names.toml").read_text(encoding="utf-8"))["names"]
"""Owners (``module`` or ``module:Class``) with their names, the use of these, and what does not work without them."""
PACKAGES = sorted({re.split("[.:]", owner)[0] for owner, *_ in TABLE})
OF_PYTHON = {
    "_exit": "os",  # documented
    "_getframe": "sys",  # documented
    "_current_frames": "sys",  # documented
    "_fields": "collections.namedtuple",  # documented
    "_replace": "collections.namedtuple",  # documented
    "_actions": "argparse",
    "_action_groups": "argparse",
    "_option_string_actions": "argparse",
    "_MISSING_TYPE": "dataclasses",
}
LISTED = {name for owner, names, *_ in TABLE for name in (*re.split("[.:]", owner), *names.split())}


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
    assert [name for _, names, *_ in TABLE for name in names.split() if name not in words | renamed] == []


def _has(owner: str, name: str) -> bool:
    """Whether ``module`` or ``module:Class`` has ``name``. Attributes of instances are searched in the source."""
    module_name, _, class_name = owner.partition(":")
    holder = _holder(module_name)
    if holder is None or (class_name and not hasattr(holder, class_name)):
        return False
    owner_object = getattr(holder, class_name) if class_name else holder
    return hasattr(owner_object, name) or _module(f"{module_name}.{name}") is not None or name in _words(owner_object)


def _holder(module_name: str) -> object | None:
    """Return a module, or an object that acts as one, such as ``torch.ops.aten``. Return None if neither exists."""
    parent, _, last = module_name.rpartition(".")
    module = _module(module_name)
    return getattr(_holder(parent), last, None) if module is None and parent else module


def _module(name: str) -> ModuleType | None:
    """Import a module. Return None if it does not exist."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not name.startswith(str(error.name)):
            raise  # a package that the module needs is missing
        return None


@functools.cache
def _words(owner_object: object) -> frozenset[str]:
    """Return all words in the source file of a module or a class. Without a source file, the set is empty."""
    try:
        source = inspect.getsourcefile(owner_object)  # type: ignore[arg-type]
    except TypeError:
        return frozenset()
    return frozenset(re.findall(r"\w+", Path(source).read_text(encoding="utf-8")) if source else ())


@pytest.mark.parametrize("package", PACKAGES)
def test_is_there(package: str) -> None:
    pytest.importorskip(package)
    missing = []
    for owner, names, _, broken in TABLE:
        if re.split("[.:]", owner)[0] != package:
            continue
        try:
            gone = [name for name in names.split() if not _has(owner, name)]
        except ModuleNotFoundError as error:
            if str(error.name).partition(".")[0] == package:
                raise
            continue  # the module needs another package that is not installed, so nobody can use it here
        missing += [f"{owner} has no {name}: without it, {broken}" for name in gone]
    assert missing == []


def test_wrappers_are_called_as_we_take_them_to_be() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_PREFIX
    from torch.distributed.fsdp._common_utils import FSDP_WRAPPED_MODULE

    from rapidformer_templates.models.blocks import canonical_name

    assert canonical_name(f"a.{_CHECKPOINT_PREFIX}{FSDP_WRAPPED_MODULE}.weight") == "a.weight"
