"""``benchmarks moe``: the gain of a mixture of experts, and the cost of its matrix products.

Two small GPTs read the same sources of Python. One is dense. The other has many experts and sends each token to some
of them. The experts of a token are together as wide as the dense feed-forward, so the same number of parameters is
active for a token. Then one sparse layer takes turns with two loops over the same experts.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - its usual name

from benchmarks.contest import Advance, Answer, Columns, Contest, Flag, asks, bars, progress, table, verdict
from benchmarks.models import gpt2
from benchmarks.small_gpt import LENGTH, TURN, measure, rows_of
from benchmarks.texts import sources
from rapidformer_templates.switches.mixture_of_experts.layer import Experts, Gate, SparseFeedForward, choose
from rapidformer_templates.switches.mixture_of_experts.losses import BalanceLosses

EXPERTS, TOP_K = 16, 2
LAYERS, HIDDEN, WIDTH = 2, 32, 128
"""Sizes of the two models. ``WIDTH`` is the width of the dense feed-forward."""

BYTES = 6_000_000
"""Size of the text. A model reads half of it once."""

WAYS = {
    "dense": "--lr 3e-3",
    f"{EXPERTS} experts, {TOP_K} per token": f"--lr 3e-3 --num-experts {EXPERTS} --moe-top-k {TOP_K} "
    f"--moe-ffn-hidden-size {WIDTH // TOP_K}",
}
SHAPE = {"tokens": 1024, "hidden": 256, "width": 512}
"""Sizes of the layer that is timed: a batch of 8 × 128 tokens of a small GPT."""

GROUPED, LOOP, SEPARATE = "grouped", "loop", "loop, separate matrices"
SPEED_GOAL, LOAD_GOAL = 2.0, 2.0


class LoopOverExperts(nn.Module):
    """The usual implementation of a mixture: the experts process their tokens one after the other.

    Args:
        layer: The layer whose weights are used.
        stacked: Whether the experts are slices of one parameter, as in transformers' ``eager`` implementation.
            Otherwise each expert has separate parameters, so the backward does not build a gradient of the whole
            stack for each expert.
    """

    def __init__(self, layer: SparseFeedForward, *, stacked: bool) -> None:
        super().__init__()
        self.gate = nn.Parameter(layer.gate.weight.detach().clone())
        self.top_k = layer.gate.top_k
        up, down = layer.experts.up.detach().clone(), layer.experts.down.detach().clone()
        self.up: Any = nn.Parameter(up) if stacked else nn.ParameterList(matrix.clone() for matrix in up)
        self.down: Any = nn.Parameter(down) if stacked else nn.ParameterList(matrix.clone() for matrix in down)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map [1, T, hidden] to the same shape."""
        tokens = hidden.flatten(0, 1)
        weights, chosen = choose(tokens @ self.gate.T, self.top_k)
        result = torch.zeros_like(tokens)
        for i in range(len(self.up)):
            rows, places = torch.where(chosen == i)
            output = F.gelu(tokens[rows] @ self.up[i]) @ self.down[i]
            result = result.index_add(0, rows, output * weights[rows, places].unsqueeze(1))
        return result.view_as(hidden)


def measure_speed(rounds: int, advance: Advance = lambda text: None) -> Contest:
    """Time a forward and backward of the sparse layer, with its losses, and of the loops, in turns."""
    torch.manual_seed(0)
    hidden, width, tokens = SHAPE["hidden"], SHAPE["width"], SHAPE["tokens"]
    experts = Experts(EXPERTS, hidden, width, F.gelu, gated=False, bias=False)
    layer = SparseFeedForward(
        Gate(hidden, EXPERTS, TOP_K), experts, BalanceLosses(1, EXPERTS, balance=0.01, z=0.001), 0
    )
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.05)
    ways: dict[str, nn.Module] = {
        GROUPED: layer,
        LOOP: LoopOverExperts(layer, stacked=True),
        SEPARATE: LoopOverExperts(layer, stacked=False),
    }
    rows = torch.randn(8, tokens // 8, hidden, requires_grad=True)
    upstream = torch.randn_like(rows)
    first, *others = [way(rows) for way in ways.values()]
    for other in others:
        torch.testing.assert_close(other, first, rtol=1e-3, atol=1e-4)

    def turn(way: nn.Module) -> None:
        way.zero_grad()
        rows.grad = None
        way(rows).backward(upstream)

    contest = Contest({name: partial(turn, way) for name, way in ways.items()}, work=tokens)
    contest.run(rounds, warmup=3, advance=advance)
    return contest


@asks(Flag("steps", 3000, "optimizer steps per model"), Flag("rounds", 30, "turns per way to compute"))
def answer(options: argparse.Namespace) -> Answer:
    build = partial(gpt2, LAYERS, HIDDEN, 2, 256, LENGTH, n_inner=WIDTH)
    with progress("moe", -(-options.steps // TURN) + options.rounds + 3) as advance:
        dense, sparse = rows = measure(build, rows_of(sources(BYTES)), options.steps, WAYS, advance)
        contest = measure_speed(options.rounds, advance)
    of_an_expert = 2 * HIDDEN * (WIDTH // TOP_K) + WIDTH // TOP_K + HIDDEN
    for row in rows:
        row["active"] = row["parameters"] - (row["load"] is not None) * LAYERS * (EXPERTS - TOP_K) * of_an_expert
    rate = {name: statistics.median(contest.rates(name)) for name in contest.ways}
    over = {name: contest.ratio(GROUPED, over=name) for name in (LOOP, SEPARATE)}
    columns: Columns = {
        "feed-forward": "{name}",
        "parameters": "{parameters:,}",
        "active": "{active:,}",
        "held-out loss": "{loss:.4f}",
        "expert load": lambda row: "{min:.2f} … {max:.2f}".format_map(row["load"]) if row["load"] else "",
        "its time over the dense one's": "{step_ms_ratio:.2f}",
    }
    gain = dense["loss"] - sparse["loss"]
    even = sparse["load"]["min"] >= 1 / LOAD_GOAL and sparse["load"]["max"] <= LOAD_GOAL
    speeds = f"{rate[GROUPED]:,.0f} and {rate[LOOP]:,.0f} tokens/s of a layer, forward and backward"
    reached = verdict(over[LOOP] >= SPEED_GOAL)
    return Answer(
        {"steps": options.steps, "ways": rows, "layer": SHAPE, "layer_tokens_per_second": rate, "grouped_over": over},
        table(f"mixture of experts: a GPT after {options.steps} steps", rows, columns),
        [
            f"goal: a lower loss than the dense model's: {verdict(gain > 0)} ({gain:+.4f} lower)",
            f"goal: expert load within a factor of {LOAD_GOAL:g} of even: {verdict(even)}",
            f"goal: {SPEED_GOAL:g} × the tokens/s of a loop over experts: {reached} ({over[LOOP]:.2f} ×: {speeds})",
            f"over a loop whose experts have separate matrices: {over[SEPARATE]:.2f} ×",
        ],
        bars("tokens per second of a layer, forward and backward", rate, ours=[GROUPED]),
    )
