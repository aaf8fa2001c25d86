"""``benchmarks overhead``: the overhead of training loops, in milliseconds of processor time per step.

Each loop is paired with a separate plain PyTorch loop. The two take turns of a few steps, and the reported number is
the median of the differences within the pairs. The noise of a shared machine is larger than the overhead, but it hits
both loops. Processor time leaves out the time in which other programs run. The pair of two plain loops is the null
control. Its distance from zero is the resolution of the method.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from benchmarks.contest import Answer, Contest, Flag, bars, bootstrap, table, verdict, why_absent
from benchmarks.overhead_loops import CONTENDERS, Contender, Fabric, Ours
from benchmarks.turns import Loop
from rapidformer_templates.commands.bench.output import Advance, progress
from rapidformer_templates.errors import RapidformerError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FLAGS = (Flag("rounds", 60, "pairs of turns per loop"), Flag("steps", 25, "optimizer steps per turn"))

WARMUP = 50
"""Warm-up steps of each loop, which do not count."""

GOAL_MS = 0.15
PLAIN = "plain"


def measure_overhead(
    rounds: int, steps: int, kinds: tuple[type[Contender], ...] = CONTENDERS, advance: Advance = lambda text: None
) -> list[dict[str, Any]]:
    """Measure each loop next to a plain one.

    Returns:
        For each loop, milliseconds per step of the loop and of the plain one, and the median of the differences
        with its 95 % interval (bootstrap over the pairs).

    Raises:
        RapidformerError: A loop did not do the same work as the plain one.
    """
    total = WARMUP + rounds * steps + 1  # one more, so that no loop ends
    with _one_thread(), ExitStack() as stack:
        pairs = []
        for kind in kinds:
            both = (Contender(total), kind(total))
            loops = [stack.enter_context(closing(Loop(one.run, clock=time.process_time))) for one in both]
            _warm_up(both, loops)
            ways = zip((PLAIN, kind.name), loops, strict=True)
            pairs.append(Contest({name: partial(loop.advance, steps) for name, loop in ways}, work=steps))
        for number in range(rounds):
            for pair in pairs:
                pair.round()
            advance(f"round {number + 1}")
    return [_row(pair) for pair in pairs]


def _warm_up(both: tuple[Contender, Contender], loops: list[Loop]) -> None:
    """Run both loops for a while and check that they reach the same loss. Otherwise they do not do the same work.

    It is not possible to compare later: over hundreds of steps, rounding alone makes any two loops diverge.
    """
    for loop in loops:
        loop.advance(WARMUP)
    expected, actual = (float(one.model.last_loss) for one in both)
    if abs(actual - expected) > 1e-4 * abs(expected):
        raise RapidformerError(
            f"{both[1].name} reached the loss {actual}, but the plain loop reached {expected}: they do different work",
            where="benchmarks overhead",
        )


def _row(pair: Contest) -> dict[str, Any]:
    plain, own = (np.array(seconds) * 1000 / pair.work for seconds in pair.seconds.values())
    low, high = bootstrap(lambda extra: np.median(extra, axis=1), own - plain)
    figures: dict[str, Any] = {"step_ms": np.median(own), "plain_ms": np.median(plain)}
    figures |= {"extra_ms": np.median(own - plain), "low_ms": low, "high_ms": high}
    return {"name": list(pair.ways)[1]} | {key: round(float(figure), 4) for key, figure in figures.items()}


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread, and collect and freeze all objects.

    A step of 2 ms gains nothing from more threads, and the threads of all loops would get in each other's way. A
    garbage collection of everything that was imported would hit a random loop for many milliseconds.
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


def answer(options: argparse.Namespace) -> Answer:
    reasons = {kind.name: why_absent(kind.module, kind.package) for kind in CONTENDERS}
    absent = {name: reason for name, reason in reasons.items() if reason}
    present = tuple(kind for kind in CONTENDERS if kind.name not in absent)
    with progress("overhead", options.rounds) as advance:
        rows = measure_overhead(options.rounds, options.steps, present, advance)
    columns = {
        "loop": "{name}",
        "ms per step": "{step_ms:.3f}",
        "its plain loop": "{plain_ms:.3f}",
        "extra ms": "{extra_ms:+.3f}",
        "95 % interval": "{low_ms:+.3f} … {high_ms:+.3f}",
    }
    errors = [[row["extra_ms"] - row["low_ms"] for row in rows], [row["high_ms"] - row["extra_ms"] for row in rows]]
    return Answer(
        {"rounds": options.rounds, "steps_per_turn": options.steps, "loops": rows, "absent": absent},
        table("overhead of training loops, ms per step", rows, columns),
        [_goals(rows), *(f"absent: {name}: {reason}" for name, reason in absent.items())],
        bars(
            "extra milliseconds per step over a plain PyTorch loop",
            {row["name"]: row["extra_ms"] for row in rows},
            ours=[Ours.name],
            errors=errors,
            more=_draw_goal,
        ),
    )


def _draw_goal(axes: Axes) -> None:
    axes.axvline(GOAL_MS, color="black", linestyle=":", label=f"goal: {GOAL_MS} ms")
    axes.legend()


def _goals(rows: list[dict[str, Any]]) -> str:
    extra = {row["name"]: row["extra_ms"] for row in rows}
    ours, fabric = extra[Ours.name], extra.get(Fabric.name)
    line = f"goal: at most {GOAL_MS} ms over the plain loop: {verdict(ours <= GOAL_MS)} ({ours:+.3f} ms)"
    if fabric is not None:
        line += f"; at most a third of Fabric's {fabric:+.3f} ms: {verdict(ours <= fabric / 3)}"
    return line
