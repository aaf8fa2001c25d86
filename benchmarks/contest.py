"""A contest: ways to do the same work, which take turns; and the answer that a question gives with it.

What is compared is measured in turns, so that a busy moment of the machine hits all ways, and compared turn by turn.
A way is a function that does its next piece of work; :mod:`benchmarks.turns` makes one of a whole training loop.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import RenderableType
from rich.table import Table

from rapidformer_templates.commands.bench.output import Advance, spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Turn = Callable[[], float | None]
"""A way's next piece of work; the seconds that it took, or None where those of the call count."""

Row = dict[str, Any]
"""Figures of a way, as they stand in the JSON."""

Columns = Mapping[str, str | Callable[[Any], str]]
"""By heading, the cell of a row: a format string that names its figures, or a function of it."""


class Contest:
    """Ways to do the same work.

    Attributes:
        ways: by name.
        work: what each turn does: samples, tokens, bytes.
        seconds: of the turns that counted, by way; those with one number were neighbours in time.
    """

    def __init__(self, ways: Mapping[str, Turn], work: float = 1) -> None:
        self.ways = dict(ways)
        self.work = work
        self.seconds: dict[str, list[float]] = {name: [] for name in ways}
        self._orders = _orders(list(ways))

    def run(self, rounds: int, *, warmup: int = 0, advance: Advance = lambda text: None) -> None:
        """One turn of each way a round; those of the first ``warmup`` rounds do not count."""
        for number in range(warmup + rounds):
            self.round(counts=number >= warmup)
            advance(f"round {number + 1}")

    def round(self, *, counts: bool = True) -> None:
        """One turn of each, in another order than the last time."""
        for name in next(self._orders):
            began = time.perf_counter()
            own = self.ways[name]()
            spent = time.perf_counter() - began if own is None else own
            if counts:
                self.seconds[name].append(spent)

    def rates(self, name: str) -> list[float]:
        """Work a second, turn by turn."""
        return [self.work / seconds for seconds in self.seconds[name]]

    def rate(self, name: str) -> float:
        """Work a second of all turns together."""
        return self.work * len(self.seconds[name]) / sum(self.seconds[name])

    def ratios(self, name: str, over: str) -> list[float]:
        """How many times as fast as another way, turn by turn."""
        return [theirs / own for own, theirs in zip(self.seconds[name], self.seconds[over], strict=True)]

    def ratio(self, name: str, over: str) -> float:
        """The median of :meth:`ratios`."""
        return statistics.median(self.ratios(name, over))


def _orders(names: list[str]) -> Iterator[list[str]]:
    """Orders drawn at random; each is followed by its reverse, so that nobody is always behind the same one."""
    draw = np.random.default_rng(0)
    while True:
        order = [names[i] for i in draw.permutation(len(names))]
        yield order
        yield order[::-1]


def bootstrap(statistic: Callable[..., np.ndarray], *paired: np.ndarray) -> tuple[float, float]:
    """The 95 % interval of a statistic of turns, which are drawn anew for all ways alike.

    Args:
        statistic: of arrays of shape (draws, turns, …), one value a draw.
        paired: of shape (turns, …).
    """
    turns = len(paired[0])
    draws = np.random.default_rng(0).integers(turns, size=(2000, turns))
    low, high = np.quantile(statistic(*(values[draws] for values in paired)), (0.025, 0.975))
    return float(low), float(high)


def mean_sd(values: Sequence[float], form: str = ".2f") -> str:
    """Mean ± standard deviation."""
    return f"{statistics.mean(values):{form}} ± {spread(values):{form}}"


def median_sd(values: Sequence[float], form: str = ".2f") -> str:
    """Median ± standard deviation."""
    return f"{statistics.median(values):{form}} ± {spread(values):{form}}"


def verdict(reached: bool) -> str:
    """Of a goal."""
    return "reached" if reached else "missed"


@dataclass(frozen=True)
class Flag:
    """A flag of a question.

    Attributes:
        default: its type says what the flag takes: a positive number, a word, on or off; None: a folder.
        kind: reads its word, where that is not enough.
        choices: the words that it takes.
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


@dataclass(frozen=True)
class Answer:
    """What a question gives.

    Attributes:
        figures: for the JSON.
        table: for people.
        notes: lines below it: goals reached or missed, and who is absent.
        draw: draws the picture.
        status: of the command.
    """

    figures: dict[str, Any]
    table: RenderableType
    notes: list[str]
    draw: Callable[[Axes], None] | None = None
    status: int = 0


def table(title: str, rows: Iterable[Any], columns: Columns, left: int = 1) -> Table:
    """A line for each row.

    Args:
        rows: figures by name; or whatever the columns are functions of.
        left: columns of words, which begin at the left.
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
    """Draws a bar for each way, orange where it is ours.

    Args:
        label: of what the lengths are.
        values: the length; of several values their mean, with their deviation.
        errors: of the lengths, one each or (below, above).
        texts: beside the bars.
        more: what else is drawn.
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
