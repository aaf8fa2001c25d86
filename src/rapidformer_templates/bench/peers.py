"""``bench peers``: the demo's job by this library and by transformers' Trainer, with everything else equal.

Model, tweets, batch size, epochs, learning rate, schedule, weight decay, clipping and optimizer are
the same. Each run is a process of its own; the solutions take turns, so that a slow hour of the
machine hits all of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from rapidformer_templates.bench import peers_job
from rapidformer_templates.bench.demo_data import demo_model_folder, make_demo_data
from rapidformer_templates.bench.output import Advance, progress, put_out
from rapidformer_templates.errors import RapidformerError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OURS = "rapidformer_templates"
GOALS = {"transformers, dynamic padding": 1.4, "transformers, grouped by length": 1.1}
"""Samples a second of this library over those of the others."""

Run = dict[str, float]


def measure_peers(
    repeats: int, train: int, held_out: int, advance: Advance = lambda text: None
) -> dict[str, list[Run]]:
    """Run each solution ``repeats`` times, taking turns; the runs of each.

    Args:
        train, held_out: number of tweets.
        advance: told of each run.

    Raises:
        RapidformerError: the demo's data or model is absent, or a run failed.
    """
    runs: dict[str, list[Run]] = {name: [] for name in peers_job.SOLUTIONS}
    demo_model_folder()  # absent? then before anything is started
    with tempfile.TemporaryDirectory(prefix="rapidformer-peers-") as name:
        folder = Path(name)
        make_demo_data(folder / "data", train, held_out)
        for repeat in range(repeats):
            for solution in runs:
                runs[solution].append(_run(solution, repeat, folder))
                advance(solution)
    return runs


def _run(solution: str, seed: int, folder: Path) -> Run:
    """One run in a process of its own."""
    result = folder / "result.json"
    command = [sys.executable, "-m", peers_job.__name__, solution, str(folder), str(seed), str(result)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode != 0:
        raise RapidformerError(f"the run of {solution} failed", where=process.stderr.strip()[-2000:])
    figures: Run = json.loads(result.read_text(encoding="utf-8"))
    result.unlink()
    return figures


def main(options: argparse.Namespace) -> int:
    """Measure, print and write; the exit status."""
    with progress("peers", options.repeats * len(peers_job.SOLUTIONS)) as advance:
        runs = measure_peers(options.repeats, options.train, options.held_out, advance)
    result = {
        "train": options.train,
        "held_out": options.held_out,
        "runs": runs,
        "ratios": {name: _ratios(runs, name) for name in GOALS},
    }
    put_out(options, "peers", result, _table(runs), _verdicts(runs), lambda axes: _draw(axes, runs))
    return 0


def _ratios(runs: dict[str, list[Run]], peer: str) -> list[float]:
    """Our training speed over a peer's, turn by turn."""
    turns = zip(runs[OURS], runs[peer], strict=True)
    return [round(ours["samples_per_second"] / theirs["samples_per_second"], 3) for ours, theirs in turns]


def _spread(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def _table(runs: dict[str, list[Run]]) -> Table:
    table = Table(title="the demo's job, median ± standard deviation over the runs")
    table.add_column("solution")
    columns = {
        "training samples/s": ("samples_per_second", 1),
        "evaluation samples/s": ("eval_samples_per_second", 1),
        "positions a token": ("positions_a_token", 3),
        "accuracy": ("accuracy", 3),
        "whole run, s": ("total_seconds", 1),
    }
    for heading in columns:
        table.add_column(heading, justify="right")
    for name, results in runs.items():
        cells = []
        for field, digits in columns.values():
            values = [run[field] for run in results]
            cells.append(f"{statistics.median(values):.{digits}f} ± {_spread(values):.{digits}f}")
        table.add_row(name, *cells)
    return table


def _verdicts(runs: dict[str, list[Run]]) -> list[str]:
    lines = []
    for peer, goal in GOALS.items():
        ratios = _ratios(runs, peer)
        ratio = statistics.median(ratios)
        reached = "reached" if ratio >= goal else "missed"
        lines.append(f"{ratio:.2f} ± {_spread(ratios):.2f} × {peer}; goal {goal} ×: {reached}")
    return lines


def _draw(axes: Axes, runs: dict[str, list[Run]]) -> None:
    speeds: dict[str, Any] = {name: [run["samples_per_second"] for run in results] for name, results in runs.items()}
    medians = [statistics.median(values) for values in speeds.values()]
    colours = ["tab:orange" if name == OURS else "tab:blue" for name in speeds]
    axes.barh(list(speeds), medians, xerr=[_spread(values) for values in speeds.values()], color=colours)
    axes.set_xlabel("training samples per second")
    axes.invert_yaxis()
