"""``bench optimizers``: what each optimizer keeps of a parameter, where it takes the loss, and how long its step takes.

A small GPT reads the docstrings of Python's own library as bytes. Each optimizer trains a copy of its
own from the same start on the same batches; they take turns of a few steps, so that all see the same
moments of a busy machine.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from rich.table import Table
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.padding import docstrings
from rapidformer_templates.commands.bench.output import Advance, progress, put_out
from rapidformer_templates.engines.pieces import bytes_held, state_tensors
from rapidformer_templates.engines.recipe import default_optimizer, schedule, undecayed
from rapidformer_templates.planning.environment import installed_packages
from rapidformer_templates.planning.flags import TrainingFlags
from rapidformer_templates.planning.optimizers import OPTIMIZERS
from rapidformer_templates.planning.plan import Plan
from rapidformer_templates.switches.optimizer.muon import rule_by_shape, tables_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SEED, LENGTH, ROWS, TURN, HELD_OUT = 0, 128, 8, 10, 64
REFERENCE = "adamw_torch_fused"
CLOSE = ("adamw_bnb_8bit", "adamw_torch_8bit", "adamw_torch_4bit", "adamw_anyprecision")
"""Those that make AdamW's update with less state: their loss should be its loss."""
OTHERS = ("adafactor", "lamb", "muon")
GOAL = 0.01
SIZES: dict[str, dict[str, Any]] = {
    "small": {"n_embd": 128, "n_layer": 2, "n_head": 2},
    "paper": {"n_embd": 768, "n_layer": 12, "n_head": 12},
}


@dataclass(frozen=True)
class Row:
    """One optimizer.

    Attributes:
        name: of the optimizer.
        state_bytes: of state a parameter, over the whole model, from its storages.
        promised: the same of a large matrix.
        loss: on held-out text, in nats a byte, after the last step.
        over_adamw: that over AdamW's.
        step_ms: milliseconds of an update, without forward and backward.
        time_over_adamw: that over AdamW's.
    """

    name: str
    state_bytes: float
    promised: float
    loss: float
    over_adamw: float
    step_ms: float
    time_over_adamw: float


def text() -> torch.Tensor:
    """The docstrings of Python's library as one row of bytes after another, of shape (rows, LENGTH)."""
    pieces = docstrings()
    joined = torch.cat([torch.as_tensor(pieces[i]["input_ids"]) for i in range(len(pieces))]).long()
    rows = joined[: len(joined) // LENGTH * LENGTH].view(-1, LENGTH)
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(SEED))]


class Contender:
    """A model that one optimizer trains."""

    def __init__(self, name: str, sizes: dict[str, Any], steps: int, lr: float, device: torch.device) -> None:
        torch.manual_seed(SEED)
        dropouts: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        given: dict[str, Any] = {"vocab_size": 256, "n_positions": LENGTH, "bos_token_id": 0, "eos_token_id": 0}
        self.name = name
        model: Any = GPT2LMHeadModel(GPT2Config(**given, **dropouts, **sizes))
        model.loss_type = "ForCausalLM"  # or transformers warns that it guesses so
        self.model = model.to(device)
        training = TrainingFlags(lr=lr, weight_decay=0.01, lr_warmup_iters=max(1, steps // 10), min_lr=lr / 10)
        options = rule_by_shape(tables_of(self.model)) if name == "muon" else undecayed
        plan = Plan("Trainer", optimizer=name, optimizer_implementation=OPTIMIZERS[name].implementation)
        recipe = default_optimizer(plan, training, options)
        named = list(self.model.named_parameters())
        self.optimizer = recipe.build(named, recipe.differences(named))
        self._peaks = [group["lr"] for group in self.optimizer.param_groups]
        self._factor = schedule(training, steps)
        self.updating: list[float] = []

    def step(self, batch: torch.Tensor, number: int) -> None:
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
    def loss(self, rows: torch.Tensor) -> float:
        self.model.eval()
        losses = [float(self.model(input_ids=part, labels=part).loss) for part in rows.split(ROWS)]
        self.model.train()
        return sum(losses) / len(losses)

    def state_bytes(self) -> float:
        parameters = sum(p.numel() for p in self.model.parameters())
        return bytes_held({"optimizer": state_tensors(self.optimizer)})["optimizer"] / parameters


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def available() -> tuple[list[str], list[str]]:
    """(optimizers that can run here, lines about those that cannot)."""
    names, absent, packages = [REFERENCE], [], installed_packages()
    for name in (*CLOSE, *OTHERS):
        package = OPTIMIZERS[name].package
        if package is None or package in packages:
            names.append(name)
        else:
            absent.append(f"{name} is absent: {OPTIMIZERS[name].install}")
    return names, absent


def measure(
    names: Sequence[str],
    sizes: dict[str, Any],
    steps: int,
    lr: float,
    rows: torch.Tensor,
    advance: Advance = lambda text: None,
) -> list[Row]:
    """Train with each optimizer, in turns.

    Args:
        names: the first is the one that the others are compared with.
        sizes: of the model.
        steps: of each optimizer.
        lr: peak learning rate of all.
        rows: text of shape (rows, LENGTH), where to train; the first rows are held out.
        advance: told of each turn.
    """
    contenders = [Contender(name, sizes, steps, lr, rows.device) for name in names]
    held_out, rest = rows[:HELD_OUT], rows[HELD_OUT:]
    for begin in range(0, steps, TURN):
        for contender in contenders:
            for number in range(begin, min(begin + TURN, steps)):
                start = number * ROWS % (len(rest) - ROWS)
                contender.step(rest[start : start + ROWS], number)
        advance(f"step {min(begin + TURN, steps)}")
    losses = [contender.loss(held_out) for contender in contenders]
    # The median: the first steps make the state, and a busy machine makes some of them long.
    times = [sorted(c.updating)[len(c.updating) // 2] * 1000 for c in contenders]
    return [
        Row(
            c.name,
            round(c.state_bytes(), 4),
            OPTIMIZERS[c.name].state_bytes,
            round(loss, 5),
            round(loss / losses[0], 5),
            round(spent, 4),
            round(spent / times[0], 3),
        )
        for c, loss, spent in zip(contenders, losses, times, strict=True)
    ]


def main(options: argparse.Namespace) -> int:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    names, absent = available()
    rows = text().to(device)
    with progress("optimizers", -(-options.steps // TURN)) as advance:
        found = measure(names, SIZES[options.scale], options.steps, options.lr, rows, advance)
    result = {"steps": options.steps, "lr": options.lr, "scale": options.scale, "device": device.type}
    notes = [*_verdict(found), *absent]
    rows_out = [asdict(row) for row in found]
    put_out(
        options, "optimizers", {**result, "optimizers": rows_out}, _table(found, options.steps), notes, _draw(found)
    )
    return 0


def _verdict(rows: Sequence[Row]) -> list[str]:
    close = [row for row in rows if row.name in CLOSE]
    far = [f"{row.name} {row.over_adamw:.4f}" for row in close if abs(row.over_adamw - 1) > GOAL]
    return [f"goal: loss within {GOAL:.0%} of {REFERENCE}'s: {'missed by ' + ', '.join(far) if far else 'reached'}"]


def _table(rows: Sequence[Row], steps: int) -> Table:
    table = Table(title=f"optimizers: {steps} steps of a small GPT on real text")
    table.add_column("optimizer")
    for heading in ("state B/param", "of a matrix", "held-out loss", "over AdamW", "update ms", "over AdamW"):
        table.add_column(heading, justify="right")
    for row in rows:
        figures = (f"{row.state_bytes:.2f}", f"{row.promised:g}", f"{row.loss:.4f}", f"{row.over_adamw:.4f}")
        table.add_row(row.name, *figures, f"{row.step_ms:.2f}", f"{row.time_over_adamw:.2f}")
    return table


def _draw(rows: Sequence[Row]) -> Any:
    def draw(axes: Axes) -> None:
        axes.scatter([row.state_bytes for row in rows], [row.loss for row in rows])
        for row in rows:
            axes.annotate(row.name, (row.state_bytes, row.loss), xytext=(4, 4), textcoords="offset points")
        axes.set_xlabel("bytes of state a parameter")
        axes.set_ylabel("held-out loss")
        axes.margins(x=0.25, y=0.15)

    return draw
