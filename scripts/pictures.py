"""Pictures of README and manual: ``python scripts/pictures.py`` writes docs/pictures/ from real output and figures.

``workers.svg`` is a drawing.

``--train`` first trains the runs of the picture about parity again. It stores their losses in ``parity.json`` and takes
about ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))

from rapidformer_templates.commands.main import main as rapidformer  # noqa: E402

FOLDER = ROOT / "docs" / "pictures"
RESULTS = ROOT / "benchmarks" / "results"
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
    """A bar chart of a table in benchmarks/results/: its benchmark, its column, and the texts of the picture."""

    benchmark: str
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
    Chart("published-runs", "median error", "Median error of predicted seconds, % (grey: fitted)", "^(?!.*fitted)"),
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


def rows(chart: Chart) -> list[tuple[str, float]]:
    """Return the labels and values of a chart."""
    for header, *body in _tables(chart.benchmark):
        if chart.column in header:
            column = header.index(chart.column)
            cells = [(row[0], _number(row[column])) for row in body]
            return [(label, value) for label, value in cells if value is not None]
    raise ValueError(f"no column '{chart.column}' in the results of {chart.benchmark}")


def _tables(benchmark: str) -> Iterator[list[list[str]]]:
    """Yield the tables of a results file, each with its header."""
    document = json.loads((RESULTS / f"{benchmark}.json").read_text(encoding="utf-8"))
    for table in document["tables"].values():
        yield [table["columns"], *table["rows"]]


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


def bars(chart: Chart) -> str:
    """Return the chart as an SVG with its own background, so that it is readable on a light and on a dark page."""
    labels, values = zip(*rows(chart), strict=True)
    with drawn(8.6, 0.9 + 0.38 * len(labels)) as (figure, out):
        axes = figure.subplots()
        own = [re.search(chart.ours, label) for label in labels]
        bars_drawn = axes.barh(labels, values, color=["#3f51b5" if mine else "#9aa5b1" for mine in own], height=0.66)
        axes.bar_label(bars_drawn, labels=[f"{value:,.5g}" for value in values], padding=4)
        _title(figure, axes, chart.title)
        axes.margins(x=0.14)
        axes.spines[:].set_visible(False)
        axes.axvline(0, color="#57606a", linewidth=0.8)
        axes.tick_params(length=0, labelbottom=False)
    return out.getvalue()


def _title(figure: Any, axes: Any, title: str) -> None:
    """Write the title of a picture. Its rows start at the top, and the background of the figure shows."""
    figure.suptitle(title, x=0.015, ha="left", fontsize=11.5, fontweight="bold")
    axes.invert_yaxis()
    axes.set_facecolor("none")


JOB = (
    "--task pretraining --device cpu --dropout 0 --train-iters 300 --global-batch-size 16 "
    "--log-interval 1 --eval-interval 25 --save-interval 50"
)
"""The job of the picture about parity: ``examples/pretrain_gpt.py`` as a Trainer, without dropout."""
LAYOUTS = {
    "one process": "--micro-batch-size 16",
    "2 workers, DDP": "--micro-batch-size 8 --nproc-per-node 2",
    "2 workers, FSDP": "--micro-batch-size 8 --nproc-per-node 2 --fsdp-memory-optimization",
    "2 workers, tensor parallel": "--micro-batch-size 16 --nproc-per-node 2 --tensor-model-parallel-size 2",
    "2 workers, pipeline": "--micro-batch-size 4 --nproc-per-node 2 --pipeline-model-parallel-size 2",
}
KILLED = "killed at step 150, resumed"
STYLES = {
    "one process": ("#1f2328", "-"),
    "2 workers, DDP": ("#3f51b5", "--"),
    "2 workers, FSDP": ("#00897b", "-."),
    "2 workers, tensor parallel": ("#c77700", ":"),
    "2 workers, pipeline": ("#ad1457", (0, (5, 1))),
    KILLED: ("#57606a", (0, (1, 3))),
}
STORED = FOLDER / "parity.json"
WINDOW = 15
"""Number of steps over which curves are smoothed."""
FLOOR = 1e-9
"""Smaller differences are drawn here."""


def train() -> None:
    """Train the job in each layout, and once with ``kill -9`` and ``--resume``. Store the losses of all steps."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        source = (ROOT / "examples" / "pretrain_gpt.py").read_text(encoding="utf-8")
        script = folder / "pretrain_gpt.py"
        script.write_text(source.replace("Pretrainer", "Trainer"), encoding="utf-8")
        runs = {}
        for name, flags in LAYOUTS.items():
            _start(script, flags, folder / name).wait()
            runs[name] = _losses(folder / name)
        first = LAYOUTS["one process"]
        process = _start(script, first, folder / KILLED)
        while len(_losses(folder / KILLED)["loss"]) < 150:
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        _start(script, f"{first} --resume", folder / KILLED).wait()
        runs[KILLED] = _losses(folder / KILLED)
    lines = (f"{json.dumps(name)}: {json.dumps(losses)}" for name, losses in runs.items())
    STORED.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def _start(script: Path, flags: str, run: Path) -> subprocess.Popen[bytes]:
    words = [sys.executable, str(script), *shlex.split(f"{JOB} {flags}"), "--save", str(run)]
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    return subprocess.Popen(words, env=settings, start_new_session=True)


def _losses(run: Path) -> Mapping[str, Any]:
    """Return the training losses of all steps, and (step, loss) of the evaluations."""
    file = run / "metrics.jsonl"
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    rows = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return {
        "loss": [round(row["loss"], 9) for row in rows if "loss" in row],
        "eval_loss": [(row["step"], round(row["eval_loss"], 9)) for row in rows if "eval_loss" in row],
    }


def parity() -> str:
    """Draw the losses of the runs in :data:`STORED`, and their distance from those of one process."""
    import numpy as np

    runs = json.loads(STORED.read_text(encoding="utf-8"))
    one = np.array(runs["one process"]["loss"])
    steps = np.arange(1, len(one) + 1)
    with drawn(8.6, 5.6) as (figure, out):
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(5, 3))
        upper.plot(steps, one, color="#d0d7de", linewidth=0.8, label="loss of each step")
        for name, run in runs.items():
            colour, dashes = STYLES[name]
            loss = np.array(run["loss"])
            upper.plot(steps, _smoothed(loss), color=colour, linestyle=dashes, linewidth=2.2, label=f"{name}")
            if name != "one process":
                apart = np.abs(loss - one) / one
                largest = np.array([apart[max(0, end - WINDOW) : end].max() for end in steps])
                lower.semilogy(steps, np.maximum(largest, FLOOR), color=colour, linestyle=dashes, linewidth=1.8)
        at, evaluated = zip(*runs["one process"]["eval_loss"], strict=True)
        upper.plot(at, evaluated, "o", color="#cf222e", markersize=4.5, label="validation", zorder=3)
        upper.legend(loc="upper right", ncols=2, frameon=False, fontsize=9.5)
        upper.set_ylabel("loss")
        upper.set_title(
            "A small GPT learns Python's library: six runs, one curve", loc="left", fontweight="bold", fontsize=11.5
        )
        lower.set(ylim=(FLOOR / 3, 1e-3), xlabel="step", yticks=[1e-8, 1e-6, 1e-4])
        title = f"relative difference from one process, the largest of {WINDOW} steps"
        lower.set_title(title, loc="left", fontsize=10)
        lower.text(len(one) - 2, FLOOR * 1.7, f"{KILLED}: 0", ha="right", fontsize=9.5, color=STYLES[KILLED][0])
        for axes in (upper, lower):
            axes.set_facecolor("none")
            axes.spines[["top", "right"]].set_visible(False)
            axes.set_xlim(0, len(one))
            axes.grid(axis="y", color="#d0d7de", linewidth=0.6)
    return out.getvalue()


KINDS = {"experts": "experts", "context": "context", "zero": "ZeRO", "fsdp": "FSDP", "optimizer": "divided update"}
"""Kinds of layouts by a word in their name. The first one that fits counts."""


def planner() -> str:
    """Return the errors of predicted peaks by the kind of layout, from the table of all layouts."""
    table = next(_tables("planner"))
    columns = {"rules": ("error", "#3f51b5", -0.12), "the engine itself": ("engine", "#c77700", 0.12)}
    names = [*KINDS.values(), "tensor, pipeline, replicas", "one process"]
    with drawn(8.6, 0.9 + 0.42 * len(names)) as (figure, out):
        axes = figure.subplots()
        for label, (column, colour, below) in columns.items():
            place = table[0].index(column)
            points = [(_number(row[place]), names.index(_kind(row[1])) + below) for row in table[1:]]
            axes.scatter(*zip(*[point for point in points if point[0] is not None], strict=True), s=16, color=colour,
                         alpha=0.6, linewidth=0, label=label)  # fmt: skip
        axes.set_yticks(range(len(names)), names)
        _title(figure, axes, "Error of the predicted peak, % (right: too high)")
        axes.axvline(0, color="#57606a", linewidth=0.8)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x", color="#d0d7de", linewidth=0.6)
        axes.legend(frameon=False, loc="lower right")
    return out.getvalue()


def _kind(layout: str) -> str:
    for word, kind in KINDS.items():
        if word in layout:
            return kind
    return "one process" if layout.startswith("1·1·1,") else "tensor, pipeline, replicas"


def _smoothed(losses: Any) -> Any:
    """Return the mean over :data:`WINDOW` steps, up to each step."""
    import numpy as np

    sums = np.concatenate([[0.0], np.cumsum(losses)])
    ends = np.arange(1, len(losses) + 1)
    begins = np.maximum(ends - WINDOW, 0)
    return (sums[ends] - sums[begins]) / (ends - begins)


def curves(file: Path) -> str:
    """Draw the measured series of a recipe. The file has a title, the names of the axes, and points by series."""
    stored = json.loads(file.read_text(encoding="utf-8"))
    with drawn(8.6, 3.4) as (figure, out):
        axes = figure.subplots()
        own = ("#3f51b5", "#c77700", "#00897b", "#ad1457", "#57606a", "#9aa5b1")
        for number, (name, points) in enumerate(stored["series"].items()):
            axes.plot(*zip(*points, strict=True), color=own[number % len(own)], linewidth=2.0, label=name)
        figure.suptitle(stored["title"], x=0.015, ha="left", fontsize=11.5, fontweight="bold")
        axes.set_facecolor("none")
        axes.set_xlabel(stored["x"])
        axes.set_ylabel(stored["y"])
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#d0d7de", linewidth=0.6)
        if len(stored["series"]) > 1:
            axes.legend(frameon=False, fontsize=9)
    return out.getvalue()


def pictures() -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each picture that is made from output and figures."""
    for name, command in TERMINAL.items():
        yield f"{name}.svg", terminal(command)
    yield "parity.svg", parity()
    yield "planner.svg", planner()
    for chart in CHARTS:
        yield f"{chart.benchmark}.svg", bars(chart)
    for file in sorted(FOLDER.glob("recipe-*.json")):
        yield f"{file.stem}.svg", curves(file)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--train", action="store_true", help="train the runs of the picture about parity again")
    FOLDER.mkdir(exist_ok=True)
    if parser.parse_args(argv).train:
        train()
    for name, text in pictures():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
