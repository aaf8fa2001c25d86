"""``bench run`` and ``bench mfu``: time some steps of a training command, and compare them with a matrix product."""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from rich.table import Table
from torch import nn

from rapidformer_templates.commands.bench.cli import put_out, spread
from rapidformer_templates.commands.bench.models import SCALES, MatrixProduct, fast_precision, training_flops_of
from rapidformer_templates.commands.main import template_of
from rapidformer_templates.data.collate import samples_in
from rapidformer_templates.errors import ConfigError
from rapidformer_templates.planning.environment import kind_of
from rapidformer_templates.planning.flag_parser import parse
from rapidformer_templates.planning.registry import switch_options
from rapidformer_templates.run.hooks import Callback
from rapidformer_templates.run.performance import peak_memory_mb
from rapidformer_templates.system import accelerator
from rapidformer_templates.trainer import Trainer

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from rapidformer_templates.engines.contract import StepResult

REFUSED = ("--train-iters", "--epochs", "--save", "--resume", "--user-script")
"""Flags that the benchmark sets itself."""

WARMUP = 2
"""First turns that do not count, because of allocations, receipts and rebuilt buckets."""

RESULT = "bench"
"""Key of the measurements in the summary of the run."""


def main(options: argparse.Namespace) -> int:
    """Measure, print and write the result, and return the exit status.

    Raises:
        RapidformerError: the flags are refused, or the run failed.
    """
    words: list[str] = list(options.words)
    refused = [word for word in words if word.partition("=")[0].replace("_", "-") in REFUSED]
    if refused:
        message = f"{refused[0]} is not a flag of a measured run"
        raise ConfigError(message, where=f"bench {options.name}", hint="see --turns and --steps-a-turn")
    if options.scale:  # bench mfu: its flags come before those of the command line
        model, config = SCALES[options.scale], parse(words, switch_options())
        precision = fast_precision(kind_of(config.get("device") or "auto"))
        is_open = precision != "fp32" and "mixed_precision" not in config.origins
        narrow = ["--mixed-precision", precision] if is_open else []
        words[:0] = [*narrow, "--micro-batch-size", str(model.micro_batch), "--lr", "1e-4"]
    base = model.job(samples=1024) if options.scale else template_of(words)
    plan = base([*words, "--train-iters", "1", "--no-save"]).plan  # refuses bad flags before anything starts
    steps = options.steps_a_turn or (1 if plan.device == "cpu" else 10)
    total = str((options.turns + WARMUP) * steps)
    flags = [*words, "--train-iters", total, "--log-interval", total, "--no-save"]
    template = counting(base)(flags, callbacks=[Turns(steps)])
    with contextlib.redirect_stdout(io.StringIO()):  # the results of the run, which the table repeats
        summary = template.fit()
    result = {**summary[RESULT], "flags": words, "plan": plan.to_json()}
    title = f"{options.scale or ''} rapidformer {' '.join(words)}".lstrip()
    put_out(options, options.name, result, _table(result, title), draw=lambda axes: _draw(axes, result))
    return 0


def counting(base: type[Trainer]) -> type[Trainer]:
    """Return a template that counts the model FLOPs of a sample, for the shapes of the first batch.

    They are 0 for a model that is not of transformers.
    """

    class Counting(base):  # type: ignore[valid-type, misc]
        flops: float | None = None

        def build_model(self) -> nn.Module:
            model: nn.Module = super().build_model()
            self.kind, self.settings = type(model), getattr(model, "config", None)
            return model

        def compute_loss(self, model: Any, batch: Any) -> Any:
            if self.flops is None:
                self.flops = training_flops_of(self.kind, self.settings, batch) / max(samples_in(batch), 1)
            return super().compute_loss(model, batch)

    return Counting


class Turns(Callback):
    """Measures turns of optimizer steps, and adds the figures to the summary of the run.

    All workers wait for each other at the end of a turn. Then rank 0 times a matrix product.

    Args:
        steps: optimizer steps per turn.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.seconds: list[float] = []
        self.rates: list[float] = []

    def on_train_start(self, trainer: Any) -> None:
        self.device = torch.device(trainer.plan.device)
        self.setup_mb = peak_memory_mb(self.device)
        self.product = MatrixProduct(self.device.type, trainer.plan.precision) if trainer.is_main else None
        self._begin()

    def on_step_end(self, trainer: Any, step: int, result: StepResult) -> None:
        self.loss = result.loss
        if step % self.steps == 0:
            self._wait()
            self.seconds.append((time.perf_counter() - self._mark) / self.steps)
            self._begin()

    def on_train_end(self, trainer: Any, summary: Mapping[str, Any]) -> None:
        if self.product is None:
            return
        sizes, memory = trainer.plan.sizes, list(summary["peak_memory_mb_by_rank"])
        memory[0] = max(self.setup_mb, memory[0] - self.product.nbytes / 1e6)
        flops = (trainer.flops or 0.0) * sizes.global_batch
        machines = 1 if self.device.type == "cpu" else sizes.world  # workers on a CPU share it
        figures = figures_of(self.seconds, self.rates, sizes.global_batch, flops / machines)
        figures |= {"peak_mb": max(memory), "loss": float(self.loss), "flops_a_step": flops}
        cast(dict[str, Any], summary)[RESULT] = figures | {"parameters": summary["parameters"]}

    def _begin(self) -> None:
        if self.product:
            self.rates.append(self.product.rate())
        self._wait()
        self._mark = time.perf_counter()

    def _wait(self) -> None:
        accelerator.synchronize(self.device)
        if dist.is_initialized():
            dist.barrier()


def figures_of(seconds: Sequence[float], rates: Sequence[float], batch: int, flops: float) -> dict[str, Any]:
    """Return the speed and the utilisation of the turns after the warm-up.

    Args:
        seconds: seconds per step of each turn.
        rates: FLOP/s of the matrix product before the first turn and after each turn.
        flops: model FLOPs per step and machine. 0 if they are not known.
    """
    turns, peaks = seconds[WARMUP:], [(a + b) / 2 for a, b in pairwise(rates)][WARMUP:]
    shares = [flops / spent / peak for spent, peak in zip(turns, peaks, strict=True)]
    return {
        "samples_per_second": batch * len(turns) / sum(turns),
        "samples_per_second_sd": spread([batch / spent for spent in turns]),
        "utilisation": statistics.median(shares) if flops else None,
        "matrix_product_flops_per_second": statistics.median(peaks),
        "seconds": list(turns),
    }


def _table(result: Mapping[str, Any], title: str) -> Table:
    grid, share = Table(title=title, title_justify="left"), result["utilisation"]
    cells = {
        "samples/s": f"{result['samples_per_second']:.2f} ± {result['samples_per_second_sd']:.2f}",
        "peak MB per worker": f"{result['peak_mb']:,.0f}",
        "utilisation": "not known" if share is None else f"{share:.3f}",
        "precision": result["plan"]["precision"],
        "parameters": f"{result['parameters']:,}",
        "loss of the last step": f"{result['loss']:.4f}",
    }
    for heading in cells:
        grid.add_column(heading, justify="right")
    grid.add_row(*cells.values())
    return grid


def _draw(axes: Axes, result: Mapping[str, Any]) -> None:
    seconds = result["seconds"]
    batch = result["samples_per_second"] * sum(seconds) / len(seconds)
    axes.plot(range(1, len(seconds) + 1), [batch / spent for spent in seconds], "o-", color="tab:orange")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("turn")
    axes.set_ylabel("samples per second")
