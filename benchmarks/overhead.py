"""``bench overhead``: what a training loop costs besides the training, in milliseconds a step.

Each loop is paired with a plain PyTorch loop of its own. The two take turns of a few steps, in
alternating order, and what is reported is the median of the differences within the pairs: the noise
of a shared machine is larger than the overhead, but it hits both. The pair plain against plain is
the null control; its distance from zero is what the method cannot see.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rich.table import Table

from benchmarks.overhead_loops import CONTENDERS, Contender, Fabric, Ours
from benchmarks.turns import PausedLoop
from rapidformer_templates.commands.bench.output import Advance, progress, put_out, why_absent
from rapidformer_templates.errors import RapidformerError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WARMUP = 50
"""Steps of each loop before the first that counts."""

GOAL_MS = 0.15


@dataclass(frozen=True)
class Overhead:
    """A loop beside a plain one.

    Attributes:
        name: of the library.
        step_ms: median time of its steps.
        plain_ms: median time of the steps of the plain loop at its side.
        extra_ms: median of the differences within the pairs.
        low_ms, high_ms: 95 % interval of that median (bootstrap over the pairs).
    """

    name: str
    step_ms: float
    plain_ms: float
    extra_ms: float
    low_ms: float
    high_ms: float


class _Pair:
    """A contender and a plain loop of its own."""

    def __init__(self, kind: type[Contender], steps: int) -> None:
        self.contender = kind(steps)
        self.plain = Contender(steps)
        self.loops = (PausedLoop(self.plain.run), PausedLoop(self.contender.run))
        self.seconds: list[tuple[float, float]] = []

    def warm_up(self) -> None:
        """Run both for a while; they must come to the same loss, or they do not do the same work.

        Later is too late to compare: over hundreds of steps rounding alone drives any two loops apart.

        Raises:
            RapidformerError: the losses differ.
        """
        for loop in self.loops:
            loop.advance(WARMUP)
        expected, actual = float(self.plain.model.last_loss), float(self.contender.model.last_loss)
        if abs(actual - expected) > 1e-4 * abs(expected):
            raise RapidformerError(
                f"{self.contender.name} reached the loss {actual}, the plain loop {expected}: not the same work",
                where="bench overhead",
            )

    def take_turns(self, steps: int) -> None:
        """A turn each, the other one first each time."""
        order = (0, 1) if len(self.seconds) % 2 == 0 else (1, 0)
        spent = [0.0, 0.0]
        for which in order:
            spent[which] = self.loops[which].advance(steps)
        self.seconds.append((spent[0], spent[1]))

    def result(self, steps: int) -> Overhead:
        milliseconds = np.array(self.seconds) * 1000 / steps
        extra = milliseconds[:, 1] - milliseconds[:, 0]
        draws = np.random.default_rng(0).choice(extra, (2000, len(extra)))
        low, high = np.quantile(np.median(draws, axis=1), (0.025, 0.975))
        plain, contender = np.median(milliseconds, axis=0)
        figures = (contender, plain, np.median(extra), low, high)
        return Overhead(self.contender.name, *(round(float(figure), 4) for figure in figures))

    def close(self) -> None:
        for loop in self.loops:
            loop.close()


def measure_overhead(
    rounds: int, steps: int, kinds: tuple[type[Contender], ...] = CONTENDERS, advance: Advance = lambda text: None
) -> list[Overhead]:
    """Measure the loops side by side.

    Args:
        rounds: turns of each loop.
        steps: optimizer steps a turn.
        kinds: the loops; all must be installed.
        advance: told of each round.

    Raises:
        RapidformerError: a loop did not do the work of the plain one.
    """
    total = WARMUP + rounds * steps
    pairs = [_Pair(kind, total + 1) for kind in kinds]  # one more, so that no loop comes to its end
    try:
        with _one_thread():
            for pair in pairs:
                pair.warm_up()
            for number in range(rounds):
                for pair in pairs:
                    pair.take_turns(steps)
                advance(f"round {number + 1}")
        return [pair.result(steps) for pair in pairs]
    finally:
        for pair in pairs:
            pair.close()


@contextmanager
def _one_thread() -> Iterator[None]:
    """A step of 2 ms gains nothing from more threads, and every loop's would stand in the others' way.

    Collected garbage and frozen survivors: a collection of everything that was imported would hit
    one loop at random for many milliseconds.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        torch.set_num_threads(threads)


def main(options: argparse.Namespace) -> int:
    """Measure, print and write; the exit status."""
    reasons = {kind.name: why_absent(kind.module, kind.package) for kind in CONTENDERS}
    present = tuple(kind for kind in CONTENDERS if reasons[kind.name] is None)
    absent = {name: reason for name, reason in reasons.items() if reason}
    with progress("overhead", options.rounds) as advance:
        rows = measure_overhead(options.rounds, options.steps, present, advance)
    notes = [_verdict(rows), *(f"absent: {name}: {reason}" for name, reason in absent.items())]
    result = {
        "rounds": options.rounds,
        "steps_a_turn": options.steps,
        "loops": [asdict(row) for row in rows],
        "absent": absent,
    }
    put_out(options, "overhead", result, _table(rows), notes, lambda axes: _draw(axes, rows))
    return 0


def _table(rows: list[Overhead]) -> Table:
    table = Table(title="overhead of training loops, ms a step")
    table.add_column("loop")
    for heading in ("ms a step", "plain loop beside it", "extra ms", "95 % interval"):
        table.add_column(heading, justify="right")
    for row in rows:
        interval = f"{row.low_ms:+.3f} … {row.high_ms:+.3f}"
        table.add_row(row.name, f"{row.step_ms:.3f}", f"{row.plain_ms:.3f}", f"{row.extra_ms:+.3f}", interval)
    return table


def _verdict(rows: list[Overhead]) -> str:
    extra = {row.name: row.extra_ms for row in rows}
    ours, fabric = extra[Ours.name], extra.get(Fabric.name)
    line = f"goal: at most {GOAL_MS} ms over the plain loop: {_reached(ours <= GOAL_MS)} ({ours:+.3f} ms)"
    if fabric is not None:
        line += f"; at most a third of Fabric's {fabric:+.3f} ms: {_reached(ours <= fabric / 3)}"
    return line


def _reached(reached: bool) -> str:
    return "reached" if reached else "missed"


def _draw(axes: Axes, rows: list[Overhead]) -> None:
    names = [row.name for row in rows]
    extra = [row.extra_ms for row in rows]
    errors: Any = [[row.extra_ms - row.low_ms for row in rows], [row.high_ms - row.extra_ms for row in rows]]
    axes.barh(names, extra, xerr=errors, color=["tab:orange" if n == Ours.name else "tab:blue" for n in names])
    axes.axvline(GOAL_MS, color="black", linestyle=":", label=f"goal: {GOAL_MS} ms")
    axes.set_xlabel("extra milliseconds a step over a plain PyTorch loop")
    axes.invert_yaxis()
    axes.legend()
