"""The automatic strategy: search for the best feasible layout."""

from __future__ import annotations

from dataclasses import dataclass

from rapidformer_templates.flags import flag
from rapidformer_templates.switches._switch import Stage, Switch


@dataclass(frozen=True)
class AutoStrategyFlags:
    """Acceleration"""

    auto_strategy: bool = flag(False, "search for the best layout of workers and batch")


SWITCH = Switch(
    name="auto-strategy",
    summary="Search for the best feasible layout of workers and batch.",
    source="[M]",
    stage=Stage.DATA,
    options=AutoStrategyFlags,
    active=lambda options, sizes: options.auto_strategy,
    on={"auto_strategy": True},
    off={"auto_strategy": False},
    available=False,
)
