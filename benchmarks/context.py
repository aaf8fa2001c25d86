"""Memory of a worker for long sequences with context parallelism, predicted and measured: docs/parallelism.md.

It measures peaks of live storages on a CPU. So it measures bytes, but not times.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from benchmarks.contest import Answer, Columns, Flag, Row, asks, progress, table
from benchmarks.planner import Case, Result, measure
from benchmarks.planner_worker import LENGTHS
from rapidformer_templates.switches.auto_strategy.layouts import Layout

FLAGS = (
    Flag("workers", 4, "maximum number of worker processes"),
    Flag("num-experts", 0, "experts that replace each feed-forward, 0 for none", kind=int),
    Flag("expert-model-parallel-size", 1, "workers over which one copy of the experts is divided"),
    Flag("longest", 32768, f"longest sequence in tokens, one of {', '.join(map(str, LENGTHS))}"),
)

GOAL = 0.10
"""Goal: largest relative difference from 1/N of one worker's memory, without parameters and optimizer state."""

COLUMNS: Columns = {
    "tokens": "{tokens:,}",
    "workers": "{workers}",
    "states": lambda row: "exact" if row["states_exact"] else "differ",
    "peak MB": "{measured_mb:.1f}",
    "predicted": "{predicted_mb:.1f}",
    "error": "{error:+.1%}",
    "without states": "{beside_mb:.1f}",
    "of one worker's": "{share:.3f}",
}


@asks(*FLAGS)
def answer(options: argparse.Namespace) -> Answer:
    sizes = [workers for workers in (1, 2, 4) if workers <= options.workers]
    lengths = [length for length in LENGTHS if length <= options.longest]
    experts = f"--num-experts {options.num_experts}" if options.num_experts else ""
    over = options.expert_model_parallel_size
    layouts = [Layout(context=workers, experts=math.gcd(over, workers)) for workers in sizes]
    cases = [Case(f"llama-{n}", layout, adapters=experts) for layout in layouts for n in lengths]
    with progress("context", len(sizes)) as advance:
        results = measure(cases, advance)
    alone = {result.case.model: _beside(result) for result in results if result.case.layout.context == 1}
    rows = sorted((_row(result, alone) for result in results), key=lambda row: (row["tokens"], row["workers"]))
    title = "peak memory of a worker, with and without weights and optimizer state: a llama of 2 blocks, width 64"
    title += f", {options.num_experts} experts" if experts else ""
    farthest = max(abs(row["share"] * row["workers"] - 1) for row in rows)
    note = f"without states: at most {farthest:.1%} from 1/N of one worker's memory (goal {GOAL:.0%})"
    return Answer({"rows": rows}, table(title, rows, COLUMNS, left=0), [note], partial(_draw, rows))


def _beside(result: Result) -> float:
    """Return the measured bytes without parameters and optimizer state, which are complete on each worker."""
    return float(result.measured - result.predicted.parameters - result.predicted.optimizer)


def _row(result: Result, alone: dict[str, float]) -> Row:
    return {
        "tokens": int(result.case.model.partition("-")[2]),
        "workers": result.case.layout.context,
        "states_exact": result.exact,
        "measured_mb": result.measured / 1e6,
        "predicted_mb": result.predicted.total / 1e6,
        "error": result.error,
        "beside_mb": _beside(result) / 1e6,
        "share": _beside(result) / alone[result.case.model],
    }


def _draw(rows: Sequence[Row], axes: Any) -> None:
    for workers in sorted({row["workers"] for row in rows}):
        mine = [row for row in rows if row["workers"] == workers]
        axes.plot(
            [row["tokens"] for row in mine], [row["measured_mb"] for row in mine], "o-", label=f"{workers} workers"
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xlabel("tokens per sequence")
    axes.set_ylabel("peak per worker, MB")
    axes.legend()
