"""``bench padding``: what padding costs on the lengths of real text, and how much of it each way to batch saves.

A small GPT reads the docstrings of Python's own library as bytes, cut at 1,024. Each way to batch has
a model of its own; they take turns of a few steps in one process, each round in another order. Useful
are tokens that are not padding. All ways have the same token budget a batch.
"""

from __future__ import annotations

import argparse
import ast
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rich.table import Table
from transformers import GPT2Config, GPT2LMHeadModel

from rapidformer_templates.commands.bench.output import Advance, progress, put_out
from rapidformer_templates.data.collate import CausalCollate, Ragged, TokenizedSamples
from rapidformer_templates.data.loader import load
from rapidformer_templates.data.order import Order, Request, SampleOrder
from rapidformer_templates.data.shapes import Shape, choose_shapes
from rapidformer_templates.data.types import Data
from rapidformer_templates.switches.dynamic_shape.batches import DynamicOrder

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LONGEST, ROWS, SEED, LR = 1024, 8, 0, 1e-3
BUDGET = LONGEST * ROWS
WARMUP = 2
"""Steps of each way before the first that counts."""

CAPS = (1, 2, 4, 8, 16, 0)
MAXIMUM, RANDOM, GROUPED, UNCAPPED = "padded to the maximum", "random batches", "grouped by length", "any shape"
GOALS = {RANDOM: 2.0, MAXIMUM: 5.0}
FILL_GOAL = 0.97


@dataclass(frozen=True)
class Row:
    """One way to batch.

    Attributes:
        name: of the way.
        shapes: distinct shapes of the batches of an epoch.
        fill: share of an epoch's tokens that are not padding.
        tokens_per_second: useful tokens over the time of all turns.
        over_random, over_maximum: that over the other's, with the 95 % interval (bootstrap over the rounds).
    """

    name: str
    shapes: int
    fill: float
    tokens_per_second: float
    over_random: tuple[float, float, float]
    over_maximum: tuple[float, float, float]


def docstrings(limit: int | None = None) -> TokenizedSamples:
    """The docstrings of Python's library as bytes, cut at :data:`LONGEST`."""
    return TokenizedSamples({"input_ids": Ragged(list(text) for text in islice(_docstrings(), limit))})


def _docstrings() -> Iterator[bytes]:
    library = Path(sysconfig.get_path("stdlib"))
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    # Its packages, but neither site-packages nor the tests.
    for file in sorted(library.glob("*.py")) + sorted(library.glob("[!_st]*/*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, owners) and (text := ast.get_docstring(node)):
                yield text.encode()[:LONGEST]


def ways(lengths: np.ndarray) -> dict[str, Callable[[], tuple[Order, Shape | None]]]:
    """Each way to batch: an order, and the shape of all batches if it forces one."""

    def static(grouped: bool) -> Order:
        return SampleOrder(len(lengths), ROWS, SEED, by_epochs=True, lengths=lengths if grouped else None)

    def dynamic(cap: int, multiple: int = 1) -> Order:
        return DynamicOrder(lengths, choose_shapes(lengths, BUDGET, cap, multiple), 1, SEED, by_epochs=True)

    found: dict[str, Callable[[], tuple[Order, Shape | None]]] = {
        MAXIMUM: lambda: (static(False), Shape(ROWS, LONGEST)),
        RANDOM: lambda: (static(False), None),
        GROUPED: lambda: (static(True), None),
    }
    for cap in CAPS:
        name = f"{cap} shape{'s' if cap > 1 else ''}" if cap else UNCAPPED
        found[name] = lambda cap=cap: (dynamic(cap), None)  # type: ignore[misc]
    found["8 shapes in multiples of 8"] = lambda: (dynamic(8, 8), None)
    return found


class Contender:
    """A model that is trained on batches formed in one way."""

    def __init__(self, name: str, samples: TokenizedSamples, order: Order, shape: Shape | None) -> None:
        self.name = name
        self.samples = samples
        self.order = order
        self.shape = shape
        torch.manual_seed(SEED)
        sizes: dict[str, Any] = {"vocab_size": 256, "n_positions": LONGEST, "n_embd": 64, "n_layer": 2, "n_head": 2}
        self.model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
        self.model.loss_type = "ForCausalLM"  # or transformers warns that it guesses so
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR)
        data = Data(train=samples, collate=CausalCollate(0, mask=False))
        self._batches = load(samples, data, self._requests(), workers=0, pin_memory=False)
        self.turns: list[tuple[float, int]] = []

    def _requests(self) -> Iterator[Request]:
        step = 0
        while True:
            for request in self.order.requests(step, 1, range(1)):
                yield replace(request, shape=self.shape) if self.shape else request
            step += 1

    def advance(self, steps: int) -> tuple[float, int]:
        """(seconds, useful tokens) of some steps; loading and padding are part of them."""
        useful, began = 0, time.perf_counter()
        for _ in range(steps):
            batch = next(self._batches)
            useful += int(self.samples.lengths[batch.samples].sum())
            self.model(**batch.batch).loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return time.perf_counter() - began, useful

    def epoch(self) -> tuple[set[tuple[int, int]], float]:
        """(distinct shapes, fill) of the batches of an epoch."""
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

    Args:
        rounds: turns of each way.
        steps: optimizer steps a turn.
        samples: to train on.
        advance: told of each round.
    """
    contenders = [Contender(name, samples, *way()) for name, way in ways(samples.lengths).items()]
    for contender in contenders:
        contender.advance(WARMUP)
    draw = np.random.default_rng(SEED)
    for number in range(rounds):
        for i in draw.permutation(len(contenders)):
            contenders[i].turns.append(contenders[i].advance(steps))
        advance(f"round {number + 1}")
    turns = {contender.name: np.array(contender.turns) for contender in contenders}
    return [_row(contender, turns) for contender in contenders]


def _row(contender: Contender, turns: dict[str, np.ndarray]) -> Row:
    mine = turns[contender.name]
    shapes, fill = contender.epoch()
    over = (_ratio(mine, turns[other]) for other in (RANDOM, MAXIMUM))
    return Row(contender.name, len(shapes), round(fill, 4), round(_rate(mine)), *over)


def _rate(turns: np.ndarray) -> float:
    return float(turns[..., 1].sum() / turns[..., 0].sum())


def _ratio(mine: np.ndarray, other: np.ndarray) -> tuple[float, float, float]:
    """Ratio of the rates with its 95 % interval, rounds drawn anew for both alike."""
    draws = np.random.default_rng(0).integers(len(mine), size=(2000, len(mine)))
    rates = [turns[draws].sum(axis=1) for turns in (mine, other)]
    ratios = (rates[0][:, 1] / rates[0][:, 0]) / (rates[1][:, 1] / rates[1][:, 0])
    low, high = np.quantile(ratios, (0.025, 0.975))
    return round(_rate(mine) / _rate(other), 3), round(float(low), 3), round(float(high), 3)


def main(options: argparse.Namespace) -> int:
    """Measure, print and write; the exit status."""
    samples = docstrings()
    with progress("padding", options.rounds) as advance:
        rows = measure_padding(options.rounds, options.steps, samples, advance)
    lengths = samples.lengths
    text = {"samples": len(lengths), "mean": round(float(lengths.mean()), 1), "longest": int(lengths.max())}
    result = {
        "rounds": options.rounds,
        "steps_a_turn": options.steps,
        "tokens_a_batch": BUDGET,
        "text": text,
        "ways": [asdict(row) for row in rows],
    }
    notes = [f"text: {text['samples']:,} docstrings, {text['mean']} bytes on average, {text['longest']} at most"]
    put_out(options, "padding", result, _table(rows), notes + _verdict(rows), lambda axes: _draw(axes, rows))
    return 0


def _table(rows: list[Row]) -> Table:
    table = Table(title=f"padding: batches of up to {BUDGET:,} tokens")
    table.add_column("batches")
    for heading in ("shapes", "fill", "useful tokens/s", "over random", "over maximum"):
        table.add_column(heading, justify="right")
    for row in rows:
        ratios = (f"{value:.2f} ({low:.2f} … {high:.2f})" for value, low, high in (row.over_random, row.over_maximum))
        table.add_row(row.name, f"{row.shapes}", f"{row.fill:.3f}", f"{row.tokens_per_second:,.0f}", *ratios)
    return table


def _verdict(rows: list[Row]) -> list[str]:
    best = next(row for row in rows if row.name == UNCAPPED)
    found = {RANDOM: best.over_random[0], MAXIMUM: best.over_maximum[0]}
    lines = [f"goal: without a cap a fill of {FILL_GOAL}: {_reached(best.fill >= FILL_GOAL)} ({best.fill:.3f})"]
    lines += [
        f"goal: without a cap {goal:g} × the useful tokens/s of {name}: "
        f"{_reached(found[name] >= goal)} ({found[name]:.2f} ×)"
        for name, goal in GOALS.items()
    ]
    return lines


def _reached(reached: bool) -> str:
    return "reached" if reached else "missed"


def _draw(axes: Axes, rows: list[Row]) -> None:
    dynamic = [row.name not in (MAXIMUM, RANDOM, GROUPED) for row in rows]
    bars = axes.barh(
        [row.name for row in rows],
        [row.tokens_per_second for row in rows],
        color=["tab:orange" if ours else "tab:blue" for ours in dynamic],
    )
    axes.bar_label(bars, [f" fill {row.fill:.2f}" for row in rows])
    axes.set_xlabel("useful tokens a second")
    axes.margins(x=0.15)
    axes.invert_yaxis()
