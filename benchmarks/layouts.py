"""Compare runs of eighteen layouts with a single process. pytorch/torchtitan#3029 has such a table for another trainer.

The model is a gpt2 with 4 blocks. The global batch of 8 is split into micro batches of one sample, so gradients are
accumulated. Each layout starts with the same weights and reads the same samples in the same order. That table shards by
FSDP everywhere. Here, ZeRO-2 replaces FSDP under tensor or pipeline parallelism, which do not support FSDP (RF004).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.contest import Answer, Columns, Flag, Row, asks, progress, table
from rapidformer_templates.data.types import Data
from rapidformer_templates.errors import RapidformerError
from rapidformer_templates.system import launch
from rapidformer_templates.trainer import Trainer

SIZES = ("fsdp", "tp", "pp", "cp")
LAYOUTS: Sequence[Mapping[str, int]] = (
    {},
    *({name: 2} for name in SIZES),
    *({one: 2, other: 2} for i, one in enumerate(SIZES) for other in SIZES[i + 1 :]),
    *({name: 2 for name in SIZES if name != without} for without in reversed(SIZES)),
    {"fsdp": 8},
    {"fsdp": 4, "tp": 2},
    {"fsdp": 2, "cp": 4},
)
"""One process, each parallelism with two workers, all pairs and triples, and three layouts with eight workers."""

WAYS = {"fp64": "", "fp32": "", "compiled": "--torch-compile"}
"""Flags for each way to train a layout. The compiled runs are in fp32."""

VOCABULARY, LENGTH, SAMPLES = 96, 32, 64


def _ways(word: str) -> list[str]:
    ways = word.split(",")
    if unknown := [way for way in ways if way not in WAYS]:
        raise argparse.ArgumentTypeError(f"unknown way {', '.join(unknown)}; choose from {', '.join(WAYS)}")
    return ways


FLAGS = (
    Flag("steps", 100, "optimizer steps"),
    Flag("workers", 8, "maximum number of worker processes"),
    Flag("ways", ",".join(WAYS), "how each layout is trained", kind=_ways),
)

COLUMNS: Columns = {
    "layout": "{layout}",
    "run": "{way}",
    "step 1": "{first:.8f}",
    "halfway": "{middle:.8f}",
    "end": "{last:.8f}",
    "largest difference": "{difference:.1e}",
    "graph breaks": lambda row: _count(row["graph_breaks"]),
    "recompiled": lambda row: _count(row["recompilations"]),
}


@asks(*FLAGS)
def answer(options: argparse.Namespace) -> Answer:
    ways = options.ways
    layouts = [layout for layout in LAYOUTS if _workers(layout) <= options.workers]
    rows: list[Row] = []
    with progress("layouts", len(layouts)) as advance:
        for layout in layouts:
            rows += _rows(layout, ways, options.steps, rows[: len(ways)])
            advance(_name(layout))
    worst = {way: max(row["difference"] for row in rows if row["way"] == way) for way in ways}
    notes = [f"{way}: the losses of all layouts are within {found:.1e} of one process" for way, found in worst.items()]
    title = f"the loss of {len(layouts)} layouts compared with one process, {options.steps} steps"
    return Answer({"rows": rows}, table(title, rows, COLUMNS, left=2), notes, None)


def _count(found: int | None) -> str:
    return "" if found is None else str(found)


def _workers(layout: Mapping[str, int]) -> int:
    return math.prod(layout.values())


def _name(layout: Mapping[str, int]) -> str:
    return " × ".join(f"{name}{size}" for name, size in layout.items()) or "one process"


def flags_of(layout: Mapping[str, int]) -> str:
    """Return the flags of a layout."""
    names = {"tp": "tensor-model-parallel", "pp": "pipeline-model-parallel", "cp": "context-parallel"}
    sizes = " ".join(f"--{names[name]}-size {size}" for name, size in layout.items() if name in names)
    divided = {"tp", "pp"} & layout.keys()
    sharded = "--zero-2-memory-optimization" if divided else "--fsdp-memory-optimization"
    return f"{sizes} {sharded if 'fsdp' in layout else ''}".strip()


def _rows(layout: Mapping[str, int], ways: Sequence[str], steps: int, alone: Sequence[Row]) -> list[Row]:
    """Return a row for each way, compared with the run of one process."""
    with tempfile.TemporaryDirectory(prefix="rf-") as folder:
        file = Path(folder) / "curves.json"
        command = [sys.executable, "-m", __name__, str(file), str(steps), ",".join(ways), flags_of(layout)]
        if _workers(layout) == 1:
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        else:
            launch.run_workers(command, _workers(layout))
        found = json.loads(file.read_text(encoding="utf-8"))
    rows = []
    for i, way in enumerate(ways):
        losses = found[way]["losses"]
        wanted = alone[i]["losses"] if alone else losses
        apart = [abs(a - b) / abs(b) for a, b in zip(losses, wanted, strict=True)]
        shown = {"first": losses[0], "middle": losses[steps // 2 - 1], "last": losses[-1], "difference": max(apart)}
        rows.append({"layout": _name(layout), "way": way, **shown, **found[way]})
    return rows


class Job(Trainer):
    """Train on sequences that count up by different steps, so there is something to learn."""

    double: bool

    def build_data(self) -> Data:
        draw = torch.Generator().manual_seed(0)
        starts, strides = (torch.randint(1, VOCABULARY, (SAMPLES, 1), generator=draw) for _ in range(2))
        rows = (starts + strides * torch.arange(LENGTH)) % VOCABULARY
        return Data(train=[{"input_ids": row, "labels": row} for row in rows])

    def build_model(self) -> Any:
        sizes: dict[str, Any] = {
            "vocab_size": VOCABULARY,
            "n_positions": LENGTH,
            "n_embd": 32,
            "n_layer": 4,
            "n_head": 4,
        }
        sizes |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, use_cache=False))
        return model.double() if self.double else model

    def compute_loss(self, model: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        # The loss of transformers rounds logits to 32 bits.
        logits, labels = model(input_ids=batch["input_ids"]).logits[:, :-1], batch["labels"][:, 1:]
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def on_step_end(self, step: int, result: Any) -> None:
        self.losses = [*getattr(self, "losses", []), float(result.loss)]


def main() -> None:
    """``python -m … FILE STEPS WAYS FLAGS``: run one worker of a layout in each way."""
    file, steps, ways, flags = sys.argv[1:]
    settings = f"--device cpu --train-iters {steps} --micro-batch-size 1 --global-batch-size 8 --lr 1e-3 --no-save"
    found = {}
    for way in ways.split(","):
        job = Job(f"{settings} --optimizer adamw_torch --clip-grad 1.0 {flags} {WAYS[way]}".split())
        job.double = way == "fp64"
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
            receipts = job.fit()["receipts"]
        told = receipts.get("compile") or {}
        counts = {name: sum(told[name].values()) if told else None for name in ("graph_breaks", "recompilations")}
        found[way] = {"losses": job.losses, **counts}
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        Path(file).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    try:
        main()
    except RapidformerError as error:
        sys.exit(error.render())
