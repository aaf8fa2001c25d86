"""The keys that the installed DeepSpeed reads, from its own configuration classes. Imports neither DeepSpeed nor torch.

DeepSpeed's sections are pydantic models. Their fields are parsed from the source code. Importing them would take
seconds and choose a device, which making a plan must not do.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Mapping
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
        trees = [ast.parse((root / source).read_text(encoding="utf-8")) for source in SOURCES]
        aio = re.findall(r'^AIO_\w+ = "(\w+)"', (root / AIO).read_text(encoding="utf-8"), re.MULTILINE)
    except (OSError, SyntaxError):
        return {}
    models = {
        entry.name: entry
        for tree in trees
        for entry in tree.body
        if isinstance(entry, ast.ClassDef) and "DeepSpeedConfigModel" in map(ast.unparse, entry.bases)
    }
    sections = {name: _keys(models[kind], models) for name, kind in SECTIONS.items() if kind in models}
    return {**sections, "aio": SectionKeys(dict.fromkeys(aio))}


def _keys(model: ast.ClassDef, models: Mapping[str, ast.ClassDef]) -> SectionKeys:
    """Return the keys of a model: the names of its fields, and the aliases in ``Field(…, alias="…")``."""
    names: dict[str, SectionKeys | None] = {}
    replaced = {}
    for entry in model.body:
        if not isinstance(entry, ast.AnnAssign) or not isinstance(entry.target, ast.Name):
            continue
        name = entry.target.id
        types = [node.id for node in ast.walk(entry.annotation) if isinstance(node, ast.Name)]
        names[name] = next((_keys(models[kind], models) for kind in types if kind in models), None)
        options = {word.arg: word.value for word in entry.value.keywords} if isinstance(entry.value, ast.Call) else {}
        match options.get("alias"):
            case ast.Constant(value=str(alias)):
                names[alias] = names[name]
        match options.get("json_schema_extra"):
            case ast.Dict(keys=keys, values=values):
                pairs = zip(keys, values, strict=True)
                extra = {key.value: value for key, value in pairs if isinstance(key, ast.Constant)}
                if "deprecated" in extra:
                    replacement = extra.get("new_param")
                    replaced[name] = str(replacement.value) if isinstance(replacement, ast.Constant) else ""
    return SectionKeys(names, replaced)
