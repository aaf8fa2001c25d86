"""Output for users: the plan before a run, a table and a plot after it, and ``summary.json``."""

from __future__ import annotations

import math
import os
import platform
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from torch import nn

from rapidformer_templates.models.blocks import canonical_name, shape_of
from rapidformer_templates.models.placement import placement_of
from rapidformer_templates.planning.environment import version_of_package
from rapidformer_templates.planning.plan import Plan
from rapidformer_templates.planning.registry import REGISTRY
from rapidformer_templates.run.best import LOSS
from rapidformer_templates.run.folder import RunFolder, is_test_line, read_metrics
from rapidformer_templates.system.files import finite, write_json
from rapidformer_templates.system.workers import Workers

if TYPE_CHECKING:
    from rapidformer_templates.engines.contract import Engine
    from rapidformer_templates.run.loop import Loop, Position
    from rapidformer_templates.run.meter import Meter
    from rapidformer_templates.run.template import Template

REPORTED_PACKAGES = ("torch", "transformers", "datasets", "accelerate", "deepspeed", "fairscale", "onnxruntime")


def say(workers: Workers, line: str, *, loud: bool = False) -> None:
    """Print a line from rank 0. Loud lines begin with ``warning:``."""
    if workers.is_main:
        print_lines(f"warning: {line}" if loud else line)


def print_lines(text: str) -> None:
    """Print lines to standard error. Errors are ignored, so that a run continues if nobody reads them."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def show_plan(plan: Plan) -> None:
    """Print the plan in a few lines."""
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
    lines += [f"note       {note}" for note in plan.notes]
    print_lines("\n".join(lines))


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that may affect a run's results."""
    versions_by_package = {"python": platform.python_version()}
    for name in ("rapidformer_templates", *REPORTED_PACKAGES):
        try:
            versions_by_package[name] = version_of_package(name)
        except PackageNotFoundError:
            continue
    return versions_by_package


def summarise(
    template: Template, loop: Loop, metrics: dict[str, float], receipts: dict[str, Any], workers: Workers
) -> dict[str, Any]:
    """Return the summary of a run. Rank 0 writes it to ``summary.json``."""
    summary = {
        **what_was_done(template.plan, loop.engine, loop.position, loop.meter, receipts),
        "epochs": loop.epoch,
        "metrics": metrics,
        "best": loop.position.best,
        "stopped_early": loop.early_stop_reason,
        "skipped_lines": len(template.task.skipped) if template.uses_task else 0,
    }
    if not loop.meter.steps and loop.folder and loop.folder.summary.exists():
        # A complete run was resumed without a step, so its earlier measurements are still valid.
        earlier = loop.folder.read_summary()
        measured = ("throughput", "receipts", "wall_seconds", "peak_memory_mb", "peak_memory_mb_by_rank")
        summary |= {name: earlier[name] for name in measured}
    summary["trackers"] = workers.broadcast(loop.trackers.end(summary) if loop.trackers else {})
    if workers.is_main and loop.folder:
        write_json(loop.folder.summary, finite(summary))
    return summary


def what_was_done(
    plan: Plan, engine: Engine, position: Position, meter: Meter, receipts: dict[str, Any]
) -> dict[str, Any]:
    """Return the part of the summary that runs and sessions share. Call it on every rank."""
    rates = meter.totals()
    memory = engine.workers.gather(rates["peak_memory_mb"])
    parameters, trainable = count_parameters(engine.model, engine.workers)
    return {
        "template": plan.template,
        "switches": list(plan.switches),
        "steps": position.step,
        "samples": position.samples,
        "tokens": position.tokens,
        "throughput": {name: value for name, value in rates.items() if "per_second" in name or name == "step_ms"},
        "peak_memory_mb": max(memory),
        "peak_memory_mb_by_rank": memory,
        "wall_seconds": rates["wall_seconds"],
        "parameters": parameters,
        "trainable_parameters": trainable,
        "receipts": receipts,
        "versions": versions(),
    }


def count_parameters(model: nn.Module, workers: Workers) -> tuple[int, int]:
    """Return (all, trained) parameter elements of the whole model. Call it on every rank."""
    placement, total, trained = placement_of(model), 0, 0
    for name, parameter in model.named_parameters():
        stages = placement.stages.get(placement.whole_name(canonical_name(name)), (workers.pipeline_rank,))
        if stages[0] == workers.pipeline_rank:
            size = math.prod(shape_of(parameter))
            total, trained = total + size, trained + size * parameter.requires_grad
    if workers.pipeline == 1:
        return total, trained
    first = workers.copy_rank == 0 and workers.tensor_rank == 0
    sums = workers.sum(total * first, trained * first)
    return int(sums[0]), int(sums[1])


def show_results(folder: RunFolder | None, summary: dict[str, Any]) -> None:
    """Print a table of the results to standard output, and plot the curves in the run folder."""
    table = Table(title="results", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_row("steps", f"{summary['steps']:,} ({summary['epochs']:g} epochs)")
    for name, value in summary["metrics"].items():
        table.add_row(name, f"{value:.4f}")
    rates = summary["throughput"]
    if rates:
        spread = f" ± {rates['samples_per_second_sd']:,.1f}"
        table.add_row("samples/s", f"{rates['samples_per_second']:,.1f}{spread}")
        if "tokens_per_second" in rates:
            table.add_row("tokens/s", f"{rates['tokens_per_second']:,.0f}")
    table.add_row("peak memory per worker", f"{summary['peak_memory_mb']:,.0f} MB")
    table.add_row("wall time", f"{summary['wall_seconds']:,.1f} s")
    frozen = summary["trainable_parameters"] < summary["parameters"]
    trained = f", {summary['trainable_parameters']:,} of them trained" if frozen else ""
    table.add_row("parameters", f"{summary['parameters']:,}{trained}")
    if folder:
        draw_curves(folder)
        for name, path in (("metrics", folder.metrics), ("curves", folder.curves), ("exported model", folder.export)):
            if path.exists():
                table.add_row(name, str(path))
    for name, tracker in summary["trackers"].items():
        table.add_row(name, f"failed: {tracker['failed']}" if tracker["failed"] else tracker["where"])
    console = Console(force_jupyter=False)  # plain text, even in a notebook
    with console.capture() as captured:
        console.print(table)
    try:
        print(captured.get(), end="", flush=True)
    except OSError:  # nobody reads it any more, but the run must still finish
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def draw_curves(folder: RunFolder) -> None:
    """Plot loss and throughput over the steps to ``curves.png``."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = read_metrics(folder.metrics)
    steps = [line for line in lines if "loss" in line]
    evaluations = [line for line in lines if "loss" not in line and not is_test_line(line)]
    losses = dict.fromkeys(name for line in evaluations for name in line if name == LOSS or name.endswith("/loss"))
    figure = Figure(figsize=(8, 6), layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True)
    upper.plot([s["step"] for s in steps], [s["loss"] for s in steps], label="training", linewidth=1)
    for name in losses:
        points = [(line["step"], line[name]) for line in evaluations if name in line]
        label = "validation" if name == LOSS else name.removesuffix("/loss")
        upper.plot(*zip(*points, strict=True), "o-", label=label)
    upper.set_ylabel("loss")
    upper.legend()
    lower.plot([s["step"] for s in steps], [s["samples_per_second"] for s in steps], color="tab:green", linewidth=1)
    lower.set_ylabel("samples per second")
    lower.set_ylim(bottom=0)
    lower.set_xlabel("optimizer step")
    for axes in (upper, lower):
        axes.grid(alpha=0.3)
    temporary = folder.curves.with_name("curves.tmp.png")
    figure.savefig(temporary, dpi=110)
    temporary.rename(folder.curves)
