"""Output for users: the plan before a run, a table and a plot after it, and ``summary.json``."""

from __future__ import annotations

import math
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from rich.table import Table

from rapidformer_templates.errors import counted
from rapidformer_templates.models.blocks import canonical_name, shape_of
from rapidformer_templates.planning.environment import versions_of
from rapidformer_templates.planning.plan import Plan
from rapidformer_templates.planning.registry import REGISTRY
from rapidformer_templates.run.folder import MetricsLine, RunFolder, Summary, is_test_line, read_metrics
from rapidformer_templates.run.performance import Meter
from rapidformer_templates.run.receipts import Measurements
from rapidformer_templates.run.run import Best, Run
from rapidformer_templates.run.steps import LOSS
from rapidformer_templates.system.files import finite, write_json
from rapidformer_templates.system.terminal import console, print_lines
from rapidformer_templates.system.workers import Workers

if TYPE_CHECKING:
    from rapidformer_templates.engines.assembly import Assembly
    from rapidformer_templates.run.loop import Loop

REPORTED_PACKAGES = (
    "rapidformer_templates", "torch", "transformers", "datasets", "accelerate", "deepspeed", "fairscale", "onnxruntime",
)  # fmt: skip
"""Packages whose versions may affect a run's results."""


def show_plan(plan: Plan) -> None:
    """Print the plan in a few lines."""
    print_lines("\n".join([*plan_lines(plan), *(f"note       {note}" for note in plan.notes)]))


def plan_lines(plan: Plan) -> list[str]:
    """Return the plan in a few lines."""
    sizes = plan.sizes
    batch = f"{sizes.global_batch} samples per step = {sizes.micro_batch} micro × {sizes.data} data-parallel"
    if any(REGISTRY[name].order for name in plan.switches):  # its batches are counted in tokens
        batch = f"{sizes.data * sizes.accumulation} micro batches per step = {sizes.data} data-parallel"
    lines = [
        f"template   {plan.template} ({plan.values['template']['origin']})",
        f"plan       {sizes.world} × {plan.device}, {plan.precision}, {plan.engine.partition(':')[2]}",
        f"batch      {batch} × {sizes.accumulation} accumulated",
        f"optimizer  {plan.optimizer}: {plan.optimizer_implementation}",
    ]
    if plan.switches:
        lines.append(f"switches   {' → '.join(plan.switches)}")
    return lines


def summarise(loop: Loop, metrics: dict[str, float], receipts: Measurements) -> Summary:
    """Return the summary of a run. Rank 0 writes it to ``summary.json``."""
    run = loop.run
    summary = {
        **what_was_done(run, loop.meter, receipts),
        "epochs": loop.epoch,
        "metrics": metrics,
        "metrics_step": loop.exported_step,
        "best": run.position.best,
        "stopped_early": loop.early_stop_reason,
        "stragglers": loop.stragglers.summary(),
        "skipped_lines": len(run.task.bad.skipped) if run.task else 0,
    }
    if not loop.meter.steps and run.folder:
        # A complete run was resumed without a step, so its earlier measurements are still valid.
        earlier = run.folder.read_summary()
        measured = {"started", "throughput", "receipts", "wall_seconds", "stragglers"}
        measured |= {"peak_memory_mb", "peak_memory_mb_by_rank"}
        summary |= {name: value for name, value in earlier.items() if name in measured}
    summary["trackers"] = run.workers.broadcast(loop.log.trackers.end(summary) if loop.log.trackers else {})
    if run.workers.is_main and run.folder:
        write_json(run.folder.summary, finite(summary))
    return summary


def what_was_done(run: Run, meter: Meter, receipts: Measurements) -> Summary:
    """Return the part of the summary that runs and sessions share. Call it on every rank."""
    rates = meter.totals()
    memory = run.workers.gather(rates["peak_memory_mb"])
    parameters, trainable = count_parameters(run.engine.assembly, run.workers)
    return {
        **run.workers.broadcast(_how_it_was_started(rates["wall_seconds"]) if run.workers.is_main else {}),
        "template": run.plan.template,
        "switches": list(run.plan.switches),
        "steps": run.position.step,
        "samples": run.position.samples,
        "tokens": run.position.tokens,
        "throughput": {name: value for name, value in rates.items() if "per_second" in name or name == "step_ms"},
        "peak_memory_mb": max(memory),
        "peak_memory_mb_by_rank": memory,
        "wall_seconds": rates["wall_seconds"],
        "parameters": parameters,
        "trainable_parameters": trainable,
        "receipts": receipts,
        "versions": versions_of(REPORTED_PACKAGES),
    }


def _how_it_was_started(seconds: float) -> dict[str, str | None]:
    """Return when, where and how this process started to train, ``seconds`` ago, and the commit of its code."""
    git = ("git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    try:
        commit = subprocess.run(git, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        commit = None  # there is no git, or the working folder is in no repository
    started = datetime.now().astimezone() - timedelta(seconds=seconds)
    return {
        "started": started.isoformat(timespec="seconds"),
        "host": socket.gethostname(),
        "git_commit": commit,
        "command": shlex.join(sys.orig_argv),
    }


def count_parameters(assembly: Assembly, workers: Workers) -> tuple[int, int]:
    """Return (all, trained) parameter elements of the whole model. Call it on every rank."""
    placement, total, trained = assembly.placement, 0, 0
    for name, parameter in assembly.model.named_parameters():
        stages = placement.stages.get(placement.whole_name(canonical_name(name)), (workers.pipeline_rank,))
        if stages[0] == workers.pipeline_rank:
            size = math.prod(shape_of(parameter))
            total, trained = total + size, trained + size * parameter.requires_grad
    if workers.pipeline == 1:
        return total, trained
    first = workers.copy_rank == 0 and workers.tensor_rank == 0
    sums = workers.sum(total * first, trained * first)
    return int(sums[0]), int(sums[1])


def show_results(folder: RunFolder | None, summary: Summary) -> None:
    """Print a table of the results to standard output, and plot the curves in the run folder."""
    table = Table(title="results", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right", overflow="fold")  # a path that is cut off cannot be opened
    table.add_row("steps", f"{summary['steps']:,} ({counted(summary['epochs'], 'epoch')})")
    if summary["metrics"]:
        best, step = summary["best"], summary["metrics_step"]
        which = f"the best by {best['metric']}" if best and best["step"] == step else "the last one"
        table.add_row("metrics of", f"step {step:,}, {which}")
    for name, value in summary["metrics"].items():
        table.add_row(name, f"{value:.4f}")
    rates = summary["throughput"]
    if rates:
        spread = f" ± {rates['samples_per_second_sd']:,.1f}" if "samples_per_second_sd" in rates else ""
        table.add_row("samples/s", f"{rates['samples_per_second']:,.1f}{spread}")
        if "tokens_per_second" in rates:
            table.add_row("tokens/s", f"{rates['tokens_per_second']:,.0f}")
    table.add_row("peak memory per worker", f"{summary['peak_memory_mb']:,.0f} MB")
    table.add_row("wall time", f"{summary['wall_seconds']:,.1f} s")
    frozen = summary["trainable_parameters"] < summary["parameters"]
    trained = f", {summary['trainable_parameters']:,} of them trained" if frozen else ""
    table.add_row("parameters", f"{summary['parameters']:,}{trained}")
    if folder:
        draw_curves(folder, summary["best"])
        for name, path in (("metrics", folder.metrics), ("curves", folder.curves), ("exported model", folder.export)):
            if path.exists():
                table.add_row(name, str(path))
    for name, tracker in summary["trackers"].items():
        table.add_row(name, f"failed: {tracker['failed']}" if tracker["failed"] else tracker["where"])
    terminal = console(plain=True)
    with terminal.capture() as captured:
        terminal.print(table)
    try:
        print(captured.get(), end="", flush=True)
    except OSError:  # nobody reads it any more, but the run must still finish
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


Points = list[tuple[int, float]]
"""(step, value) of a curve."""

TRAINING, LOSSES, RATE, SPEED = "training", "loss", "learning rate", "samples per second"

LEAST_SMOOTHED = 40
"""Number of points from which on the training loss is also drawn as a moving average."""

KEPT = 0.9
"""Share of the moving average that remains at each point."""


def curves_of(lines: Sequence[MetricsLine], metric: str = LOSS) -> dict[str, dict[str, Points]]:
    """Return the curves of ``metrics.jsonl`` by panel and label. Curves and panels without a point are left out.

    Args:
        metric: the metric that selects the best step. It has its own panel unless it is a loss.
    """
    steps = [line for line in lines if "loss" in line]
    evaluations = [line for line in lines if "loss" not in line and not is_test_line(line)]
    names = dict.fromkeys(name for line in evaluations for name in line if name == LOSS or name.endswith("/loss"))

    def points(lines: Sequence[MetricsLine], name: str) -> Points:
        return [(line["step"], line[name]) for line in lines if line.get(name) is not None]

    losses = {TRAINING: points(steps, "loss")}
    losses |= {
        "validation" if name == LOSS else name.removesuffix("/loss"): points(evaluations, name) for name in names
    }
    panels = {LOSSES: losses, RATE: {RATE: points(steps, "lr")}, SPEED: {SPEED: points(steps, "samples_per_second")}}
    if metric not in names:
        panels = {LOSSES: losses, metric: {metric: points(evaluations, metric)}, **panels}
    with_points = {title: {label: c for label, c in curves.items() if c} for title, curves in panels.items()}
    return {title: curves for title, curves in with_points.items() if curves}


def smoothed(points: Points) -> Points:
    """Return the exponential moving average of a curve, without a bias at its beginning."""
    average, weight, result = 0.0, 0.0, []
    for step, value in points:
        average = KEPT * average + (1 - KEPT) * value
        weight = KEPT * weight + (1 - KEPT)
        result.append((step, average / weight))
    return result


def draw_curves(folder: RunFolder, best: Best | None = None) -> None:
    """Plot losses, the metric that selects the best step, learning rate and throughput to ``curves.png``."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = curves_of(read_metrics(folder.metrics), best["metric"] if best else LOSS)
    if not panels:
        return
    figure = Figure(figsize=(8, 3 * len(panels)), layout="constrained")
    FigureCanvasAgg(figure)
    title = folder.path.resolve().name
    if best:
        title += f": best {best['metric']} {best['value']:.4g} at step {best['step']:,}"
    figure.suptitle(title, fontsize="medium", parse_math=False)
    all_axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (name, curves) in zip(all_axes, panels.items(), strict=True):
        for number, (label, points) in enumerate(curves.items()):
            is_dense = label in (TRAINING, RATE, SPEED) and len(points) > 1  # a line through one point is invisible
            is_noisy = label == TRAINING and len(points) >= LEAST_SMOOTHED
            style: dict[str, Any] = {"linewidth": 1, "color": "tab:green" if name == SPEED else f"C{number}"}
            if is_noisy:
                axes.plot(*zip(*points, strict=True), "-", alpha=0.3, **style)
            shown = smoothed(points) if is_noisy else points
            axes.plot(*zip(*shown, strict=True), "-" if is_dense else "o-", label=label, **style)
        if best:
            axes.axvline(best["step"], color="tab:red", linestyle=":", linewidth=1, label="best step")
        axes.set_ylabel(name)
        axes.grid(alpha=0.3)
        if name in (RATE, SPEED):
            axes.set_ylim(bottom=0)
        else:
            axes.legend()
    all_axes[-1].set_xlabel("optimizer step")
    temporary = folder.curves.with_name("curves.tmp.png")
    figure.savefig(temporary, dpi=110)
    temporary.rename(folder.curves)
