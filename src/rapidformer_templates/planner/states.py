"""Bytes of the model's states on each worker, by the rules of each engine; exact, and read off its memory in tests."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

FP32, MOMENTS, COUNTER = 4, 8, 4
"""Bytes of a number in fp32, of AdamW's two moments of a parameter, and of its count of steps for a tensor."""


@dataclass(frozen=True)
class Facts:
    """A parameter of the model: its shape, and whether it decays (those that do not are a group of their own)."""

    shape: tuple[int, ...]
    decays: bool

    @property
    def count(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Held:
    """Bytes that a worker holds between two steps; of gradients, when the update begins."""

    parameters: int
    gradients: int
    optimizer: int

    def per_parameter(self, count: int) -> tuple[float, float, float]:
        return self.parameters / count, self.gradients / count, self.optimizer / count


Formula = Callable[[Sequence[Facts], int, int], list[Held]]
"""(parameters, workers, bytes of a number in the type that is computed in) → what each worker should hold."""


def replicated(parameters: Sequence[Facts], workers: int, width: int) -> list[Held]:
    """DDP: everything everywhere."""
    count = sum(p.count for p in parameters)
    return [Held(FP32 * count, FP32 * count, MOMENTS * count + COUNTER * len(parameters))] * workers


def owned(parameters: Sequence[Facts], workers: int, width: int) -> list[Held]:
    """OSS: the state of a parameter lies whole with its owner, so the shares are uneven."""
    count = FP32 * sum(p.count for p in parameters)
    return [Held(count, count, state) for _, state in _of_owners(parameters, workers)]


def owned_with_gradients(parameters: Sequence[Facts], workers: int, width: int) -> list[Held]:
    """OSS + SDP: so do the gradients."""
    count = FP32 * sum(p.count for p in parameters)
    return [Held(count, gradients, state) for gradients, state in _of_owners(parameters, workers)]


def _of_owners(parameters: Sequence[Facts], workers: int) -> list[tuple[int, int]]:
    """Bytes of (gradients, optimizer state) by owner: each parameter goes to whoever has fewest, group by group."""
    counts, tensors = [0] * workers, [0] * workers
    for parameter in sorted(parameters, key=lambda p: not p.decays):
        owner = counts.index(min(counts))
        counts[owner] += parameter.count
        tensors[owner] += 1
    return [(FP32 * c, MOMENTS * c + COUNTER * t) for c, t in zip(counts, tensors, strict=True)]


def cut_in_rows(parameters: Sequence[Facts], workers: int, width: int) -> list[Held]:
    """FSDP: each parameter is cut along its first dimension, and filled up to equal parts."""
    count = sum(math.ceil(p.shape[0] / workers) * math.prod(p.shape[1:]) for p in parameters)
    return [Held(FP32 * count, FP32 * count, MOMENTS * count + COUNTER * len(parameters))] * workers


def cut_groups(parameters: Sequence[Facts], workers: int, width: int) -> list[Held]:
    """ZeRO-1 and -2: whole parameters; gradients, fp32 masters and moments of this worker's part of each group.

    DeepSpeed keeps masters also where parameters are fp32 already, and the whole gradient of a parameter
    that two workers share.
    """
    whole = width * sum(p.count for p in parameters)
    groups, shares = _groups(parameters, workers)
    held = []
    for rank in range(workers):
        gradients = sum(_overlapping(group, rank * n, (rank + 1) * n) for group, n in zip(groups, shares, strict=True))
        held.append(Held(whole, width * gradients, (FP32 + MOMENTS) * sum(shares) + COUNTER * len(groups)))
    return held


def cut_groups_on_host(parameters: Sequence[Facts], workers: int, width: int) -> list[Held]:
    """ZeRO-2 with offload: gradients go into the masters' own; DeepSpeedCPUAdam counts steps outside of tensors."""
    whole = width * sum(p.count for p in parameters)
    share = sum(_groups(parameters, workers)[1])
    return [Held(whole, FP32 * share, (FP32 + MOMENTS) * share)] * workers


def _groups(parameters: Sequence[Facts], workers: int) -> tuple[list[list[int]], list[int]]:
    """(sizes of the parameters, elements of a worker's part) of the two groups: the parts are equal and even."""
    groups = [[p.count for p in parameters if p.decays is decays] for decays in (True, False)]
    return groups, [2 * math.ceil(sum(group) / (2 * workers)) for group in groups]


def _overlapping(sizes: Sequence[int], start: int, end: int) -> int:
    """Elements of all parameters of a flattened group of which some lie between ``start`` and ``end``."""
    total = first = 0
    for size in sizes:
        total += size if first < end and first + size > start else 0
        first += size
    return total


KEPT_WHOLE = 100_000
"""ZeRO-3 keeps parameters of fewer elements whole beside their parts (``--zero-3-param-persistence-threshold``)."""


def cut_each(parameters: Sequence[Facts], workers: int, width: int) -> list[Held]:
    """ZeRO-3: this worker's part of each flattened parameter, of its gradient, its fp32 master and its moments."""
    share, small = _parts(parameters, workers)
    return [Held(width * (share + small), width * share, (FP32 + MOMENTS) * share + 2 * COUNTER)] * workers


def cut_each_on_host(parameters: Sequence[Facts], workers: int, width: int) -> list[Held]:
    """ZeRO-3 with offload: gradients twice, as they are reduced and as the update on the host takes them."""
    share, small = _parts(parameters, workers)
    return [Held(width * (share + small), (width + FP32) * share, (FP32 + MOMENTS) * share)] * workers


SUB_GROUP, LEAST_ON_DISK = 25_000_000, 2**20 // FP32
"""Elements after which a sub-group ends, and below which it stays in memory."""


def cut_each_on_disk(parameters: Sequence[Facts], workers: int, width: int) -> list[Held]:
    """ZeRO-3 with NVMe: as with offload, but a sub-group's masters, their gradients and moments lie on the disk."""
    share, small = _parts(parameters, workers)
    in_memory = sum(size for size in _sub_groups(parameters, workers) if size < LEAST_ON_DISK)
    gradients = width * share + FP32 * in_memory
    return [Held(width * (share + small), gradients, (FP32 + MOMENTS) * in_memory)] * workers


def _sub_groups(parameters: Sequence[Facts], workers: int) -> list[int]:
    """Elements of a worker's part of each sub-group, which is a run of the parameters of a group."""
    sizes = []
    for decays in (True, False):
        size = 0
        for parameter in (p for p in parameters if p.decays is decays):
            size += math.ceil(parameter.count / workers)
            if size >= SUB_GROUP:
                sizes.append(size)
                size = 0
        sizes += [size] if size else []
    return sizes


def _parts(parameters: Sequence[Facts], workers: int) -> tuple[int, int]:
    """Elements of (this worker's part of every parameter, small parameters that are kept whole)."""
    share = sum(math.ceil(p.count / workers) for p in parameters)
    return share, sum(p.count for p in parameters if p.count < KEPT_WHOLE)
