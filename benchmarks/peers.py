"""``bench peers``: the demo's job by this library and by transformers' Trainer, with everything else equal.

Model, tweets, batch size, epochs, learning rate, schedule, weight decay, clipping and optimizer are
the same. Each solution runs in a process of its own, and the processes take turns of a few steps,
so that a busy moment of the machine hits all of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from benchmarks import peers_job
from rapidformer_templates.commands.bench.output import Advance, progress, put_out, spread
from rapidformer_templates.commands.demo import demo_model_folder, make_demo_data
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
    """Run the solutions side by side, ``repeats`` times; the runs of each.

    Args:
        train, held_out: number of tweets.
        advance: told of each repeat.

    Raises:
        RapidformerError: the demo's data or model is absent, or a run failed.
    """
    demo_model_folder()  # absent? then before anything is started
    runs: dict[str, list[Run]] = {name: [] for name in peers_job.SOLUTIONS}
    with tempfile.TemporaryDirectory(prefix="rapidformer-peers-") as name:
        folder = Path(name)
        make_demo_data(folder, train, held_out)
        for repeat in range(repeats):
            with ExitStack() as stack:
                contenders = [stack.enter_context(closing(_Contender(name, repeat, folder))) for name in runs]
                unfinished = contenders
                while unfinished:
                    unfinished = [contender for contender in unfinished if contender.take_turn()]
                for contender in contenders:
                    runs[contender.solution].append(contender.figures)
            advance(f"repeat {repeat + 1}")
    return runs


class _Contender:
    """A run in a process of its own, which works only while it has its turn."""

    def __init__(self, solution: str, seed: int, folder: Path) -> None:
        self.solution = solution
        self.figures: Run = {}
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed by close)
        self._process = subprocess.Popen(
            [sys.executable, "-m", peers_job.__name__, solution, str(folder), str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def take_turn(self) -> bool:
        """Let it work for a turn; whether there is more to do.

        Raises:
            RapidformerError: the run failed.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):  # it is dead: reading tells
            self._process.stdin.write("go on\n")
            self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if answer == peers_job.PAUSED:
            return True
        if not answer:
            self._log.seek(0)
            raise RapidformerError(f"{self.solution} failed: {self._log.read().strip()[-2000:]}", where="bench peers")
        self.figures = json.loads(answer)
        return False

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._log.close()


def main(options: argparse.Namespace) -> int:
    """Measure, print and write; the exit status."""
    with progress("peers", options.repeats) as advance:
        runs = measure_peers(options.repeats, options.train, options.held_out, advance)
    result = {
        "train": options.train,
        "held_out": options.held_out,
        "runs": runs,
        "ratios": {name: ratios(runs, name) for name in GOALS},
    }
    put_out(options, "peers", result, _table(runs), _verdicts(runs), lambda axes: _draw(axes, runs))
    return 0


def ratios(runs: dict[str, list[Run]], peer: str) -> list[float]:
    """Our training speed over a peer's, repeat by repeat."""
    pairs = zip(runs[OURS], runs[peer], strict=True)
    return [round(ours["samples_per_second"] / theirs["samples_per_second"], 3) for ours, theirs in pairs]


def _table(runs: dict[str, list[Run]]) -> Table:
    table = Table(title="the demo's job, median ± standard deviation over the runs")
    table.add_column("solution")
    columns = {
        "training samples/s": ("samples_per_second", 1),
        "evaluation samples/s": ("eval_samples_per_second", 1),
        "positions a token": ("positions_a_token", 3),
        "accuracy": ("accuracy", 3),
    }
    for heading in columns:
        table.add_column(heading, justify="right")
    for name, results in runs.items():
        cells = []
        for field, digits in columns.values():
            values = [run[field] for run in results]
            cells.append(f"{statistics.median(values):.{digits}f} ± {spread(values):.{digits}f}")
        table.add_row(name, *cells)
    return table


def _verdicts(runs: dict[str, list[Run]]) -> list[str]:
    lines = []
    for peer, goal in GOALS.items():
        values = ratios(runs, peer)
        ratio = statistics.median(values)
        reached = "reached" if ratio >= goal else "missed"
        lines.append(f"{ratio:.2f} ± {spread(values):.2f} × {peer}; goal {goal} ×: {reached}")
    return lines


def _draw(axes: Axes, runs: dict[str, list[Run]]) -> None:
    speeds: dict[str, Any] = {name: [run["samples_per_second"] for run in results] for name, results in runs.items()}
    medians = [statistics.median(values) for values in speeds.values()]
    colours = ["tab:orange" if name == OURS else "tab:blue" for name in speeds]
    axes.barh(list(speeds), medians, xerr=[spread(values) for values in speeds.values()], color=colours)
    axes.set_xlabel("training samples per second")
    axes.invert_yaxis()
