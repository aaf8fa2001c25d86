"""Memory of a worker, predicted and measured, for long sequences (docs/parallelism.md) and for activations on the host
(docs/recomputation.md).

Both run on a CPU, so they measure bytes, but not times. For offloading, arrays that do not count as device memory
simulate the host.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.contest import Answer, Columns, Flag, Row, asks, progress, table
from benchmarks.planner import Case, Result, measure
from benchmarks.planner_worker import LENGTHS
from rapidformer_templates.switches.auto_strategy.layouts import Layout

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


@asks(
    Flag("workers", 4, "maximum number of worker processes"),
    Flag("num-experts", 0, "experts that replace each feed-forward, 0 for none", kind=int),
    Flag("expert-model-parallel-size", 1, "workers over which one copy of the experts is divided"),
    Flag("longest", 32768, f"longest sequence in tokens, one of {', '.join(map(str, LENGTHS))}"),
)
def context(options: argparse.Namespace) -> Answer:
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


OFFLOADED = (
    Case("gpt2", Layout(micro_batch=8)),
    Case("gpt2", Layout(micro_batch=8, recompute="full")),
    Case("llama", Layout(micro_batch=4, recompute="selective")),
    Case("gpt2", Layout(tensor=2, micro_batch=4)),
    Case("llama", Layout(pipeline=2, micro_batch=2, accumulation=8)),
    Case("llama", Layout(data=2, micro_batch=2, partitioning="fsdp")),
)

OFFLOAD_COLUMNS: Columns = {
    "model": "{model}",
    "layout": "{layout}",
    "on the device": "{here_mb:.2f}",
    "offloaded": "{offloaded_mb:.2f}",
    "predicted": "{predicted_mb:.2f}",
    "error": "{error:+.1%}",
    "on the host": "{host_mb:.2f}",
}


@asks(Flag("workers", 2, "maximum number of worker processes"))
def offload(options: argparse.Namespace) -> Answer:
    cases = [case for case in OFFLOADED if case.layout.world <= options.workers]
    both = [*cases, *(replace(case, offload=True) for case in cases)]
    with progress("offload", len({case.layout.world for case in cases})) as advance:
        results = {result.case: result for result in measure(both, advance)}
    rows = [_offload_row(results[case], results[replace(case, offload=True)]) for case in cases]
    title = (
        "peak per worker, MB: activations on the device, then on the host (tensor·pipeline·data, micro × accumulation)"
    )
    return Answer({"rows": rows}, table(title, rows, OFFLOAD_COLUMNS, left=2), [], partial(_draw_offload, rows))


def _offload_row(here: Result, offloaded: Result) -> Row:
    return {
        "model": here.case.model,
        "layout": here.case.name,
        "here_mb": here.measured / 1e6,
        "offloaded_mb": offloaded.measured / 1e6,
        "predicted_mb": offloaded.predicted.total / 1e6,
        "error": offloaded.error,
        "host_mb": offloaded.host / 1e6,
        "host_predicted_mb": offloaded.predicted.host / 1e6,
    }


def _draw_offload(rows: Sequence[Row], axes: Any) -> None:
    names = [f"{row['model']} {row['layout']}" for row in rows]
    for key, label in (("here_mb", "activations on the device"), ("offloaded_mb", "activations on the host")):
        axes.plot([row[key] for row in rows], names, "o", label=label)
    axes.set_xlabel("measured peak per worker, MB")
    axes.legend()
