"""``benchmarks states``: bytes of model states per parameter on each worker, by formula and by the receipts.

Each way to partition the states trains a few steps in bf16 with 1, 2 and 4 replicas of a small llama, or of its halves
under tensor parallelism.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.contest import Advance, Answer, Columns, Flag, Row, asks, progress, table, verdict
from benchmarks.planner import run_in_groups
from benchmarks.planner_worker import MODELS
from rapidformer_templates.switches.auto_strategy.layouts import Layout
from rapidformer_templates.switches.auto_strategy.memory import states_by_worker

FLAGS = (Flag("workers", 4, "maximum number of worker processes"),)

MODEL = "llama"
WORLDS = (1, 2, 4)
PRECISION = "bf16"


@dataclass(frozen=True)
class Way:
    """A way to partition the model states.

    Attributes:
        layout: Layout of one replica.
        formula: Returns the bytes per parameter for a number of replicas, without buckets.
        text: The formula as text.
        goal: Returns the bytes per parameter that a worker may hold at most. None if there is no goal.
    """

    layout: Layout
    formula: Callable[[int], float]
    text: str
    goal: Callable[[int], float] | None = None


WAYS = {
    "none": Way(Layout(), lambda d: 18, "2 + 4 + 12"),
    "distributed-optimizer": Way(
        Layout(partitioning="distributed-optimizer"), lambda d: 2 + 16 / d, "2 + (4 + 12) / d", lambda d: 2 + 4 + 12 / d
    ),
    "zero-1": Way(Layout(partitioning="zero-1"), lambda d: 2 + 14 / d, "2 + (2 + 12) / d"),
    "zero-2": Way(Layout(partitioning="zero-2"), lambda d: 2 + 14 / d, "2 + (2 + 12) / d", lambda d: 2 + 16 / d),
    "zero-1, tensor 2": Way(Layout(tensor=2, partitioning="zero-1"), lambda d: 2 + 16 / d, "2 + (4 + 12) / d"),
    "zero-2, tensor 2": Way(
        Layout(tensor=2, partitioning="zero-2"), lambda d: 2 + 16 / d, "2 + (4 + 12) / d", lambda d: 2 + 16 / d
    ),
    "fsdp": Way(Layout(partitioning="fsdp"), lambda d: 16 / d, "(4 + 4 + 8) / d"),
    "zero-3": Way(Layout(partitioning="zero-3"), lambda d: 16 / d, "(2 + 2 + 12) / d"),
}
"""Parameters + gradients + optimizer state of AdamW, with master weights if the way has them."""

KINDS = ("parameter_bytes", "gradient_bytes", "optimizer_state_bytes")


def measure(workers: int, advance: Advance = lambda text: None) -> list[Row]:
    """Return a row for each way. All ways with the same number of workers run in one group of processes."""
    told: dict[str, dict[int, list[dict[str, Any]]]] = {name: {} for name in WAYS}
    for world in (count for count in WORLDS if count <= workers):
        layouts = {
            name: replace(way.layout, data=world // way.layout.tensor, micro_batch=2)
            for name, way in WAYS.items()
            if world >= way.layout.tensor
        }
        jobs = [(MODEL, [*layout.flags(), "--mixed-precision", PRECISION]) for layout in layouts.values()]
        for (name, layout), ranks in zip(layouts.items(), run_in_groups(jobs, world), strict=True):
            told[name][layout.data] = _held(layout, ranks)
        advance(f"{world} workers")
    return [_row(name, held) for name, held in told.items()]


def _held(layout: Layout, ranks: Sequence[dict[str, Any]]) -> list[dict[str, float]]:
    """Return bytes per parameter of each worker's part of the model, by kind."""
    whole = states_by_worker(MODELS[MODEL].shapes(""), replace(layout, partitioning="none"))
    counts = [held.parameters / 4 for held in whole]  # the planner's default is fp32
    return [
        {kind: size / count for kind, size in rank["held"].items() if isinstance(size, int)}
        for rank, count in zip(ranks, counts, strict=True)
    ]


def _row(name: str, told: dict[int, list[dict[str, float]]]) -> Row:
    """Build the row of a way from the worker that holds most, for each number of replicas."""
    most = {count: max(ranks, key=lambda held: sum(held[kind] for kind in KINDS)) for count, ranks in told.items()}
    return {
        "name": name,
        "formula": WAYS[name].text,
        "expected": {count: WAYS[name].formula(count) for count in told},
        "held": {count: [held[kind] for kind in KINDS] for count, held in most.items()},
        "buckets": {count: held.get("bucket_bytes", 0) for count, held in most.items()},
    }


def _columns(replicas: Sequence[int]) -> Columns:
    def parts(row: Row) -> str:
        return " + ".join(f"{part:.2f}" for part in row["held"][max(row["held"])])

    def whole(count: int) -> Callable[[Row], str]:
        return lambda row: (
            f"{sum(row['held'][count]):.2f} ({row['expected'][count]:.2f})" if count in row["held"] else "–"
        )

    return {
        "": "{name}",
        "formula": "{formula}",
        **{f"d = {count} (formula)": whole(count) for count in replicas},
        "parts at the largest d": parts,
    }


def notes(rows: Sequence[Row]) -> list[str]:
    """Return lines with the goals, and with the size of the buckets, which the table does not count."""
    lines = []
    for row in rows:
        goal = WAYS[row["name"]].goal
        if goal:
            # Norms stay in fp32. They are a thousandth of the model.
            reached = all(round(sum(held), 2) <= goal(count) for count, held in row["held"].items())
            most = ", ".join(f"{goal(count):.2f}" for count in row["held"])
            lines.append(f"{row['name']}: goal at most {most}: {verdict(reached)}")
    buckets = {row["name"]: row["buckets"] for row in rows if any(row["buckets"].values())}
    told = (f"{name} {max(sizes.values()):.2f}" for name, sizes in buckets.items())
    return [*lines, f"buckets, not included: {', '.join(told) or 'none'}"]


@asks(*FLAGS)
def answer(options: argparse.Namespace) -> Answer:
    replicas = [count for count in WORLDS if count <= options.workers]
    with progress("states", len(replicas)) as advance:
        rows = measure(options.workers, advance)
    title = (
        f"bytes per parameter that a worker holds in {PRECISION}, for d replicas: parameters + gradients + optimizer"
    )
    return Answer({"model": MODEL, "rows": rows}, table(title, rows, _columns(replicas), left=2), notes(rows))
