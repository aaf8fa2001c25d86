"""Changes that may mend a refused combination, and what each costs in the search for the nearest one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rapidformer_templates.planning.config import spelling
from rapidformer_templates.planning.switch import Change, Request

# The nearest combination keeps the most of what was asked. A change of the template keeps every
# switch and every hook, so it is nearer than another switch; taking a switch out is the last resort.
ADD = 1.0
MOVE = 1.5
REPLACE = 2.0
DROP = 4.0

WITHOUT = "without "  # begins the text of a change that only leaves flags out


def spell(values: Mapping[str, Any]) -> str:
    """The values as flags; those that are turned off are left out: ``--optimizer adafactor``."""
    words = (
        spelling(name) if value is True else f"{spelling(name)} {value}" for name, value in values.items() if value
    )
    return " ".join(words)


def add(values: Mapping[str, Any], note: str = "") -> Change:
    """Give flags that are required."""
    return Change(spell(values), ADD, values, note=note)


def replace(values: Mapping[str, Any], note: str = "") -> Change:
    """Give flags other values, or others in their place."""
    return Change(spell(values), REPLACE, values, note=note)


def drop(off: Mapping[str, Any], note: str = "") -> Change:
    """Leave flags out. A choice such as ``--data-iterator`` is spelled with the value that turns it off."""
    kept = {name: value for name, value in off.items() if isinstance(value, str)}
    gone = [spelling(name) for name in off if name not in kept]
    words = ([spell(kept)] if kept else []) + ([f"{WITHOUT}{' '.join(gone)}"] if gone else [])
    return Change(" ".join(words), DROP, off, note=note)


def move(request: Request, template: str) -> Change:
    """Work in another template: one base class in a script, one flag on a command line."""
    if request.environment.white_box:
        return Change(f"class MyTask({template})", MOVE, template=template, note="your hooks stay as they are")
    return Change(f"--template {template}", MOVE, template=template, note="the switches stay as they are")
