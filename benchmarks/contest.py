"""Compare ways to do the same work by letting them take turns, and describe the answer to a benchmark question.

The ways take turns so that a busy moment of the machine hits all of them, and they are compared turn by turn. A way is
a function that does its next piece of work. :mod:`benchmarks.workers` turns a whole training loop into such a function.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from rapidformer_templates.commands.bench.cli import spread
from rapidformer_templates.system.terminal import console

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Advance = Callable[[str], None]
"""Reports that one more part is done. Its argument is the text next to the progress bar."""

Turn = Callable[[], float | None]
"""Do a way's next piece of work. Returns the seconds that it took, or None if the duration of the call counts."""

Row = dict[str, Any]
"""Results of a way, as written to the JSON file."""

Columns = Mapping[str, str | Callable[[Any], str]]
"""Cells of a row by column heading: a format string with the row's keys, or a function of the row."""


class Contest:
    """Ways to do the same work.

    Attributes:
        ways: The ways by name.
        work: Amount of work in each turn, in samples, tokens or bytes.
        seconds: Seconds of the measured turns by way. Turns with the same index ran one after the other.
    """

    def __init__(self, ways: Mapping[str, Turn], work: float = 1) -> None:
        self.ways = dict(ways)
        self.work = work
        self.seconds: dict[str, list[float]] = {name: [] for name in ways}
        self._orders = _orders(list(ways))

    def run(self, rounds: int, *, warmup: int = 0, advance: Advance = lambda text: None) -> None:
        """Run one turn of each way per round. The first ``warmup`` rounds do not count."""
        for number in range(warmup + rounds):
            self.round(counts=number >= warmup)
            advance(f"round {number + 1}")

    def round(self, *, counts: bool = True) -> None:
        """Run one turn of each way, in a different order than last time."""
        for name in next(self._orders):
            began = time.perf_counter()
            own = self.ways[name]()
            spent = time.perf_counter() - began if own is None else own
            if counts:
                self.seconds[name].append(spent)

    def rates(self, name: str) -> list[float]:
        """Return the work per second of each turn."""
        return [self.work / seconds for seconds in self.seconds[name]]

    def rate(self, name: str) -> float:
        """Return the work per second over all turns."""
        return self.work * len(self.seconds[name]) / sum(self.seconds[name])

    def ratios(self, name: str, over: str) -> list[float]:
        """Return the speed relative to another way, turn by turn."""
        return [theirs / own for own, theirs in zip(self.seconds[name], self.seconds[over], strict=True)]

    def ratio(self, name: str, over: str) -> float:
        """Return the median of :meth:`ratios`."""
        return statistics.median(self.ratios(name, over))


def _orders(names: list[str]) -> Iterator[list[str]]:
    """Yield random orders, each followed by its reverse, so that no way always runs after the same one."""
    draw = np.random.default_rng(0)
    while True:
        order = [names[i] for i in draw.permutation(len(names))]
        yield order
        yield order[::-1]


def bootstrap(statistic: Callable[..., np.ndarray], *paired: np.ndarray) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of a statistic of turns. All ways are resampled with the same indices.

    Args:
        statistic: Maps arrays of shape (draws, turns, …) to one value per draw.
        paired: Arrays of shape (turns, …).
    """
    turns = len(paired[0])
    draws = np.random.default_rng(0).integers(turns, size=(2000, turns))
    low, high = np.quantile(statistic(*(values[draws] for values in paired)), (0.025, 0.975))
    return float(low), float(high)


def mean_sd(values: Sequence[float], form: str = ".2f") -> str:
    """Format mean ± standard deviation."""
    return f"{statistics.mean(values):{form}} ± {spread(values):{form}}"


def median_sd(values: Sequence[float], form: str = ".2f") -> str:
    """Format median ± standard deviation."""
    return f"{statistics.median(values):{form}} ± {spread(values):{form}}"


def in_short(why: str) -> str:
    """Return the line of an error text that says what is wrong. The JSON has the whole text."""
    lines = why.strip().splitlines()
    return next((line for line in lines if line.startswith("error")), lines[-1])


def verdict(reached: bool) -> str:
    """Say whether a goal was reached."""
    return "reached" if reached else "missed"


def why_absent(module: str, package: str) -> str | None:
    """Return the reason why a peer cannot take part, or None if it can."""
    if importlib.util.find_spec(module) is None:
        return f"{package} is not installed (pip install {package})"
    return None


@dataclass(frozen=True)
class Flag:
    """A command-line flag of a question.

    Attributes:
        default: Its type determines what the flag takes: a positive number, a word, or on and off. None means a
        folder.
        kind: Parses the value if the type of the default is not enough.
        choices: The words that the flag accepts.
    """

    name: str
    default: Any
    text: str
    kind: Callable[[str], Any] | None = None
    choices: tuple[str, ...] | None = None

    def add(self, parser: argparse.ArgumentParser) -> None:
        text = self.text if self.default is None else f"{self.text} (default: {self.default})"
        more: dict[str, Any] = {"default": self.default, "help": text}
        if isinstance(self.default, bool):
            more["action"] = argparse.BooleanOptionalAction
        elif self.choices:
            more["choices"] = self.choices
        else:
            more["type"] = self.kind or (Path if self.default is None else _positive(type(self.default)))
        parser.add_argument(f"--{self.name}", **more)


def _positive(kind: type) -> Callable[[str], Any]:
    def number(text: str) -> Any:
        value = kind(text)
        if value <= 0:
            raise argparse.ArgumentTypeError("must be more than 0")
        return value

    return number


Answering = Callable[[argparse.Namespace], "Answer"]


def asks(*flags: Flag) -> Callable[[Answering], Answering]:
    """Mark the function that answers a question, and declare the flags of the question."""

    def mark(function: Answering) -> Answering:
        vars(function)["flags"] = flags
        return function

    return mark


@contextmanager
def progress(title: str, parts: int) -> Iterator[Advance]:
    """Show a progress bar on standard error, if that is a terminal.

    The bar is drawn only when it advances. A thread that redraws it would disturb the measurement.
    """
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    texts = (TextColumn(f"{{task.{name}}}", markup=False) for name in ("description", "fields[text]"))
    with Progress(*texts, *columns, console=console(on_stderr=True), auto_refresh=False) as bar:
        task = bar.add_task(title, total=parts, text="")
        yield lambda text: bar.update(task, advance=1, text=text, refresh=True)


@dataclass(frozen=True)
class Answer:
    """The answer to a question.

    Attributes:
        figures: Results for the JSON file.
        table: The table that is printed.
        notes: Lines below the table: goals that were reached or missed, and solutions that are not installed.
        draw: Draws the picture.
        status: Exit status of the command.
    """

    figures: dict[str, Any]
    table: RenderableType
    notes: list[str]
    draw: Callable[[Axes], None] | None = None
    status: int = 0


def table(title: str, rows: Iterable[Any], columns: Columns, left: int = 1) -> Table:
    """Build a table with a line for each row.

    Args:
        rows: Dictionaries of results, or any objects that the functions in ``columns`` accept.
        left: Number of text columns, which are left-aligned.
    """
    made = Table(title=title, title_justify="left")
    for number, heading in enumerate(columns):
        made.add_column(heading, justify="left" if number < left else "right")
    for row in rows:
        made.add_row(*(cell(row) if callable(cell) else cell.format_map(row) for cell in columns.values()))
    return made


def bars(
    label: str,
    values: Mapping[str, float | Sequence[float]],
    ours: Collection[str] = (),
    errors: Any = None,
    texts: Sequence[str] = (),
    more: Callable[[Axes], Any] = lambda axes: None,
) -> Callable[[Axes], None]:
    """Return a function that draws a bar for each way, in orange for ours.

    Args:
        label: Label of the axis.
        values: Length of each bar. For several values, the bar shows their mean and standard deviation.
        errors: Errors of the lengths: one value each, or (below, above).
        texts: Labels next to the bars.
        more: Draws more on the same axes.
    """
    several = {name: [value] if isinstance(value, (int, float)) else value for name, value in values.items()}
    lengths = [statistics.mean(some) for some in several.values()]
    if errors is None and any(len(some) > 1 for some in several.values()):
        errors = [spread(some) for some in several.values()]

    def draw(axes: Axes) -> None:
        colours = ["tab:orange" if name in ours else "tab:blue" for name in several]
        drawn = axes.barh(list(several), lengths, xerr=errors, color=colours)
        if texts:
            axes.bar_label(drawn, [f" {text}" for text in texts], padding=4)
            axes.margins(x=0.25)
        axes.set_xlabel(label)
        axes.invert_yaxis()
        more(axes)

    return draw
