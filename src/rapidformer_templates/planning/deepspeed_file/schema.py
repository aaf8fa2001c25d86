"""The keys that the installed DeepSpeed reads, from its own configuration classes. Imports neither DeepSpeed nor torch.

DeepSpeed's sections are pydantic models. Their fields are parsed from the source code. Importing them would take
seconds and choose a device, which making a plan must not do.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

SECTIONS = {
    "zero_optimization": "DeepSpeedZeroConfig",
    "fp16": "DeepSpeedFP16Config",
    "bf16": "DeepSpeedBF16Config",
}
"""Sections, with the class that reads them."""

SOURCES = (
    "runtime/zero/config.py",
    "runtime/zero/offload_config.py",
    "runtime/zero/leaf_module_config.py",
    "runtime/precision_config.py",
)
AIO = "runtime/swap_tensor/constants.py"


@dataclass(frozen=True)
class SectionKeys:
    """The keys of a section.

    Attributes:
        names: the keys. A key that is a section itself maps to its keys.
        replaced: deprecated keys of DeepSpeed, with their replacements.
    """

    names: Mapping[str, SectionKeys | None]
    replaced: Mapping[str, str] = field(default_factory=dict)


@cache
def known_keys() -> Mapping[str, SectionKeys]:
    """Return the keys of the sections that are passed to DeepSpeed.

    Empty without DeepSpeed, or with unknown sources.
    """
    spec = importlib.util.find_spec("deepspeed")
    if spec is None or not spec.submodule_search_locations:
        return {}
    root = Path(spec.submodule_search_locations[0])
    try:
        trees = {source: ast.parse((root / source).read_text(encoding="utf-8")) for source in SOURCES}
        aio = re.findall(r'^AIO_\w+ = "(\w+)"', (root / AIO).read_text(encoding="utf-8"), re.MULTILINE)
    except (OSError, SyntaxError):
        return {}
    classes = {c.name: c for tree in trees.values() for c in tree.body if isinstance(c, ast.ClassDef)}
    sections = {name: _keys(classes[kind], classes) for name, kind in SECTIONS.items() if kind in classes}
    return {**sections, "aio": SectionKeys(dict.fromkeys(aio))}


def _keys(model: ast.ClassDef, classes: Mapping[str, ast.ClassDef]) -> SectionKeys:
    """Return the keys of a model: the names and aliases of its fields."""
    names: dict[str, SectionKeys | None] = {}
    replaced = {}
    for entry in model.body:
        if not isinstance(entry, ast.AnnAssign) or not isinstance(entry.target, ast.Name):
            continue
        name, options = entry.target.id, _options(entry.value)
        kinds = {word.id for word in ast.walk(entry.annotation) if isinstance(word, ast.Name)} & set(classes)
        inner = next((_keys(classes[kind], classes) for kind in sorted(kinds) if _is_section(classes[kind])), None)
        for key in (name, *_texts(options.get("alias"))):
            names[key] = inner
        if "deprecated" in (extra := _texts(options.get("json_schema_extra"))):
            replaced[name] = extra[extra.index("new_param") + 1] if "new_param" in extra else ""
    return SectionKeys(names, replaced)


def _is_section(model: ast.ClassDef) -> bool:
    return any(isinstance(base, ast.Name) and base.id == "DeepSpeedConfigModel" for base in model.bases)


def _options(value: ast.expr | None) -> dict[str, ast.expr]:
    """Return the keyword arguments of ``Field(…)``."""
    return {word.arg: word.value for word in value.keywords if word.arg} if isinstance(value, ast.Call) else {}


def _texts(value: ast.expr | None) -> list[str]:
    """Return the strings in an expression, in order."""

    def walk(node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        if isinstance(node, ast.Dict):  # each key, then its value
            for key, entry in zip(node.keys, node.values, strict=True):
                yield from [text for part in (key, entry) if part is not None for text in walk(part)]
        else:
            for child in ast.iter_child_nodes(node):
                yield from walk(child)

    return list(walk(value)) if value is not None else []
