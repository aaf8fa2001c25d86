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
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from benchmarks.contest import (
    Advance,
    Answer,
    Contest,
    Flag,
    asks,
    bars,
    bootstrap,
    progress,
    table,
    verdict,
    why_absent,
)  # fmt: skip
from benchmarks.loops import HAND_WRITTEN, HF_TRAINER, Job, train
from benchmarks.workers import Loop
from rapidformer_templates.commands.bench.models import BenchModel
from rapidformer_templates.errors import RapidformerError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MODEL = BenchModel("classifier", 2, 32, 2, 64, 16, micro_batch=8)
"""A BERT of two blocks. A step takes a few milliseconds on a CPU."""

OURS, FABRIC = "rapidformer_templates", "Lightning Fabric"
CONTENDERS = {
    f"{HAND_WRITTEN} again (null control)": HAND_WRITTEN, OURS: OURS, FABRIC: FABRIC, "accelerate": "accelerate",
    HF_TRAINER: HF_TRAINER,
}  # fmt: skip
"""The loop of each contender. Each is compared with the loop by hand."""

PACKAGES = {FABRIC: ("lightning_fabric", "lightning-fabric"), "accelerate": ("accelerate", "accelerate")}
"""Module and package that a contender needs."""

WARMUP = 50
"""Warm-up steps of each loop, which do not count."""

GOAL_MS = 0.15


def measure_overhead(
    rounds: int, steps: int, contenders: Mapping[str, str] = CONTENDERS, advance: Advance = lambda text: None
) -> list[dict[str, Any]]:
    """Measure each loop next to a plain one.

    Returns:
        For each loop, milliseconds per step of the loop and of the plain one, and the median of the differences
        with its 95 % interval (bootstrap over the pairs).

    Raises:
        RapidformerError: A loop did not do the same work as the plain one.
    """
    job = Job(MODEL, 1 + WARMUP + rounds * steps + 1)  # one more, so that no loop ends
    with _one_thread(), ExitStack() as stack:
        pairs = {}
        for name, loop in contenders.items():
            both = [
                stack.enter_context(closing(Loop(train, each, job, clock=time.process_time)))
                for each in (HAND_WRITTEN, loop)
            ]
            _warm_up(name, *both)
            pairs[name] = Contest({str(i): partial(each.advance, steps) for i, each in enumerate(both)}, work=steps)
        for number in range(rounds):
            for pair in pairs.values():
                pair.round()
            advance(f"round {number + 1}")
    return [_row(name, pair) for name, pair in pairs.items()]


def _warm_up(name: str, *both: Loop) -> None:
    """Run both loops for a while and check that they reach the same loss. Otherwise they do not do the same work.

    It is not possible to compare later: over hundreds of steps, rounding alone makes any two loops diverge.
    """
    for loop in both:
        loop.advance(1)  # the setup
        loop.advance(WARMUP)
    expected, actual = (loop.loss for loop in both)
    if abs(actual - expected) > 1e-4 * abs(expected):
        raise RapidformerError(
            f"{name} reached the loss {actual}, but the plain loop reached {expected}: they do different work",
            where="benchmarks overhead",
        )


def _row(name: str, pair: Contest) -> dict[str, Any]:
    plain, own = (np.array(seconds) * 1000 / pair.work for seconds in pair.seconds.values())
    low, high = bootstrap(lambda extra: np.median(extra, axis=1), own - plain)
    figures: dict[str, Any] = {"step_ms": np.median(own), "plain_ms": np.median(plain)}
    figures |= {"extra_ms": np.median(own - plain), "low_ms": low, "high_ms": high}
    return {"name": name} | {key: round(float(figure), 4) for key, figure in figures.items()}


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


@asks(Flag("rounds", 60, "pairs of turns per loop"), Flag("steps", 25, "optimizer steps per turn"))
def answer(options: argparse.Namespace) -> Answer:
    reasons = {name: why_absent(*needed) for name, needed in PACKAGES.items()}
    absent = {name: reason for name, reason in reasons.items() if reason}
    present = {name: loop for name, loop in CONTENDERS.items() if name not in absent}
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
    extra = {row["name"]: row["extra_ms"] for row in rows}
    goal = f"goal: at most {GOAL_MS} ms over the plain loop: {verdict(extra[OURS] <= GOAL_MS)} ({extra[OURS]:+.3f} ms)"
    if FABRIC in extra:
        reached = verdict(extra[OURS] <= extra[FABRIC] / 3)
        goal += f"; at most a third of Fabric's {extra[FABRIC]:+.3f} ms: {reached}"
    return Answer(
        {"rounds": options.rounds, "steps_per_turn": options.steps, "loops": rows, "absent": absent},
        table("overhead of training loops, ms per step", rows, columns),
        [goal, *(f"absent: {name}: {reason}" for name, reason in absent.items())],
        bars("extra milliseconds per step over a plain PyTorch loop", extra, [OURS], errors, more=_draw_goal),
    )


def _draw_goal(axes: Axes) -> None:
    axes.axvline(GOAL_MS, color="black", linestyle=":", label=f"goal: {GOAL_MS} ms")
    axes.legend()
