"""Names of other packages that this library uses although they are not part of a public interface.

A name in the table ``private_names.toml`` may disappear in the next version of its package. Every other name that the
library uses is public. The dependencies have no upper bounds, because a bound would also refuse versions that still
have the names. Instead, ``rapidformer doctor`` and the tests look for each name in the installed packages. Importing
this module imports none of the packages.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType


@dataclass(frozen=True)
class PrivateName:
    """Private names of one owner, and the features that need them.

    Attributes:
        owner: ``module`` or ``module:Class`` that has the names.
        names: the names. For a class, these may be attributes that only its instances have.
        serves: what the names are used for.
        without: what does not work if a name is missing.
    """

    owner: str
    names: tuple[str, ...]
    serves: str
    without: str

    @property
    def package(self) -> str:
        return self.owner.partition(":")[0].partition(".")[0]


@functools.cache
def private_names() -> tuple[PrivateName, ...]:
    """Return the entries of ``private_names.toml``."""
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    return tuple(PrivateName(owner, tuple(names.split()), *texts) for owner, names, *texts in table["names"])


def missing(package: str) -> Iterator[tuple[str, PrivateName]]:
    """Yield the names that the installed version of ``package`` lacks, each with its entry.

    If an entry's module needs another package that is not installed, the entry is skipped, because nobody can use it.
    """
    for entry in private_names():
        if entry.package != package:
            continue
        try:
            yield from [(name, entry) for name in entry.names if not has(entry.owner, name)]
        except ModuleNotFoundError as error:
            if str(error.name).partition(".")[0] == package:
                raise


def has(owner: str, name: str) -> bool:
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
    if source is None:
        return frozenset()
    with open(source, encoding="utf-8") as file:
        return frozenset(re.findall(r"\w+", file.read()))
