"""``benchmarks export-memory``: memory and time of exporting a checkpoint and of merging adapters.

The peers read the whole model: ``from_pretrained`` and ``save_pretrained`` of transformers, with ``merge_and_unload``
of peft between them. Each run has a process to itself, and flushes its files to the disk. The ways take turns.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers.models.llama.modeling_llama  # noqa: F401 - it would be imported while memory is measured
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.contest import Advance, Answer, Columns, Flag, asks, progress, table, verdict
from benchmarks.measured_export import Weights, growth_of_process
from benchmarks.new_processes import run_in_new_processes
from rapidformer_templates.run.checkpoint import format as checkpoint
from rapidformer_templates.run.export import export_checkpoint
from rapidformer_templates.switches.lora.exported import merge
from rapidformer_templates.system.files import sync
from rapidformer_templates.system.workers import Workers

FLAGS = (
    Flag("width", 1024, "hidden size of the model; 1024 gives 222 M parameters"),
    Flag("blocks", 16, "blocks of the model"),
    Flag("repeats", 3, "runs of each way"),
)
EXPORT, MERGE = "export of a checkpoint", "merge of adapters"
WAYS = {
    EXPORT: ("rapidformer export", "from_pretrained, save_pretrained"),
    MERGE: ("rapidformer export --merge", "from_pretrained, merge_and_unload, save_pretrained"),
}
"""Our way and that of the peer for each kind of work."""


@dataclass(frozen=True)
class Cost:
    """Memory and times of a way.

    Attributes:
        growth: bytes by which the process grew at most, without mapped files.
        seconds: time, until the files are on the disk.
        processor_seconds: time of the processor.
    """

    growth: int
    seconds: float
    processor_seconds: float


def write_sources(config: LlamaConfig, folder: Path) -> None:
    """Write a checkpoint, the same model as transformers saves it, a base in bf16, and adapters for it."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    checkpoint.save(folder, 1, Weights(model), {}, Workers(0, 0, 1, torch.device("cpu")))
    model.save_pretrained(folder / "whole")
    model.config.save_pretrained(folder / "described")
    base = LlamaForCausalLM.from_pretrained(folder / "whole", dtype=torch.bfloat16)
    base.save_pretrained(folder / "base")
    adapted = get_peft_model(base, LoraConfig(init_lora_weights=False, target_modules=["q_proj", "o_proj"]))
    adapted.save_pretrained(str(folder / "adapters"))
    config.save_pretrained(folder / "adapters")


def run_way(case: tuple[str, Path]) -> Cost:
    """Run a way in this process. It writes to the folder ``output``."""
    way, folder = case
    output = folder / "output"
    ours_export, peer_export = WAYS[EXPORT]
    ours_merge, peer_merge = WAYS[MERGE]

    def read(name: str) -> LlamaForCausalLM:
        return LlamaForCausalLM.from_pretrained(folder / name, dtype=torch.float32)

    runs: dict[str, Callable[[], None]] = {
        ours_export: lambda: export_checkpoint(folder / "step-1", folder / "described", output, averages=False),
        peer_export: lambda: read("whole").save_pretrained(output),
        ours_merge: lambda: merge(folder / "adapters", output, str(folder / "base")),
        peer_merge: lambda: (
            PeftModel.from_pretrained(read("base"), folder / "adapters").merge_and_unload().save_pretrained(output)
        ),
    }
    torch.set_num_threads(1)
    os.sync()
    before = resource.getrusage(resource.RUSAGE_SELF)
    began = time.perf_counter()
    with growth_of_process() as growth:
        runs[way]()
        for file in output.iterdir():
            sync(file)
    seconds = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_SELF)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Cost(growth(), seconds, spent)


def measure(options: argparse.Namespace, advance: Advance = lambda text: None) -> dict[str, Cost]:
    """Return the highest memory and the lowest times of each way."""
    ways = [way for pair in WAYS.values() for way in pair]
    costs: dict[str, list[Cost]] = {way: [] for way in ways}
    config = LlamaConfig(
        hidden_size=options.width,
        intermediate_size=options.width * 11 // 4,
        num_hidden_layers=options.blocks,
        num_attention_heads=8,
        vocab_size=8000,
        architectures=["LlamaForCausalLM"],
    )
    with tempfile.TemporaryDirectory(prefix="rf-") as name:
        write_sources(config, Path(name))
        for number in range(options.repeats):
            for way in ways if number % 2 else reversed(ways):
                costs[way] += run_in_new_processes(run_way, [(way, Path(name))])
                shutil.rmtree(Path(name) / "output")
                advance(way)
    return {
        way: Cost(
            max(cost.growth for cost in some),
            min(cost.seconds for cost in some),
            min(cost.processor_seconds for cost in some),
        )
        for way, some in costs.items()
    }


def notes(costs: dict[str, Cost]) -> list[str]:
    """Return for each kind of work how it compares with the peer."""
    lines = []
    for work, (ours, peer) in WAYS.items():
        own, other = costs[ours], costs[peer]
        lines.append(
            f"{work}: {own.growth / other.growth:.2f} × the memory, {own.seconds / other.seconds:.2f} × the time and "
            f"{own.processor_seconds / other.processor_seconds:.2f} × the processor time of the peer; "
            f"goal for the time: 1 ×: {verdict(own.seconds <= other.seconds)}"
        )
    return lines


@asks(*FLAGS)
def answer(options: argparse.Namespace) -> Answer:
    with progress("export-memory", options.repeats * 4) as advance:
        costs = measure(options, advance)
    columns: Columns = {
        "way": lambda item: item[0],
        "growth in MB": lambda item: f"{item[1].growth / 1e6:,.0f}",
        "seconds": lambda item: f"{item[1].seconds:.1f}",
        "processor seconds": lambda item: f"{item[1].processor_seconds:.1f}",
    }
    figures = {way: asdict(cost) for way, cost in costs.items()}
    title = "memory without mapped files, and time until the files are on the disk"
    return Answer(figures, table(title, costs.items(), columns), notes(costs))
