"""``bench mfu``: how much of the machine's arithmetic each training loop turns into training.

The loops do the same work in turns, and a large matrix product is timed before and after each turn, so that a busy
moment of the machine hits the loop and what it is measured by. ``flops.py`` states the convention.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from rich.table import Table

from rapidformer_templates.bench.flops import MatrixProduct, training_flops
from rapidformer_templates.bench.loops import Contender, Ours, TransformersTrainer
from rapidformer_templates.bench.output import Advance, progress, put_out, spread
from rapidformer_templates.bench.turns import PausedLoop
from rapidformer_templates.bench.works import MODELS, Work, work_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KINDS: tuple[type[Contender], ...] = (Contender, TransformersTrainer, Ours)
GOALS = {"cpu": 0.70, "cuda": 0.45}
WARMUP = 3
"""Steps of each loop before the first that counts."""

SAME_LOSS = {"fp32": 1e-3, "bf16": 2e-2}
"""How far the losses after the warm-up may be apart, as a share."""


@dataclass(frozen=True)
class Utilisation:
    """One loop.

    Attributes:
        tokens_per_second, tokens_per_second_sd: over the turns.
        flops_per_second: of the model, the median over the turns.
        peak_flops_per_second: of the matrix products around those turns.
        utilisation: the median of the ratios turn by turn.
        over_bare: speed over the bare loop's, the median over the rounds.
        peak_memory_mb: on a GPU where the loops ran one after the other; else None.
    """

    name: str
    tokens_per_second: float
    tokens_per_second_sd: float
    flops_per_second: float
    peak_flops_per_second: float
    utilisation: float
    over_bare: float
    peak_memory_mb: float | None


@dataclass
class _Turns:
    """A loop's seconds a step, and the rate of the matrix product around each turn."""

    seconds: list[float]
    peaks: list[float]
    memory_mb: float | None = None


def measure_utilisation(
    work: Work,
    rounds: int,
    steps: int,
    kinds: Sequence[type[Contender]] = KINDS,
    *,
    together: bool = True,
    advance: Advance = lambda text: None,
) -> list[Utilisation]:
    """Measure the loops side by side.

    Args:
        rounds: turns of each loop.
        steps: optimizer steps a turn.
        kinds: the loops; the first is what the others are compared with.
        together: False lets them run one after the other, where memory is too short for all models.
        advance: told of each turn.

    Raises:
        RapidformerError: a loop did not do the work of the first one.
    """
    product = MatrixProduct(work.device, work.precision)
    total = WARMUP + rounds * steps + 1  # one more, so that no loop comes to its end
    turns: dict[str, _Turns] = {}
    first: Contender | None = None
    for group in [list(kinds)] if together else [[kind] for kind in kinds]:
        contenders = [kind(work, total) for kind in group]
        loops = [PausedLoop(contender.run, product.wait) for contender in contenders]
        try:
            _reset_peak(work)
            for contender, loop in zip(contenders, loops, strict=True):
                loop.advance(WARMUP)
                first = first or contender
                contender.check_against(first, SAME_LOSS[work.precision])
                turns[contender.name] = _Turns([], [])
            for number in range(rounds):
                for i in range(len(loops)) if number % 2 else reversed(range(len(loops))):
                    mine = turns[contenders[i].name]
                    before = product.rate()
                    mine.seconds.append(loops[i].advance(steps) / steps)
                    mine.peaks.append((before + product.rate()) / 2)
                    advance(contenders[i].name)
            if not together and work.device == "cuda":
                turns[contenders[0].name].memory_mb = torch.cuda.max_memory_allocated() / 1e6
        finally:
            for loop in loops:
                loop.close()
        if not together:
            first.model = _Loss(first.model.last_loss)  # its memory is for the next one
            del contenders, loops, contender, loop
            gc.collect()
    flops = training_flops(work.build, work.example)
    bare = turns[kinds[0].name].seconds
    return [_row(name, mine, bare, flops, work.tokens) for name, mine in turns.items()]


class _Loss:
    """What is left of a model that was compared."""

    def __init__(self, last_loss: torch.Tensor) -> None:
        self.last_loss = float(last_loss)


def _reset_peak(work: Work) -> None:
    if work.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _row(name: str, mine: _Turns, bare: list[float], flops: int, tokens: int) -> Utilisation:
    rates = [flops / seconds for seconds in mine.seconds]
    return Utilisation(
        name=name,
        tokens_per_second=round(tokens / statistics.median(mine.seconds), 1),
        tokens_per_second_sd=round(spread([tokens / seconds for seconds in mine.seconds]), 1),
        flops_per_second=statistics.median(rates),
        peak_flops_per_second=statistics.median(mine.peaks),
        utilisation=round(statistics.median(rate / peak for rate, peak in zip(rates, mine.peaks, strict=True)), 4),
        over_bare=round(statistics.median(b / s for b, s in zip(bare, mine.seconds, strict=True)), 4),
        peak_memory_mb=mine.memory_mb,
    )


def main(options: argparse.Namespace) -> int:
    """Measure, print and write; the exit status."""
    from rapidformer_templates.environment import detect_gpu

    device = "cuda" if options.device != "cpu" and detect_gpu() is not None else "cpu"
    precision = options.precision or ("bf16" if device == "cuda" else "fp32")
    name = options.model or {"cpu": "bert-base/3", "cuda": "bert-base"}[device]
    work = work_of(name, device, precision, batch=options.batch)
    with progress("mfu", options.rounds * len(KINDS)) as advance:
        rows = measure_utilisation(work, options.rounds, options.steps, together=device == "cpu", advance=advance)
    shape = MODELS[name]
    title = f"{name}: {shape.layers} layers, hidden {shape.hidden}, {shape.length} tokens, batch {work.batch}"
    result = {
        "model": name,
        "shape": asdict(shape),
        "batch": work.batch,
        "device": device,
        "precision": precision,
        "threads": torch.get_num_threads(),
        "flops_a_step": training_flops(work.build, work.example),
        "loops": [asdict(row) for row in rows],
    }
    put_out(options, "mfu", result, _table(rows, title), _verdict(rows, device), lambda axes: _draw(axes, rows))
    return 0


def _table(rows: list[Utilisation], title: str) -> Table:
    table = Table(title=f"model FLOPs utilisation, {title}")
    table.add_column("loop")
    for heading in ("tokens/s", "model GFLOP/s", "matrix product GFLOP/s", "utilisation", "over the bare loop"):
        table.add_column(heading, justify="right")
    for row in rows:
        speed = f"{row.tokens_per_second:,.0f} ± {row.tokens_per_second_sd:,.0f}"
        rates = (f"{rate / 1e9:,.0f}" for rate in (row.flops_per_second, row.peak_flops_per_second))
        table.add_row(row.name, speed, *rates, f"{row.utilisation:.3f}", f"{row.over_bare:.3f}")
    return table


def _verdict(rows: list[Utilisation], device: str) -> list[str]:
    ours, goal = next(row for row in rows if row.name == Ours.name).utilisation, GOALS[device]
    return [
        f"goal: utilisation of at least {goal:.2f}: {'reached' if ours >= goal else 'missed'} ({ours:.3f})",
        "FLOPs: matrix products and attention of forward and backward by torch's counter; no causal discount",
    ]


def _draw(axes: Axes, rows: list[Utilisation]) -> None:
    colours: Any = ["tab:orange" if row.name == Ours.name else "tab:blue" for row in rows]
    bars = axes.barh([row.name for row in rows], [row.utilisation for row in rows], color=colours)
    axes.bar_label(bars, fmt="%.3f")
    axes.set_xlabel("model FLOP/s over those of a large matrix product")
    axes.set_xlim(0, 1)
    axes.invert_yaxis()
