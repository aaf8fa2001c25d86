"""``benchmarks seconds``: the seconds of a step that the planner predicts on this machine, compared with real steps.

Measures the rates of this machine as ``rapidformer bench calibrate`` does, trains the layouts of ``benchmarks planner``
on 2 and 4 processes, and predicts their seconds with the measured rates. No constant is fitted to the steps.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.contest import Answer, Columns, Flag, Row, asks, progress, table, verdict
from benchmarks.planner import CASES, Case, run_in_group
from benchmarks.planner_worker import MODELS, measure_seconds
from benchmarks.published_runs import kendall_tau
from rapidformer_templates.commands.bench.calibrate import calibrate
from rapidformer_templates.planning.environment import Environment
from rapidformer_templates.switches.auto_strategy.memory import variant_of
from rapidformer_templates.switches.auto_strategy.model_of_flags import communication_sizes
from rapidformer_templates.switches.auto_strategy.step_seconds import Timing, predict_seconds
from rapidformer_templates.switches.auto_strategy.timing import find_hardware

GOAL_MEDIAN = 0.15
"""Goal: median of the relative errors of the seconds of a step."""

SECONDS = 0.2
"""Time of each measurement of the rates."""


def predict_case(case: Case, device_file: str) -> Timing:
    """Return the predicted seconds of a step of a case, with the rates of a device file."""
    layout, sizes = case.layout, MODELS[case.model]
    shapes = sizes.shapes(case.adapters)
    setting = case.setting(shapes)
    place = Environment(device="cpu", world_size=layout.world, local_world_size=layout.world, device_file=device_file)
    hardware = find_hardware(place, case.precision)
    cuts = layout.pipeline * layout.virtual
    stages = layout.stages or (shapes.stage_sizes(cuts) if layout.pipeline > 1 else ())
    trace = shapes.trace(variant_of(layout, setting))
    facts = communication_sizes(shapes, sizes.length)
    return predict_seconds(layout, setting, trace, facts, hardware, layout.world, stages)


@asks(
    Flag("workers", 4, "maximum number of worker processes"),
    Flag("every", 1, "measure only every n-th layout, to try it out"),
    Flag("device-file", None, "use this device file instead of measuring the rates"),
)
def answer(options: argparse.Namespace) -> Answer:
    """Measure the rates and the steps. The status is 0 even if the goal is missed."""
    counts = [count for count in (2, 4) if count <= options.workers]
    cases = {count: [case for case in CASES if case.layout.world == count][:: options.every] for count in counts}
    with tempfile.TemporaryDirectory(prefix="rf-") as folder:
        file = Path(options.device_file or Path(folder, "device.json"))
        if not options.device_file:
            calibrate("cpu", counts, SECONDS).write(file)
        rows: list[Row] = []
        with progress("seconds", len(counts)) as advance:
            for count, group in cases.items():
                told = run_in_group([(case.model, case.flags) for case in group], count, measure_seconds)
                rows += [_row(case, ranks, str(file)) for case, ranks in zip(group, told, strict=True)]
                advance(f"{count} workers")
    errors = [abs(row["error"]) for row in rows]
    per_model: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        per_model[f"{row['model']}, {row['workers']} workers"].append((row["predicted"], row["measured"]))
    taus = {name: kendall_tau(pairs) for name, pairs in per_model.items() if len(pairs) > 2}
    median = statistics.median(errors)
    notes = [
        f"median error {median:.1%}, worst {max(errors):.0%}",
        f"goal: median {GOAL_MEDIAN:.0%}: {verdict(median <= GOAL_MEDIAN)}",
        "Kendall's tau: " + ", ".join(f"{name} {tau:.2f}" for name, tau in taus.items()),
    ]
    shown = table("milliseconds of a step (tensor·pipeline·data, micro × accumulation)", rows, COLUMNS, left=2)
    return Answer({"rows": rows, "tau": taus}, shown, notes, partial(_draw, rows))


def _row(case: Case, ranks: Sequence[Sequence[float]], device_file: str) -> Row:
    predicted = predict_case(case, device_file)
    measured = statistics.median(max(steps) for steps in zip(*ranks, strict=True))
    return {
        "model": case.model,
        "layout": case.name,
        "workers": case.layout.world,
        "predicted": predicted.total,
        "parts": vars(predicted),
        "measured": measured,
        "error": predicted.total / measured - 1,
    }


COLUMNS: Columns = {
    "model": "{model}",
    "layout": "{layout}",
    "predicted": lambda row: f"{row['predicted'] * 1e3:.0f}",
    "measured": lambda row: f"{row['measured'] * 1e3:.0f}",
    "error": "{error:+.0%}",
}


def _draw(rows: Sequence[Row], axes: Any) -> None:
    """Plot predicted against measured seconds. On the line they are equal."""
    for model in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in rows if row["model"] == model]
        axes.scatter([row["measured"] for row in mine], [row["predicted"] for row in mine], label=model, s=18)
    ends = [0, max(row["measured"] for row in rows) * 1.05]
    axes.plot(ends, ends, color="lightgrey", zorder=0)
    axes.set_xlabel("measured seconds of a step")
    axes.set_ylabel("predicted")
    axes.legend()
