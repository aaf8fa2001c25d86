"""``benchmarks optimizers``: for each optimizer, its state per parameter, the loss that it reaches, and its time.

A small GPT reads the docstrings of Python's own library as bytes. Each optimizer trains a separate copy from the same
start on the same batches. They take turns of a few steps, so that a busy moment of the machine hits all of them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from benchmarks.contest import Advance, Answer, Contest, Flag, Row, asks, progress, table
from benchmarks.models import gpt2
from benchmarks.texts import docstrings
from rapidformer_templates.engines.optimizer_state import state_tensors
from rapidformer_templates.engines.receipt import bytes_by_kind
from rapidformer_templates.engines.recipe import default_optimizer, schedule, undecayed
from rapidformer_templates.models.blocks import tables_of
from rapidformer_templates.planning.environment import installed_packages
from rapidformer_templates.planning.flags import TrainingFlags
from rapidformer_templates.planning.optimizers import OPTIMIZERS
from rapidformer_templates.planning.plan import Plan
from rapidformer_templates.switches.optimizer.muon import rule_by_shape

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FLAGS = (
    Flag("steps", 300, "of each optimizer"),
    Flag("lr", 1e-3, "peak learning rate"),
    Flag("scale", "small", "of the model", choices=("small", "paper")),
)

SEED, LENGTH, ROWS, TURN, HELD_OUT, LONGEST = 0, 128, 8, 10, 64, 1024
REFERENCE = "adamw_torch_fused"
CLOSE = ("adamw_bnb_8bit", "adamw_torch_8bit", "adamw_torch_4bit", "adamw_anyprecision")
"""Optimizers that compute AdamW's update with less state. They should reach the loss of AdamW."""
OTHERS = ("adafactor", "lamb", "muon")
GOAL = 0.01
SIZES = {"small": (2, 128, 2), "paper": (12, 768, 12)}
"""Layers, hidden size, heads."""


def text() -> torch.Tensor:
    """Return the docstrings of Python's library as consecutive rows of bytes, of shape (rows, LENGTH)."""
    pieces = docstrings(LONGEST)
    joined = torch.cat([torch.as_tensor(pieces[i]["input_ids"]) for i in range(len(pieces))]).long()
    rows = joined[: len(joined) // LENGTH * LENGTH].view(-1, LENGTH)
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(SEED))]


class Contender:
    """A model that one optimizer trains.

    Attributes:
        updating: Seconds of each update, without forward and backward.
    """

    def __init__(self, name: str, sizes: tuple[int, int, int], steps: int, lr: float, text: torch.Tensor) -> None:
        torch.manual_seed(SEED)
        self.model = gpt2(*sizes, 256, LENGTH).to(text.device)
        self.held_out, self.text = text[:HELD_OUT], text[HELD_OUT:]
        training = TrainingFlags(lr=lr, weight_decay=0.01, lr_warmup_iters=max(1, steps // 10), min_lr=lr / 10)
        options = rule_by_shape(tables_of(self.model)) if name == "muon" else undecayed
        plan = Plan("Trainer", optimizer=name, optimizer_implementation=OPTIMIZERS[name].implementation.path)
        recipe = default_optimizer(plan, training, options)
        named = list(self.model.named_parameters())
        self.optimizer = recipe.build(named, recipe.differences(named))
        self._peaks = [group["lr"] for group in self.optimizer.param_groups]
        self._factor = schedule(training, steps)
        self._left = range(steps)
        self.updating: list[float] = []

    def turn(self) -> None:
        now, self._left = self._left[:TURN], self._left[TURN:]
        for number in now:
            start = number * ROWS % (len(self.text) - ROWS)
            self._step(self.text[start : start + ROWS], number)

    def _step(self, batch: torch.Tensor, number: int) -> None:
        self.model(input_ids=batch, labels=batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for group, peak in zip(self.optimizer.param_groups, self._peaks, strict=True):
            group["lr"] = peak * self._factor(number)
        _wait(batch.device)
        began = time.perf_counter()
        self.optimizer.step()
        _wait(batch.device)
        self.updating.append(time.perf_counter() - began)
        self.optimizer.zero_grad()

    @torch.no_grad()
    def loss(self) -> float:
        """Return the loss on held-out text, in nats per byte."""
        self.model.eval()
        return statistics.mean(
            float(self.model(input_ids=part, labels=part).loss) for part in self.held_out.split(ROWS)
        )

    def state_bytes(self) -> float:
        """Return the bytes of optimizer state per parameter, over the whole model, counted from its storages."""
        parameters = sum(p.numel() for p in self.model.parameters())
        return bytes_by_kind({"optimizer": state_tensors(self.optimizer)})["optimizer"] / parameters


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def available() -> tuple[list[str], list[str]]:
    """Return the optimizers that can run here, and lines about those that cannot."""
    packages = installed_packages()
    needed = {name: OPTIMIZERS[name].package for name in (*CLOSE, *OTHERS)}
    missing = {name: package for name, package in needed.items() if package and package.name not in packages}
    names = [name for name in (REFERENCE, *CLOSE, *OTHERS) if name not in missing]
    return names, [f"{name} is absent: {package.install}" for name, package in missing.items()]


def measure(names: Sequence[str], options: argparse.Namespace, text: torch.Tensor, advance: Advance) -> list[Row]:
    """Train with each optimizer, in turns. The others are compared with the first one.

    Args:
        text: Training text of shape (rows, LENGTH). Its first rows are held out. The models train on its device.
    """
    steps = options.steps
    contenders = {name: Contender(name, SIZES[options.scale], steps, options.lr, text) for name in names}
    Contest({name: one.turn for name, one in contenders.items()}).run(-(-steps // TURN), advance=advance)
    losses = {name: one.loss() for name, one in contenders.items()}
    # Use the median. The first steps create the state, and a busy machine makes some steps slow.
    times = {name: statistics.median_high(one.updating) * 1000 for name, one in contenders.items()}
    return [
        {
            "name": name,
            "state_bytes": round(one.state_bytes(), 4),
            "promised": OPTIMIZERS[name].state_bytes,  # for a large matrix
            "loss": round(losses[name], 5),
            "over_adamw": round(losses[name] / losses[names[0]], 5),
            "step_ms": round(times[name], 4),
            "time_over_adamw": round(times[name] / times[names[0]], 3),
        }
        for name, one in contenders.items()
    ]


@asks(*FLAGS)
def answer(options: argparse.Namespace) -> Answer:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    names, absent = available()
    rows = text().to(device)
    with progress("optimizers", -(-options.steps // TURN)) as advance:
        found = measure(names, options, rows, advance)
    settings = {"steps": options.steps, "lr": options.lr, "scale": options.scale, "device": device.type}
    columns = {
        "optimizer": "{name}",
        "state B/param": "{state_bytes:.2f}",
        "of a matrix": "{promised:g}",
        "held-out loss": "{loss:.4f}",
        "over AdamW": "{over_adamw:.4f}",
        "update ms": "{step_ms:.2f}",
        "its time over AdamW's": "{time_over_adamw:.2f}",
    }
    return Answer(
        {**settings, "optimizers": found},
        table(f"optimizers: {options.steps} steps of a small GPT on real text", found, columns),
        [_goal(found), *absent],
        partial(_draw, found),
    )


def _goal(rows: Sequence[Row]) -> str:
    far = [row for row in rows if row["name"] in CLOSE and abs(row["over_adamw"] - 1) > GOAL]
    missed = "missed by " + ", ".join("{name} {over_adamw:.4f}".format_map(row) for row in far)
    return f"goal: loss within {GOAL:.0%} of {REFERENCE}'s: {missed if far else 'reached'}"


def _draw(rows: Sequence[Row], axes: Axes) -> None:
    axes.scatter([row["state_bytes"] for row in rows], [row["loss"] for row in rows])
    for row in rows:
        axes.annotate(row["name"], (row["state_bytes"], row["loss"]), xytext=(4, 4), textcoords="offset points")
    axes.set_xlabel("bytes of state per parameter")
    axes.set_ylabel("held-out loss")
    axes.margins(x=0.25, y=0.15)
