"""The keys of a DeepSpeed file: what DeepSpeed reads, what the table ``keys.toml`` says, and which are mistakes.

DeepSpeed's sections are pydantic models. Their fields are parsed from the source code of the installed DeepSpeed.
Importing them would take seconds and choose a device, which making a plan must not do. Does not import torch.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TypeGuard

from rapidformer_templates.errors import did_you_mean
from rapidformer_templates.planning.deepspeed_file.file import (
    AUTO,
    DeepSpeedFile,
    Json,
    Section,
    is_neutral,
    look_up,
    section_at,
    shown,
)
from rapidformer_templates.planning.optimizers import DEEPSPEED_TYPES
from rapidformer_templates.planning.schedules import DEEPSPEED_NEEDED, DEEPSPEED_PARAMETERS

DEEPSPEED_SECTIONS = {
    "zero_optimization": "DeepSpeedZeroConfig",
    "fp16": "DeepSpeedFP16Config",
    "bf16": "DeepSpeedBF16Config",
}
"""Sections, with the class that reads them."""

DEEPSPEED_SOURCES = (
    "runtime/zero/config.py",
    "runtime/zero/offload_config.py",
    "runtime/zero/leaf_module_config.py",
    "runtime/precision_config.py",
)
AIO_SOURCE = "runtime/swap_tensor/constants.py"


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
        trees = [ast.parse((root / source).read_text(encoding="utf-8")) for source in DEEPSPEED_SOURCES]
        aio = re.findall(r'^AIO_\w+ = "(\w+)"', (root / AIO_SOURCE).read_text(encoding="utf-8"), re.MULTILINE)
    except (OSError, SyntaxError):
        return {}
    models = {
        entry.name: entry
        for tree in trees
        for entry in tree.body
        if isinstance(entry, ast.ClassDef) and "DeepSpeedConfigModel" in map(ast.unparse, entry.bases)
    }
    sections = {name: _fields_of(models[kind], models) for name, kind in DEEPSPEED_SECTIONS.items() if kind in models}
    return {**sections, "aio": SectionKeys(dict.fromkeys(aio))}


def _fields_of(model: ast.ClassDef, models: Mapping[str, ast.ClassDef]) -> SectionKeys:
    """Return the keys of a model: the names of its fields, and the aliases in ``Field(…, alias="…")``."""
    names: dict[str, SectionKeys | None] = {}
    replaced = {}
    for entry in model.body:
        if not isinstance(entry, ast.AnnAssign) or not isinstance(entry.target, ast.Name):
            continue
        name = entry.target.id
        types = [node.id for node in ast.walk(entry.annotation) if isinstance(node, ast.Name)]
        names[name] = next((_fields_of(models[kind], models) for kind in types if kind in models), None)
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


@dataclass(frozen=True)
class KeyTable:
    """How each key of a DeepSpeed file is handled.

    Attributes:
        own: top-level keys that are flags, or that the library implements itself in the same way.
        passed: top-level keys that are passed to DeepSpeed.
        noted: keys that request what happens anyway, with a line for the plan.
        refused: top-level keys that would do nothing, or replace a part of the library, with what to do instead.
        only: keys with the only value that fits the library, and why.
    """

    own: frozenset[str]
    passed: frozenset[str]
    noted: Mapping[str, str]
    refused: Mapping[str, str]
    only: Mapping[str, tuple[Json, str]]

    @property
    def top(self) -> set[str]:
        """All top-level keys that are known."""
        return {*self.own, *self.passed, *self.refused, *self.noted, *(path for path in self.only if "." not in path)}


@cache
def key_table() -> KeyTable:
    """Read the table."""
    table = tomllib.loads(Path(__file__).with_name("keys.toml").read_text(encoding="utf-8"))
    return KeyTable(
        frozenset(table["own"]),
        frozenset(table["passed"]),
        table["noted"],
        {key: group["why"] for group in table["refused"] for key in group["keys"]},
        {path: (entry.get("value"), entry["why"]) for path, entry in table["only"].items()},
    )


OPTIMIZERS = {kind.lower(): name for kind, name in DEEPSPEED_TYPES.items()}
"""Optimizer types of DeepSpeed, with the flag's value that makes the same update."""

OPTIMIZER_OPTIONS = (
    "lr", "weight_decay", "betas", "eps", "adam_w_mode", "torch_adam", "bias_correction", "amsgrad", "max_grad_norm",
)  # fmt: skip

Problem = tuple[str, str]
"""(path of a key, what is wrong with it)."""


def unknown_keys(file: DeepSpeedFile) -> Iterator[Problem]:
    """Yield keys that neither DeepSpeed nor the library knows, and keys that DeepSpeed has deprecated."""
    schema, top = known_keys(), key_table().top
    for key, value in file.content.items():
        if key not in top:
            yield key, _no_such_key(key, top)
        elif key in schema:
            yield from _unknown_in(value, key, schema[key])
    schedule = None  # another type is refused as idle
    if parameters := DEEPSPEED_PARAMETERS.get(type_of(file.content, "scheduler")):
        schedule = SectionKeys(dict.fromkeys([*parameters, "last_batch_iteration"]))
    options = SectionKeys(dict.fromkeys(OPTIMIZER_OPTIONS))
    for key, keys in (
        ("optimizer", SectionKeys({"type": None, "params": options, "legacy_fusion": None})),
        ("scheduler", SectionKeys({"type": None, "params": schedule})),
    ):
        section = file.content.get(key)
        params = section.get("params", {}) if isinstance(section, Mapping) else section
        if section is not None and not isinstance(params, Mapping):
            yield key, f"{key} must be a section with a type and params"
        else:
            yield from _unknown_in(section, key, keys)


def _unknown_in(section: Json, path: str, keys: SectionKeys) -> Iterator[Problem]:
    if not isinstance(section, Mapping):
        if section is not None:
            yield path, f"{path} must be a section, not {section!r}"
        return
    for key, value in section.items():
        key_path = f"{path}.{key}"
        if key not in keys.names:
            yield key_path, _no_such_key(key_path, [f"{path}.{name}" for name in keys.names])
        elif key in keys.replaced and not is_neutral(value):
            yield key_path, f"{key_path} is deprecated in DeepSpeed: write {path}.{keys.replaced[key]}"
        elif (inner := keys.names[key]) is not None:
            yield from _unknown_in(value, key_path, inner)


def _no_such_key(path: str, keys: Iterable[str]) -> str:
    hint = did_you_mean(path, sorted(keys), cutoff=0.75)
    return f"no such key: {path}" + (f"; {hint}" if hint else "")


def idle_keys(file: DeepSpeedFile) -> Iterator[Problem]:
    """Yield known keys that would do nothing here, or something else than the library does."""
    content, table = file.content, key_table()
    for key, hint in table.refused.items():
        if not is_neutral(value := content.get(key)):
            what = "a section " if isinstance(value, Mapping) else ""
            yield key, f"{file.name} has {what}{key}: {hint}"
    for path, (only, why) in table.only.items():
        value = look_up(content, path)
        if value is not None and value != only:
            yield path, f"{path} = {shown(value)} is not possible: {why}"
    stage, dtype = look_up(content, "zero_optimization.stage"), look_up(content, "communication_data_type")
    if stage is not None and stage not in (0, 1, 2, 3):
        yield "zero_optimization.stage", f"zero_optimization.stage = {shown(stage)}: the stages are 0, 1, 2 and 3"
    if dtype is not None and str(dtype).lower() not in ("fp16", "bf16", "fp32"):
        yield "communication_data_type", f"communication_data_type = {shown(dtype)}: the types are fp16, bf16 and fp32"
    yield from _idle_optimizer(content)
    yield from _idle_scheduler(content)
    devices = [look_up(content, f"zero_optimization.offload_{what}.device") for what in ("optimizer", "param")]
    if devices[0] in (None, "none") and devices[1] not in (None, "none"):
        path = "zero_optimization.offload_param"
        yield path, f"{path} needs offload_optimizer: parameters leave the device after the optimizer state"


def _idle_optimizer(content: Section) -> Iterator[Problem]:
    kind, path = type_of(content, "optimizer") or "AdamW", "optimizer.params"  # the guide's default
    if kind.lower() not in OPTIMIZERS:
        names = ", ".join(DEEPSPEED_TYPES)
        yield "optimizer.type", f"optimizer.type = {kind} is not among the optimizers of --optimizer: {names}"
        return
    if look_up(content, f"{path}.adam_w_mode") is False and kind.lower() != "adam":
        yield f"{path}.adam_w_mode", f"{path}.adam_w_mode = false needs the type Adam, not {kind}"
    betas, eps = look_up(content, f"{path}.betas"), look_up(content, f"{path}.eps")
    if betas is not None and not are_betas(betas):
        yield f"{path}.betas", f"{path}.betas must be two numbers from 0 to below 1, not {betas!r}"
    if eps is not None and not is_nonnegative(eps):
        yield f"{path}.eps", f"{path}.eps must be a number of at least 0, not {eps!r}"


def _idle_scheduler(content: Section) -> Iterator[Problem]:
    if not isinstance(content.get("scheduler"), Mapping):
        return
    kind, path = type_of(content, "scheduler"), "scheduler.params"
    if kind not in DEEPSPEED_PARAMETERS:
        means = did_you_mean(kind, DEEPSPEED_PARAMETERS) or f"choose from {', '.join(DEEPSPEED_PARAMETERS)}"
        yield "scheduler.type", f"scheduler.type = {kind or 'none'} is not a schedule of DeepSpeed; {means}"
        return
    parameters = section_at(content, path)
    for name, value in parameters.items():
        problem = _problem_with(name, value)
        if name in (*DEEPSPEED_PARAMETERS[kind], "last_batch_iteration") and value not in (None, AUTO) and problem:
            yield f"{path}.{name}", f"{path}.{name} = {shown(value)}: {problem}"
    for name in DEEPSPEED_NEEDED.get(kind, ()):
        if name not in parameters:
            yield "scheduler", f"{path}.{name} is missing, which {kind} needs"
    if kind == "OneCycle" and parameters.get("cycle_momentum", True) is not False:
        why = "the optimizer sets the betas; DeepSpeed would move them with the learning rate"
        yield f"{path}.cycle_momentum", f"{path}.cycle_momentum must be false: {why}"


def _problem_with(name: str, value: Json) -> str | None:
    """Return what is wrong with a parameter of a schedule, or None."""
    if name == "last_batch_iteration":
        return None if value == -1 else "a resumed run continues where it stopped; leave it out"
    if name == "warmup_type":
        return None if value in ("log", "linear") else "log or linear"
    if name in ("cycle_momentum", "lr_range_test_staircase"):
        return None if isinstance(value, bool) else "true or false"
    if not is_nonnegative(value) or value > sys.float_info.max:
        return "a number of at least 0 is needed"
    counts = ("warmup_num_steps", "cycle_first_step_size", "lr_range_test_step_size")
    return "at least 1 is needed" if name in counts and value < 1 else None


def type_of(content: Section, section: str) -> str:
    """Return the ``type`` of a section, or an empty string."""
    return str(section_at(content, section).get("type") or "")


def is_nonnegative(value: Json) -> TypeGuard[float]:
    """Return whether a value is a number of at least 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


def are_betas(value: Json) -> TypeGuard[list[float]]:
    """Return whether a value can be Adam's two decays."""
    return isinstance(value, list) and len(value) == 2 and all(is_nonnegative(beta) and beta < 1 for beta in value)
