"""The result of a search: layouts with their predictions, the constraints of the others, and whole trainings.

Results of earlier searches are in the user's cache folder, so that an equal search needs neither traces nor torch. The
name of a file is a hash of everything that a result depends on: flags, machine, devices, versions of packages, the
source of this package, and the files that flags name. Files are written under a temporary name and then renamed. A file
that cannot be read is ignored. This module does not import torch.
"""

from __future__ import annotations

import json
import math
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from hashlib import sha256
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from rapidformer_templates.data.finetuning.locating import steps_of
from rapidformer_templates.planning.config import RunConfig
from rapidformer_templates.planning.environment import DEVICE_KINDS, Environment, version_of_package
from rapidformer_templates.planning.flag_values import Epochs
from rapidformer_templates.planning.hub import cached_folder
from rapidformer_templates.planning.registry import SWITCHES
from rapidformer_templates.planning.request import precision
from rapidformer_templates.switches.auto_strategy.layouts import Layout
from rapidformer_templates.switches.auto_strategy.step_seconds import Timing
from rapidformer_templates.switches.auto_strategy.timing import GB, Hardware
from rapidformer_templates.system.files import JSON_ERRORS, hash_of, user_cache

ALLOWANCE = 0.05
"""Share of the predicted memory that must also be free: for fragmentation, and for buffers a transfer still holds."""

SHOWN = 10
"""Number of layouts in a table. A search ends when this number of layouts fit and all others are slower."""

DISK_GB_PER_SECOND = 1.0
"""Assumed rate at which all workers together write a checkpoint: a shared file system, or one fast disk."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one worker at its peak.

    Attributes:
        parameters, gradients, optimizer: the states. Gradients are those at the start of the update.
        buffers: what an engine holds in addition: buckets, whole parameters of active blocks.
        activations: everything else that is alive at the peak. If the peak comes before the gradients
            exist, activations use their memory, and only the rest counts here.
        host: offloaded states and activations in the host memory of a GPU worker. It is not part of the total.
    """

    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    activations: int
    host: int = 0

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.buffers + self.activations


@dataclass(frozen=True)
class SetupMemory:
    """Bytes of one worker at its peak before the first step. On a CPU both are the same memory.

    Attributes:
        device: on the accelerator.
        host: in the memory of its node.
    """

    device: int
    host: int


@dataclass(frozen=True)
class Candidate:
    """A layout that fits.

    Attributes:
        memory: at the peak of training.
        setup: at the peak before the first step.
        needed_gb: memory that the device must have: the higher peak plus the allowance and the context.
        host_gb: memory that a node must have for all of its workers: the higher peak plus the allowance.
        step_flops: operations of the model's matrix products in an optimizer step of all workers. Recomputation does
            not count.
    """

    layout: Layout
    memory: Memory
    setup: SetupMemory
    timing: Timing
    needed_gb: float
    host_gb: float
    step_flops: float

    @property
    def samples_per_second(self) -> float:
        return self.layout.global_batch / self.timing.total


@dataclass(frozen=True)
class Rejected:
    """A layout that does not work, and the constraint that failed."""

    layout: Layout
    constraint: str


@dataclass(frozen=True)
class Unknown:
    """Quantities that are predicted as if a switch were off.

    Attributes:
        switch: name of the switch.
        kinds: the affected kinds of ``FORECAST``.
        why: the reason.
    """

    switch: str
    kinds: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class ModelTotals:
    """Sizes of a model that do not depend on the layout.

    Attributes:
        tokens_per_sample: positions of a sample in the input of the model, including padding.
        checkpoint_bytes: bytes of weights and optimizer state in a checkpoint.
        is_trained_whole: whether all parameters are trained.
        has_equal_batches: whether each optimizer step has the same number of samples.
    """

    tokens_per_sample: int
    checkpoint_bytes: int
    is_trained_whole: bool
    has_equal_batches: bool


@dataclass(frozen=True)
class SearchResult:
    """The layouts of a number of workers.

    Attributes:
        layouts: the fastest that fit, best first.
        rejected: those that do not fit or break a rule.
        totals: sizes of the model that do not depend on the layout.
        not_predicted: effects of flags that the numbers leave out.
        slower: number of other layouts. Whether they fit was not tried, because ``SHOWN`` faster ones do.
        file: the file that the result was read from, or None if it was searched for.
    """

    layouts: tuple[Candidate, ...]
    rejected: tuple[Rejected, ...]
    totals: ModelTotals
    not_predicted: tuple[Unknown, ...] = ()
    slower: int = 0
    file: Path | None = field(default=None, compare=False)


@dataclass(frozen=True)
class TrainingTerms:
    """Values that the answers about a whole training depend on, besides the layout.

    Attributes:
        tokens: length of the training. None takes it from ``--train-iters`` or ``--epochs``.
        price_per_hour: price of one worker, which is a GPU, for an hour.
        disk_gb_per_second: GB/s at which all workers together write a checkpoint. None assumes it.
    """

    tokens: int | None = None
    price_per_hour: float | None = None
    disk_gb_per_second: float | None = None


@dataclass(frozen=True)
class TrainingEstimate:
    """A whole training with one layout.

    Attributes:
        steps: optimizer steps. It and everything that follows from it is None if the length is unknown.
        tokens_per_step: tokens of an optimizer step of all workers.
        gpu_hours: hours of all workers together.
        mfu: model FLOPs utilization: the share of the devices' peak that the model's matrix products need, without
            recomputation. None if the peak is unknown, or if some parameters are frozen.
        cost: in the currency of the price.
        checkpoint_gb, checkpoint_seconds: size of a checkpoint, and the time to write it.
        disk_gb_per_second: GB/s at which all workers together write it.
    """

    steps: int | None
    tokens_per_step: int
    tokens: int | None
    tokens_per_second: float
    hours: float | None
    gpu_hours: float | None
    mfu: float | None
    cost: float | None
    checkpoint_gb: float
    checkpoint_seconds: float
    disk_gb_per_second: float

    def lines(self, environment: Environment, terms: TrainingTerms) -> list[str]:
        """Return the estimate as lines for people."""
        kind = "GPU" if environment.device != "cpu" else "worker"
        use = "" if self.mfu is None else f", MFU {self.mfu:.1%}"
        lines = [f"training: {self.tokens_per_second:,.0f} tokens/s{use}, {self.tokens_per_step:,} tokens per step"]
        if self.steps is not None and self.hours is not None and self.gpu_hours is not None:
            lines.append(
                f"  {self.steps:,} steps = {_in_words(self.tokens or 0)} tokens in {self.hours:,.1f} hours "
                f"({self.hours / 24:,.1f} days), without evaluations, checkpoints and restarts"
            )
            price = "" if self.cost is None else f" = {self.cost:,.2f} at {terms.price_per_hour:g} per {kind} and hour"
            lines.append(f"  {self.gpu_hours:,.1f} {kind}-hours{price}")
        elif terms.price_per_hour is not None:
            lines.append("  no cost: --tokens, --train-iters or --epochs must say how long the training is")
        source = "assumed" if terms.disk_gb_per_second is None else "--disk-gb-per-second"
        return [
            *lines,
            f"  a checkpoint: {self.checkpoint_gb:,.3g} GB, {self.checkpoint_seconds:,.3g} s to write at "
            f"{self.disk_gb_per_second:g} GB/s for all workers together ({source})",
        ]


def _in_words(count: int) -> str:
    """Write a number of tokens in three digits: 300,000,012 → ``300M``."""
    for scale, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M")):
        if count >= scale:
            return f"{count / scale:.4g}{unit}"
    return f"{count:,}"


def estimate_training(
    candidate: Candidate, config: RunConfig, environment: Environment, terms: TrainingTerms, totals: ModelTotals
) -> TrainingEstimate:
    """Return the estimate of a training with a layout."""
    global_batch, step_seconds = candidate.layout.global_batch, candidate.timing.total
    tokens_per_step = global_batch * totals.tokens_per_sample
    steps = _count_steps(config, terms, totals, global_batch)
    hours = None if steps is None else steps * step_seconds / 3600
    gpu_hours = None if hours is None else hours * environment.world_size
    mfu = None
    if environment.device_kind is not None and totals.is_trained_whole:
        peak: float = getattr(DEVICE_KINDS[environment.device_kind], f"{precision(config, environment)}_tflops")
        mfu = candidate.step_flops / (step_seconds * environment.world_size * peak * 1e12)
    rate = terms.disk_gb_per_second or DISK_GB_PER_SECOND
    checkpoint_gb = totals.checkpoint_bytes / GB
    return TrainingEstimate(
        steps=steps,
        tokens_per_step=tokens_per_step,
        tokens=None if steps is None else steps * tokens_per_step,
        tokens_per_second=tokens_per_step / step_seconds,
        hours=hours,
        gpu_hours=gpu_hours,
        mfu=mfu,
        cost=None if gpu_hours is None or terms.price_per_hour is None else gpu_hours * terms.price_per_hour,
        checkpoint_gb=checkpoint_gb,
        checkpoint_seconds=checkpoint_gb / rate,
        disk_gb_per_second=rate,
    )


def _count_steps(config: RunConfig, terms: TrainingTerms, totals: ModelTotals, global_batch: int) -> int | None:
    """Return the optimizer steps of the training, or None if the flags and the data do not tell."""
    length = config.training.train_iters
    if terms.tokens is not None:
        return math.ceil(terms.tokens / (global_batch * totals.tokens_per_sample))
    if isinstance(length, int):
        return length
    if length is None and config.training.epochs is not None:
        length = Epochs(f"{config.training.epochs}epochs")
    return steps_of(config, length, global_batch) if length and totals.has_equal_batches else None


KEPT = 50
"""Number of results that stay in the folder. The oldest ones are deleted."""


def cache_folder() -> Path:
    """Return the folder of the results."""
    return user_cache() / "searches"


def cache_file(config: RunConfig, environment: Environment, hardware: Hardware, *, by_memory: bool) -> Path | None:
    """Return the file of a search. None if other packages add switches, whose source is not known here.

    Args:
        by_memory: whether the blocks of each stage are chosen by predicted memory.
    """
    if entry_points(group=SWITCHES):
        return None
    facts = {
        "versions": {name: version_of_package(name) for name in ("torch", "transformers")} | {"python": sys.version},
        "machine": platform.machine(),
        "source": _source_hash(),
        "flags": {name: repr(value) for name, value in config.items()},
        "origins": dict(config.origins),
        "environment": repr(environment),
        "hardware": repr(hardware),
        "by_memory": by_memory,
        "files": sorted(_files_of(config)),
    }
    return cache_folder() / f"{hash_of(facts)}.json"


@cache
def _source_hash() -> str:
    """Return a hash of the source files of this package."""
    root, content = Path(__file__).parents[2], sha256()
    for file in sorted([*root.rglob("*.py"), *root.rglob("*.toml")]):
        content.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes())
    return content.hexdigest()


def _files_of(config: RunConfig) -> Iterator[str]:
    """Yield the path, size and time of each file that a flag names, and of each file in a folder that it names."""
    model, data = config.model, config.data
    on_hub = ((model.pretrained_model_name_or_path, model.revision), (data.tokenizer_path, None))
    folders = [cached_folder(name, revision, "config") for name, revision in on_hub if name]
    unread = ("save", "data_dir", "data_path", "data_cache_dir")  # a plan reads no samples
    values = [value for name, value in config.items() if isinstance(value, str) and name not in unread]
    for path in [*map(Path, values), *filter(None, folders)]:
        with suppress(OSError, ValueError):  # a text that cannot be the name of a file
            for file in [path, *(sorted(path.iterdir()) if path.is_dir() else ())]:
                facts = file.stat()
                yield f"{file.resolve()} {facts.st_size} {facts.st_mtime_ns}"


def read_result(file: Path) -> SearchResult | None:
    """Return an earlier result, or None if there is none. A file that cannot be read is ignored with a note."""
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
        return replace(_decoded(stored), file=file)
    except FileNotFoundError:
        return None
    except JSON_ERRORS as error:
        print(f"note: {file} is damaged and is ignored ({type(error).__name__}: {error})", file=sys.stderr)
        return None


def write_result(file: Path, result: SearchResult) -> None:
    """Store a result. If the folder cannot be written to, a note says so."""
    temporary = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(asdict(replace(result, file=None))), encoding="utf-8")
        temporary.replace(file)
        by_age = sorted(file.parent.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
        for old in by_age[:-KEPT]:
            old.unlink(missing_ok=True)
    except OSError as error:
        print(f"note: the result of the search is not stored in {file.parent} ({error})", file=sys.stderr)


def _decoded(stored: dict[str, Any]) -> SearchResult:
    return SearchResult(
        layouts=tuple(_candidate(**values) for values in stored["layouts"]),
        rejected=tuple(Rejected(_layout(**values["layout"]), values["constraint"]) for values in stored["rejected"]),
        totals=ModelTotals(**stored["totals"]),
        not_predicted=tuple(
            Unknown(values["switch"], tuple(values["kinds"]), values["why"]) for values in stored["not_predicted"]
        ),
        slower=stored["slower"],
    )


def _candidate(
    *, layout: dict[str, Any], memory: dict[str, int], setup: dict[str, int], timing: dict[str, float], **rest: float
) -> Candidate:
    return Candidate(_layout(**layout), Memory(**memory), SetupMemory(**setup), Timing(**timing), **rest)


def _layout(*, stages: list[int], **sizes: Any) -> Layout:
    return Layout(**sizes, stages=tuple(stages))
