"""The solutions of ``bench partitioning``: what each is, what it should hold, and what was published of it."""

from __future__ import annotations

from dataclasses import dataclass

from rapidformer_templates.planner.states import (
    Formula,
    cut_each,
    cut_each_on_disk,
    cut_each_on_host,
    cut_groups,
    cut_groups_on_host,
    cut_in_rows,
    owned,
    owned_with_gradients,
    replicated,
)


@dataclass(frozen=True)
class Scale:
    """How large the model and its batches are.

    Attributes:
        vocabulary: tokens, as padded.
        length: tokens of a sample.
        accumulation: micro batches of one sample that each worker adds up for a step.
        cuda_workers: GPUs that it needs, one a worker; 0 runs anywhere with any number of workers.
    """

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    length: int
    accumulation: int
    cuda_workers: int = 0


SCALES = {
    "tiny": Scale(2, 32, 2, 128, 16, accumulation=2),
    "small": Scale(8, 640, 10, 16_000, 128, accumulation=2),
    "paper": Scale(24, 2048, 32, 50_304, 1024, accumulation=1, cuda_workers=4),
}
"""``paper`` is the GPT of the published table: GPT-2's vocabulary of 50,257, padded to a multiple of 128."""


@dataclass(frozen=True)
class Solution:
    """A way to divide the model's state.

    Attributes:
        flags: what asks for it.
        formula: what each worker should hold.
        peers: who has the same, by the names in ``partitioning_peers``.
        published: samples/s and peak MB on 4 GPUs of 32 GB, or why there are none.
        offload: as in a plan's ``engine_options``; the folder of NVMe is added.
    """

    flags: tuple[str, ...]
    formula: Formula
    peers: tuple[str, ...] = ()
    published: tuple[float, int] | str = "not published"
    offload: str | None = None

    @property
    def package(self) -> str | None:
        """What must be installed."""
        words = " ".join(self.flags)
        return "deepspeed" if "--zero" in words else "fairscale" if "--oss" in words else None


ZERO = "--zero-{}-memory-optimization"

SOLUTIONS = {
    "none": Solution((), replicated, ("accelerate DDP",), "out of memory"),
    "mixed": Solution((), replicated, (), (9.57, 25_061)),
    "oss": Solution(("--oss-memory-optimization",), owned, (), (6.02, 22_077)),
    "oss-sdp": Solution(("--oss-sdp-memory-optimization",), owned_with_gradients, (), (7.01, 17_113)),
    "fsdp": Solution(("--fsdp-memory-optimization",), cut_in_rows, ("accelerate FSDP", "torch fully_shard"), "N/A"),
    "zero-1": Solution((ZERO.format(1),), cut_groups, ("accelerate ZeRO-1",), (12.88, 15_709)),
    "zero-2": Solution((ZERO.format(2),), cut_groups, ("accelerate ZeRO-2",), (10.27, 15_693)),
    "zero-3": Solution((ZERO.format(3),), cut_each, ("accelerate ZeRO-3",), "N/A"),
    "zero-2-offload": Solution((ZERO.format(2), "--cpu-offload"), cut_groups_on_host, offload="cpu"),
    "zero-3-offload": Solution((ZERO.format(3), "--cpu-offload"), cut_each_on_host, offload="cpu"),
    "zero-3-nvme": Solution((ZERO.format(3), "--nvme-path"), cut_each_on_disk, offload="nvme:"),
}
"""By name, in the order of the table; the published ones below ``mixed`` stand on top of mixed precision."""
