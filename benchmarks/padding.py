"""``benchmarks padding``: the cost of padding on the lengths of real text, and how much of it each way to batch saves.

A small GPT reads the docstrings of Python's own library as bytes, truncated to 1,024. Each way to batch has a separate
model. The ways take turns of a few steps in one process. Useful tokens are tokens that are not padding. All ways have
the same token budget per batch.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from benchmarks.contest import Advance, Answer, Contest, Flag, Row, asks, bars, bootstrap, progress, table, verdict
from benchmarks.models import gpt2
from benchmarks.texts import docstrings
from rapidformer_templates.data.collate import CausalCollate, TokenizedSamples
from rapidformer_templates.data.loader import load
from rapidformer_templates.data.order import BatchRequest, Order, SampleOrder
from rapidformer_templates.data.shapes import Shape, choose_shapes
from rapidformer_templates.data.types import Data
from rapidformer_templates.switches.dynamic_shape.batches import DynamicOrder

LONGEST, ROWS, SEED, LR = 1024, 8, 0, 1e-3
BUDGET = LONGEST * ROWS
WARMUP = 2
"""Warm-up steps of each way, which do not count."""

CAPS = (1, 2, 4, 8, 16, 0)
MAXIMUM, RANDOM, GROUPED, UNCAPPED = "padded to the maximum", "random batches", "grouped by length", "any shape"
GOALS = {RANDOM: 2.0, MAXIMUM: 5.0}
FILL_GOAL = 0.97


def ways(lengths: np.ndarray) -> dict[str, Callable[[], tuple[Order, Shape | None]]]:
    """Return the ways to batch: each is an order, and the shape of all batches if it forces one."""

    def static(grouped: bool) -> Order:
        return SampleOrder(len(lengths), ROWS, SEED, by_epochs=True, lengths=lengths if grouped else None)

    def dynamic(cap: int, multiple: int = 1) -> tuple[Order, None]:
        return DynamicOrder(lengths, choose_shapes(lengths, BUDGET, cap, multiple), 1, SEED), None

    found: dict[str, Callable[[], tuple[Order, Shape | None]]] = {
        MAXIMUM: lambda: (static(False), Shape(ROWS, LONGEST)),
        RANDOM: lambda: (static(False), None),
        GROUPED: lambda: (static(True), None),
    }
    for cap in CAPS:
        found[f"{cap} shape{'s' if cap > 1 else ''}" if cap else UNCAPPED] = partial(dynamic, cap)
    found["8 shapes in multiples of 8"] = partial(dynamic, 8, 8)
    return found


class Contender:
    """A model that is trained on batches formed in one way.

    Attributes:
        useful: Tokens of each turn without padding.
    """

    def __init__(self, samples: TokenizedSamples, order: Order, shape: Shape | None) -> None:
        self.samples = samples
        self.order = order
        self.shape = shape
        torch.manual_seed(SEED)
        self.model = gpt2(2, 64, 2, 256, LONGEST, dropout=0.1)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR)
        data = Data(train=samples, collate=CausalCollate(0, mask=False))
        self._batches = load(samples, data, self._requests(), workers=0, pin_memory=False)
        self.useful: list[int] = []

    def _requests(self) -> Iterator[BatchRequest]:
        step = 0
        while True:
            for request in self.order.requests(step, 1, range(1)):
                yield replace(request, shape=self.shape) if self.shape else request
            step += 1

    def advance(self, steps: int) -> None:
        """Run some steps. Loading and padding are part of the measured time."""
        useful = 0
        for _ in range(steps):
            batch = next(self._batches)
            useful += int(self.samples.lengths[batch.samples].sum())
            self.model(**batch.batch).loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.useful.append(useful)

    def epoch(self) -> tuple[set[tuple[int, int]], float]:
        """Return the distinct shapes and the fill of the batches of an epoch."""
        lengths, shapes, padded = self.samples.lengths, set(), 0
        for step in range(self.order.steps_per_epoch):
            (request,) = self.order.requests(step, 1, range(1))
            shape = self.shape or request.shape or (len(request.samples), int(lengths[request.samples].max()))
            shapes.add((shape[0], shape[1]))
            padded += shape[0] * shape[1]
        return shapes, float(lengths.sum() / padded)


def measure_padding(
    rounds: int, steps: int, samples: TokenizedSamples, advance: Advance = lambda text: None
) -> list[Row]:
    """Train in all ways, in turns.

    Returns:
        For each way, the distinct shapes and the fill of an epoch, useful tokens per second, and the ratio to the
        other ways with its 95 % interval (bootstrap over the rounds).
    """
    contenders = {name: Contender(samples, *way()) for name, way in ways(samples.lengths).items()}
    for contender in contenders.values():
        contender.advance(WARMUP)
    contest = Contest({name: partial(contender.advance, steps) for name, contender in contenders.items()})
    contest.run(rounds, advance=advance)
    turns = {
        name: np.column_stack([contest.seconds[name], contender.useful[1:]]) for name, contender in contenders.items()
    }
    rows = []
    for name, contender in contenders.items():
        shapes, fill = contender.epoch()
        row = {"name": name, "shapes": len(shapes), "fill": round(fill, 4)}
        row["tokens_per_second"] = round(float(_rate(turns[name])))
        row |= {key: _over(turns[name], turns[other]) for key, other in OTHERS.items()}
        rows.append(row)
    return rows


OTHERS = {"over_random": RANDOM, "over_maximum": MAXIMUM}


def _rate(turns: np.ndarray) -> np.ndarray:
    """Return useful tokens per second for turns of shape (…, turns, 2), which hold seconds and tokens."""
    whole = turns.sum(axis=-2)
    return whole[..., 1] / whole[..., 0]


def _over(mine: np.ndarray, other: np.ndarray) -> tuple[float, float, float]:
    """Return the ratio of the rates with its 95 % interval."""
    low, high = bootstrap(lambda a, b: _rate(a) / _rate(b), mine, other)
    return round(float(_rate(mine) / _rate(other)), 3), round(low, 3), round(high, 3)


@asks(Flag("rounds", 8, "turns per way"), Flag("steps", 3, "optimizer steps per turn"))
def answer(options: argparse.Namespace) -> Answer:
    samples = docstrings(LONGEST)
    with progress("padding", options.rounds) as advance:
        rows = measure_padding(options.rounds, options.steps, samples, advance)
    lengths = samples.lengths
    text = {"samples": len(lengths), "mean": round(float(lengths.mean()), 1), "longest": int(lengths.max())}
    figures = {"rounds": options.rounds, "steps_per_turn": options.steps, "tokens_per_batch": BUDGET, "text": text}
    columns = {
        "batches": "{name}",
        "shapes": "{shapes}",
        "fill": "{fill:.3f}",
        "useful tokens/s": "{tokens_per_second:,}",
        "over random": "{over_random[0]:.2f} ({over_random[1]:.2f} … {over_random[2]:.2f})",
        "over maximum": "{over_maximum[0]:.2f} ({over_maximum[1]:.2f} … {over_maximum[2]:.2f})",
    }
    about = "text: {samples:,} docstrings, {mean} bytes on average, {longest} at most".format_map(text)
    return Answer(
        {**figures, "ways": rows},
        table(f"padding: batches of up to {BUDGET:,} tokens", rows, columns),
        [about, *_goals(rows)],
        bars(
            "useful tokens per second",
            {row["name"]: row["tokens_per_second"] for row in rows},
            ours=[row["name"] for row in rows if row["name"] not in (MAXIMUM, RANDOM, GROUPED)],
            texts=[f"fill {row['fill']:.2f}" for row in rows],
        ),
    )


def _goals(rows: list[Row]) -> list[str]:
    best = next(row for row in rows if row["name"] == UNCAPPED)
    over = {other: best[key][0] for key, other in OTHERS.items()}
    fill = f"{verdict(best['fill'] >= FILL_GOAL)} ({best['fill']:.3f})"
    return [
        f"goal: without a cap a fill of {FILL_GOAL}: {fill}",
        *(
            f"goal: without a cap {goal:g} × the useful tokens/s of {name}: "
            f"{verdict(over[name] >= goal)} ({over[name]:.2f} ×)"
            for name, goal in GOALS.items()
        ),
    ]
