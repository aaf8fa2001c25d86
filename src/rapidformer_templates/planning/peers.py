"""This library's names for the flags of other trainers, with the table ``peers.toml``. Does not import torch."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

from rapidformer_templates.errors import alike

SIMILAR = 0.75
"""How similar two names must be to suggest one for the other: ``tf31`` and ``tf32``, but not ``bf16`` and ``tf32``."""


class Equivalent(NamedTuple):
    """This library's equivalent of another trainer's flag.

    Attributes:
        flags: the flags, with a value if the name implies one (``--mixed-precision bf16``). Empty if there is none.
        note: additional information.
    """

    flags: str
    note: str = ""


@cache
def equivalents() -> dict[str, Equivalent]:
    """Return the equivalents of ``peers.toml`` by name, with underscores."""
    table = tomllib.loads(Path(__file__).with_name("peers.toml").read_text(encoding="utf-8"))
    return {
        name.replace("-", "_"): Equivalent(*columns)
        for names, *columns in table["equivalents"]
        for name in names.split()
    }


def as_yaml(flags: str) -> str:
    """Return flags as in a file: ``mixed_precision: bf16``."""
    return ", ".join(f"{name}: {value}" if value else name for name, value in _pairs(flags))


def as_code(flags: str) -> str:
    """Return flags as in a script: ``mixed_precision="bf16"``."""
    return ", ".join(f'{name}="{value}"' if value else name for name, value in _pairs(flags))


def _pairs(flags: str) -> list[tuple[str, str]]:
    """Return (field, value) of each flag."""
    pairs = re.findall(r"--(\S+)(?: (?!--)(\S+))?", flags)
    return [(name.replace("-", "_"), value) for name, value in pairs]


def flag_hint(word: str, known: Iterable[str], spelled: Callable[[str], str] = str) -> str | None:
    """Return a hint for an unknown name: its equivalent here, or the known flag with the closest spelling.

    Args:
        word: the name, with or without its dashes.
        known: the known flags, with their dashes.
        spelled: formats flags as the source of the name does. By default, as a command line.
    """
    name = word.lstrip("-").replace("-", "_").lower()
    equivalent = equivalents().get(name)
    if equivalent is not None:
        return " ".join(
            part
            for part in (equivalent.flags and f"did you mean {spelled(equivalent.flags)}?", equivalent.note)
            if part
        )
    flags = {flag.lstrip("-").replace("-", "_"): flag for flag in known}
    near = alike(name, flags, cutoff=SIMILAR)
    return f"did you mean {spelled(flags[near[0]])}?" if near else None
