"""``benchmarks precision``: 16-bit weights with fp32 masters, compared with fp32 and with fp32 weights under autocast.

A small GPT reads the docstrings of Python's own library as bytes. Each way trains a separate copy from the same start
on the same batches, with two micro batches per step. The ways take turns of a few steps.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.contest import Advance, Answer, Contest, Flag, Row, asks, progress, table
from benchmarks.models import gpt2
from benchmarks.optimizers import HELD_OUT, LENGTH, ROWS, SEED, text
from rapidformer_templates import compose

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FLAGS = (
    Flag("steps", 300, "of each way"),
    Flag("lr", 1e-3, "peak learning rate"),
    Flag("layers", 4, "of the model"),
    Flag("hidden", 192, "width of the model"),
    Flag("fp16", True, "also train in fp16, which is slow on most CPUs"),
)

TURN, MICRO = 10, 4
REFERENCE = "fp32"
WAYS: dict[str, dict[str, Any]] = {
    REFERENCE: {},
    "bf16 weights, fp32 masters": {"mixed_precision": "bf16"},
    "bf16, gradients in bf16, too": {"mixed_precision": "bf16", "grad_accum_dtype": "bf16"},
    "bf16, fp32 weights kept": {"mixed_precision": "bf16", "keep_fp32_parameters": True},
    "fp16 weights, fp32 masters": {"mixed_precision": "fp16"},
    "fp16, fp32 weights kept": {"mixed_precision": "fp16", "keep_fp32_parameters": True},
}
"""Switches of each way."""
GOAL = 0.005


class Contender:
    """A model that is trained in one way.

    Attributes:
        seconds: Processor seconds of each step.
        skipped: Number of steps whose scaled gradient overflowed.
    """

    def __init__(self, way: str, options: argparse.Namespace, rows: torch.Tensor) -> None:
        torch.manual_seed(SEED)
        model = gpt2(options.layers, options.hidden, max(1, options.hidden // 64), 256, LENGTH)
        optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.01)
        warmup = max(1, options.steps // 10)
        sizes: dict[str, Any] = {"micro_batch_size": MICRO, "global_batch_size": ROWS, "clip_grad": 1.0}
        with contextlib.redirect_stderr(io.StringIO()):
            self.session = compose(
                model,
                optimizer,
                lambda model, batch: model(**batch).loss,
                schedule=lambda step: min(1.0, (step + 1) / warmup) * (1 - 0.9 * step / options.steps),
                **sizes,
                **WAYS[way],
            )
        self.held_out, self.text = rows[:HELD_OUT], rows[HELD_OUT:]
        self._left = range(options.steps)
        self.seconds: list[float] = []
        self.skipped = 0

    def turn(self) -> None:
        now, self._left = self._left[:TURN], self._left[TURN:]
        for number in now:
            start = number * ROWS % (len(self.text) - ROWS)
            batch = self.text[start : start + ROWS]
            began = time.process_time()
            result = self.session.step([_batch(part) for part in batch.split(MICRO)])
            self.seconds.append(time.process_time() - began)
            self.skipped += bool(result.skipped)

    def loss(self) -> float:
        """Return the loss on held-out text, in nats per byte."""
        return statistics.mean(self.session.evaluate(_batch(part)).loss for part in self.held_out.split(ROWS))

    def bytes_by_kind(self) -> dict[str, float]:
        """Return the bytes held per parameter, by kind."""
        summary = self.session.summary()
        held = summary["receipts"]["held_bytes_by_rank"][0]
        kinds = {"weights": "parameter_bytes", "gradients": "gradient_bytes", "optimizer": "optimizer_state_bytes"}
        return {name: round(held[kind] / summary["parameters"], 3) for name, kind in kinds.items()}


def _batch(rows: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input_ids": rows, "labels": rows}


def measure(options: argparse.Namespace, rows: torch.Tensor, advance: Advance = lambda text: None) -> list[Row]:
    """Train in each way, in turns."""
    ways = [way for way, flags in WAYS.items() if options.fp16 or flags.get("mixed_precision") != "fp16"]
    contenders = {way: Contender(way, options, rows) for way in ways}
    Contest({way: one.turn for way, one in contenders.items()}).run(-(-options.steps // TURN), advance=advance)
    losses = {way: one.loss() for way, one in contenders.items()}
    times = {way: statistics.median(one.seconds) for way, one in contenders.items()}
    return [
        {
            "name": way,
            **one.bytes_by_kind(),
            "loss": round(losses[way], 5),
            "over_fp32": round(losses[way] / losses[REFERENCE], 5),
            "skipped": one.skipped,
            "time_over_fp32": round(times[way] / times[REFERENCE], 3),
        }
        for way, one in contenders.items()
    ]


@asks(*FLAGS)
def answer(options: argparse.Namespace) -> Answer:
    rows = text()
    with progress("precision", -(-options.steps // TURN)) as advance:
        found = measure(options, rows, advance)
    columns = {
        "way": "{name}",
        "weights B/param": "{weights:.2f}",
        "gradients": "{gradients:.2f}",
        "optimizer": "{optimizer:.2f}",
        "held-out loss": "{loss:.4f}",
        "over fp32": "{over_fp32:.4f}",
        "skipped": "{skipped}",
        "its time over fp32's": "{time_over_fp32:.2f}",
    }
    settings = {name: getattr(options, name) for name in ("steps", "lr", "layers", "hidden")}
    return Answer(
        {**settings, "precision": found},
        table(f"precision: {options.steps} steps of a small GPT on real text", found, columns),
        [_goal(found)],
        partial(_draw, found),
    )


def _goal(rows: Sequence[Row]) -> str:
    far = [row for row in rows if abs(row["over_fp32"] - 1) > GOAL]
    missed = "missed by " + ", ".join("{name} {over_fp32:.4f}".format_map(row) for row in far)
    return f"goal: loss within {GOAL:.1%} of fp32's: {missed if far else 'reached'}"


def _draw(rows: Sequence[Row], axes: Axes) -> None:
    kinds, left = ("weights", "gradients", "optimizer"), [0.0] * len(rows)
    for kind in kinds:
        widths = [row[kind] for row in rows]
        axes.barh([row["name"] for row in rows], widths, left=left, label=kind)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("bytes per parameter")
    axes.legend()
