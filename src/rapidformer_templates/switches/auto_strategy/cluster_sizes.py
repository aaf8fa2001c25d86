"""``plan --auto-strategy --world-size 8,16,32``: the best layouts of several cluster sizes, as a table and a picture.

Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from rapidformer_templates.errors import Refused
from rapidformer_templates.planning.config import RunConfig
from rapidformer_templates.planning.environment import Environment
from rapidformer_templates.switches.auto_strategy import command, results
from rapidformer_templates.switches.auto_strategy.timing import Hardware
from rapidformer_templates.system.files import writing
from rapidformer_templates.system.terminal import console

if TYPE_CHECKING:
    from rapidformer_templates.switches.auto_strategy.model_of_flags import ModelSource


@dataclass(frozen=True)
class ClusterSize:
    """A number of workers with its best layout.

    Attributes:
        best: the best layout, or None if nothing fits.
        constraint: what is missing if nothing fits.
        training: the whole training with the best layout.
    """

    workers: int
    best: results.Candidate | None = None
    training: results.TrainingEstimate | None = None
    constraint: str | None = None

    def to_json(self) -> dict[str, object]:
        """Return the public JSON form. See docs/planner.md."""
        best = command.layout_to_json(self.best, self.training) if self.best and self.training else None
        return {"world_size": self.workers, "best": best, "constraint": self.constraint}


def plan_clusters(
    config: RunConfig,
    environment: Environment,
    sizes: Sequence[int],
    terms: results.TrainingTerms,
    source: ModelSource | None = None,
    *,
    as_json: bool,
    plot: str | None,
    cached: bool,
) -> int:
    """Search for each number of workers and print. Return the exit status, which is 1 if nothing fits anywhere.

    Args:
        environment: the environment of the first size. Its workers of a node are an upper limit for the others.
        source: builds the model. The default is the model of the flags.
        plot: file of the picture, if one is wanted.
        cached: whether results of equal searches are used.

    Raises:
        Refused: a rule refuses the flags for each size.
        ModelError, ConfigError: see :func:`command.search`.
    """
    clusters: list[ClusterSize] = []
    subjects: command.Subjects = {}
    result: results.SearchResult | None = None
    hardware: Hardware | None = None
    refused: Refused | None = None
    for size in sizes:
        place = replace(environment, world_size=size, local_world_size=min(environment.local_world_size, size))
        try:
            result, hardware = command.search(config, place, source=source, cached=cached, subjects=subjects)
        except Refused as refusal:
            refused = refusal
            first = refusal.diagnostics[0]
            clusters.append(ClusterSize(size, constraint=f"{first.rule}: {first.message}"))
            continue
        if not result.layouts:
            clusters.append(ClusterSize(size, constraint=command.closest_constraint(result)))
            continue
        training = results.estimate_training(result.layouts[0], config, place, terms, result.totals)
        clusters.append(ClusterSize(size, result.layouts[0], training))
    if result is None or hardware is None:
        assert refused is not None
        raise refused
    if plot:
        draw(clusters, hardware.memory_gb, terms, Path(plot))
    smallest = min((cluster.workers for cluster in clusters if cluster.best), default=None)
    if as_json:
        content = {
            "ok": smallest is not None,
            "clusters": [cluster.to_json() for cluster in clusters],
            "smallest": smallest,
            "assumed": hardware.lines(),
            "not_predicted": [vars(unknown) for unknown in result.not_predicted],
        }
        print(json.dumps(content, indent=2))
    else:
        show(clusters, smallest)
        for line in (*(f"assumed: {line}" for line in hardware.lines()), *command.not_predicted(result.not_predicted)):
            print(line)
    return 1 if smallest is None else 0


COLUMNS = ("workers", "best layout", "global", "needed GB", "s/step", "tokens/s", "MFU", "days", "cost")


def show(clusters: Sequence[ClusterSize], smallest: int | None) -> None:
    """Print a table of the sizes, and the smallest one that fits."""
    table = Table(title="Cluster sizes", title_justify="left")
    for name in COLUMNS:
        table.add_column(name, justify="left" if name == "best layout" else "right")
    for cluster in clusters:
        best, training = cluster.best, cluster.training
        if best is None or training is None:
            table.add_row(str(cluster.workers), f"nothing fits: {cluster.constraint}")
            continue
        table.add_row(
            str(cluster.workers),
            in_words(best),
            str(best.layout.global_batch),
            f"{best.needed_gb:.1f}",
            f"{best.timing.total:.3g}",
            f"{training.tokens_per_second:,.0f}",
            "" if training.mfu is None else f"{training.mfu:.1%}",
            "" if training.hours is None else f"{training.hours / 24:,.2f}",
            "" if training.cost is None else f"{training.cost:,.0f}",
        )
    console(piped_width=160).print(table)
    print("nothing fits on any of these sizes" if smallest is None else f"smallest that fits: {smallest} workers")


def in_words(candidate: results.Candidate) -> str:
    """Describe a layout on one line: ``tensor 2 × pipeline 4 · 2 × data 8, micro 1, zero-2, selective``."""
    layout = candidate.layout
    sizes = {"tensor": layout.tensor, "context": layout.context, "pipeline": layout.pipelined, "data": layout.data}
    divided = " × ".join(f"{name} {size}" for name, size in sizes.items() if size not in (1, "1")) or "data 1"
    experts = f"experts over {layout.experts}" if layout.experts > 1 else ""
    saving = [layout.partitioned, layout.recompute]
    more = [experts, f"micro {layout.micro_batch}", *(word for word in saving if word != "none")]
    return ", ".join([divided, *filter(None, more)])


def draw(clusters: Sequence[ClusterSize], memory_gb: float, terms: results.TrainingTerms, file: Path) -> None:
    """Draw time, use of the devices, memory and cost over the number of workers. The suffix is the format.

    Raises:
        RapidformerError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    def row(of: Callable[[results.Candidate, results.TrainingEstimate], float | None]) -> list[float | None]:
        return [of(each.best, each.training) if each.best and each.training else None for each in clusters]

    hours, used = row(lambda best, training: training.hours), row(lambda best, training: training.mfu)
    costs = row(lambda best, training: training.cost)
    panels: list[tuple[str, list[float | None], float | None]] = [
        ("seconds per step", row(lambda best, training: best.timing.total), None),
        ("tokens per second", row(lambda best, training: training.tokens_per_second), None),
        ("GB needed per worker", row(lambda best, training: best.needed_gb), memory_gb),
    ]
    if any(hour is not None for hour in hours):
        panels[0] = ("days of training", [None if hour is None else hour / 24 for hour in hours], None)
    if any(share is not None for share in used):
        panels[1] = ("MFU in %", [None if share is None else 100 * share for share in used], None)
    if any(cost is not None for cost in costs):
        panels.append((f"cost at {terms.price_per_hour:g} per worker and hour", costs, None))
    figure = Figure(figsize=(3.2 * len(panels), 3.2), layout="constrained")
    names = [str(cluster.workers) for cluster in clusters]
    for axes, (title, values, limit) in zip(figure.subplots(1, len(panels)), panels, strict=True):
        axes.bar(names, [value or 0.0 for value in values], color="#4477aa")
        for place, value in enumerate(values):
            if value is None:
                axes.text(place, 0, "does not fit", ha="center", va="bottom", fontsize=8, color="#cc3311")
            else:
                axes.text(place, value / 2, f"{value:,.3g}", ha="center", va="center", fontsize=8, color="white")
        if limit is not None:
            axes.axhline(limit, color="#cc3311", linestyle="--")
            title += f" (of {limit:g})"
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("workers")
        axes.margins(y=0.15)
        axes.spines[["top", "right"]].set_visible(False)
    with writing(file):
        figure.savefig(file, dpi=150)
