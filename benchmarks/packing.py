"""Packed rows: documents kept apart by a matrix of tokens × tokens, and taken one by one without it."""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from rapidformer_templates.commands.bench.output import progress, put_out
from rapidformer_templates.commands.bench.worker import peak_mb
from rapidformer_templates.switches.flash_attention.kernels import NAMES

MASK, DOCUMENTS = "a mask of the row", "document by document"
WAYS = {MASK: "sdpa", DOCUMENTS: NAMES["flash"]}  # attention functions of transformers
ROWS = 2
SEED = 0


@dataclass
class Row:
    """A way to keep documents apart.

    Attributes:
        tokens_per_second: of forward and backward.
        over_mask: median over the rounds of the seconds with a mask over ours.
        step_megabytes: what the first step adds to a fresh process's peak of resident memory.
    """

    name: str
    tokens_per_second: int
    over_mask: float
    step_megabytes: float


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(SEED)
    sizes: dict[str, Any] = {
        "hidden_size": 256,
        "intermediate_size": 688,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    }
    return LlamaForCausalLM(LlamaConfig(vocab_size=512, **sizes, max_position_embeddings=1 << 16, use_cache=False))


def make_batch(tokens: int) -> dict[str, torch.Tensor]:
    """Rows that are full of documents, whose lengths are log-normal with a mean of 97."""
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


def step(model: LlamaForCausalLM, batch: dict[str, torch.Tensor], way: str) -> float:
    """Forward and backward; the loss."""
    model.set_attn_implementation(WAYS[way])
    loss = model(**batch).loss
    loss.backward()
    model.zero_grad()
    return float(loss.detach())


def memory_of(way: str, tokens: int) -> float:
    """Megabytes that a step adds to the peak of a fresh process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_peak_of_a_step, (way, tokens, torch.get_num_threads()))


def _peak_of_a_step(way: str, tokens: int, threads: int) -> float:
    torch.set_num_threads(threads)
    model = make_model()
    step(model, make_batch(64), way)  # what is allocated once and for all
    batch, before = make_batch(tokens), peak_mb("cpu")
    step(model, batch, way)
    return peak_mb("cpu") - before


def measure_packing(rounds: int, tokens: int) -> list[Row]:
    """Both ways in turns.

    Args:
        rounds: steps of each way.
        tokens: of a row.
    """
    model, batch = make_model(), make_batch(tokens)
    losses = [step(model, batch, way) for way in WAYS]
    assert np.allclose(losses[0], losses[1], rtol=1e-5), losses
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    with progress("packing", rounds) as advance:
        for number in range(rounds):
            for way in list(WAYS)[:: 1 if number % 2 else -1]:
                began = time.perf_counter()
                step(model, batch, way)
                seconds[way].append(time.perf_counter() - began)
            advance(f"round {number + 1}")
    return [
        Row(
            way,
            round(ROWS * tokens / statistics.median(seconds[way])),
            round(statistics.median(np.array(seconds[MASK]) / np.array(seconds[way])), 3),
            round(memory_of(way, tokens), 1),
        )
        for way in WAYS
    ]


def main(options: argparse.Namespace) -> int:
    """Measure, print and write; the exit status."""
    rows = measure_packing(options.rounds, options.tokens)
    table = Table(title=f"packing: {ROWS} rows of {options.tokens:,} tokens, llama of 4 layers, 256 wide")
    table.add_column("documents apart by")
    for heading in ("tokens/s", "over the mask", "MB a step"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(row.name, f"{row.tokens_per_second:,}", f"{row.over_mask:.2f} ×", f"{row.step_megabytes:,.0f}")
    documents = int((make_batch(options.tokens)["position_ids"] == 0).sum())
    notes = [f"{documents} documents, {ROWS * options.tokens / documents:.0f} tokens on average"]
    result = {"rounds": options.rounds, "tokens_a_row": options.tokens, "ways": [asdict(row) for row in rows]}
    put_out(options, "packing", result, table, notes)
    return 0
