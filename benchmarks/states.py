"""``benchmarks states``: bytes of the model's states that a worker holds a parameter, by formula and by the receipts.

Each way to share them out trains some steps in bf16 with 1, 2 and 4 replicas of a small llama.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.contest import Answer, Columns, Flag, Row, table, verdict
from benchmarks.planner import run_in_groups
from benchmarks.planner_worker import MODELS
from rapidformer_templates.commands.bench.output import Advance, progress
from rapidformer_templates.switches.auto_strategy.layouts import PARTITIONINGS, Layout

FLAGS = (Flag("workers", 4, "most worker processes"),)

MODEL = "llama"
REPLICAS = (1, 2, 4)
PRECISION = "bf16"


@dataclass(frozen=True)
class Way:
    """How the states are shared out.

    Attributes:
        formula: bytes a parameter for a number of replicas, without buckets.
        text: the formula.
        goal: the most that a worker may hold, where there is a goal.
    """

    formula: Callable[[int], float]
    text: str
    goal: Callable[[int], float] | None = None


WAYS = {
    "none": Way(lambda d: 18, "2 + 4 + 12"),
    "zero-1": Way(lambda d: 2 + 14 / d, "2 + (2 + 12) / d"),
    "zero-2": Way(lambda d: 2 + 14 / d, "2 + (2 + 12) / d", lambda d: 2 + 16 / d),
    "fsdp": Way(lambda d: 16 / d, "(4 + 4 + 8) / d"),
    "zero-3": Way(lambda d: 16 / d, "(2 + 2 + 12) / d"),
}
"""By the planner's names: parameters + gradients + optimizer state of AdamW, with masters where there are any."""

assert WAYS.keys() <= PARTITIONINGS.keys()


def measure(replicas: Sequence[int], advance: Advance = lambda text: None) -> list[Row]:
    """A row for each way; those of one number of replicas run in one group of processes."""
    told = {}
    for count in replicas:
        layouts = [Layout(data=count, micro_batch=2, partitioning=name) for name in WAYS]
        jobs = [[*layout.flags(), "--mixed-precision", PRECISION] for layout in layouts]
        told[count] = dict(zip(WAYS, run_in_groups([(MODEL, flags) for flags in jobs], count), strict=True))
        advance(f"{count} replicas")
    parameters = sum(p.count for p in MODELS[MODEL].shapes("").all_parameters.values())
    return [_row(name, {count: told[count][name] for count in replicas}, parameters) for name in WAYS]


def _row(name: str, told: dict[int, list[dict[str, Any]]], parameters: int) -> Row:
    """The worker that holds most, of each number of replicas."""
    kinds = ("parameter_bytes", "gradient_bytes", "optimizer_state_bytes")
    most = {count: max((rank["held"] for rank in ranks), key=_sum_of(kinds)) for count, ranks in told.items()}
    return {
        "name": name,
        "formula": WAYS[name].text,
        "expected": {count: WAYS[name].formula(count) for count in told},
        "held": {count: [held[kind] / parameters for kind in kinds] for count, held in most.items()},
        "buckets": {count: held.get("bucket_bytes", 0) / parameters for count, held in most.items()},
    }


def _sum_of(kinds: Sequence[str]) -> Callable[[dict[str, int]], int]:
    return lambda held: sum(held[kind] for kind in kinds)


def _columns(replicas: Sequence[int]) -> Columns:
    def held(count: int) -> Callable[[Row], str]:
        return lambda row: " + ".join(f"{part:.2f}" for part in row["held"][count])

    def whole(count: int) -> Callable[[Row], str]:
        return lambda row: f"{sum(row['held'][count]):.2f} ({row['expected'][count]:.2f})"

    return {
        "": "{name}",
        "formula": "{formula}",
        **{f"d = {count} (formula)": whole(count) for count in replicas},
        f"its parts at {replicas[-1]}": held(replicas[-1]),
    }


def notes(rows: Sequence[Row]) -> list[str]:
    """Goals, and what is not counted."""
    lines = []
    for row in rows:
        goal = WAYS[row["name"]].goal
        if goal:
            reached = all(sum(held) <= goal(count) for count, held in row["held"].items())
            most = ", ".join(f"{goal(count):.2f}" for count in row["held"])
            lines.append(f"{row['name']}: at most {most} are the goal: {verdict(reached)}")
    buckets = {row["name"]: row["buckets"] for row in rows if any(row["buckets"].values())}
    told = (f"{name} {max(sizes.values()):.2f}" for name, sizes in buckets.items())
    return [*lines, f"buckets beside them: {', '.join(told) or 'none'}"]


def answer(options: argparse.Namespace) -> Answer:
    replicas = [count for count in REPLICAS if count <= options.workers]
    with progress("states", len(replicas)) as advance:
        rows = measure(replicas, advance)
    title = f"bytes a parameter that a worker holds in {PRECISION}, for d replicas: parameters + gradients + optimizer"
    return Answer({"model": MODEL, "rows": rows}, table(title, rows, _columns(replicas), left=2), notes(rows))
