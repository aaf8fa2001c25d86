"""The worker of ``benchmarks planner``: trains a few steps in each layout and reports the memory that it used.

Counts every storage of a real tensor while it is alive, from before the model is built until after the last step. On
one worker, the profiler's record of torch's allocator is reported as well, which is independent of this library. With
several workers that record would miss memory that the threads of the collectives free.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import BertConfig, BertForMaskedLM

from benchmarks.models import gpt2, llama
from benchmarks.stand_in_host import taken_for_a_gpu
from rapidformer_templates.data.types import Data
from rapidformer_templates.planning.environment import detect
from rapidformer_templates.planning.flag_parser import parse
from rapidformer_templates.planning.registry import REGISTRY
from rapidformer_templates.planning.resolve import resolve
from rapidformer_templates.switches.auto_strategy.model_of_flags import with_switches
from rapidformer_templates.switches.auto_strategy.model_shapes import ModelShapes
from rapidformer_templates.switches.auto_strategy.tracing import LiveStorages, loss_of_model
from rapidformer_templates.system.process_state import resident_bytes
from rapidformer_templates.system.workers import join
from rapidformer_templates.trainer import Trainer

STEPS = 4
"""Optimizer steps of a run. Optimizer state exists from the second step on."""

TRAINING = ("--device", "cpu", "--train-iters", str(STEPS), "--lr", "1e-4", "--template", "Trainer", "--no-save")
"""Flags of every run."""

MARK = "rapidformer: step "


@dataclass(frozen=True)
class Sizes:
    """A model and its batches.

    Attributes:
        make: Builds the model with a number of blocks.
        blocks: Number of blocks.
        vocabulary: Number of tokens.
        length: Tokens per sample.
        width: Hidden size.
        heads: Attention heads of a block.
    """

    make: Callable[[int], Any]
    blocks: int
    vocabulary: int
    length: int
    width: int
    heads: int

    def shapes(self, adapters: str = "") -> ModelShapes:
        """Return the model as the planner knows it.

        Args:
            adapters: Flags that add adapters to the model.
        """
        config = REGISTRY.complete(parse(adapters.split(), REGISTRY.options()))
        plan = resolve(config, detect("Trainer", "benchmark", device="cpu", world_size=1))
        return ModelShapes(lambda blocks: with_switches(self.build(blocks).train(), config, plan), self.batch)

    def build(self, blocks: int | None) -> Any:
        """Build the model with a number of blocks, or with all of them."""
        return self.make(self.blocks if blocks is None else blocks)

    def batch(self, samples: int) -> dict[str, torch.Tensor]:
        """Return a micro batch with the shapes of training."""
        tokens = torch.zeros((samples, self.length), dtype=torch.long)
        return {"input_ids": tokens, "labels": tokens}

    def compute_loss(self, model: Any, batch: Any) -> torch.Tensor:
        """Return the model's own loss."""
        return loss_of_model(model, batch)

    def samples(self) -> list[dict[str, Any]]:
        """Return random tokens of one length, without padding."""
        draw = torch.Generator().manual_seed(0)
        tokens = torch.randint(self.vocabulary, (64 if self.length < 2048 else 8, self.length), generator=draw)
        return [{"input_ids": row, "labels": row} for row in tokens]


def _gpt2(blocks: int) -> Any:
    return gpt2(blocks, 128, 4, 1024, 128, dropout=0.1, use_cache=False)


def _gpt(blocks: int) -> Any:
    return gpt2(blocks, 256, 8, 4096, 128, dropout=0.1, use_cache=False)


def _llama(blocks: int) -> Any:
    return llama(blocks, 192, 6, 2048, 256, num_key_value_heads=2, intermediate_size=512)


def _bert(blocks: int) -> Any:
    sizes: dict[str, Any] = {"hidden_size": 256, "num_attention_heads": 4, "num_hidden_layers": blocks}
    sizes |= {"intermediate_size": 1024, "max_position_embeddings": 128}
    return BertForMaskedLM(BertConfig(**sizes, vocab_size=4096))


LENGTHS = (2048, 8192, 32768)
"""Numbers of tokens in the long sequences."""


def long_llama(blocks: int, length: int) -> Any:
    """Build a llama with width 64 and a vocabulary of 512 words."""
    return llama(blocks, 64, 4, 512, length, num_key_value_heads=2, intermediate_size=160)


MODELS = {
    **{f"llama-{n}": Sizes(partial(long_llama, length=n), 2, 512, n, 64, 4) for n in LENGTHS},
    "gpt2": Sizes(_gpt2, 6, 1024, 128, 128, 4),
    "llama": Sizes(_llama, 8, 2048, 192, 192, 6),
    "bert": Sizes(_bert, 4, 4096, 96, 256, 4),
    "gpt": Sizes(_gpt, 8, 4096, 128, 256, 8),
}
"""Models by architecture: 1.3 M parameters with dropout and a tied head, 4 M with grouped heads and no dropout, 5 M
with a mask, and 7 M for the layouts of the published table."""


def measure(model: str, workers: int, flags: Sequence[str]) -> dict[str, Any]:
    """Train in this process, which is one of the workers, with the flags of a layout.

    Returns:
        ``held``: bytes of parameters, gradients, optimizer state and buckets, from the receipts.
        ``peaks``: peak bytes of live storages in each step from the second on.
        ``allocator_peaks``: the same from the record of the allocator. Empty with several workers.
        ``resident_mb``: memory of the process after the run.
        ``host``: bytes of activations that were on the host at a time.
    """
    sizes = MODELS[model]

    class Measured(Trainer):
        def build_data(self) -> Data:
            self.peaks: list[int] = []
            self.watching = ExitStack()
            if workers == 1:
                self.record = self.watching.enter_context(
                    profile(activities=[ProfilerActivity.CPU], profile_memory=True)
                )
            self.live = LiveStorages()
            self.watching.enter_context(self.live.following_resizes())
            self.watching.enter_context(self.live)
            return Data(train=sizes.samples())

        def build_model(self) -> Any:
            return sizes.make(sizes.blocks)

        def on_step_end(self, step: int, result: Any) -> None:
            with record_function(f"{MARK}{step}"):
                self.peaks.append(self.live.peak)
            self.live.reset_peak()
            if step == STEPS:
                self.watching.close()

    # Offload to numpy arrays, which are not storages. So the count is what would be on a GPU.
    with taken_for_a_gpu() if "--offload-activations" in flags else nullcontext():
        job = Measured([*TRAINING, *flags])
        summary = job.fit()
    host = summary["receipts"].get("offloaded_bytes_at_a_time", 0)
    recorded = peaks_of(job.record.profiler.kineto_results.events()) if workers == 1 else []
    held = summary["receipts"]["held_bytes_by_rank"][torch.distributed.get_rank() if workers > 1 else 0]
    return {
        "held": held,
        "peaks": job.peaks[1:],
        "allocator_peaks": recorded,
        "resident_mb": resident_bytes("VmRSS") / 1e6,
        "host": host,
    }


def peaks_of(events: Sequence[Any]) -> list[int]:
    """Return the peak of live bytes in each step from the second on, from a profile's record of the allocator."""
    ends = sorted(event.start_ns() for event in events if event.name().startswith(MARK))
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    peaks = [0] * len(ends)
    alive = step = 0
    for when, size in changes:
        while step < len(ends) and when > ends[step]:
            step += 1
            if step < len(ends):
                peaks[step] = alive
        alive += size
        if step < len(ends):
            peaks[step] = max(peaks[step], alive)
    return peaks[1:]


SECONDS_WARMUP, SECONDS_STEPS = 3, 6
"""Steps that do not count, and steps that do. The first ones allocate, and some engines rebuild their buckets."""


def measure_seconds(model: str, workers: int, flags: Sequence[str]) -> list[float]:
    """Train in this process, which is one of the workers, and return the seconds of each step after the warm-up."""
    sizes, ends = MODELS[model], list[float]()

    class Timed(Trainer):
        def build_data(self) -> Data:
            return Data(train=sizes.samples())

        def build_model(self) -> Any:
            return sizes.make(sizes.blocks)

        def on_step_end(self, step: int, result: Any) -> None:
            ends.append(time.perf_counter())

    Timed([*TRAINING, "--train-iters", str(SECONDS_WARMUP + SECONDS_STEPS), *flags]).fit()
    return [end - begin for begin, end in pairwise(ends[SECONDS_WARMUP - 1 :])]


Job = tuple[str, Sequence[str]]
"""A model, and the flags of its run."""


def run_jobs(measure: Callable[..., Any], jobs: Sequence[Job]) -> list[Any]:
    """Run jobs one after another in this process, which is one of the workers of a group."""
    torch.set_num_threads(1)
    found = []
    with join("cpu") as workers:
        for model, flags in jobs:
            gc.collect()  # or garbage of the previous job would be freed during this one
            found.append(measure(model, workers.world, flags))
    return found
