"""The tables of ``rapidformer bench``: the solutions in each, their models, and the published figures.

This module does not import torch. A table is data. :mod:`measure` runs it and :mod:`report` shows it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from rapidformer_templates.switches.auto_strategy.state_bytes import (
    Formula,
    divided_groups,
    divided_groups_on_host,
    divided_in_rows,
    each_divided,
    each_divided_on_disk,
    each_divided_on_host,
    owned,
    owned_with_gradients,
    replicated,
    replicated_with_masters,
)


@dataclass(frozen=True)
class BenchScale:
    """The size of the model and its batches.

    Attributes:
        vocabulary: number of tokens in the vocabulary, including padding.
        length: tokens per sample.
        accumulation: micro batches that each worker accumulates per step.
        cuda_workers: number of GPUs that the scale needs, with one worker on each. 0 runs on any device with any
            number of workers.
        micro_batch: samples per micro batch.
        kind: ``gpt`` (causal language model) or ``bert`` (masked tokens and sentence order).
        workers: default number of worker processes.
        global_batch: samples per step for any number of workers. With 0, it is the sum of the workers' samples.
    """

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    length: int
    accumulation: int
    cuda_workers: int = 0
    micro_batch: int = 1
    kind: str = "gpt"
    workers: int = 2
    global_batch: int = 0


@dataclass(frozen=True)
class Solution:
    """A row of a table.

    Attributes:
        flags: flags that turn the solution on.
        formula: formula for the bytes that each worker should hold, if it is known.
        peers: names in ``job_peers`` of peers that offer the same.
        published: samples/s and peak MB on 4 GPUs of 32 GB, or the reason why there are none.
        offload: where the optimizer state is stored. The folder of NVMe is added later.
        precision: ``fp32``, ``mixed``, ``best`` or ``published``. ``mixed`` is a 16-bit type. ``best`` is a 16-bit type
            if the device is fast at it. ``published`` is mixed on a GPU, as in the published tables, and fp32 on a CPU.
        divides: number of workers that one copy of the model needs.
    """

    flags: tuple[str, ...] = ()
    formula: Formula | None = None
    peers: tuple[str, ...] = ()
    published: tuple[float, int] | str = "not published"
    offload: Literal["cpu", "nvme"] | None = None
    precision: str = "published"
    divides: int = 1

    @property
    def package(self) -> str | None:
        """The package that must be installed, or None."""
        words = " ".join(self.flags)
        return "deepspeed" if "--zero" in words else "fairscale" if "--oss" in words else None


@dataclass(frozen=True)
class Table:
    """One table.

    Attributes:
        name: name of the table and its files.
        solutions: solutions by name, in the order of the rows.
        scales: scales by name. ``paper`` is the published model.
        utilisation: goal for this library's model FLOPs utilisation, by device.
        notes: lines below the table.
    """

    name: str
    solutions: Mapping[str, Solution]
    scales: Mapping[str, BenchScale]
    utilisation: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def solution_of(self, name: str) -> str:
        """Return the solution that a peer is compared with. For a solution, return its own name."""
        return next((own for own, solution in self.solutions.items() if name in solution.peers), name)


ZERO = "--zero-{}-memory-optimization"

PARTITIONING = Table(
    "partitioning",
    {
        "none": Solution((), replicated, ("accelerate DDP",), "out of memory", precision="fp32"),
        "mixed": Solution((), replicated_with_masters, (), (9.57, 25_061), precision="mixed"),
        "oss": Solution(("--oss-memory-optimization",), owned, (), (6.02, 22_077)),
        "oss-sdp": Solution(("--oss-sdp-memory-optimization",), owned_with_gradients, (), (7.01, 17_113)),
        "fsdp": Solution(
            ("--fsdp-memory-optimization",), divided_in_rows, ("accelerate FSDP", "torch fully_shard"), "N/A"
        ),
        "zero-1": Solution((ZERO.format(1),), divided_groups, ("accelerate ZeRO-1",), (12.88, 15_709)),
        "zero-2": Solution((ZERO.format(2),), divided_groups, ("accelerate ZeRO-2",), (10.27, 15_693)),
        "zero-3": Solution((ZERO.format(3),), each_divided, ("accelerate ZeRO-3",), "N/A"),
        "zero-2-offload": Solution((ZERO.format(2), "--cpu-offload"), divided_groups_on_host, offload="cpu"),
        "zero-3-offload": Solution((ZERO.format(3), "--cpu-offload"), each_divided_on_host, offload="cpu"),
        "zero-3-nvme": Solution((ZERO.format(3), "--nvme-path"), each_divided_on_disk, offload="nvme"),
    },
    {
        "tiny": BenchScale(2, 32, 2, 128, 16, accumulation=2),
        "small": BenchScale(8, 640, 10, 16_000, 128, accumulation=2),
        "paper": BenchScale(24, 2048, 32, 50_304, 1024, accumulation=1, cuda_workers=4, workers=4),
    },
)
"""``paper`` is the published GPT: GPT-2's vocabulary of 50,257, padded to a multiple of 128. The published rows
below ``mixed`` use mixed precision, and on a GPU these do as well."""

HAND_WRITTEN, HF_TRAINER = "plain PyTorch", "transformers' Trainer"

MIXED_PRECISION = Table(
    "mixed-precision",
    {
        "fp32": Solution(peers=(HF_TRAINER,), published=(103.07, 17_025), precision="fp32"),
        "mixed": Solution(peers=(f"{HF_TRAINER}, mixed",), published=(178.15, 12_698), precision="mixed"),
    },
    {
        "tiny": BenchScale(2, 32, 2, 128, 16, 1, micro_batch=4, kind="bert", workers=1),
        "small": BenchScale(4, 512, 8, 8_192, 128, 1, micro_batch=8, kind="bert", workers=1),
        "paper": BenchScale(12, 768, 12, 30_522, 512, 4, micro_batch=16, kind="bert", workers=1, global_batch=64),
    },
    notes=("published: 4 GPUs of 32 GB, 64 samples per step; samples/s are the sum over all GPUs",),
)


def _layout(tensor: int, pipeline: int, published: tuple[float, int]) -> tuple[str, Solution]:
    flags = []
    if tensor > 1:
        flags += ["--tensor-model-parallel-size", str(tensor)]
    if pipeline > 1:
        flags += ["--pipeline-model-parallel-size", str(pipeline)]
    return f"tp {tensor}, pp {pipeline}", Solution(tuple(flags), published=published, divides=tensor * pipeline)


PARALLEL = Table(
    "parallel",
    dict(
        [
            _layout(1, 1, (9.63, 25_061)),
            _layout(2, 1, (7.59, 11_300)),
            _layout(4, 1, (6.16, 5_673)),
            _layout(1, 2, (8.46, 12_375)),
            _layout(1, 4, (8.03, 8_141)),
            _layout(2, 2, (7.37, 6_211)),
        ]
    ),
    {
        "tiny": BenchScale(4, 32, 4, 128, 16, 1, workers=4, global_batch=4),
        "small": BenchScale(8, 640, 20, 16_000, 128, 1, workers=4, global_batch=4),
        "paper": BenchScale(24, 2048, 32, 50_304, 1024, 1, cuda_workers=4, workers=4, global_batch=4),
    },
)

UTILISATION = Table(
    "mfu",
    {
        "rapidformer": Solution(peers=(HAND_WRITTEN, HF_TRAINER), precision="best"),
        "rapidformer, compiled": Solution(
            ("--torch-compile",), peers=(f"{HAND_WRITTEN}, compiled", f"{HF_TRAINER}, compiled"), precision="best"
        ),
    },
    {
        "tiny": BenchScale(2, 32, 2, 128, 16, 1, micro_batch=2, workers=1),
        "small": BenchScale(4, 768, 12, 8_192, 128, 1, micro_batch=8, kind="bert", workers=1),
        "bert-base": BenchScale(12, 768, 12, 30_522, 512, 1, micro_batch=32, kind="bert", workers=1),
        "gpt-124m": BenchScale(12, 768, 12, 50_304, 1024, 1, micro_batch=16, workers=1),
        "paper": BenchScale(24, 2048, 32, 50_304, 1024, 1, micro_batch=8, workers=1),
    },
    utilisation={"cpu": 0.70, "cuda": 0.45},
    notes=(
        "FLOPs: matrix products and attention of a forward and its backward, as torch counts them for the plain "
        "model; no discount for a causal mask",
    ),
)
"""``paper`` is the published GPT of 1.3 billion parameters."""

RUN = "run"
"""The table of one configuration with the user's flags."""

TABLES = {table.name: table for table in (PARTITIONING, MIXED_PRECISION, PARALLEL, UTILISATION)}
