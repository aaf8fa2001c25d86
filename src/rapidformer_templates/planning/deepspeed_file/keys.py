"""The keys of a DeepSpeed file: what the table ``keys.toml`` says about them, and which are mistakes.

DeepSpeed itself checks the sections that it reads: ``switches/zero/file_check.py``. Does not import torch.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rapidformer_templates.errors import did_you_mean
from rapidformer_templates.planning.deepspeed_file.file import (
    DeepSpeedFile,
    Json,
    Section,
    is_neutral,
    look_up,
    section_at,
    shown,
    type_of,
)
from rapidformer_templates.planning.optimizers import DEEPSPEED_TYPES

Problem = tuple[str, str]
"""(path of a key, what is wrong with it)."""

SECTIONS = (
    "zero_optimization", "fp16", "bf16", "aio", "scheduler", "scheduler.params", "optimizer", "optimizer.params",
)  # fmt: skip
OPTIMIZERS = {kind.lower(): name for kind, name in DEEPSPEED_TYPES.items()}
"""Optimizer types of DeepSpeed, with the flag's value that makes the same update."""


@dataclass(frozen=True)
class KeyTable:
    """How each key of a DeepSpeed file is handled.

    Attributes:
        own: top-level keys that are flags, or that the library implements itself in the same way.
        passed: top-level keys that are passed to DeepSpeed.
        of_optimizer: keys of the section ``optimizer``.
        noted: keys that request what happens anyway, with a line for the plan.
        refused: top-level keys that would do nothing, or replace a part of the library, with what to do instead.
        only: keys with the only value that fits the library, and why.
        choices: keys with their possible values.
    """

    own: list[str]
    passed: list[str]
    of_optimizer: list[str]
    noted: Mapping[str, str]
    refused: Mapping[str, str]
    only: Mapping[str, Mapping[str, Json]]
    choices: Mapping[str, list[Json]]

    @property
    def top(self) -> set[str]:
        """All top-level keys that are known."""
        return {*self.own, *self.passed, *self.refused, *self.noted, *(path for path in self.only if "." not in path)}


@cache
def key_table() -> KeyTable:
    """Read the table."""
    return KeyTable(**tomllib.loads(Path(__file__).with_name("keys.toml").read_text(encoding="utf-8")))


def unknown_keys(file: DeepSpeedFile) -> Iterator[Problem]:
    """Yield keys that neither DeepSpeed nor the library knows, as far as DeepSpeed itself is not needed to tell."""
    table = key_table()
    yield from unknown_in(file.content, "", dict.fromkeys(table.top, ""), deep=False)
    yield from unknown_in(section_at(file.content, "optimizer"), "optimizer.", dict.fromkeys(table.of_optimizer, ""))
    for path in SECTIONS:
        value = look_up(file.content, path)
        if value is not None and not isinstance(value, Mapping):
            yield path, f"{path} must be a section, not {value!r}"


def unknown_in(
    section: Mapping[str, Json], above: str, known: Mapping[str, str], *, deep: bool = True
) -> Iterator[Problem]:
    """Yield the keys of a section that are not known or deprecated.

    Args:
        above: the path of the section, with a dot at its end.
        known: the paths of known keys. Each deprecated key has its replacement.
        deep: whether to look into inner sections.
    """
    for key, value in section.items():
        path = f"{above}{key}"
        if path not in known:
            hint = did_you_mean(path, sorted(known), cutoff=0.75)
            yield path, f"no such key: {path}" + (f"; {hint}" if hint else "")
        elif known[path] and not is_neutral(value):
            yield path, f"{path} is deprecated in DeepSpeed: write {above}{known[path]}"
        elif deep and isinstance(value, Mapping):
            yield from unknown_in(value, f"{path}.", known)


def idle_keys(file: DeepSpeedFile) -> Iterator[Problem]:
    """Yield known keys that would do nothing here, or something else than the library does."""
    content, table = file.content, key_table()
    for key, hint in table.refused.items():
        if not is_neutral(value := content.get(key)):
            yield key, f"{file.name} has {'a section ' * isinstance(value, Mapping)}{key}: {hint}"
    for path, entry in table.only.items():
        value = look_up(content, path)
        if value is not None and value != entry.get("value"):
            yield path, f"{path} = {shown(value)} is not possible: {entry['why']}"
    choices_by_path: dict[str, Sequence[Json]] = {**table.choices, "optimizer.type": [*OPTIMIZERS]}
    for path, choices in choices_by_path.items():
        value, names = look_up(content, path), [str(choice) for choice in choices]
        if value is not None and value not in choices and str(value).lower() not in names:
            yield path, f"{path} = {shown(value)} is not possible: choose from {', '.join(names)}"
    yield from _idle_options(content)


def _idle_options(content: Section) -> Iterator[Problem]:
    """Yield options that exclude others, or that the library does not have."""
    kind = type_of(content, "optimizer") or "AdamW"  # the guide's default
    if look_up(content, "optimizer.params.adam_w_mode") is False and kind.lower() != "adam":
        yield "optimizer.params.adam_w_mode", f"optimizer.params.adam_w_mode = false needs the type Adam, not {kind}"
    betas = look_up(content, "optimizer.params.betas")
    if betas is not None and not (isinstance(betas, list) and len(betas) == 2):
        yield "optimizer.params.betas", f"optimizer.params.betas must be two numbers, not {betas!r}"
    if type_of(content, "scheduler") == "OneCycle" and look_up(content, "scheduler.params.cycle_momentum") is not False:
        why = "the optimizer sets the betas; DeepSpeed would move them with the learning rate"
        yield "scheduler.params.cycle_momentum", f"scheduler.params.cycle_momentum must be false: {why}"
    devices = [look_up(content, f"zero_optimization.offload_{what}.device") for what in ("optimizer", "param")]
    if devices[0] in (None, "none") and devices[1] not in (None, "none"):
        path = "zero_optimization.offload_param"
        yield path, f"{path} needs offload_optimizer: parameters leave the device after the optimizer state"
