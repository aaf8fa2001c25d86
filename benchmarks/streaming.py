"""``benchmarks streaming``: memory and speed of a pass over streamed text, compared with the same text read at once.

Each pass runs in a separate process. No model is trained, so only the cost of the data is measured.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from benchmarks.contest import Answer, Flag, asks, progress, table, verdict
from benchmarks.workers import run_in_workers
from rapidformer_templates.data.loader import load
from rapidformer_templates.data.order import BatchRequest
from rapidformer_templates.data.tasks import load_task
from rapidformer_templates.data.types import Endless
from rapidformer_templates.planning.flag_parser import parse
from rapidformer_templates.planning.registry import switch_options
from rapidformer_templates.planning.resolve import with_template_defaults
from rapidformer_templates.system.process_state import resident_bytes

SHARDS, BATCH = 4, 32
STREAMED, WINDOWS, WHOLE = "causal_lm, streamed", "pretraining, streamed", "causal_lm, read whole"
TASKS = {
    STREAMED: "--task causal_lm --streaming --train-iters 1 --data-dir {0}",
    WINDOWS: "--task pretraining --streaming --train-iters 1 --data-path {0}",
    WHOLE: "--task causal_lm --epochs 1 --validation-fraction 0 --data-dir {0}",
}
KINDS = {"streamed": (STREAMED,), "windows": (WINDOWS,), "whole": (WHOLE,), "all": tuple(TASKS)}
MODEL = "--model-type gpt2 --seq-length 256 --num-layers 1 --hidden-size 16 --num-attention-heads 2"
GOAL = 1.3
"""Goal: ratio of the peak memory for the largest text to that for the smallest."""


def make_text(folder: Path, megabytes: float) -> None:
    """Write documents of words with Zipf's law, about 600 characters each, in shards of JSON lines."""
    draw = np.random.default_rng(0)
    words = np.array(["".join(draw.choice(list("etaoinshrdlu"), draw.integers(2, 9))) for _ in range(5000)])
    share = 1 / np.arange(1, 5001)
    lines = [
        json.dumps({"text": " ".join(draw.choice(words, draw.integers(20, 180), p=share / share.sum()))}) + "\n"
        for _ in range(2000)
    ]
    block = "".join(lines).encode()
    for shard in range(SHARDS):
        with (folder / f"train-{shard:05d}-of-{SHARDS:05d}.jsonl").open("wb") as file:
            while file.tell() < megabytes * 1e6 / SHARDS:
                rest = int(megabytes * 1e6 / SHARDS) - file.tell()
                file.write(block if rest >= len(block) else block[: block.rindex(b"\n", 0, max(rest, 2000)) + 1])


def make_tokenizer(folder: Path, text: Path) -> Path:
    """Train and save a byte-level BPE of 8,000 tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=8000, special_tokens=["<|endoftext|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    with text.open(encoding="utf-8") as file:
        texts = (json.loads(line)["text"] for line in islice(file, 2000))
        tokenizer.train_from_iterator(texts, trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>").save_pretrained(folder)
    return folder


def measure(flags: Sequence[str]) -> dict[str, float]:
    """Make one pass over the batches of a run with these flags, in this process."""
    config = with_template_defaults(parse([*flags, "--lr", "1"], switch_options()), "Trainer")
    task = load_task(config)
    began, before = time.perf_counter(), resident_bytes("VmRSS") / 2**20
    data = task.build_data()
    samples: Any = data.train
    streamed = isinstance(samples, Endless)
    batches = count() if streamed else range(len(samples) // BATCH)
    requests = (BatchRequest(list(p), (1, 2), list(p)) for p in (range(i * BATCH, (i + 1) * BATCH) for i in batches))
    tokens, bookmark = 0, None
    for batch in load(samples, data, requests, workers=0, pin_memory=False):
        if batch.bookmark and batch.bookmark["epoch"]:
            break
        tokens, bookmark = tokens + batch.tokens, batch.bookmark
    seconds, peak = time.perf_counter() - began, resident_bytes("VmHWM") / 2**20
    began = time.perf_counter()
    if streamed and bookmark:
        samples.go_to(bookmark)
        samples[bookmark["position"]]
    return {
        "before": before,
        "peak": peak,
        "seconds": seconds,
        "tokens": tokens,
        "resumed": time.perf_counter() - began if streamed else 0.0,
    }


@asks(
    Flag("megabytes", "10 100 1000", "sizes of the text in MB", kind=str),
    Flag("whole", 100.0, "largest text that is read at once, in MB"),
    Flag("data", "all", "kind of data to measure", choices=("all", "streamed", "windows", "whole")),
    Flag("folder", None, "folder for the generated text (default: temporary files)"),
)
def answer(options: argparse.Namespace) -> Answer:
    sizes = [float(size) for size in options.megabytes.split()]
    ways = [(size, way) for size in sizes for way in KINDS[options.data] if way != WHOLE or size <= options.whole]
    rows: list[dict[str, Any]] = []
    with progress("streaming", len(ways)) as advance:
        for size in sizes:
            with tempfile.TemporaryDirectory(dir=options.folder) as name:
                folder = Path(name) / "text"
                folder.mkdir()
                make_text(folder, size)
                tokenizer = make_tokenizer(Path(name) / "tokenizer", next(folder.glob("*.jsonl")))
                for way in (way for of, way in ways if of == size):
                    flags = f"{TASKS[way].format(folder)} {MODEL} --tokenizer-path {tokenizer}".split()
                    (found,) = run_in_workers(measure, flags)
                    rows.append({"way": way, "size": size, "rate": size / found["seconds"], **found})
                    advance(f"{size:g} MB, {way}")
    peaks = {way: [row["peak"] for row in rows if row["way"] == way] for way in (STREAMED, WINDOWS)}
    growth = {way: found[-1] / found[0] for way, found in peaks.items() if found}
    columns = {
        "data": "{way}",
        "text, MB": "{size:,g}",
        "before, MB": "{before:,.0f}",
        "peak, MB": "{peak:,.0f}",
        "pass, s": "{seconds:,.1f}",
        "MB/s": "{rate:,.1f}",
        "resume, s": "{resumed:,.1f}",
    }
    span = f"from {sizes[0]:g} to {sizes[-1]:g} MB the peak grows to"
    notes = [f"{way}: {span} {times:.2f} × (goal {GOAL} ×): {verdict(times <= GOAL)}" for way, times in growth.items()]
    return Answer({"rows": rows, "growth": growth}, table("memory of one pass over text", rows, columns), notes)
