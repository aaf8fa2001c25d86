"""Bytes of the model's states on each worker, by the rules of each engine; exact, and read off its memory in tests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from rapidformer_templates.switches.auto_strategy.optimizer_states import (
    ADAMW,
    BF16,
    FP32,
    UNCOUNTED_ADAM,
    Facts,
    StateRule,
    part_of,
    runs,
)
from rapidformer_templates.switches.fsdp.expert_shards import widthwise

__all__ = ["FP32", "Facts", "Held", "How"]


@dataclass(frozen=True)
class Held:
    """Bytes that a worker holds between two steps; of gradients, when the update begins.

    Attributes:
        on_host: of these, those of each kind that lie in host memory also where the worker is a GPU.
        host_copies: bytes beside them in the host memory of a GPU's worker.
    """

    parameters: int
    gradients: int
    optimizer: int
    on_host: tuple[int, int, int] = field(default=(0, 0, 0), compare=False, kw_only=True)
    host_copies: int = field(default=0, compare=False, kw_only=True)

    def per_parameter(self, count: int) -> tuple[float, float, float]:
        return self.parameters / count, self.gradients / count, self.optimizer / count

    def beside(self, frozen: Held, more: int = 0) -> Held:
        """With parameters that are not trained, of which there are neither gradients nor state.

        Args:
            more: bytes of those that lie in codes, less what others are narrower than the engine's own type.
        """
        away = (self.on_host[0] + frozen.on_host[0], *self.on_host[1:])
        return replace(self, parameters=self.parameters + frozen.parameters + more, on_host=away)

    @property
    def on_gpu(self) -> Held:
        """What of it lies in the memory of a GPU."""
        away = self.on_host
        return Held(self.parameters - away[0], self.gradients - away[1], self.optimizer - away[2])

    @property
    def beside_gpu(self) -> int:
        """Bytes in the host memory of a GPU's worker."""
        return sum(self.on_host) + self.host_copies


KEPT_WHOLE = 100_000
"""DeepSpeed's own threshold: ZeRO-3 keeps parameters of at most so many elements whole beside their parts. A plan's
follows the model (``--zero-3-param-persistence-threshold``)."""

SUB_GROUP, SUB_GROUP_FOR_DISK, LEAST_ON_DISK = 1_000_000_000, 25_000_000, 2**20 // FP32
"""Elements after which a sub-group of ZeRO-3 ends, the same with NVMe, and below which one stays in memory."""


@dataclass(frozen=True)
class How:
    """What the bytes of an engine depend on besides the parameters and the workers.

    Attributes:
        optimizer: how large its state is.
        kept_whole, sub_group: of ZeRO-3, see ``KEPT_WHOLE`` and ``SUB_GROUP``; None is the product's own.
    """

    optimizer: StateRule = ADAMW
    kept_whole: int = KEPT_WHOLE
    sub_group: int | None = None


PLAIN, ON_HOST = How(), How(UNCOUNTED_ADAM)
"""torch's AdamW, and DeepSpeed's on the host."""


class Formula(Protocol):
    """(parameters, workers, bytes of a number in the type that is computed in) → what each worker should hold."""

    def __call__(self, parameters: Sequence[Facts], workers: int, width: int, how: How = PLAIN) -> list[Held]: ...


def replicated(parameters: Sequence[Facts], workers: int, width: int, how: How = PLAIN) -> list[Held]:
    """DDP: everything everywhere."""
    count = FP32 * sum(p.count for p in parameters)
    return [Held(count, count, how.optimizer.bytes_of(parameters))] * workers


def replicated_with_masters(parameters: Sequence[Facts], workers: int, width: int, how: How = PLAIN) -> list[Held]:
    """Weights of 16 bits, fp32 masters and sums of gradients in fp32: everything everywhere."""
    (held, *_) = replicated(parameters, 1, width, how)
    narrowed = sum(p.count for p in parameters if p.narrows)
    parts = (held.parameters - (FP32 - BF16) * narrowed, held.gradients, held.optimizer + FP32 * narrowed)
    return [Held(*parts)] * workers


def replicated_on_host(parameters: Sequence[Facts], workers: int, width: int, how: How = PLAIN) -> list[Held]:
    """DDP with offload: the optimizer in host memory, with copies of weights and gradients."""
    (held, *_) = replicated(parameters, 1, width, how)
    copies = held.parameters + held.gradients
    return [replace(held, on_host=(0, 0, held.optimizer), host_copies=copies)] * workers


def divided_experts(
    parameters: Sequence[Facts], workers: int, width: int, how: How = PLAIN, *, over: int
) -> list[Held]:
    """Expert parallelism: everything everywhere, but of the experts a share of those of ``over`` workers."""
    return replicated([p.among(over) for p in parameters], workers, width, how)


def owned(parameters: Sequence[Facts], workers: int, width: int, how: How = PLAIN) -> list[Held]:
    """OSS: the state of a parameter lies whole with its owner, so the shares are uneven."""
    count = FP32 * sum(p.count for p in parameters)
    return [Held(count, count, how.optimizer.bytes_of(own)) for own in _of_owners(parameters, workers, how)]


def owned_with_gradients(parameters: Sequence[Facts], workers: int, width: int, how: How = PLAIN) -> list[Held]:
    """OSS + SDP: so do the gradients."""
    count = FP32 * sum(p.count for p in parameters)
    return [
        Held(count, FP32 * sum(p.count for p in own), how.optimizer.bytes_of(own))
        for own in _of_owners(parameters, workers, how)
    ]


def _of_owners(parameters: Sequence[Facts], workers: int, how: How) -> list[list[Facts]]:
    """Whose each parameter is: it goes to whoever has fewest elements, group by group."""
    owners: list[list[Facts]] = [[] for _ in range(workers)]
    counts = [0] * workers
    for parameter in (p for group in how.optimizer.groups_of(parameters) for p in group):
        owner = counts.index(min(counts))
        counts[owner] += parameter.count
        owners[owner].append(parameter)
    return owners


def divided_in_rows(parameters: Sequence[Facts], workers: int, width: int, how: How = PLAIN) -> list[Held]:
    """FSDP: each parameter is divided along its first dimension, and filled up to equal parts; its state is not."""
    return _in_parts([[_part(p, rank, workers) for p in parameters] for rank in range(workers)], how)


def divided_in_rows_beside_experts(
    parameters: Sequence[Facts], workers: int, width: int, how: How = PLAIN, *, over: int, shards: int
) -> list[Held]:
    """FSDP beside expert parallelism: of the experts' share each of ``shards`` workers has a part of every expert."""
    parts = []
    for rank in range(workers):
        own = rank // over % shards  # neighbours have different experts
        parts.append([_of_expert(p, own, over, shards) if p.is_expert else _part(p, rank, workers) for p in parameters])
    return _in_parts(parts, how)


def _in_parts(parts: Sequence[Sequence[Facts]], how: How) -> list[Held]:
    """``parts``: by rank, what it has; the memory of all is as large as that of the first."""
    count = FP32 * sum(p.count for p in parts[0])
    return [Held(count, count, how.optimizer.bytes_of(mine)) for mine in parts]


def _of_expert(parameter: Facts, rank: int, over: int, shards: int) -> Facts:
    mine = parameter.among(over)
    return _part(mine, rank, shards, widthwise(mine.shape, shards))


def _part(parameter: Facts, rank: int, workers: int, dim: int = 0) -> Facts:
    shape = [*parameter.shape]
    shape[dim] = part_of(shape[dim], rank, workers)
    return replace(parameter, shape=tuple(shape))


def divided_groups(parameters: Sequence[Facts], workers: int, width: int, how: How = PLAIN) -> list[Held]:
    """ZeRO-1 and -2: whole parameters; gradients, fp32 masters and moments of this worker's part of each group.

    DeepSpeed keeps masters also where parameters are fp32 already, and the whole gradient of a parameter
    that two workers share.
    """
    whole = width * sum(p.count for p in parameters)
    groups, shares = _groups(parameters, workers, how)
    optimizer = FP32 * sum(shares) + how.optimizer.bytes_of(runs(shares))
    held = []
    for rank in range(workers):
        gradients = sum(_overlapping(group, rank * n, (rank + 1) * n) for group, n in zip(groups, shares, strict=True))
        held.append(Held(whole, width * gradients, optimizer))
    return held


def divided_groups_on_host(parameters: Sequence[Facts], workers: int, width: int, how: How = ON_HOST) -> list[Held]:
    """ZeRO-1 and -2 with offload: gradients go into the masters' own."""
    whole = width * sum(p.count for p in parameters)
    shares = _groups(parameters, workers, how)[1]
    gradients, optimizer = FP32 * sum(shares), FP32 * sum(shares) + how.optimizer.bytes_of(runs(shares))
    return [Held(whole, gradients, optimizer, on_host=(0, gradients, optimizer))] * workers


def _groups(parameters: Sequence[Facts], workers: int, how: How) -> tuple[list[list[int]], list[int]]:
    """(sizes of the parameters, elements of a worker's part) of each group: the parts are equal and even."""
    groups = [[p.count for p in group] for group in how.optimizer.groups_of(parameters)]
    return groups, [2 * math.ceil(sum(group) / (2 * workers)) for group in groups]


def _overlapping(sizes: Sequence[int], start: int, end: int) -> int:
    """Elements of all parameters of a flattened group of which some lie between ``start`` and ``end``."""
    total = first = 0
    for size in sizes:
        total += size if first < end and first + size > start else 0
        first += size
    return total


def each_divided(parameters: Sequence[Facts], workers: int, width: int, how: How = PLAIN) -> list[Held]:
    """ZeRO-3: this worker's part of each flattened parameter, of its gradient, its fp32 master and its moments."""
    share, small = _parts(parameters, workers, how)
    optimizer = _masters_and_state(_sub_groups(parameters, workers, how, SUB_GROUP), how)
    return [Held(width * (share + small), width * share, optimizer)] * workers


def each_divided_on_host(parameters: Sequence[Facts], workers: int, width: int, how: How = ON_HOST) -> list[Held]:
    """ZeRO-3 with offload: gradients twice, as they are reduced and as the update on the host takes them."""
    share, small = _parts(parameters, workers, how)
    gradients = (width + FP32) * share
    optimizer = _masters_and_state(_sub_groups(parameters, workers, how, SUB_GROUP), how)
    away = (width * share, gradients, optimizer)
    return [Held(width * (share + small), gradients, optimizer, on_host=away)] * workers


def each_divided_on_disk(parameters: Sequence[Facts], workers: int, width: int, how: How = ON_HOST) -> list[Held]:
    """ZeRO-3 with NVMe: as with offload, but a sub-group's masters, their gradients and moments lie on the disk."""
    share, small = _parts(parameters, workers, how)
    in_memory = [n for n in _sub_groups(parameters, workers, how, SUB_GROUP_FOR_DISK) if n < LEAST_ON_DISK]
    gradients, optimizer = width * share + FP32 * sum(in_memory), _masters_and_state(in_memory, how)
    away = (width * share, gradients, optimizer)
    return [Held(width * (share + small), gradients, optimizer, on_host=away)] * workers


def _masters_and_state(sub_groups: Sequence[int], how: How) -> int:
    return FP32 * sum(sub_groups) + how.optimizer.bytes_of(runs(sub_groups))


def _sub_groups(parameters: Sequence[Facts], workers: int, how: How, usual: int) -> list[int]:
    """Elements of a worker's part of each sub-group, which is a run of the parameters of a group."""
    limit = how.sub_group or usual
    sizes = []
    for group in how.optimizer.groups_of(parameters):
        size = 0
        for parameter in group:
            size += math.ceil(parameter.count / workers)
            if size >= limit:
                sizes.append(size)
                size = 0
        sizes += [size] if size else []
    return sizes


def _parts(parameters: Sequence[Facts], workers: int, how: How) -> tuple[int, int]:
    """Elements of (this worker's part of every parameter, small parameters that are kept whole)."""
    share = sum(math.ceil(p.count / workers) for p in parameters)
    return share, sum(p.count for p in parameters if p.count <= how.kept_whole)
