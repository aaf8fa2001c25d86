"""``bench run``: measures one configuration, given as the flags of a training command, with its model and data."""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from rich.table import Table

from rapidformer_templates.commands.bench.flops import MatrixProduct
from rapidformer_templates.commands.bench.output import put_out, spread
from rapidformer_templates.commands.bench.runs import WARMUP, MeasuredRun, run_together
from rapidformer_templates.commands.bench.tables import RUN
from rapidformer_templates.commands.bench.worker import BenchJob
from rapidformer_templates.commands.main import template_of
from rapidformer_templates.errors import RapidformerError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

REFUSED = ("--train-iters", "--epochs", "--save", "--resume", "--user-script")
"""Flags that the benchmark sets itself."""


def main(options: argparse.Namespace) -> int:
    """Measure, print and write the result, and return the exit status.

    Raises:
        RapidformerError: the flags are refused, or the run failed.
    """
    words = list(options.words)
    refused = [word for word in words if word.partition("=")[0].replace("_", "-") in REFUSED]
    if refused:
        raise RapidformerError(
            f"{refused[0]} is not a flag of a measured run",
            where="bench run",
            hint="see --turns and --steps-a-turn",
        )
    template = template_of(words)([*words, "--train-iters", "1", "--no-save"])
    plan = template.plan  # refuses bad flags before anything starts
    machines = 1 if plan.device == "cpu" else plan.sizes.world
    product = MatrixProduct(plan.device, plan.precision)
    with tempfile.TemporaryDirectory(prefix="rf-") as folder:
        job = BenchJob(
            table=RUN,
            solution=RUN,
            peer=None,
            scale="",
            workers=plan.sizes.world,
            turns=options.turns + WARMUP,
            steps=options.steps_a_turn or (1 if plan.device == "cpu" else 10),
            device=plan.device,
            precision=plan.precision,
            address=str(Path(folder) / "0.sock"),
            nvme="",
            words=tuple(without_launch(words)),
        )
        runs, reasons = run_together([job], 0, product.rate)
    if reasons:
        raise RapidformerError(f"the run failed: {reasons[RUN]}", where="bench run")
    result = _result(runs[RUN], machines)
    document = {**result, "flags": words, "plan": plan.to_json()}
    put_out(options, RUN, document, _table(result, words), [], lambda axes: _draw(axes, runs[RUN], result))
    return 0


def without_launch(words: list[str]) -> list[str]:
    """Return the flags without ``--nproc-per-node``, because the benchmark starts the workers."""
    rest, skip = [], False
    for word in words:
        name, equals, _ = word.partition("=")
        if skip or name.replace("_", "-") == "--nproc-per-node":
            skip = not skip and not equals
            continue
        rest.append(word)
    return rest


class RunResult(TypedDict):
    """The measured values, as the JSON has them."""

    samples_per_second: float
    samples_per_second_sd: float
    peak_mb: float
    utilisation: float | None
    flops_a_step: float
    matrix_product_flops_per_second: float
    loss: float
    parameters: int
    seconds: list[float]


def _result(run: MeasuredRun, machines: int) -> RunResult:
    main_worker = run.figures[0]
    batch, flops = main_worker["global_batch"], main_worker["flops"]
    rates = [batch / seconds for seconds in run.seconds]
    shares = [flops / seconds / peak / machines for seconds, peak in zip(run.seconds, run.peaks, strict=True)]
    return {
        "samples_per_second": batch * len(run.seconds) / sum(run.seconds),
        "samples_per_second_sd": spread(rates),
        "peak_mb": run.peak_mb,
        "utilisation": statistics.median(shares) if flops else None,
        "flops_a_step": flops,
        "matrix_product_flops_per_second": statistics.median(run.peaks),
        "loss": main_worker["loss"],
        "parameters": main_worker["parameters"],
        "seconds": run.seconds,
    }


def _table(result: RunResult, words: list[str]) -> Table:
    grid = Table(title=f"rapidformer {' '.join(words)}", title_justify="left")
    for heading in ("samples/s", "peak MB per worker", "utilisation", "parameters", "loss of the last step"):
        grid.add_column(heading, justify="right")
    share = result["utilisation"]
    grid.add_row(
        f"{result['samples_per_second']:.2f} ± {result['samples_per_second_sd']:.2f}",
        f"{result['peak_mb']:,.0f}",
        "not known" if share is None else f"{share:.3f}",
        f"{result['parameters']:,}",
        f"{result['loss']:.4f}",
    )
    return grid


def _draw(axes: Axes, run: MeasuredRun, result: RunResult) -> None:
    batch = result["samples_per_second"] * sum(run.seconds) / len(run.seconds)
    axes.plot(range(1, len(run.seconds) + 1), [batch / seconds for seconds in run.seconds], "o-", color="tab:orange")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("turn")
    axes.set_ylabel("samples per second")
