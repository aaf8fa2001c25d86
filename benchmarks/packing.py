"""``benchmarks packing``: packed documents that are separated by a mask matrix, or processed one by one without it."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.contest import Answer, Contest, Flag, Row, asks, progress, table
from benchmarks.models import llama
from benchmarks.workers import run_in_workers
from rapidformer_templates.switches.flash_attention.kernels import NAMES
from rapidformer_templates.system.process_state import resident_bytes

MASK, DOCUMENTS = "a mask of the row", "document by document"
WAYS = {MASK: "sdpa", DOCUMENTS: NAMES["flash"]}  # attention implementations in transformers
ROWS = 2
SEED = 0


def make_model() -> Any:
    torch.manual_seed(SEED)
    return llama(4, 256, 4, 512, 1 << 16, intermediate_size=688)


def make_batch(tokens: int) -> dict[str, torch.Tensor]:
    """Return rows that are filled with documents. Document lengths are log-normal with a mean of 97."""
    draw = np.random.default_rng(SEED)
    positions = np.empty((ROWS, tokens), dtype=np.int64)
    for row in positions:
        filled = 0
        while filled < tokens:
            length = min(1 + int(draw.lognormal(4.2, 0.85)), tokens - filled)
            row[filled : filled + length] = np.arange(length)
            filled += length
    ids = torch.from_numpy(draw.integers(0, 512, (ROWS, tokens)))
    return {"input_ids": ids, "labels": ids, "position_ids": torch.from_numpy(positions)}


def step(model: Any, batch: dict[str, torch.Tensor], way: str) -> float:
    """Run forward and backward. Returns the loss."""
    model.set_attn_implementation(WAYS[way])
    loss = model(**batch).loss
    loss.backward()
    model.zero_grad()
    return float(loss.detach())


def _peak_of_a_step(way: str, tokens: int, threads: int) -> float:
    torch.set_num_threads(threads)
    model = make_model()
    step(model, make_batch(64), way)  # allocates everything that is allocated only once
    batch, before = make_batch(tokens), resident_bytes("VmHWM") / 1e6
    step(model, batch, way)
    return resident_bytes("VmHWM") / 1e6 - before


def measure_packing(rounds: int, tokens: int) -> list[Row]:
    """Time forward and backward of both ways in turns. Measure by how much the first step raises a process's peak."""
    model, batch = make_model(), make_batch(tokens)
    losses = [step(model, batch, way) for way in WAYS]
    assert np.allclose(losses[0], losses[1], rtol=1e-5), losses

    def turn(way: str) -> None:
        step(model, batch, way)

    contest = Contest({way: partial(turn, way) for way in WAYS}, work=ROWS * tokens)
    with progress("packing", rounds) as advance:
        contest.run(rounds, advance=advance)
    return [
        {
            "name": way,
            "tokens_per_second": round(float(np.median(contest.rates(way)))),
            "over_mask": round(contest.ratio(way, over=MASK), 3),
            "step_megabytes": round(run_in_workers(_peak_of_a_step, way, tokens, torch.get_num_threads())[0], 1),
        }
        for way in WAYS
    ]


@asks(Flag("rounds", 10, "steps per way"), Flag("tokens", 2048, "tokens per row"))
def answer(options: argparse.Namespace) -> Answer:
    rows = measure_packing(options.rounds, options.tokens)
    documents = int((make_batch(options.tokens)["position_ids"] == 0).sum())
    columns = {
        "documents separated by": "{name}",
        "tokens/s": "{tokens_per_second:,}",
        "over the mask": "{over_mask:.2f} ×",
        "MB per step": "{step_megabytes:,.0f}",
    }
    return Answer(
        {"rounds": options.rounds, "tokens_per_row": options.tokens, "ways": rows},
        table(f"packing: {ROWS} rows of {options.tokens:,} tokens, llama of 4 layers, 256 wide", rows, columns),
        [f"{documents} documents, {ROWS * options.tokens / documents:.0f} tokens on average"],
    )
