"""Changes of flags that a refusal suggests. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rapidformer_templates.planning.config import spelling

if TYPE_CHECKING:
    from rapidformer_templates.planning.switch import Request


@dataclass(frozen=True)
class Change:
    """One change in the search for a combination that works.

    Attributes:
        describe: what the user would change, such as ``--fsdp-memory-optimization``.
        cost: one of the constants below.
        values: fields to set.
        template: the new template, if it changes.
        note: why it helps.
    """

    describe: str
    cost: float
    values: Mapping[str, object] = field(default_factory=dict)
    template: str | None = None
    note: str = ""


# The nearest combination keeps as much as possible of what the user asked for. Another template keeps every switch and
# every hook, so it is nearer than another switch. Removing a switch is the last resort.
ADD = 1.0
MOVE = 1.5
REPLACE = 2.0
DROP = 4.0

WITHOUT = "without "  # begins the text of a change that only removes flags


def spell(values: Mapping[str, object]) -> str:
    """Spell values as flags, such as ``--optimizer adafactor``. Flags that are turned off are left out."""
    words = (
        spelling(name) if value is True else f"{spelling(name)} {value}" for name, value in values.items() if value
    )
    return " ".join(words)


def _described(values: Mapping[str, object]) -> str:
    """Return values as flags, and then the flags that they turn off."""
    off = [spelling(name) for name, value in values.items() if not value]
    return " ".join([spell(values), *([f"{WITHOUT}{' '.join(off)}"] if off else [])])


def add(values: Mapping[str, object], note: str = "") -> Change:
    """Add required flags."""
    return Change(_described(values), ADD, values, note=note)


def replace(values: Mapping[str, object], note: str = "") -> Change:
    """Change the values of flags, or replace flags with others."""
    return Change(_described(values), REPLACE, values, note=note)


def drop(off: Mapping[str, object], note: str = "") -> Change:
    """Remove flags. A choice such as ``--data-iterator`` is spelled with the value that turns it off."""
    replacements = {name: value for name, value in off.items() if isinstance(value, str)}
    dropped = [spelling(name) for name in off if name not in replacements]
    words = ([spell(replacements)] if replacements else []) + ([f"{WITHOUT}{' '.join(dropped)}"] if dropped else [])
    return Change(" ".join(words), DROP, off, note=note)


def move(request: Request, template: str) -> Change:
    """Change the template: one base class in a script, or one flag on a command line."""
    if request.environment.white_box:
        return Change(f"class MyTask({template})", MOVE, template=template, note="your hooks stay unchanged")
    return Change(f"--template {template}", MOVE, template=template, note="the switches stay unchanged")
