"""``benchmarks setup-memory``: how much memory and time a worker needs to build a model, under each engine.

A model is built with random weights, or loaded from files. Each case runs twice: every worker builds all of the model,
as before it could be divided, or the engine divides the model while it is built. The model is a llama. Divided experts
need a mixture, which has as many parameters.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, PreTrainedConfig, PreTrainedTokenizerFast

from benchmarks.contest import Advance, Answer, Columns, Flag, asks, progress, table, verdict
from benchmarks.new_processes import run_in_new_processes
from benchmarks.setup_memory_worker import Case, Result, work
from rapidformer_templates.system.launch import reserved_port

TENSOR, STAGES, EXPERTS = (f"--{name}-model-parallel-size" for name in ("tensor", "pipeline", "expert"))
FSDP = "--fsdp-memory-optimization"
ENGINES = {
    "ddp": (),
    "fsdp": (FSDP,),
    "hybrid": (FSDP, "--fsdp-shard-size", "2"),
    "tensor": (TENSOR, "4"),
    "pipeline": (STAGES, "4"),
    "2x2": (TENSOR, "2", STAGES, "2"),
    "zero-3": ("--zero-3-memory-optimization",),
    "experts": (EXPERTS, "4"),
    "fsdp-int4": (FSDP, "--lora-rank", "8", "--quantize-base", "int4"),
}
"""Flags of each engine."""
WORKERS = 4

FLAGS = (
    Flag("width", 1536, "hidden size of the model; 1536 gives 551 M parameters"),
    Flag("blocks", 16, "blocks of the model"),
    Flag("dtype", "bfloat16", "type of the weights in the files", choices=("bfloat16", "float32")),
    Flag("engines", ",".join(ENGINES), "engines to measure, separated by commas", kind=str),
    Flag("weights", "random,pretrained", "sources of the weights, separated by commas", kind=str),
    Flag("whole", True, "also measure workers that build the whole model each"),
    Flag("first-step", False, "measure until the end of the first step, and not only the building"),
    Flag("repeats", 1, "runs of each case; the fastest one counts"),
)

GOAL = 1.1
"""A worker may need its share and the largest part that is whole at a time, and a tenth more."""


@dataclass(frozen=True)
class Comparison:
    """The workers that need most memory and most time in a case.

    Attributes:
        largest: bytes of the model's largest block or embedding in fp32.
        shares: if the engine divides the model while it is built.
        whole: if each worker builds the whole model. None if that was not measured.
    """

    engine: str
    weights: str
    largest: int
    shares: Result
    whole: Result | None

    @property
    def relative(self) -> float:
        """The peak relative to the share and the largest part."""
        return self.shares.peak / (self.shares.share + self.largest)


def measure(options: argparse.Namespace, advance: Advance = lambda text: None) -> list[Comparison]:
    """Measure each engine with each source of the weights."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="rf-") as name:
        largest: dict[str, int] = {}
        for engine, weights in product(options.engines.split(","), options.weights.split(",")):
            config = model_config(options.width, options.blocks, mixture=engine == "experts")
            folder = Path(name) / config.model_type
            if config.model_type not in largest:
                largest[config.model_type] = write_model(config, getattr(torch, options.dtype), folder)
            case = Case(str(folder), ENGINES[engine], weights == "pretrained", True, options.first_step)
            whole = _fastest(replace(case, divided=False), options.repeats) if options.whole else None
            shares = _fastest(case, options.repeats)
            rows.append(Comparison(engine, weights, largest[config.model_type], shares, whole))
            advance(f"{engine}, {weights}")
    return rows


def model_config(width: int, blocks: int, *, mixture: bool) -> PreTrainedConfig:
    experts = 4
    kind, inner = (MixtralConfig, width * 8 // 3 // experts) if mixture else (LlamaConfig, width * 8 // 3)
    config: PreTrainedConfig = kind(
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=blocks,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        vocab_size=32_000,
        max_position_embeddings=512,
    )
    if mixture:
        config.num_local_experts = experts
    return config


def write_model(config: PreTrainedConfig, dtype: torch.dtype, folder: Path) -> int:
    """Save a model with its tokenizer. Returns the fp32 bytes of its largest block or embedding."""
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


def _fastest(case: Case, repeats: int) -> Result:
    return min((_run(case) for _ in range(repeats)), key=lambda result: result.seconds)


def _run(case: Case) -> Result:
    """Run a case in a group of workers. Returns the values of those that need most."""
    with reserved_port() as port:
        everywhere = {"WORLD_SIZE": str(WORKERS), "LOCAL_WORLD_SIZE": str(WORKERS)}
        everywhere |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        results = run_in_new_processes(
            work, [(case, {**everywhere, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(WORKERS)]
        )
    shares, peaks, seconds = zip(*((one.share, one.peak, one.seconds) for one in results), strict=True)
    return Result(max(shares), max(peaks), max(seconds))


def _columns(*, whole: bool) -> Columns:
    def megabytes(value: Callable[[Comparison], int]) -> Callable[[Comparison], str]:
        return lambda row: f"{value(row) / 1e6:,.0f}"

    def of_whole(text: Callable[[Result, Comparison], str]) -> Callable[[Comparison], str]:
        return lambda row: text(row.whole, row) if row.whole else ""

    columns: dict[str, str | Callable[[Comparison], str]] = {
        "engine": lambda row: row.engine,
        "weights": lambda row: row.weights,
        "share": megabytes(lambda row: row.shares.share),
        "largest part": megabytes(lambda row: row.largest),
        "in shares": megabytes(lambda row: row.shares.peak),
        "in shares / (share + largest part)": lambda row: f"{row.relative:.2f}",
        "seconds": lambda row: f"{row.shares.seconds:.1f}",
    }
    if whole:
        columns |= {
            "whole on each worker": of_whole(lambda result, _: f"{result.peak / 1e6:,.0f}"),
            "seconds, whole": of_whole(lambda result, _: f"{result.seconds:.1f}"),
            "seconds in shares / whole": of_whole(lambda result, row: f"{row.shares.seconds / result.seconds:.2f}"),
        }
    return columns


def notes(rows: Sequence[Comparison]) -> list[str]:
    """Return whether the goal was reached, and by which rows not. DDP has no shares."""
    missed = [f"{row.engine}, {row.weights}" for row in rows if row.engine != "ddp" and row.relative > GOAL]
    goal = f"goal: at most the share and the largest part, and {GOAL - 1:.0%} more: {verdict(not missed)}"
    return [goal + (f" (not by {'; '.join(missed)})" if missed else "")]


@asks(*FLAGS)
def answer(options: argparse.Namespace) -> Answer:
    with progress("setup-memory", len(options.engines.split(",")) * len(options.weights.split(","))) as advance:
        rows = measure(options, advance)
    title = f"peak MB of building a model on each of {WORKERS} workers, in fp32"
    shown = table(title, rows, _columns(whole=options.whole), left=2)
    return Answer({"rows": [asdict(row) for row in rows]}, shown, notes(rows))
