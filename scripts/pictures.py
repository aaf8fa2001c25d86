"""Pictures of README and manual: ``python scripts/pictures.py`` writes docs/pictures/ from real output and figures.

``--run FOLDER`` also draws the curves of a run. The existing curves are from ``rapidformer demo``.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))

from rapidformer_templates.commands.main import main as rapidformer  # noqa: E402
from rapidformer_templates.planning.plan import Sizes  # noqa: E402
from rapidformer_templates.planning.worker_groups import groups_of  # noqa: E402

FOLDER = ROOT / "docs" / "pictures"
WIDTH = 100  # columns of a terminal. Longer lines are wrapped

TERMINAL = {
    "plan": "rapidformer plan --task pretraining --model-type gpt2 --fsdp-memory-optimization --mixed-precision bf16 "
    "--checkpoint-activations --micro-batch-size 4 --global-batch-size 64 --world-size 8 --device cpu",
    "refusal": "rapidformer plan --task causal_lm --fsdp-memory-optimization --tensor-model-parallel-size 2 "
    "--world-size 4 --device cpu",
}
"""Commands whose output is shown, by the name of the picture."""


@dataclass(frozen=True)
class Chart:
    """A bar chart of a table in docs/benchmarks.md: the section, the heading of the column, and the picture's texts."""

    section: str
    column: str
    title: str
    ours: str = "rapidformer_templates"


CHARTS = (
    Chart("overhead", "extra ms", "Overhead compared with a plain PyTorch loop, ms per step (less is better)"),
    Chart("peers", "training samples/s", "The demo's job, training samples per second (more is better)"),
    Chart("faults", "resumed", "Runs that resumed without help after kill -9, of 200 (more is better)"),
    Chart("saving", "GB/s", "A state durably on the disk, GB/s (more is better)"),
    Chart(
        "padding",
        "useful tokens/s",
        "Useful tokens per second for each way to batch (more is better)",
        "dynamic|most|cap",
    ),
    Chart("mfu", "samples/s", "Training of one model with three loops, samples per second (more is better)"),
    Chart("adapters", "together", "Weights, gradients and optimizer state, MB (less is better)", "LoRA|DoRA"),
    Chart("optimizers", "state, bytes per parameter", "State, bytes per parameter (less is better)", "bit|any|muon"),
    Chart("fused-loss", "peak of tensors, MB", "Peak of tensors, MB (less is better)", "fused"),
)


def terminal(command: str) -> str:
    """Return a command and its real output, as an SVG of a terminal."""
    answer = io.StringIO()
    with contextlib.redirect_stdout(answer), contextlib.redirect_stderr(answer):
        rapidformer(shlex.split(command)[1:])
    console = Console(record=True, width=WIDTH, file=io.StringIO(), color_system="truecolor")
    console.print(Text("$ ", style="bold green") + Text(_broken(command), style="bold"))
    console.print(_coloured(answer.getvalue().rstrip("\n")))
    picture = console.export_svg(title="rapidformer", unique_id="terminal")
    # Use the typeface of the reader's own terminal instead of one that is loaded from the web.
    picture = re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.S)
    return picture.replace("Fira Code", "ui-monospace, Menlo, Consolas, DejaVu Sans Mono")


def _broken(command: str) -> str:
    """Break a command into lines of the terminal's width, with the backslashes that a shell needs."""
    lines, line = [], ""
    for word in re.split(r" (?=--)", command):
        if line and len(line) + len(word) > WIDTH - 6:
            lines, line = [*lines, line + " \\"], "   "
        line = f"{line} {word}".lstrip(" ") if not line.startswith(" ") else f"{line} {word}"
    return "\n".join([*lines, line])


def _coloured(answer: str) -> Text:
    """Colour what a reader looks for first: errors, and the labels of lines."""
    text = Text(answer)
    text.highlight_regex(r"(?m)^error\[\w+\]", "bold red")
    text.highlight_regex(r"(?m)^  (why|asked|works|  or|more|help|where) ", "bold cyan")
    text.highlight_regex(r"--[a-z][\w-]*", "green")
    return text


def rows(chart: Chart, page: str) -> list[tuple[str, float]]:
    """Return the labels and values of a chart, read from the page."""
    section = page.split(f"\n## {chart.section}\n", 1)[1].split("\n## ", 1)[0]
    for header, *body in _tables(section):
        if chart.column in header:
            column = header.index(chart.column)
            cells = [(row[0], _number(row[column])) for row in body]
            return [(label, value) for label, value in cells if value is not None]
    raise ValueError(f"no column '{chart.column}' in section {chart.section}")


def _tables(section: str) -> Iterator[list[list[str]]]:
    for block in re.findall(r"(?:^\|.*\n?)+", section, flags=re.M):
        lines = [[cell.strip(" *`") for cell in line.strip("|").split("|")] for line in block.splitlines()]
        yield [line for line in lines if not set("".join(line)) <= set("-: ")]


def _number(cell: str) -> float | None:
    """Return the number in a cell, without what follows ±. For several, such as ``19.6, 24.5``, return the mean."""
    found = re.findall(r"[-+]?\d[\d,]*\.?\d*", re.split(r"±|\(|×", re.sub(r"(?<=\d),(?=\d{3}\b)", "", cell))[0])
    numbers = [float(number.rstrip(",")) for number in found]
    return sum(numbers) / len(numbers) if numbers else None


@contextlib.contextmanager
def drawn(width: float, height: float) -> Iterator[tuple[Any, io.StringIO]]:
    """Yield a figure to draw on, and a buffer that contains its SVG afterwards, which is the same on every machine."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    out = io.StringIO()
    settings = {"svg.fonttype": "none", "svg.hashsalt": "docs", "font.family": "sans-serif", "font.size": 11}
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(width, height), layout="constrained", facecolor="#f6f8fa")
        FigureCanvasSVG(figure)
        figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)
        yield figure, out
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})


def bars(chart: Chart, page: str) -> str:
    """Return the chart as an SVG with its own background, so that it is readable on a light and on a dark page."""
    labels, values = zip(*[(label.replace("`", ""), value) for label, value in rows(chart, page)], strict=True)
    with drawn(8.6, 0.9 + 0.38 * len(labels)) as (figure, out):
        axes = figure.subplots()
        own = [re.search(chart.ours, label) for label in labels]
        bars_drawn = axes.barh(labels, values, color=["#3f51b5" if mine else "#9aa5b1" for mine in own], height=0.66)
        axes.bar_label(bars_drawn, labels=[f"{value:,.5g}" for value in values], padding=4)
        figure.suptitle(chart.title, x=0.015, ha="left", fontsize=11.5, fontweight="bold")
        axes.invert_yaxis()
        axes.margins(x=0.14)
        axes.set_facecolor("none")
        axes.spines[:].set_visible(False)
        axes.axvline(0, color="#57606a", linewidth=0.8)
        axes.tick_params(length=0, labelbottom=False)
    return out.getvalue()


WORKERS = Sizes(world=16, local_world=16, tensor=2, context=2, data=2, pipeline=2)
"""Sixteen workers, two in each dimension."""
COLOURS = {"tensor": "#3f51b5", "context": "#00897b", "data": "#c77700", "pipeline": "#ad1457"}
BENT = {"tensor": 0.0, "context": 0.0, "data": 0.34, "pipeline": -0.22}
"""Curvature of the line between two workers, as a fraction of its length."""


def workers() -> str:
    """Draw which workers communicate: the groups of :data:`WORKERS` as in the plan."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import FancyArrowPatch

    groups = {group.name: group for group in groups_of(WORKERS)}
    places = [_place(rank, {name: rank // group.stride % 2 for name, group in groups.items()}) for rank in range(16)]
    with drawn(8.6, 4.9) as (figure, out):
        axes = figure.subplots()
        for name, group in groups.items():
            for first in (rank for rank in range(16) if rank // group.stride % 2 == 0):
                ends = places[first], places[first + group.stride]
                line = FancyArrowPatch(*ends, arrowstyle="-", connectionstyle=f"arc3,rad={BENT[name]}", zorder=1)
                line.set(color=COLOURS[name], linewidth=2.2 if name == "tensor" else 1.6)
                axes.add_patch(line)
        for rank, (x, y) in enumerate(places):
            box = {"boxstyle": "round,pad=0.42", "facecolor": "#ffffff", "edgecolor": "#57606a"}
            axes.text(x, y, f"{rank}", ha="center", va="center", bbox=box, zorder=2)
        for replica, y in enumerate((3.5, 0.5)):
            axes.text(-1.0, y, f"replica {replica}", rotation=90, ha="center", va="center", fontweight="bold")
        for stage, x in enumerate((0.6, 5.0)):
            axes.text(x, 4.75, f"stage {stage}", ha="center", fontweight="bold")
        lines = [
            Line2D([], [], color=COLOURS[name], linewidth=2, label=f"{name}: {groups[name].exchanges}")
            for name in COLOURS
        ]
        axes.legend(handles=lines, loc="upper center", bbox_to_anchor=(0.5, 0.02), ncols=2, frameon=False, fontsize=10)
        axes.set(xlim=(-1.3, 6.4), ylim=(-0.9, 5.1))
        axes.axis("off")
    return out.getvalue()


def _place(rank: int, at: Mapping[str, int]) -> tuple[float, float]:
    """Place stages side by side, and replicas below each other. In each, tensor goes across and context down."""
    return at["pipeline"] * 4.4 + at["tensor"] * 1.2, 4.0 - at["data"] * 3.0 - at["context"] * 1.0


def pictures() -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each picture that is made from output and figures."""
    for name, command in TERMINAL.items():
        yield f"{name}.svg", terminal(command)
    yield "workers.svg", workers()
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    for chart in CHARTS:
        yield f"{chart.section}.svg", bars(chart, page)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, help="folder of the run whose curves are copied")
    run = parser.parse_args(argv).run
    FOLDER.mkdir(exist_ok=True)
    for name, text in pictures():
        (FOLDER / name).write_text(text, encoding="utf-8")
    if run:
        shutil.copyfile(run / "curves.png", FOLDER / "curves.png")


if __name__ == "__main__":
    main()
