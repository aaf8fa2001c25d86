"""``benchmarks graph``: BERT's fine-tuning step in eager torch, and through graphs that ONNX Runtime or inductor run.

Every solution is a run of this library in a separate process, so that its memory can be measured. All take turns of a
few steps. Dropout is on. On a CPU, eager and ONNX Runtime draw the same masks, so both must reach the same losses.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from benchmarks.contest import Answer, Columns, Contest, Flag, Row, bars, table, verdict
from benchmarks.turns import Loop, StepDone
from rapidformer_templates.commands.bench.output import Advance, in_short, progress, spread
from rapidformer_templates.data.types import Data
from rapidformer_templates.errors import RapidformerError
from rapidformer_templates.planning.environment import detect_gpu
from rapidformer_templates.run.performance import peak_memory_mb
from rapidformer_templates.switches.onnx_runtime.transform import seconds_in_graphs
from rapidformer_templates.trainer import Trainer

FLAGS = (
    Flag(
        "scale",
        "small",
        "size of the job: BERT-base with 128 tokens (small) or 512 (paper), or a tiny model to try the command",
        choices=("tiny", "small", "paper"),
    ),
    Flag("rounds", 8, "turns per solution"),
    Flag("steps", 2, "optimizer steps per turn"),
    Flag("inductor", False, "also measure torch.compile's inductor, which compiles for minutes"),
    Flag("all", False, "also measure solutions that are slow on this device"),
    Flag("device", "auto", "device of the runs; auto uses a GPU if there is one", choices=("auto", "cpu", "cuda")),
)

WARMUP, SEED = 3, 0
"""Warm-up steps of each run, in which graphs are built. They do not count."""

GOAL = 1.10
"""Goal: samples per second of ONNX Runtime relative to eager, both in fp32."""

SAME_LOSS = 1e-3
"""Largest relative difference between the losses of the last step."""


@dataclass(frozen=True)
class Scale:
    """Size of the job: a BERT, samples with ``length`` tokens, and ``batch`` samples per step."""

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
        flags: Flags that select it.
        published: Samples/s and peak MB on 4 GPUs of 32 GB [B].
        own_masks: Whether its dropout masks differ from eager's, so that the loss differs, too.
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
SLOW = {"cpu": {"mixed": "16 bits are slow on a CPU (--all measures it)"}, "cuda": {}}
INDUCTOR = "it compiles for minutes (--inductor measures it)"


class Job(Trainer):
    """Fine-tuning on samples of one length. The job sleeps while others have their turn."""

    scale: Scale
    step_done: StepDone
    before = 0.0  # seconds in graphs until the end of the warm-up
    loss = float("nan")

    def build_model(self) -> nn.Module:
        scale = self.scale
        sizes: dict[str, Any] = {"hidden_size": scale.hidden, "num_hidden_layers": scale.layers}
        sizes |= {"num_attention_heads": scale.heads, "intermediate_size": 4 * scale.hidden}
        return BertForSequenceClassification(BertConfig(vocab_size=scale.vocabulary, **sizes))

    def build_data(self) -> Data:
        draw = np.random.default_rng(SEED)
        ids = torch.from_numpy(draw.integers(0, self.scale.vocabulary, (64, self.scale.length)))
        samples = [{"input_ids": row, "labels": int(row[0]) % 2} for row in ids]
        return Data(train=samples, collate=_collate)

    def on_step_end(self, step: int, result: Any) -> None:
        if self.step_done.is_last:
            self.loss = float(result.loss)  # waits for the device
        if step == WARMUP:
            self.before = seconds_in_graphs(self.model)
        self.step_done()


def _collate(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    ids = torch.stack([sample["input_ids"] for sample in samples])
    labels = torch.tensor([sample["labels"] for sample in samples])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def train(step_done: StepDone, flags: str, scale: Scale, total: int, device: str) -> Row:
    """Train ``total`` steps.

    Returns:
        Peak memory, the last loss, seconds in graphs after the warm-up, and the receipt.

    Raises:
        RapidformerError: The flags are refused, or cannot be applied.
    """
    sizes = f"--micro-batch-size {scale.batch} --train-iters {total} --device {device} --no-save"
    job = Job(f"{sizes} --lr 1e-5 --log-interval {total} --seed {SEED} {flags}".split())
    job.scale, job.step_done = scale, step_done
    receipts = job.fit()["receipts"]
    figures = {"peak_mb": peak_memory_mb(torch.device(device)), "loss": job.loss}
    return {
        **figures,
        "in_graphs": seconds_in_graphs(job.model) - job.before,
        "onnx_runtime": receipts.get("onnx_runtime"),
    }


def measure(
    names: list[str], scale: Scale, rounds: int, steps: int, device: str, advance: Advance = lambda text: None
) -> tuple[list[Row], dict[str, str]]:
    """Train in all ways, including eager, in turns. Returns the rows, and the reasons why other ways did not run."""
    absent: dict[str, str] = {}
    total = WARMUP + rounds * steps
    with ExitStack() as stack:
        loops = {
            name: stack.enter_context(closing(Loop(train, SOLUTIONS[name].flags, scale, total, device, process=True)))
            for name in names
        }
        for name, loop in list(loops.items()):
            try:
                loop.advance(WARMUP)
            except RapidformerError as error:
                absent[name] = error.message
                del loops[name]
        contest = Contest(
            {name: partial(loop.advance, steps) for name, loop in loops.items()}, work=scale.batch * steps
        )
        contest.run(rounds, advance=advance)
        return [_row(name, contest, loop.finish()) for name, loop in loops.items()], absent


def _row(name: str, contest: Contest, ended: Row) -> Row:
    """Return speed and deviation over all turns, the median ratio to eager's, and the share of time in ONNX Runtime."""
    share = ended.pop("in_graphs") / sum(contest.seconds[name])
    return {
        "name": name,
        "samples_per_second": round(contest.rate(name), 3),
        "deviation": round(spread(contest.rates(name)), 3),
        "over_eager": round(contest.ratio(name, over=EAGER), 4),
        "share_in_graphs": round(share, 4),
        **ended,
    }


def answer(options: argparse.Namespace) -> Answer:
    device = ("cuda" if detect_gpu() else "cpu") if options.device == "auto" else options.device
    scale = SCALES[options.scale]
    left_out = {} if options.all else dict(SLOW[device])
    if not options.inductor:
        left_out["inductor"] = INDUCTOR
    names = [name for name in SOLUTIONS if name not in left_out]
    with progress("graph", options.rounds) as advance:
        rows, absent = measure(names, scale, options.rounds, options.steps, device, advance)
    absent = left_out | absent
    strayed = _strayed(rows)
    title = f"{scale.layers} layers, hidden {scale.hidden}, {scale.length} tokens, batch {scale.batch}, 1 × {device}"
    columns: Columns = {
        "solution": "{name}",
        "samples/s": "{samples_per_second:.2f} ± {deviation:.2f}",
        "over fp32": "{over_eager:.3f}",
        "peak MB": "{peak_mb:,.0f}",
        "in ORT": lambda row: f"{row['share_in_graphs']:.0%} of the time" if row["onnx_runtime"] else "",
        "published": lambda row: _published(row["name"]),
    }
    return Answer(
        {
            "scale": options.scale,
            "model": asdict(scale),
            "device": device,
            "rounds": options.rounds,
            "steps_per_turn": options.steps,
            "solutions": rows,
            "published": {name: solution.published for name, solution in SOLUTIONS.items()},
            "absent": absent,
        },
        table(f"BERT fine-tuning, {title}", rows, columns),
        [*_goal(rows), *strayed, *(f"{name} did not run: {in_short(why)}" for name, why in absent.items())],
        bars(
            "samples per second (orange: in ONNX Runtime)",
            {row["name"]: row["samples_per_second"] for row in rows},
            ours=[row["name"] for row in rows if row["onnx_runtime"]],
            errors=[row["deviation"] for row in rows],
            texts=[f"{row['over_eager']:.2f} ×, {row['peak_mb']:,.0f} MB" for row in rows],
        ),
        status=1 if strayed else 0,
    )


def _published(name: str) -> str:
    """Format samples/s, the ratio to fp32, and peak MB."""
    base, own = SOLUTIONS[EAGER].published, SOLUTIONS[name].published
    return f"{own[0]:.2f}, {own[0] / base[0]:.3f} ×, {own[1]:,} MB" if base and own else ""


def _goal(rows: list[Row]) -> list[str]:
    over = {row["name"]: row["over_eager"] for row in rows}.get(ORT)
    if over is None:
        return []
    return [f"goal: ORT at {GOAL:.2f} × the samples/s of eager fp32: {verdict(over >= GOAL)} ({over:.3f} ×)"]


def _strayed(rows: list[Row]) -> list[str]:
    """List solutions in fp32 with eager's masks whose loss differs from eager's."""
    expected = next(row["loss"] for row in rows if row["name"] == EAGER)
    return [
        f"{row['name']}: the last loss is {row['loss']:.6f}, eager's is {expected:.6f}"
        for row in rows
        if not ("mixed" in row["name"] or SOLUTIONS[row["name"]].own_masks)
        and abs(row["loss"] - expected) > SAME_LOSS * abs(expected)
    ]
