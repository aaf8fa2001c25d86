"""``benchmarks moe``: what a mixture of experts gains, and what its matrix products cost.

Two small GPTs read the same bytes (sources of Python packages and, on Debian, WordNet glosses) in the same order. One
is dense. The other has many experts and sends each token to some of them. The experts of a token are together as wide
as the dense feed-forward, so the same number of parameters is active for a token. Then one sparse layer takes turns
with two loops over the same experts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - its usual name

from benchmarks.contest import Advance, Answer, Columns, Contest, Flag, Row, asks, progress, table, verdict
from benchmarks.models import gpt2
from benchmarks.texts import write_corpus
from rapidformer_templates.data.types import Data
from rapidformer_templates.pretrainer import Pretrainer
from rapidformer_templates.run.folder import read_metrics
from rapidformer_templates.switches.mixture_of_experts.layer import Experts, Gate, SparseFeedForward, choose
from rapidformer_templates.switches.mixture_of_experts.losses import BalanceLosses

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FLAGS = (Flag("steps", 3000, "optimizer steps per model"), Flag("rounds", 30, "turns per way to compute"))

EXPERTS, TOP_K = 16, 2
MEGABYTES = 6.0
LAYERS, HIDDEN, WIDTH, LENGTH, ROWS = 2, 32, 128, 64, 32
"""Sizes of the two models. ``WIDTH`` is the width of the dense feed-forward."""

LR = 3e-3
SHAPE = {"tokens": 1024, "hidden": 256, "width": 512}
"""Sizes of the layer that is timed: a batch of 8 × 128 tokens of a small GPT."""

GROUPED, LOOP, SEPARATE = "grouped", "loop", "loop, separate matrices"
SPEED_GOAL, LOAD_GOAL = 2.0, 2.0


class Bytes(Sequence[Any]):
    """Consecutive windows of ``LENGTH`` bytes."""

    def __init__(self, text: torch.Tensor) -> None:
        self.text = text

    def __len__(self) -> int:
        return len(self.text) // LENGTH

    def __getitem__(self, index: Any) -> Any:
        ids = self.text[index * LENGTH : (index + 1) * LENGTH].long()
        return {"input_ids": ids, "labels": ids}


def read_text(folder: Path) -> torch.Tensor:
    """Return :data:`MEGABYTES` of text as bytes."""
    file = folder / "corpus.jsonl"
    write_corpus(file, MEGABYTES)
    documents = (json.loads(line)["text"] for line in file.read_text(encoding="utf-8").splitlines())
    return torch.frombuffer(bytearray("\n".join(documents).encode()), dtype=torch.uint8)


class Reader(Pretrainer):
    """A GPT over bytes. Every 20th window is held out."""

    text: torch.Tensor

    def build_data(self) -> Data:
        windows = len(self.text) // LENGTH
        held_out = torch.arange(windows) % 20 == 0
        rows = self.text[: windows * LENGTH].view(windows, LENGTH)
        return Data(train=Bytes(rows[~held_out].flatten()), valid=Bytes(rows[held_out].flatten()))

    def build_model(self) -> nn.Module:
        return gpt2(LAYERS, HIDDEN, 2, 256, LENGTH, n_inner=WIDTH)


def train(text: torch.Tensor, steps: int, folder: Path, *, mixture: bool) -> Row:
    """Train one of the models with the library itself.

    Returns:
        The number of all parameters, and of those active for a token.
        (tokens read, validation loss) at each evaluation.
        The lowest and highest load of an expert in the whole run, relative to an even load.
    """
    name = f"{EXPERTS} experts, {TOP_K} per token" if mixture else "dense"
    schedule = (
        f"--train-iters {steps} --lr {LR} --lr-warmup-iters {max(1, steps // 30)} --lr-decay-style cosine "
        f"--micro-batch-size {ROWS} --eval-interval {max(1, steps // 6)} --eval-iters 30 --device cpu "
        f"--log-interval {max(1, steps // 6)} --save-interval {steps} --no-export-model --save {folder / str(mixture)}"
    )
    flags = f" --num-experts {EXPERTS} --moe-top-k {TOP_K} --moe-ffn-hidden-size {WIDTH // TOP_K}" if mixture else ""
    reader = type("Reader", (Reader,), {"text": text, "__module__": __name__})([*(schedule + flags).split()])
    summary = reader.fit()
    metrics = read_metrics(folder / str(mixture) / "metrics.jsonl")
    sizes = {n: p.numel() for n, p in reader.model.named_parameters()}
    idle = sum(size for n, size in sizes.items() if ".experts." in n) * (EXPERTS - TOP_K) // EXPERTS
    return {
        "name": name,
        "parameters": sum(sizes.values()),
        "active": sum(sizes.values()) - idle,
        "losses": [(line["step"] * ROWS * LENGTH, line["eval_loss"]) for line in metrics if "eval_loss" in line],
        "load": summary["receipts"].get("expert_load"),
        "tokens_per_second": summary["throughput"].get("tokens_per_second", 0.0),
    }


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


@asks(*FLAGS)
def answer(options: argparse.Namespace) -> Answer:
    with tempfile.TemporaryDirectory() as temporary, progress("moe", 2 + options.rounds + 3) as advance:
        folder = Path(temporary)
        text = read_text(folder)
        runs = []
        for mixture in (False, True):
            runs.append(train(text, options.steps, folder, mixture=mixture))
            advance(runs[-1]["name"])
        contest = measure_speed(options.rounds, advance)
    rate = {name: statistics.median(contest.rates(name)) for name in contest.ways}
    over = {name: contest.ratio(GROUPED, over=name) for name in (LOOP, SEPARATE)}
    columns: Columns = {
        "feed-forward": "{name}",
        "parameters": "{parameters:,}",
        "active": "{active:,}",
        "validation loss": lambda run: f"{run['losses'][-1][1]:.4f}",
        "expert load": lambda run: "{min:.2f} … {max:.2f}".format_map(run["load"]) if run["load"] else "",
        "tokens/s": "{tokens_per_second:,.0f}",
    }
    return Answer(
        {
            "steps": options.steps,
            "text_bytes": len(text),
            "runs": runs,
            "layer": {**SHAPE, "experts": EXPERTS, "top_k": TOP_K, "threads": torch.get_num_threads()},
            "layer_tokens_per_second": {name: round(value) for name, value in rate.items()},
            "grouped_over": {name: round(ratio, 3) for name, ratio in over.items()},
        },
        table(f"mixture of experts: a GPT after {runs[0]['losses'][-1][0]:,} bytes", runs, columns),
        _goals(runs, over, rate),
        partial(_draw, runs),
    )


def _goals(runs: list[Row], over: dict[str, float], rate: dict[str, float]) -> list[str]:
    dense, sparse = runs
    gain = dense["losses"][-1][1] - sparse["losses"][-1][1]
    even = sparse["load"]["min"] >= 1 / LOAD_GOAL and sparse["load"]["max"] <= LOAD_GOAL
    return [
        f"goal: a lower validation loss than the dense model's: {verdict(gain > 0)} ({gain:+.4f} lower)",
        f"goal: expert load within a factor of {LOAD_GOAL:g} of even: {verdict(even)}",
        f"goal: {SPEED_GOAL:g} × the tokens/s of a loop over experts: {verdict(over[LOOP] >= SPEED_GOAL)} "
        f"({over[LOOP]:.2f} ×: {rate[GROUPED]:,.0f} and {rate[LOOP]:,.0f} tokens/s of a layer, forward and backward)",
        f"over a loop whose experts have separate matrices: {over[SEPARATE]:.2f} ×",
    ]


def _draw(runs: list[Row], axes: Axes) -> None:
    for run in runs:
        axes.plot(*zip(*run["losses"], strict=True), "o-", label=run["name"])
    axes.set_xlabel("bytes read")
    axes.set_ylabel("validation loss")
    axes.legend()
    axes.grid(alpha=0.3)
