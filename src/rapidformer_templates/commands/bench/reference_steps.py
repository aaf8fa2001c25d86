"""The steps of a small model in ``bench calibrate``: measured, and compared with what the other rates predict.

A step does more than its operations measured alone. Dropout draws random numbers, engines and gloo work on the
processor, and workers wait for each other. So the computation and the exchanges of a step each get a factor.
"""

from __future__ import annotations

import io
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rapidformer_templates.commands.bench.least_squares import fit_parts
from rapidformer_templates.commands.bench.tables import BenchScale
from rapidformer_templates.commands.bench.worker import build_model
from rapidformer_templates.data.types import Data
from rapidformer_templates.planning.environment import detect
from rapidformer_templates.planning.flag_parser import parse
from rapidformer_templates.planning.registry import REGISTRY
from rapidformer_templates.planning.resolve import resolve
from rapidformer_templates.switches.auto_strategy.layouts import layout_of, memory_options_of
from rapidformer_templates.switches.auto_strategy.model_of_flags import Subject
from rapidformer_templates.switches.auto_strategy.search import Search
from rapidformer_templates.switches.auto_strategy.step_seconds import Timing
from rapidformer_templates.switches.auto_strategy.timing import find_hardware
from rapidformer_templates.switches.auto_strategy.tracing import Batch, loss_of_model
from rapidformer_templates.trainer import Trainer

if TYPE_CHECKING:
    from torch import nn

    from rapidformer_templates.engines.contract import StepResult

WARMUP, STEPS = 3, 5
"""Steps that do not count, and steps that do."""

SCALES = {
    "cpu": BenchScale(8, 192, 8, 2048, 128, accumulation=2, micro_batch=2),
    "gpu": BenchScale(8, 2048, 16, 32000, 1024, accumulation=2, micro_batch=2),
}
"""Sizes of the model and its batches on a CPU and on a GPU. A step takes a fraction of a second."""

LARGEST_GROUP = 8
"""Workers of a tensor group or of a pipeline. More groups are replicas."""


class ReferenceModel:
    """A GPT-2 with dropout, its batches and its loss. It is a :class:`ModelSource` of the planner.

    Attributes:
        tokens: tokens per sample.
    """

    def __init__(self, scale: BenchScale) -> None:
        self.scale, self.tokens = scale, scale.length

    def build(self, blocks: int | None) -> nn.Module:
        """Build the model with ``blocks`` blocks, or with all of them."""
        return build_model(self.scale if blocks is None else replace(self.scale, layers=blocks), dropout=0.1)

    def batch(self, samples: int) -> dict[str, torch.Tensor]:
        """Build a micro batch with the shapes of training."""
        tokens = torch.zeros((samples, self.tokens), dtype=torch.long)
        return {"input_ids": tokens, "labels": tokens}

    def compute_loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Compute the mean loss of a batch."""
        return loss_of_model(model, batch)


def scale_of(device: str) -> BenchScale:
    """Return the sizes for a type of device."""
    return SCALES["cpu" if device == "cpu" else "gpu"]


def reference_flags(device: str, precision: str, workers: int) -> dict[str, list[str]]:
    """Return the flags of each layout in which the model is trained, by the layout's name."""
    scale, together = scale_of(device), math.gcd(workers, LARGEST_GROUP)
    own = f"--device {device} --micro-batch-size {scale.micro_batch} --train-iters {WARMUP + STEPS} --lr 1e-4 --no-save"
    own += f" --mixed-precision {precision}" if precision != "fp32" else ""
    layouts = {"replicas": ("", workers)}
    if workers > 1:
        layouts |= {
            "fsdp": ("--fsdp-memory-optimization", workers),
            "tensor": (f"--tensor-model-parallel-size {together}", workers // together),
            "pipeline": (f"--pipeline-model-parallel-size {together}", workers // together),
        }
    return {
        name: f"{own} {flags} --global-batch-size {scale.micro_batch * scale.accumulation * replicas}".split()
        for name, (flags, replicas) in layouts.items()
    }


def measure_steps(device: str, precisions: Sequence[str], workers: int) -> dict[str, dict[str, float]]:
    """Train in this process, which is one of ``workers``. Return the seconds of a step by precision and layout."""
    return {
        precision: {name: _train(device, words) for name, words in reference_flags(device, precision, workers).items()}
        for precision in precisions
    }


def _train(device: str, words: Sequence[str]) -> float:
    model, ends = ReferenceModel(scale_of(device)), list[float]()

    class Job(Trainer):
        def build_model(self) -> nn.Module:
            return model.build(None)

        def build_data(self) -> Data:
            draw = torch.Generator().manual_seed(0)
            rows = torch.randint(model.scale.vocabulary, (64, model.tokens), generator=draw)
            return Data(train=[{"input_ids": row, "labels": row} for row in rows])

        def on_step_end(self, step: int, result: StepResult) -> None:
            if device != "cpu":
                torch.accelerator.synchronize()
            ends.append(time.perf_counter())

    shown = io.StringIO()  # what a run prints is not part of the calibration
    with redirect_stdout(shown), redirect_stderr(shown):
        Job(words).fit()
    return statistics.median(b - a for a, b in zip(ends[WARMUP - 1 :], ends[WARMUP:], strict=False))


def predict_steps(file: Path, device: str, precision: str, workers: int) -> dict[str, Timing]:
    """Return what the planner predicts for a step of each layout, with the rates of a device file."""
    model, timings = ReferenceModel(scale_of(device)), {}
    for name, words in reference_flags(device, precision, workers).items():
        config = REGISTRY.complete(parse(words, REGISTRY.options()))
        machine = detect("Trainer", "calibrate", device=device, world_size=workers)
        environment = replace(machine, device_file=str(file))
        plan = resolve(config, environment)
        subject = Subject(config, plan, gpu=device != "cpu", source=model)
        search = Search(config, environment, subject, find_hardware(environment, precision))
        timings[name] = search.predict(layout_of(plan), memory_options_of(plan, subject.shapes.width)).timing
    return timings


def fit_factors(predicted: Mapping[str, Timing], measured: Mapping[str, float]) -> tuple[float, float]:
    """Return the factors of computation and of exchanges with which predictions fit measured seconds, by layout."""
    factors = fit_parts([
        ((timing.total - timing.communication) / measured[name], timing.communication / measured[name])
        for name, timing in predicted.items()
    ])  # fmt: skip
    return factors if any(timing.communication for timing in predicted.values()) else (factors[0], 1.0)
