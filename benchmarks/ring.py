"""Time of attention over a divided sequence in a ring, with flash kernels and without: docs/parallelism.md."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.contest import Answer, Columns, Flag, Row, asks, bars, progress, table
from benchmarks.workers import run_in_workers
from rapidformer_templates.engines.collectives import Peers
from rapidformer_templates.switches.layout import context_attention
from rapidformer_templates.switches.layout.context_attention import AttentionMask, ring_attention
from rapidformer_templates.switches.layout.sequence_shards import TokenIntervals
from rapidformer_templates.system.workers import Workers, join

HEADS, KEY_HEADS, SIZE = 8, 2, 64
LENGTHS = (1024, 4096, 16384)

RING, PLAIN, WHOLE = "ring", "ring, plain operations", "whole sequences of some heads"
COLUMNS: Columns = {
    "tokens": "{tokens:,}",
    "type": "{dtype}",
    **{f"{name}, ms": f"{{{name}:.0f}}" for name in (RING, PLAIN, WHOLE)},
    "plain / ring": "{gain:.1f}",
    "whole / ring": "{of_whole:.2f}",
}


@asks(
    Flag("workers", 2, "worker processes that share a sequence"),
    Flag("rounds", 5, "rounds, in which each way takes a turn"),
    Flag("longest", 4096, f"longest sequence in tokens, one of {', '.join(map(str, LENGTHS))}"),
)
def answer(options: argparse.Namespace) -> Answer:
    cases = [(n, dtype) for n in LENGTHS if n <= options.longest for dtype in ("float32", "bfloat16")]
    rows = []
    with progress("ring", len(cases)) as advance:
        for tokens, dtype in cases:
            of_workers = run_in_workers(_seconds, tokens, dtype, options.rounds, workers=options.workers)
            rows.append(_row(tokens, dtype, of_workers))
            advance(f"{tokens:,} tokens")
    title = f"forward and backward of causal attention, {HEADS} heads of {SIZE}, {options.workers} workers"
    gains = {f"{row['tokens']:,} {row['dtype']}": row["gain"] for row in rows}
    return Answer({"rows": rows}, table(title, rows, COLUMNS, left=0), [], bars("plain / ring", gains))


def _row(tokens: int, dtype: str, of_workers: list[Mapping[str, float]]) -> Row:
    slowest = {name: 1000 * max(each[name] for each in of_workers) for name in of_workers[0]}
    ratios = {"gain": slowest[PLAIN] / slowest[RING], "of_whole": slowest[WHOLE] / slowest[RING]}
    return {"tokens": tokens, "dtype": dtype, **slowest, **ratios}


def _seconds(tokens: int, dtype: str, rounds: int) -> dict[str, float]:
    """Return the median time of each way on this worker. The first round does not count."""
    with join("cpu") as workers:
        ways = _ways(workers, tokens, getattr(torch, dtype))
        taken: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds + 1):
            for name, run in ways.items():
                workers.barrier()
                begin = time.perf_counter()
                run()
                taken[name].append(time.perf_counter() - begin)
    return {name: statistics.median(seconds[1:]) for name, seconds in taken.items()}


def _ways(workers: Workers, tokens: int, dtype: torch.dtype) -> dict[str, Callable[[], None]]:
    intervals = TokenIntervals(tokens, workers.world, folded=True)
    mask = AttentionMask(intervals, None, causal=True, scale=SIZE**-0.5)
    peers = Peers(dist.group.WORLD, workers.world, workers.rank)

    def tensors(count: int, share: int) -> list[torch.Tensor]:
        heads = (HEADS // share, KEY_HEADS // share, KEY_HEADS // share)
        return [torch.randn(1, max(1, n), count, SIZE, dtype=dtype, requires_grad=True) for n in heads]

    part, whole = tensors(intervals.shard_length, 1), tensors(tokens, workers.world)
    ring = partial(ring_attention, *part, mask, peers)

    def plain() -> None:
        with mock.patch.object(context_attention, "_has_flash_kernel", return_value=False):
            both(ring)

    def both(attend: Callable[[], torch.Tensor]) -> None:
        attend().sum().backward()

    def of_heads() -> torch.Tensor:
        query, key, value = whole
        return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    return {RING: partial(both, ring), PLAIN: plain, WHOLE: partial(both, of_heads)}
