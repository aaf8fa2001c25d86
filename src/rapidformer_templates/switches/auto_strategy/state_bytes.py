"""Bytes of the model's states on each worker, by the rules of each engine. Tests compare them with real memory."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapreplace
from itertools import accumulate
from typing import Protocol, TypeAlias

from rapidformer_templates.planning.optimizer_states import (
    BF16,
    FP32,
    TWO_MOMENTS,
    UNCOUNTED_MOMENTS,
    ParameterShape,
    StateRule,
    part_of,
    runs,
)
from rapidformer_templates.planning.plan import expert_shard_dim


@dataclass(frozen=True)
class StateBytes:
    """Bytes that a worker holds between two steps. Gradients are those at the start of the update.

    Attributes:
        on_host: parameters, gradients and optimizer bytes that are in host memory even if the worker is a GPU. They are
            part of the totals.
        host_copies: additional bytes in the host memory of a GPU worker.
    """

    parameters: int
    gradients: int
    optimizer: int
    on_host: tuple[int, int, int] = field(default=(0, 0, 0), compare=False, kw_only=True)
    host_copies: int = field(default=0, compare=False, kw_only=True)

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer

    def per_parameter(self, count: int) -> tuple[float, float, float]:
        return self.parameters / count, self.gradients / count, self.optimizer / count

    def with_frozen(self, frozen: StateBytes) -> StateBytes:
        """Return these bytes plus those of frozen parameters, which have no gradients and no optimizer state."""
        away = (self.on_host[0] + frozen.on_host[0], *self.on_host[1:])
        return replace(self, parameters=self.parameters + frozen.parameters, on_host=away)

    @property
    def on_gpu(self) -> StateBytes:
        """The part of it that is in GPU memory."""
        away = self.on_host
        return StateBytes(self.parameters - away[0], self.gradients - away[1], self.optimizer - away[2])

    @property
    def beside_gpu(self) -> int:
        """Bytes in the host memory of a GPU worker."""
        return sum(self.on_host) + self.host_copies


KEPT_WHOLE = 100_000
"""DeepSpeed's default threshold: ZeRO-3 also keeps parameters of at most this many elements whole.

A plan's threshold depends on the model (``--zero-3-param-persistence-threshold``).
"""

SUB_GROUP, SUB_GROUP_FOR_DISK, LEAST_ON_DISK = 1_000_000_000, 25_000_000, 2**20 // FP32
"""Elements at which a sub-group of ZeRO-3 ends, the same with NVMe, and the size below which one stays in memory."""


@dataclass(frozen=True)
class StateOptions:
    """Everything that the bytes of an engine depend on, except the parameters and the workers.

    Attributes:
        optimizer: size of the optimizer's state.
        kept_whole, sub_group: sizes of ZeRO-3, see ``KEPT_WHOLE`` and ``SUB_GROUP``. None selects the default.
    """

    optimizer: StateRule = TWO_MOMENTS
    kept_whole: int = KEPT_WHOLE
    sub_group: int | None = None


PLAIN, ON_HOST = StateOptions(), StateOptions(UNCOUNTED_MOMENTS)
"""torch's AdamW, and DeepSpeed's AdamW on the host."""

Shapes: TypeAlias = Sequence[ParameterShape]
OfWorkers: TypeAlias = list[StateBytes]
"""The states of each worker."""


class Formula(Protocol):
    """Maps (parameters, workers, bytes per element in the compute type) to what each worker should hold."""

    def __call__(self, parameters: Shapes, workers: int, width: int, how: StateOptions = PLAIN) -> OfWorkers: ...


def replicated(parameters: Shapes, workers: int, width: int, how: StateOptions = PLAIN) -> OfWorkers:
    """DDP: every worker has everything."""
    return [StateBytes(*_whole(parameters), how.optimizer.bytes_of(parameters))] * workers


def _whole(parameters: Shapes) -> tuple[int, int]:
    """Return the bytes of whole parameters and of their fp32 gradients."""
    return sum(p.stored_bytes for p in parameters), FP32 * sum(p.count for p in parameters)


def replicated_with_masters(parameters: Shapes, workers: int, width: int, how: StateOptions = PLAIN) -> OfWorkers:
    """16-bit weights, fp32 masters and fp32 gradient sums: every worker has everything."""
    (states, *_) = replicated(parameters, 1, width, how)
    with_masters = sum(p.count for p in parameters if p.has_master)
    parts = (states.parameters - (FP32 - BF16) * with_masters, states.gradients, states.optimizer + FP32 * with_masters)
    return [StateBytes(*parts)] * workers


def replicated_on_host(parameters: Shapes, workers: int, width: int, how: StateOptions = PLAIN) -> OfWorkers:
    """DDP with offload: the optimizer is in host memory, with copies of weights and gradients."""
    (states, *_) = replicated(parameters, 1, width, how)
    copies = states.parameters + states.gradients
    return [replace(states, on_host=(0, 0, states.optimizer), host_copies=copies)] * workers


def divided_experts(parameters: Shapes, workers: int, width: int, how: StateOptions = PLAIN, *, over: int) -> OfWorkers:
    """Expert parallelism: every worker has everything, except that the experts are divided over ``over`` workers."""
    return replicated([p.among(over) for p in parameters], workers, width, how)


def owned(parameters: Shapes, workers: int, width: int, how: StateOptions = PLAIN) -> OfWorkers:
    """OSS: the owner of a parameter has its whole state, so the shares are uneven."""
    whole = _whole(parameters)
    return [StateBytes(*whole, how.optimizer.bytes_of(own)) for own in _of_owners(parameters, workers, how)]


def owned_with_gradients(parameters: Shapes, workers: int, width: int, how: StateOptions = PLAIN) -> OfWorkers:
    """OSS + SDP: the owner of a parameter has its gradient, too."""
    stored, _ = _whole(parameters)
    return [
        StateBytes(stored, FP32 * sum(p.count for p in own), how.optimizer.bytes_of(own))
        for own in _of_owners(parameters, workers, how)
    ]


def _of_owners(parameters: Shapes, workers: int, how: StateOptions) -> list[list[ParameterShape]]:
    """Parameters by owner. Each goes to the worker with the fewest elements so far, group by group."""
    owners: list[list[ParameterShape]] = [[] for _ in range(workers)]
    counts = [(0, owner) for owner in range(workers)]  # a heap
    for parameter in (p for group in how.optimizer.groups_of(parameters) for p in group):
        count, owner = counts[0]
        heapreplace(counts, (count + parameter.count, owner))
        owners[owner].append(parameter)
    return owners


def divided_in_rows(
    parameters: Shapes, workers: int, width: int, how: StateOptions = PLAIN, *, ranks: int | None = None
) -> OfWorkers:
    """FSDP: each parameter is divided along its first dimension and padded to equal parts. Its state is not padded.

    Args:
        ranks: number of workers to return. The first one has the largest parts.
    """
    return in_parts([[_part(p, rank, workers) for p in parameters] for rank in range(ranks or workers)], how)


def divided_in_rows_beside_experts(
    parameters: Shapes,
    workers: int,
    width: int,
    how: StateOptions = PLAIN,
    *,
    over: int,
    shards: int,
    ranks: int | None = None,
) -> OfWorkers:
    """FSDP with expert parallelism: ``shards`` workers divide each expert among them. For ``ranks`` see above."""
    own = [parameter.among(over) for parameter in parameters]
    every = range(ranks or workers)
    return in_parts([rows_of_worker(own, rank, workers, over=over, shards=shards) for rank in every], how)


def rows_of_worker(
    parameters: Iterable[ParameterShape], rank: int, workers: int, *, over: int, shards: int
) -> list[ParameterShape]:
    """Return a worker's rows of parameters. The experts are those of one of the ``over`` workers that divide them."""
    rows = []
    for parameter in parameters:
        if parameter.is_expert and over > 1:  # neighbours have different experts
            dim = expert_shard_dim(parameter.shape, shards)
            rows.append(_part(parameter, rank // over % shards, shards, dim))
        else:
            rows.append(_part(parameter, rank % workers, workers))
    return rows


def in_parts(parts: Sequence[Shapes], how: StateOptions) -> list[StateBytes]:
    """``parts`` lists each rank's parameters. All workers allocate as much memory for them as the first one."""
    whole = _whole(parts[0])
    return [StateBytes(*whole, how.optimizer.bytes_of(of_rank)) for of_rank in parts]


def _part(parameter: ParameterShape, rank: int, workers: int, dim: int = 0) -> ParameterShape:
    shape = [*parameter.shape]
    shape[dim] = part_of(shape[dim], rank, workers)
    # Codes are a single row of bytes.
    return replace(parameter, shape=tuple(shape), code_bytes=part_of(parameter.code_bytes, rank, workers))


def divided_groups(parameters: Shapes, workers: int, width: int, how: StateOptions = PLAIN) -> OfWorkers:
    """ZeRO-1 and -2: whole parameters; gradients, fp32 masters and moments of this worker's part of each group.

    DeepSpeed keeps masters even if parameters are already fp32, and the whole gradient of a parameter
    that two workers share.
    """
    whole = sum(p.bytes_in(width) for p in parameters)
    groups, shares = _groups(parameters, workers, how)
    optimizer = FP32 * sum(shares) + how.optimizer.bytes_of(runs(shares))
    borders = [[0, *accumulate(sizes)] for sizes in groups]
    states = []
    for rank in range(workers):
        gradients = 0
        for ends, share in zip(borders, shares, strict=True):
            stop = min(bisect_left(ends, (rank + 1) * share), len(ends) - 1)
            gradients += ends[stop] - ends[bisect_right(ends, rank * share) - 1]
        states.append(StateBytes(whole, width * gradients, optimizer))
    return states


def divided_groups_on_host(parameters: Shapes, workers: int, width: int, how: StateOptions = ON_HOST) -> OfWorkers:
    """ZeRO-1 and -2 with offload: gradients go into the gradients of the masters."""
    whole = sum(p.bytes_in(width) for p in parameters)
    shares = _groups(parameters, workers, how)[1]
    gradients, optimizer = FP32 * sum(shares), FP32 * sum(shares) + how.optimizer.bytes_of(runs(shares))
    return [StateBytes(whole, gradients, optimizer, on_host=(0, gradients, optimizer))] * workers


def _groups(parameters: Shapes, workers: int, how: StateOptions) -> tuple[list[list[int]], list[int]]:
    """Return (sizes of the parameters, elements of a worker's part) for each group. The parts are equal and even."""
    groups = [[p.count for p in group] for group in how.optimizer.groups_of(parameters)]
    return groups, [2 * math.ceil(sum(group) / (2 * workers)) for group in groups]


def each_divided(parameters: Shapes, workers: int, width: int, how: StateOptions = PLAIN) -> OfWorkers:
    """ZeRO-3: this worker's part of each flattened parameter, of its gradient, its fp32 master and its moments."""
    share, small = _parts(parameters, workers, width, how)
    optimizer = _masters_and_state(_sub_groups(parameters, workers, how, SUB_GROUP), how)
    return [StateBytes(share + small, share, optimizer)] * workers


def each_divided_on_host(parameters: Shapes, workers: int, width: int, how: StateOptions = ON_HOST) -> OfWorkers:
    """ZeRO-3 with offload: gradients exist twice, as they are reduced and as the update on the host reads them."""
    share, small = _parts(parameters, workers, width, how)
    gradients = share + FP32 * share // width
    optimizer = _masters_and_state(_sub_groups(parameters, workers, how, SUB_GROUP), how)
    away = (share, gradients, optimizer)
    return [StateBytes(share + small, gradients, optimizer, on_host=away)] * workers


def each_divided_on_disk(parameters: Shapes, workers: int, width: int, how: StateOptions = ON_HOST) -> OfWorkers:
    """ZeRO-3 with NVMe: like offload, but a sub-group's masters, their gradients and moments are on the disk."""
    share, small = _parts(parameters, workers, width, how)
    in_memory = [n for n in _sub_groups(parameters, workers, how, SUB_GROUP_FOR_DISK) if n < LEAST_ON_DISK]
    gradients, optimizer = share + FP32 * sum(in_memory), _masters_and_state(in_memory, how)
    away = (share, gradients, optimizer)
    return [StateBytes(share + small, gradients, optimizer, on_host=away)] * workers


def _masters_and_state(sub_groups: Sequence[int], how: StateOptions) -> int:
    return FP32 * sum(sub_groups) + how.optimizer.bytes_of(runs(sub_groups))


def _sub_groups(parameters: Shapes, workers: int, how: StateOptions, usual: int) -> list[int]:
    """Elements of a worker's part of each sub-group. A sub-group is a run of the parameters of a group."""
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


def _parts(parameters: Shapes, workers: int, width: int, how: StateOptions) -> tuple[int, int]:
    """Return bytes of (this worker's part of every parameter, small parameters that are kept whole)."""
    stored = [(p.code_bytes, 1) if p.code_bytes else (p.count, width) for p in parameters]
    share = sum(math.ceil(count / workers) * size for count, size in stored)
    return share, sum(count * size for count, size in stored if count <= how.kept_whole)
