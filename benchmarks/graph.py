"""``bench graph``: BERT's fine-tuning step as torch runs it, and through graphs that ONNX Runtime or inductor run.

Every solution is a run of this library in a process of its own, so that its memory is its own. All take
turns of a few steps, each round in another order, so that a busy moment of the machine hits all of them.
Dropout is on; on a CPU eager and ONNX Runtime draw the same masks, so both must come to the same losses.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table

from rapidformer_templates.commands.bench.output import Advance, progress, put_out, spread
from rapidformer_templates.errors import RapidformerError, WorkerFailed
from rapidformer_templates.planning.environment import detect_gpu

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WARMUP, SEED = 3, 0
"""Steps of each run before the first that counts: graphs are made in them."""

GOAL = 1.10
"""ONNX Runtime's samples a second over eager's, both in fp32."""

SAME_LOSS = 1e-3
"""How far the losses of the last step may be apart, as a share."""


@dataclass(frozen=True)
class Scale:
    """What is trained.

    Attributes:
        layers, hidden, heads, vocabulary: of the BERT.
        length: tokens of a sample.
        batch: samples of a step.
    """

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    length: int
    batch: int


SCALES = {
    "tiny": Scale(2, 32, 2, 128, 16, 4),
    "small": Scale(12, 768, 12, 30522, 128, 8),
    "paper": Scale(12, 768, 12, 30522, 512, 16),
}


@dataclass(frozen=True)
class Solution:
    """A way to run the step.

    Attributes:
        flags: that ask for it.
        published: samples/s and peak MB on 4 GPUs of 32 GB [B].
        own_masks: whether it draws other masks of dropout than eager, and comes to another loss.
    """

    flags: str
    published: tuple[float, int] | None = None
    own_masks: bool = False


EAGER, ORT = "fp32", "ORT"
SOLUTIONS = {
    EAGER: Solution("", (479.15, 2112)),
    "mixed": Solution("--mixed-precision", (589.66, 2127)),
    ORT: Solution("--onnx-runtime-training", (554.24, 2430)),
    "ORT + mixed": Solution("--onnx-runtime-training --mixed-precision", (614.70, 2289)),
    "inductor": Solution("--torch-compile", own_masks=True),
}
SLOW = {
    "cpu": {"mixed": "a CPU is slow at 16 bits (--all measures it)"},
    "cuda": {},
}
INDUCTOR = "it compiles for minutes (--inductor measures it)"


@dataclass(frozen=True)
class Row:
    """What a solution did.

    Attributes:
        name: of it.
        samples_per_second, deviation: mean and standard deviation over the turns.
        over_eager: its speed over eager's, the median of the rounds.
        peak_mb: greatest memory of its process; on a CPU with the interpreter and its libraries.
        loss: of the last step.
        share_in_graphs: of the time of its turns, that in ONNX Runtime's graphs.
        onnx_runtime: its receipt, where ONNX Runtime ran.
    """

    name: str
    samples_per_second: float
    deviation: float
    over_eager: float
    peak_mb: float
    loss: float
    share_in_graphs: float
    onnx_runtime: dict[str, Any] | None


class Runner:
    """A run in a process of its own, which waits until it is told to make some steps."""

    def __init__(self, name: str, scale: Scale, total: int, device: str) -> None:
        self.name = name
        self._pipe, theirs = multiprocessing.Pipe()
        arguments = (SOLUTIONS[name].flags, scale, total, device, theirs)
        self._process = multiprocessing.get_context("spawn").Process(target=_train, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        self.seconds: list[float] = []

    def hear(self) -> Any:
        """What it says next.

        Raises:
            RapidformerError: what it was refused for, or that it ended.
        """
        try:
            said = self._pipe.recv()
        except EOFError:
            raise WorkerFailed(f"the run of {self.name!r} ended", where="bench graph") from None
        if isinstance(said, RapidformerError):
            raise said
        return said

    def advance(self, steps: int) -> None:
        """Make some steps and note the seconds that they took."""
        self._pipe.send(steps)
        self.seconds.append(float(self.hear()))

    def close(self) -> None:
        self._pipe.close()
        self._process.terminate()
        self._process.join()


def _train(flags: str, scale: Scale, total: int, device: str, pipe: Connection) -> None:
    """The process of a solution: trains, waiting for its turn after the warm-up."""
    from benchmarks.graph_job import train

    try:
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
            train(flags, scale, total, device, pipe)
    except RapidformerError as error:
        pipe.send(RapidformerError(error.render()))
    except (BrokenPipeError, EOFError):
        return  # nobody waits for it any more


def measure(
    names: list[str], scale: Scale, rounds: int, steps: int, device: str, advance: Advance = lambda text: None
) -> tuple[list[Row], dict[str, str]]:
    """Train in all ways, in turns: the rows, and why others did not run.

    Args:
        names: keys of :data:`SOLUTIONS`; eager is among them.
        scale: of the model.
        rounds: turns of each.
        steps: optimizer steps a turn.
        device: ``cpu`` or ``cuda``.
        advance: told of each round.
    """
    absent: dict[str, str] = {}
    with _runners(names, scale, WARMUP + rounds * steps, device) as runners:
        for name, runner in list(runners.items()):
            try:
                runner.hear()
            except RapidformerError as error:
                absent[name] = error.message
                runners.pop(name).close()
        draw = np.random.default_rng(SEED)
        for number in range(rounds):
            for i in draw.permutation(len(runners)):
                list(runners.values())[i].advance(steps)
            advance(f"round {number + 1}")
        ended = {name: runner.hear() for name, runner in runners.items()}
        seconds = {name: runner.seconds for name, runner in runners.items()}
    return [_row(name, ended[name], seconds, scale.batch * steps) for name in ended], absent


@contextmanager
def _runners(names: list[str], scale: Scale, total: int, device: str) -> Iterator[dict[str, Runner]]:
    runners: dict[str, Runner] = {}
    try:
        for name in names:
            runners[name] = Runner(name, scale, total, device)
        yield runners
    finally:
        for runner in runners.values():
            runner.close()


def _row(name: str, ended: dict[str, Any], seconds: dict[str, list[float]], samples: int) -> Row:
    mine = seconds[name]
    rates = [samples / turn for turn in mine]
    over = statistics.median(eager / turn for eager, turn in zip(seconds[EAGER], mine, strict=True))
    return Row(name, round(samples * len(mine) / sum(mine), 3), round(spread(rates), 3), round(over, 4), **ended)


def main(options: argparse.Namespace) -> int:
    """Measure, print and write; the exit status: 1 if a solution came to another loss than eager."""
    device = ("cuda" if detect_gpu() else "cpu") if options.device == "auto" else options.device
    left_out = {} if options.all else dict(SLOW[device])
    if not options.inductor:
        left_out["inductor"] = INDUCTOR
    names = [name for name in SOLUTIONS if name not in left_out]
    with progress("graph", options.rounds) as advance:
        rows, absent = measure(names, SCALES[options.scale], options.rounds, options.steps, device, advance)
    absent = left_out | absent
    result = {
        "scale": options.scale,
        "model": asdict(SCALES[options.scale]),
        "device": device,
        "rounds": options.rounds,
        "steps_a_turn": options.steps,
        "solutions": [asdict(row) for row in rows],
        "published": {name: solution.published for name, solution in SOLUTIONS.items()},
        "absent": absent,
    }
    strayed = _strayed(rows)
    notes = [*_verdict(rows), *strayed, *(f"{name} did not run: {_in_short(why)}" for name, why in absent.items())]
    put_out(options, "graph", result, _table(rows, options.scale, device), notes, lambda axes: _draw(axes, rows))
    return 1 if strayed else 0


def _table(rows: list[Row], scale: str, device: str) -> Table:
    model = SCALES[scale]
    table = Table(
        title=f"BERT fine-tuning, {model.layers} layers, hidden {model.hidden}, {model.length} tokens, "
        f"batch {model.batch}, 1 × {device}"
    )
    table.add_column("solution")
    for heading in ("samples/s", "over fp32", "peak MB", "in ORT", "published", "over fp32", "peak MB"):
        table.add_column(heading, justify="right")
    base = SOLUTIONS[EAGER].published
    for row in rows:
        reference: tuple[str, ...] = ()
        if base and (published := SOLUTIONS[row.name].published):
            reference = (f"{published[0]:.2f}", f"{published[0] / base[0]:.3f}", f"{published[1]:,}")
        share = f"{row.share_in_graphs:.0%} of the time" if row.onnx_runtime else ""
        speed = f"{row.samples_per_second:.2f} ± {row.deviation:.2f}"
        table.add_row(row.name, speed, f"{row.over_eager:.3f}", f"{row.peak_mb:,.0f}", share, *reference)
    return table


def _verdict(rows: list[Row]) -> list[str]:
    found = {row.name: row.over_eager for row in rows}
    if ORT not in found:
        return []
    reached = "reached" if found[ORT] >= GOAL else "missed"
    return [f"goal: ORT at {GOAL:.2f} × the samples/s of eager fp32: {reached} ({found[ORT]:.3f} ×)"]


def _strayed(rows: list[Row]) -> list[str]:
    """Solutions in fp32 with eager's masks whose loss is not eager's."""
    expected = next(row.loss for row in rows if row.name == EAGER)
    return [
        f"{row.name}: the last loss is {row.loss:.6f}, eager's is {expected:.6f}"
        for row in rows
        if not ("mixed" in row.name or SOLUTIONS[row.name].own_masks)
        and abs(row.loss - expected) > SAME_LOSS * abs(expected)
    ]


def _in_short(why: str) -> str:
    """The line of an error text that says what is wrong; all of it is in the JSON."""
    lines = why.splitlines()
    return next((line for line in lines if line.startswith("error")), lines[-1])


def _draw(axes: Axes, rows: list[Row]) -> None:
    names = [row.name for row in rows]
    colours = ["tab:orange" if row.onnx_runtime else "tab:blue" for row in rows]
    errors = [row.deviation for row in rows]
    bars = axes.barh(names, [row.samples_per_second for row in rows], xerr=errors, color=colours)
    axes.bar_label(bars, [f" {row.over_eager:.2f} ×, {row.peak_mb:,.0f} MB" for row in rows], padding=4)
    axes.set_xlabel("samples per second (orange: in ONNX Runtime)")
    axes.margins(x=0.25)
    axes.invert_yaxis()
