"""``benchmarks setup-memory``: how much memory and time a worker needs to build a model, under each engine.

A model is built with random weights, or loaded from files. The engine divides it while it is built. The model is a
llama. Divided experts need a mixture, which has as many parameters.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import peft  # noqa: F401 - a worker must not grow by its imports
import torch
import transformers.models.llama.modeling_llama
import transformers.models.mixtral.modeling_mixtral  # noqa: F401
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, MixtralConfig, PreTrainedTokenizerFast

from benchmarks.contest import Advance, Answer, Columns, Flag, Row, asks, progress, table, verdict
from benchmarks.workers import run_in_workers
from rapidformer_templates.data.types import Data
from rapidformer_templates.engines.shards import local_part
from rapidformer_templates.models.loading import build_model
from rapidformer_templates.run.building import build_data, build_engine, choose_allocation
from rapidformer_templates.run.run import begin_run
from rapidformer_templates.system.workers import join
from rapidformer_templates.trainer import Trainer

TENSOR, STAGES, EXPERTS = (f"--{name}-model-parallel-size" for name in ("tensor", "pipeline", "expert"))
FSDP = "--fsdp-memory-optimization"
SHARDS = "--use-distributed-optimizer --data-parallel-sharding-strategy optim_grads_params"
ENGINES = {
    "ddp": "",
    "fsdp": FSDP,
    "hybrid": f"{FSDP} --fsdp-shard-size 2",
    "tensor": f"{TENSOR} 4",
    "pipeline": f"{STAGES} 4",
    "2x2": f"{TENSOR} 2 {STAGES} 2",
    "tensor-shards": f"{TENSOR} 2 {SHARDS}",
    "pipeline-shards": f"{STAGES} 2 {SHARDS}",
    "zero-3": "--zero-3-memory-optimization",
    "experts": f"{EXPERTS} 4",
    "fsdp-int4": f"{FSDP} --lora-rank 8 --quantize-base int4",
}
"""Flags of each engine."""
WORKERS = 4
GOAL = 1.1
"""A worker may need its share and the largest part that is whole at a time, and a tenth more."""


def write_model(width: int, blocks: int, dtype: torch.dtype, folder: Path, *, mixture: bool) -> int:
    """Save a model with its tokenizer. Returns the fp32 bytes of its largest block or embedding."""
    kind, inner = (MixtralConfig, width * 8 // 3 // 4) if mixture else (LlamaConfig, width * 8 // 3)
    sizes: dict[str, Any] = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": blocks}
    sizes |= dict.fromkeys(("num_attention_heads", "num_key_value_heads"), width // 64)
    config: Any = kind(**sizes, vocab_size=32_000, max_position_embeddings=512)
    if mixture:
        config.num_local_experts = 4
    words = {f"w{number}": number for number in range(31_990)} | {"<unk>": 31_990, "<pad>": 31_991}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<unk>")), unk_token="<unk>", pad_token="<pad>"
    )
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    units = [*model.model.layers, model.model.embed_tokens, model.lm_head]
    return max(sum(parameter.numel() for parameter in unit.parameters()) for unit in units) * 4


def build(folder: str, flags: str, pretrained: bool) -> tuple[int, int, float]:
    """Build the model of a folder in this process, which is one of the workers.

    Returns:
        The bytes of the parameters that this worker holds in the end, by how many bytes the process grew at most (with
        the parts of mapped files that it read), and the seconds of building.
    """

    class Job(Trainer):
        def build_data(self) -> Data:
            tokens = torch.arange(32).repeat(8, 1)
            return Data(train=[{"input_ids": row, "labels": row} for row in tokens])

        def build_model(self) -> nn.Module:
            if pretrained:
                return build_model(self.config, "AutoModelForCausalLM")
            return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)

    own = f"--device cpu --train-iters 1 --lr 1e-4 --template Trainer --no-save {flags}"
    if pretrained:
        own += f" --pretrained-model-name-or-path {folder}"
    elif AutoConfig.from_pretrained(folder).model_type == "mixtral":
        own += " --model-type mixtral"  # experts are divided only if the flags name a mixture
    job = Job(own.split())
    torch.set_num_threads(1)
    choose_allocation(job.plan)
    with join("cpu", job.plan.sizes) as workers:
        run = begin_run(job, workers)
        build_data(run)
        began = time.perf_counter()
        build_engine(run)
        seconds = time.perf_counter() - began
        stored = [local_part(parameter).untyped_storage() for parameter in run.engine.local_tensors()["parameters"]]
        storages = {storage.data_ptr(): storage.nbytes() for storage in stored}
        return sum(storages.values()), run.setup_peak.host, seconds


def measure(options: argparse.Namespace, advance: Advance = lambda text: None) -> list[Row]:
    """Measure each engine with each source of the weights, on the workers that need most."""
    rows: list[Row] = []
    largest: dict[bool, int] = {}
    with tempfile.TemporaryDirectory(prefix="rf-") as name:
        for engine, weights in product(options.engines.split(","), options.weights.split(",")):
            mixture = engine == "experts"
            folder = Path(name) / str(mixture)
            if mixture not in largest:
                dtype = getattr(torch, options.dtype)
                largest[mixture] = write_model(options.width, options.blocks, dtype, folder, mixture=mixture)
            told = run_in_workers(build, str(folder), ENGINES[engine], weights == "pretrained", workers=WORKERS)
            share, peak, seconds = (max(values) for values in zip(*told, strict=True))
            row = {"engine": engine, "weights": weights, "share": share, "largest": largest[mixture], "peak": peak}
            rows.append(row | {"seconds": seconds, "relative": peak / (share + largest[mixture])})
            advance(f"{engine}, {weights}")
    return rows


COLUMNS: Columns = {
    "engine": "{engine}",
    "weights": "{weights}",
    **{name: lambda row, name=name: f"{row[name] / 1e6:,.0f}" for name in ("share", "largest", "peak")},  # type: ignore[misc]
    "peak / (share + largest part)": "{relative:.2f}",
    "seconds": "{seconds:.1f}",
}


def notes(rows: Sequence[Row]) -> list[str]:
    """Return whether the goal was reached, and by which rows not. DDP has no shares."""
    missed = [f"{row['engine']}, {row['weights']}" for row in rows if row["engine"] != "ddp" and row["relative"] > GOAL]
    goal = f"goal: at most the share and the largest part, and {GOAL - 1:.0%} more: {verdict(not missed)}"
    return [goal + (f" (not by {'; '.join(missed)})" if missed else "")]


@asks(
    Flag("width", 1536, "hidden size of the model; 1536 gives 551 M parameters"),
    Flag("blocks", 16, "blocks of the model"),
    Flag("dtype", "bfloat16", "type of the weights in the files", choices=("bfloat16", "float32")),
    Flag("engines", ",".join(ENGINES), "engines to measure, separated by commas", kind=str),
    Flag("weights", "random,pretrained", "sources of the weights, separated by commas", kind=str),
)
def answer(options: argparse.Namespace) -> Answer:
    with progress("setup-memory", len(options.engines.split(",")) * len(options.weights.split(","))) as advance:
        rows = measure(options, advance)
    title = f"peak MB of building a model on each of {WORKERS} workers, in fp32"
    return Answer({"rows": rows}, table(title, rows, COLUMNS, left=2), notes(rows))
