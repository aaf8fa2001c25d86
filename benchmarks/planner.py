"""``bench planner``: the memory that the planner predicts, beside what real steps of the same layouts take.

Each layout trains some steps through the product's own engine in worker processes. Bytes of the states must be
exactly those predicted; the peak of live storages is compared, and so are the estimates that DeepSpeed and
Megatron publish for such layouts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table

from benchmarks import planner_others, planner_published
from benchmarks.planner_models import MODELS
from rapidformer_templates.commands.bench.output import Advance, progress, put_out
from rapidformer_templates.switches.auto_strategy.layouts import Layout
from rapidformer_templates.switches.auto_strategy.memory import Memory, held_by_worker, predict
from rapidformer_templates.switches.auto_strategy.search import ALLOWANCE
from rapidformer_templates.switches.auto_strategy.setting import Setting
from rapidformer_templates.switches.auto_strategy.state_bytes import Held
from rapidformer_templates.system import launch

GOAL_MEDIAN, GOAL_WORST = 0.03, 0.10
"""Errors of the peak, as shares."""


@dataclass(frozen=True)
class Row:
    """A layout of a model: a key of ``MODELS``."""

    model: str
    layout: Layout
    precision: str = "fp32"

    @property
    def flags(self) -> list[str]:
        narrow = [] if self.precision == "fp32" else ["--mixed-precision", self.precision]
        return [*self.layout.flags(), *narrow]

    @property
    def name(self) -> str:
        layout = self.layout
        sizes = f"{layout.tensor}·{layout.pipeline}·{layout.data}"
        ways = [layout.partitioning] if layout.partitioning != "none" else []
        ways += ["recompute"] if layout.recompute else []
        ways += ["sequence"] if layout.sequence_parallel else []
        ways += [self.precision] if self.precision != "fp32" else []
        return f"{sizes}  {layout.micro_batch}×{layout.accumulation}  {' '.join(ways)}".rstrip()


ROWS = (
    Row("gpt2", Layout(micro_batch=4)),
    Row("gpt2", Layout(micro_batch=2, accumulation=4)),
    Row("gpt2", Layout(micro_batch=8, recompute=True)),
    Row("llama", Layout(micro_batch=2), "bf16"),
    Row("llama", Layout(micro_batch=1, accumulation=2, recompute=True), "bf16"),
    Row("bert", Layout(micro_batch=8)),
    Row("bert", Layout(micro_batch=4), "bf16"),
    Row("gpt2", Layout(data=2, micro_batch=4)),
    Row("llama", Layout(data=2, micro_batch=2, accumulation=2)),
    Row("bert", Layout(data=2, micro_batch=4, recompute=True), "bf16"),
    Row("gpt2", Layout(data=2, micro_batch=4, partitioning="fsdp")),
    Row("llama", Layout(data=2, micro_batch=2, accumulation=2, partitioning="fsdp"), "bf16"),
    Row("llama", Layout(data=2, micro_batch=2, partitioning="zero-1")),
    Row("llama", Layout(data=2, micro_batch=2, accumulation=2, partitioning="zero-2")),
    Row("bert", Layout(data=2, micro_batch=4, partitioning="zero-3")),
    Row("gpt2", Layout(tensor=2, micro_batch=4)),
    Row("gpt2", Layout(tensor=4, micro_batch=4)),
    Row("llama", Layout(tensor=2, sequence_parallel=True, micro_batch=4)),
    Row("bert", Layout(tensor=2, micro_batch=8, recompute=True)),
    Row("gpt2", Layout(pipeline=2, micro_batch=2, accumulation=4)),
    Row("llama", Layout(micro_batch=2, accumulation=4)),
    Row("llama", Layout(pipeline=2, micro_batch=2, accumulation=4)),
    Row("llama", Layout(pipeline=4, micro_batch=2, accumulation=4)),
    Row("llama", Layout(pipeline=2, micro_batch=2, accumulation=4, recompute=True)),
    Row("bert", Layout(pipeline=2, micro_batch=4, accumulation=2), "bf16"),
    Row("llama", Layout(data=4, micro_batch=2, partitioning="fsdp", recompute=True)),
    Row("llama", Layout(tensor=2, pipeline=2, micro_batch=2, accumulation=4)),
    Row("gpt2", Layout(tensor=2, data=2, micro_batch=4, partitioning="zero-1")),
    Row("bert", Layout(pipeline=2, data=2, micro_batch=4, accumulation=2, partitioning="zero-2")),
)
"""Three models, 1, 2 and 4 workers, every engine."""


@dataclass(frozen=True)
class Result:
    """A row with what was predicted and measured; bytes.

    Attributes:
        predicted: of the worker that needs most.
        held: states of each rank as predicted, and as the receipts tell.
        measured: the greatest of the workers' usual peaks of live storages.
        highest: the highest peak of any step of any worker.
        allocator: by the record of torch's allocator; None on several workers.
        resident_mb: the largest process.
        others: what other estimators say.
    """

    row: Row
    predicted: Memory
    held: list[tuple[Held, Held]]
    measured: int
    highest: int
    allocator: int | None
    resident_mb: float
    others: dict[str, float]

    @property
    def error(self) -> float:
        """Of the peak, as a share; above zero is too much."""
        return self.predicted.total / self.measured - 1

    @property
    def beside_states(self) -> tuple[int, int]:
        """Activations, gradients and buffers at the peak, predicted and measured: all but parameters and optimizer."""
        states = self.predicted.parameters + self.predicted.optimizer
        return self.predicted.total - states, self.measured - states

    @property
    def exact(self) -> bool:
        """Whether the states are those predicted, on every rank, to the byte."""
        return all(predicted == measured for predicted, measured in self.held)

    @property
    def would_fit(self) -> bool:
        """Whether a device on which the plan says that this fits could hold its highest peak."""
        return self.predicted.total * (1 + ALLOWANCE) >= self.highest

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.row.model,
            "layout": self.row.name,
            "flags": self.row.flags,
            "workers": self.row.layout.world,
            "states_predicted": [vars(predicted) for predicted, _ in self.held],
            "states_measured": [vars(measured) for _, measured in self.held],
            "states_exact": self.exact,
            "peak_predicted": vars(self.predicted) | {"total": self.predicted.total},
            "peak_measured": self.measured,
            "peak_highest": self.highest,
            "peak_of_allocator": self.allocator,
            "resident_mb": self.resident_mb,
            "beside_states": dict(zip(("predicted", "measured"), self.beside_states, strict=True)),
            "error": self.error,
            "others": self.others,
        }


def measure(rows: Sequence[Row], advance: Advance = lambda text: None) -> list[Result]:
    """Run the rows, those of one number of workers in one group of processes."""
    results = []
    for world in sorted({row.layout.world for row in rows}):
        group = [row for row in rows if row.layout.world == world]
        for row, told in zip(group, _run(group, world), strict=True):
            results.append(_result(row, told))
        advance(f"{world} workers")
    return results


def _run(rows: Sequence[Row], world: int) -> list[list[dict[str, Any]]]:
    """What each rank tells of each row."""
    cases = [{"model": row.model, "workers": world, "flags": row.flags} for row in rows]
    with tempfile.TemporaryDirectory(prefix="rf-") as folder:
        module = "benchmarks.planner_worker"
        command = [sys.executable, "-m", module, json.dumps(cases), folder]
        if world == 1:
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        else:
            launch.run_workers(command, world)
        files = [[Path(folder) / f"{i}-{rank}.json" for rank in range(world)] for i in range(len(rows))]
        return [[json.loads(file.read_text(encoding="utf-8")) for file in ranks] for ranks in files]


def _result(row: Row, told: list[dict[str, Any]]) -> Result:
    shapes = MODELS[row.model].shapes()
    kinds = ("parameter_bytes", "gradient_bytes", "optimizer_state_bytes")
    measured = [Held(*(rank["held"][kind] for kind in kinds)) for rank in told]
    recorded = [statistics.median(rank["allocator_peaks"]) for rank in told if rank["allocator_peaks"]]
    return Result(
        row,
        predict(shapes, row.layout, Setting(row.precision)),
        list(zip(held_by_worker(shapes, row.layout, Setting(row.precision)), measured, strict=True)),
        measured=int(max(statistics.median(rank["peaks"]) for rank in told)),
        highest=max(max(rank["peaks"]) for rank in told),
        allocator=int(max(recorded)) if recorded else None,
        resident_mb=max(rank["resident_mb"] for rank in told),
        others=planner_others.estimates(shapes, row.layout, MODELS[row.model].width, MODELS[row.model].heads),
    )


def table(results: Sequence[Result]) -> Table:
    made = Table(title="memory of a worker, MB: predicted and measured (tensor·pipeline·data, micro × accumulation)")
    made.title_justify = "left"
    made.add_column("model")
    made.add_column("layout")
    for name in ("states", "predicted", "measured", "error", "beside states", "allocator"):
        made.add_column(name, justify="right")
    for name in ("DeepSpeed", "Megatron", "resident"):
        made.add_column(name, justify="right")
    for result in results:
        made.add_row(
            result.row.model,
            result.row.name,
            "exact" if result.exact else "differ",
            f"{result.predicted.total / 1e6:.2f}",
            f"{result.measured / 1e6:.2f}",
            f"{result.error:+.1%}",
            " / ".join(f"{value / 1e6:.2f}" for value in result.beside_states),
            f"{result.allocator / 1e6:.2f}" if result.allocator else "–",
            *(_other(result, name) for name in ("deepspeed", "megatron")),
            f"{result.resident_mb:.0f}",
        )
    return made


def _other(result: Result, name: str) -> str:
    estimate = result.others.get(name)
    return "–" if estimate is None else f"{estimate / 1e6:.1f} ({estimate / result.measured - 1:+.0%})"


def notes(results: Sequence[Result]) -> list[str]:
    """Errors against their goals."""
    errors = [abs(result.error) for result in results]
    median, worst = statistics.median(errors), max(errors)
    inexact = [f"{result.row.model} {result.row.name}" for result in results if not result.exact]
    beyond = [f"{result.row.model} {result.row.name}" for result in results if not result.would_fit]
    return [
        f"states: {len(results) - len(inexact)} of {len(results)} layouts exact" + _named(inexact),
        f"peak: median error {median:.1%} (goal {GOAL_MEDIAN:.0%}), worst {worst:.1%} (goal {GOAL_WORST:.0%})",
        f"would not fit although the plan says so, with its allowance of {ALLOWANCE:.0%}: {len(beyond)}"
        + _named(beyond),
        "DeepSpeed: its estimators of model states, on ZeRO rows; Megatron: sbh(34 + 5as/h) a block in 16 bits, and "
        "16 bytes a parameter (Korthikanti et al., 2022); neither counts what is outside of the blocks",
    ]


def _named(names: list[str]) -> str:
    return f" ({'; '.join(names)})" if names else ""


def draw(axes: Any, results: Sequence[Result]) -> None:
    """Predicted against measured; on the line they are equal."""
    for model in MODELS:
        mine = [result for result in results if result.row.model == model]
        axes.scatter([r.measured / 1e6 for r in mine], [r.predicted.total / 1e6 for r in mine], label=model, s=18)
    ends = [0, max(result.measured for result in results) * 1.05 / 1e6]
    axes.plot(ends, ends, color="lightgrey", zorder=0)
    axes.set_xlabel("measured peak of live storages, MB a worker")
    axes.set_ylabel("predicted, MB")
    axes.legend()


def main(options: argparse.Namespace) -> int:
    """Measure, print and write; the exit status: 1 if states differ or something would not fit."""
    rows = [row for row in ROWS if row.layout.world <= options.workers]
    with progress("planner", len({row.layout.world for row in rows})) as advance:
        results = measure(rows, advance)
    published = planner_published.rows()
    document = {"rows": [result.to_json() for result in results], "published": published}
    tables = Group(table(results), planner_published.table(published))
    put_out(options, "planner", document, tables, notes(results), lambda axes: draw(axes, results))
    return 0 if all(result.exact and result.would_fit for result in results) else 1
