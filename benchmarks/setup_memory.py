"""``benchmarks setup-memory``: how much memory a worker needs to build a model, under each engine.

A llama is built with random weights, or loaded from bf16 files. Each case runs twice: every worker builds all of the
model, as before it could be divided, or the engine divides the model while it is built.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks import setup_memory_worker
from benchmarks.contest import Answer, Columns, Flag, Row, table, verdict
from rapidformer_templates.commands.bench.output import Advance, progress
from rapidformer_templates.system import launch

TENSOR, STAGES = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
ENGINES = {
    "ddp": [],
    "fsdp": ["--fsdp-memory-optimization"],
    "hybrid": ["--fsdp-memory-optimization", "--fsdp-shard-size", "2"],
    "tensor": [TENSOR, "{workers}"],
    "pipeline": [STAGES, "{workers}"],
    "2x2": [TENSOR, "2", STAGES, "2"],
    "zero-3": ["--zero-3-memory-optimization"],
    "experts": ["--num-experts", "4", "--expert-model-parallel-size", "{workers}"],
    "fsdp-int4": ["--fsdp-memory-optimization", "--lora-rank", "8", "--quantize-base", "int4"],
}
"""Flags of each engine."""

FLAGS = (
    Flag("workers", 4, "number of worker processes; a multiple of 4"),
    Flag("width", 1536, "hidden size of the model; 1536 gives 551 M parameters"),
    Flag("blocks", 16, "blocks of the model"),
    Flag("engines", ",".join(ENGINES), "engines to measure, separated by commas", kind=str),
)

GOAL = 1.1
"""A worker may need its share and the largest part that is whole at a time, and a tenth more."""


def measure(options: argparse.Namespace, advance: Advance = lambda text: None) -> list[Row]:
    """Return a row for each engine and each source of the weights, with the worker that needs most."""
    engines = options.engines.split(",")
    settings = [(engine, pretrained) for engine in engines for pretrained in (False, True)]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="rf-") as name:
        largest = _write_model(Path(name), options.width, options.blocks)
        for engine, pretrained in settings:
            flags = [flag.format(workers=options.workers) for flag in ENGINES[engine]]
            row: Row = {"engine": engine, "weights": "pretrained" if pretrained else "random", "largest": largest}
            for way in ("before", "after"):
                case = {"folder": name, "flags": flags, "pretrained": pretrained, "divided": way == "after"}
                ranks = _run(case, options.workers)
                row |= {"share": max(rank["share"] for rank in ranks), way: max(rank["peak"] for rank in ranks)}
                row[f"seconds_{way}"] = max(rank["seconds"] for rank in ranks)
            rows.append(row)
            advance(f"{engine}, {row['weights']}")
    return rows


def _write_model(folder: Path, width: int, blocks: int) -> int:
    """Save a llama in bf16. Returns the fp32 bytes of its largest block or embedding."""
    words = {f"w{number}": number for number in range(31_990)} | {"<unk>": 31_990, "<pad>": 31_991}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<unk>")), unk_token="<unk>", pad_token="<pad>"
    )
    sizes: dict[str, Any] = {"hidden_size": width, "num_hidden_layers": blocks, "num_attention_heads": width // 64}
    sizes |= {"intermediate_size": width * 8 // 3, "vocab_size": 32_000, "max_position_embeddings": 512}
    torch.manual_seed(1)
    with torch.device("meta"):
        shape = LlamaForCausalLM(LlamaConfig(**sizes))
    units = [*shape.model.layers, shape.model.embed_tokens, shape.lm_head]
    model = LlamaForCausalLM._from_config(LlamaConfig(**sizes, dtype="bfloat16"), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return max(sum(p.numel() for p in unit.parameters()) for unit in units) * 4


def _run(case: dict[str, Any], workers: int) -> list[dict[str, float]]:
    """Run a case in a group of new processes, because memory that others have freed would change the peak."""
    with tempfile.TemporaryDirectory(prefix="rf-") as folder:
        launch.run_workers([sys.executable, "-m", setup_memory_worker.__name__, json.dumps(case), folder], workers)
        files = [Path(folder) / f"{rank}.json" for rank in range(workers)]
        return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def _columns() -> Columns:
    def megabytes(name: str) -> Any:
        return lambda row: f"{row[name] / 1e6:,.0f}"

    return {
        "engine": "{engine}",
        "weights": "{weights}",
        "share": megabytes("share"),
        "largest part": megabytes("largest"),
        "before": megabytes("before"),
        "after": megabytes("after"),
        "after / (share + largest part)": lambda row: f"{row['after'] / (row['share'] + row['largest']):.2f}",
        "seconds before": "{seconds_before:.1f}",
        "seconds after": "{seconds_after:.1f}",
    }


def notes(rows: Sequence[Row]) -> list[str]:
    """Return a line per engine that misses the goal, or one line for all."""
    missed = [
        f"{row['engine']}, {row['weights']}" for row in rows if row["after"] > GOAL * (row["share"] + row["largest"])
    ]
    goal = f"goal: at most the share and the largest part, and {GOAL - 1:.0%} more: {verdict(not missed)}"
    return [goal + (f" (not by {'; '.join(missed)})" if missed else "")]


def answer(options: argparse.Namespace) -> Answer:
    with progress("setup-memory", 2 * len(options.engines.split(","))) as advance:
        rows = measure(options, advance)
    title = f"peak MB of building a model on each of {options.workers} workers, in fp32"
    return Answer({"rows": rows}, table(title, rows, _columns(), left=2), notes(rows))
