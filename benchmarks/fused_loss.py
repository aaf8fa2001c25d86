"""``benchmarks fused-loss``: peak memory and time of a step with and without the logits of all tokens.

One process trains two copies of a small GPT-2 with its full vocabulary, in turns. Two peaks are measured: that of the
live tensors, and that of the process as the system counts it. They are measured in separate steps, because tracking
tensors takes time.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.contest import Advance, Answer, Columns, Contest, Flag, Row, asks, bars, progress, table
from benchmarks.models import gpt2
from rapidformer_templates.engines.assembly import Assembly
from rapidformer_templates.switches.auto_strategy.tracing import LiveStorages
from rapidformer_templates.switches.fused_loss.linear_cross_entropy import saved_bytes
from rapidformer_templates.switches.fused_loss.transform import fuse_loss
from rapidformer_templates.system.process_state import give_freed_memory_back, resident_bytes

FLAGS = (
    Flag("vocabulary", 50257, "words"),
    Flag("rows", 2, "samples per batch"),
    Flag("length", 512, "tokens per sample"),
    Flag("hidden", 128, "hidden size, a multiple of 64"),
    Flag("layers", 2, "blocks"),
    Flag("rounds", 5, "timed steps per way"),
    Flag("bf16", False, "bf16 autocast"),
)

SEED, WARMUP = 0, 1
PLAIN, FUSED = "whole logits", "fused"


class Contender:
    """A model that is trained with one implementation of the loss.

    Attributes:
        loss: Loss of the last step.
    """

    def __init__(self, name: str, options: argparse.Namespace, device: torch.device) -> None:
        torch.manual_seed(SEED)
        heads = max(1, options.hidden // 64)
        model = gpt2(options.layers, options.hidden, heads, options.vocabulary, options.length).to(device).train()
        if name == FUSED:
            building: Any = SimpleNamespace(workers=SimpleNamespace(device=device, ends_pipeline=True))
            fuse_loss(Assembly(model), building)
        self.model = model
        self.half = options.bf16
        self.device = device
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.batch = torch.randint(0, options.vocabulary, (options.rows, options.length), device=device)
        self.loss = 0.0

    def step(self) -> None:
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.half):
            loss = self.model(input_ids=self.batch, labels=self.batch).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.loss = float(loss.detach())

    def peak(self) -> tuple[float, float | None]:
        """Return the peak of the tensors made in a step, and the growth of the process, in MB (10^6 bytes)."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            self.step()
            return (torch.cuda.max_memory_allocated() - before) / 1e6, None
        state = [value for kept in self.optimizer.state.values() for value in kept.values()]
        with LiveStorages(known=[*self.model.parameters(), *self.model.buffers(), *state, self.batch]) as seen:
            before = seen.live
            self.step()
        return (seen.peak - before) / 1e6, _growth(self.step)


def _growth(body: Callable[[], None]) -> float | None:
    """Return by how many MB the resident memory of this process grew at most. Only Linux reports it."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # reset the recorded peak to the current size
    except OSError:
        return None
    before = resident_bytes("VmRSS") / 1e6
    body()
    return round(resident_bytes("VmHWM") / 1e6 - before, 1)


def measure(options: argparse.Namespace, device: torch.device, advance: Advance = lambda text: None) -> list[Row]:
    """Measure both ways in turns: peak memory, median time of a step, and loss of the last step."""
    contenders = {name: Contender(name, options, device) for name in (PLAIN, FUSED)}
    contest = Contest({name: contender.step for name, contender in contenders.items()})
    for contender in contenders.values():
        for _ in range(WARMUP):
            contender.step()
    peaks = {name: contender.peak() for name, contender in contenders.items()}
    contest.run(options.rounds, advance=advance)
    return [
        {
            "name": name,
            "peak_mb": round(peaks[name][0], 1),
            "rss_mb": peaks[name][1],
            "step_ms": round(statistics.median(contest.seconds[name]) * 1000, 2),
            "loss": contender.loss,
        }
        for name, contender in contenders.items()
    ]


@asks(*FLAGS)
def answer(options: argparse.Namespace) -> Answer:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        give_freed_memory_back()  # otherwise the process keeps the memory that the other way has freed
    with progress("fused-loss", options.rounds) as advance:
        rows = measure(options, device, advance)
    tokens = options.rows * options.length
    predicted = saved_bytes(tokens, options.vocabulary, half=options.bf16, device=device.type) / 1e6
    sizes = {"vocab_size": options.vocabulary, "n_positions": options.length, "n_embd": options.hidden}
    sizes |= {"n_layer": options.layers, "n_head": max(1, options.hidden // 64)}
    settings = {"sizes": sizes, "tokens": tokens, "bf16": options.bf16, "device": device.type}
    columns: Columns = {
        "loss": "{name}",
        "peak of tensors, MB": "{peak_mb:,.0f}",
        "process, MB": lambda row: "" if row["rss_mb"] is None else f"{row['rss_mb']:,.0f}",
        "step, ms": "{step_ms:,.0f}",
    }
    plain, fused = rows
    return Answer(
        {**settings, "predicted_saving_mb": round(predicted, 1), "ways": rows},
        table(f"fused loss: {tokens:,} tokens, {options.vocabulary:,} words, hidden {options.hidden}", rows, columns),
        [
            f"peak of tensors: {fused['peak_mb'] / plain['peak_mb']:.2f} × "
            f"(the planner expects {predicted:,.0f} MB less)",
            f"time of a step: {fused['step_ms'] / plain['step_ms']:.2f} ×",
            f"loss: {fused['loss']:.6f} and {plain['loss']:.6f}",
        ],
        bars(
            "peak of tensors alive in a step, MB",
            {row["name"]: row["peak_mb"] for row in rows},
            ours=[FUSED],
            texts=[f"{row['step_ms']:,.0f} ms per step" for row in rows],
        ),
    )
