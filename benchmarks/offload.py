"""Memory of a worker with and without activations on the host, predicted and measured: docs/recomputation.md.

It runs on a CPU. Arrays that do not count as device memory simulate the host. So it measures bytes, but not times.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.contest import Answer, Columns, Flag, Row, asks, progress, table
from benchmarks.planner import Case, Result, measure
from rapidformer_templates.switches.auto_strategy.layouts import Layout

FLAGS = (Flag("workers", 2, "maximum number of worker processes"),)

CASES = (
    Case("gpt2", Layout(micro_batch=8)),
    Case("gpt2", Layout(micro_batch=8, recompute="full")),
    Case("llama", Layout(micro_batch=4, recompute="selective")),
    Case("gpt2", Layout(tensor=2, micro_batch=4)),
    Case("llama", Layout(pipeline=2, micro_batch=2, accumulation=8)),
    Case("llama", Layout(data=2, micro_batch=2, partitioning="fsdp")),
)

COLUMNS: Columns = {
    "model": "{model}",
    "layout": "{layout}",
    "on the device": "{here_mb:.2f}",
    "offloaded": "{offloaded_mb:.2f}",
    "predicted": "{predicted_mb:.2f}",
    "error": "{error:+.1%}",
    "on the host": "{host_mb:.2f}",
}


@asks(*FLAGS)
def answer(options: argparse.Namespace) -> Answer:
    cases = [case for case in CASES if case.layout.world <= options.workers]
    both = [*cases, *(replace(case, offload=True) for case in cases)]
    with progress("offload", len({case.layout.world for case in cases})) as advance:
        results = {result.case: result for result in measure(both, advance)}
    rows = [_row(results[case], results[replace(case, offload=True)]) for case in cases]
    title = (
        "peak per worker, MB: activations on the device, then on the host (tensor·pipeline·data, micro × accumulation)"
    )
    return Answer({"rows": rows}, table(title, rows, COLUMNS, left=2), [], partial(_draw, rows))


def _row(here: Result, offloaded: Result) -> Row:
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


def _draw(rows: Sequence[Row], axes: Any) -> None:
    names = [f"{row['model']} {row['layout']}" for row in rows]
    for key, label in (("here_mb", "activations on the device"), ("offloaded_mb", "activations on the host")):
        axes.plot([row[key] for row in rows], names, "o", label=label)
    axes.set_xlabel("measured peak per worker, MB")
    axes.legend()
