"""Data parallelism inside a 3D layout: gradients summed over the replicas, the update shared out among them.

ZeRO-1 and ZeRO-2 as Rajbhandari et al., 2020, describe them: each of N replicas keeps the optimizer state
(and, in ZeRO-2, the summed gradients) of one N-th of its parameters, updates that and sends it to the others.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from rapidformer_templates.engines.parallel.windows import Window, windows
from rapidformer_templates.engines.pieces import local_part
from rapidformer_templates.system.workers import Workers, all_gather, reduce_scatter


@dataclass(frozen=True, eq=False)
class Trained:
    """A parameter that is trained on this worker.

    Attributes:
        name: canonical, in the whole model.
        parameter: the model's; under tensor parallelism a DTensor.
        stages: pipeline ranks that hold a copy of it; empty if this is the only one.
        chunk: the local part of the pipeline whose backward brings its gradient; None is any.
    """

    name: str
    parameter: nn.Parameter
    stages: tuple[int, ...] = ()
    chunk: int | None = None

    @property
    def local(self) -> torch.Tensor:
        """What this worker has of it."""
        return local_part(self.parameter).detach()

    @property
    def gradient(self) -> torch.Tensor | None:
        """What this worker has of its gradient."""
        return None if self.parameter.grad is None else local_part(self.parameter.grad)


@dataclass(frozen=True, eq=False)
class Unit:
    """What the optimizer updates at a time: a run of a flattened parameter, or, where nothing is sharded, all of it.

    Attributes:
        of: the parameter.
        start: first element of the run in the parameter's flattened local part.
        values: the run, in the memory of the parameter itself.
        is_run: no other replica updates it.
    """

    of: Trained
    start: int
    values: nn.Parameter
    is_run: bool


class DataShards:
    """The gradients and updates of a worker's parameters, among the replicas of the model.

    Every step is: backward passes (each between :meth:`begin_backward` and :meth:`end_backward`),
    :meth:`reduce`, the optimizer's update of the ``units``, :meth:`gather`, :meth:`drop`.

    Args:
        trained: the parameters.
        workers: this process among its peers.
        shards: ``None``, ``optimizer`` (ZeRO-1) or ``gradients`` (ZeRO-2).
        tied: the process group of the workers that hold copies of a parameter, by their pipeline ranks.

    Attributes:
        units: what this rank's optimizer is over.
    """

    def __init__(
        self,
        trained: Sequence[Trained],
        workers: Workers,
        *,
        shards: str | None,
        tied: Mapping[tuple[int, ...], dist.ProcessGroup],
    ) -> None:
        self.trained = trained
        self.tied = tied
        self.replicas = workers.data
        self.group = workers.mesh.get_group("data") if workers.mesh else None
        self.sharded = shards is not None and self.replicas > 1
        self.early = self.sharded and shards == "gradients"
        self._windows, self._kind = _windows(trained, self.replicas)
        self._rank = workers.data_rank
        self._runs: dict[Window, list[tuple[Unit, int]]] = {window: [] for window in self._windows}
        self.units = self._divide() if self.sharded else [Unit(t, 0, nn.Parameter(t.local), False) for t in trained]
        self._sums: dict[Window, torch.Tensor] = {}  # this rank's share of the summed gradients
        self._reached = [False] * len(trained)
        self._ready: set[int] = set()
        self._queue: deque[Window] = deque()
        self._pending: tuple[Window, torch.Tensor, torch.Tensor, Any] | None = None
        if self.early:
            for index, entry in enumerate(trained):
                entry.parameter.register_post_accumulate_grad_hook(lambda _, index=index: self._came(index))

    def _divide(self) -> list[Unit]:
        units = []
        for window in self._windows:
            for (index, start, count), offset in window.owned(self._rank):
                entry = self.trained[index]
                unit = Unit(entry, start, nn.Parameter(entry.local.view(-1)[start : start + count]), True)
                self._runs[window].append((unit, offset))
                units.append(unit)
        return units

    # The backward passes: only ZeRO-2 exchanges in them.

    def begin_backward(self, chunk: int | None = None) -> None:
        """Before a backward pass, of the named local part of the pipeline."""
        if self.early:
            self._ready.clear()
            self._queue = deque(w for w in self._windows if self._kind[w].chunk in (None, chunk))

    def end_backward(self) -> None:
        """After it: what the loss did not reach counts as zero, because other ranks may have reached it."""
        while self._queue:
            self._start(self._queue.popleft())
        self._finish()

    def _came(self, index: int) -> None:
        """A gradient is there. Windows leave in one order on all ranks, each as soon as it is complete."""
        self._ready.add(index)
        while self._queue and all(segment.parameter in self._ready for segment in self._queue[0].segments):
            self._start(self._queue.popleft())

    # The exchange.

    def reduce(self) -> None:
        """Leave the sum of the gradients over the replicas in the units; a parameter that no loss reached has none."""
        if self.replicas > 1 or self.tied:
            if not self.early:
                for window in self._windows:
                    self._start(window)
                self._finish()
            self._sum_tied()
            reached = self._reached_anywhere()
        else:
            reached = [entry.gradient is not None for entry in self.trained]
        there = {id(entry) for entry, flag in zip(self.trained, reached, strict=True) if flag}
        for unit, gradient in self._gradients_of_units():
            unit.values.grad = gradient if id(unit.of) in there else None

    def _gradients_of_units(self) -> Iterator[tuple[Unit, torch.Tensor | None]]:
        if not self.sharded:
            yield from ((unit, unit.of.gradient) for unit in self.units)
        for window, runs in self._runs.items():
            for unit, offset in runs:
                yield unit, self._sums[window][offset : offset + unit.values.numel()]

    def _start(self, window: Window) -> None:
        """Send a window's gradients on their way, and take in those of the one before."""
        flat = self._pack(window)
        received, work = flat, None
        if self.sharded:
            received = flat.new_empty(window.share)
            work = reduce_scatter(received, flat, group=self.group, async_op=True)
        elif self.replicas > 1:
            work = dist.all_reduce(flat, group=self.group, async_op=True)
        self._finish()
        self._pending = (window, flat, received, work)

    def _pack(self, window: Window) -> torch.Tensor:
        """The gradients of a window, laid end to end; where there is none, zeros."""
        like = self.trained[window.segments[0].parameter].local
        flat = like.new_zeros(window.share * window.ranks)
        for (index, start, count), offset in window.with_offsets():
            entry = self.trained[index]
            gradient = entry.gradient
            if gradient is not None:
                self._reached[index] = True
                flat[offset : offset + count] = gradient.reshape(-1)[start : start + count]
                if self.sharded and start + count == gradient.numel():
                    entry.parameter.grad = None
        return flat

    def _finish(self) -> None:
        """Wait for the window that is on its way."""
        if self._pending is None:
            return
        window, _, received, work = self._pending
        self._pending = None
        if work is not None:
            work.wait()
        if self.early and window in self._sums:
            self._sums[window] += received
        else:
            self._sums[window] = received
        if not self.sharded and not self._kind[window].stages:
            self._unpack(window)

    def _unpack(self, window: Window) -> None:
        """Put the sums where the model's gradients are."""
        flat = self._sums.pop(window)
        for (index, start, count), offset in window.with_offsets():
            parameter = self.trained[index].parameter
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            local_part(parameter.grad).view(-1)[start : start + count] = flat[offset : offset + count]

    def _sum_tied(self) -> None:
        """Add up what the copies of a parameter in several stages have got."""
        for window in [w for w in self._windows if self._kind[w].stages]:
            dist.all_reduce(self._sums[window], group=self.tied[self._kind[window].stages])
            if not self.sharded:
                self._unpack(window)

    def _reached_anywhere(self) -> list[bool]:
        """For each parameter, whether the loss of any replica or of any stage that has it reached it."""
        flags = torch.tensor(self._reached, dtype=torch.float32)  # the hosts know it, and no device is waited for
        if self.replicas > 1:
            dist.all_reduce(flags, group=self.group)
        for stages, group in self.tied.items():
            offsets = [index for index, entry in enumerate(self.trained) if entry.stages == stages]
            part = flags[offsets]
            dist.all_reduce(part, group=group)
            flags[offsets] = part
        return [flag > 0 for flag in flags.tolist()]

    # The update.

    @torch.no_grad()
    def gather(self) -> None:
        """Give every replica what the others have updated."""
        if not self.sharded:
            return
        for window, runs in self._runs.items():
            share = self.trained[window.segments[0].parameter].local.new_zeros(window.share)
            for unit, offset in runs:
                share[offset : offset + unit.values.numel()] = unit.values
            flat = share.new_empty(window.share * window.ranks)
            all_gather(flat, share, group=self.group)
            for (index, start, count), offset in window.with_offsets():
                self.trained[index].local.view(-1)[start : start + count] = flat[offset : offset + count]

    def drop(self) -> None:
        """Forget the gradients."""
        self._sums.clear()
        self._reached = [False] * len(self.trained)
        for unit in self.units:
            unit.values.grad = None
        for entry in self.trained:
            entry.parameter.grad = None

    def gradients(self) -> list[torch.Tensor]:
        """What this rank has of gradients now."""
        whole = [entry.gradient for entry in self.trained]
        return [*(gradient for gradient in whole if gradient is not None), *self._sums.values()]


@dataclass(frozen=True)
class _Kind:
    """What parameters must have in common to lie in one window."""

    dtype: torch.dtype
    stages: tuple[int, ...]
    chunk: int | None


def _windows(trained: Sequence[Trained], ranks: int) -> tuple[list[Window], dict[Window, _Kind]]:
    """The windows in the order in which a backward comes to them, which is about the reverse of the model's.

    Those of parameters with copies elsewhere come last, by the names of the parameters: in the same order
    on every worker that has a copy.
    """
    members: dict[_Kind, list[tuple[int, int]]] = defaultdict(list)
    for index, entry in reversed(list(enumerate(trained))):
        members[_Kind(entry.parameter.dtype, entry.stages, entry.chunk)].append((index, entry.local.numel()))
    kinds: dict[Window, _Kind] = {}
    for kind in sorted(members, key=lambda kind: kind.stages):
        sizes = members[kind]
        if kind.stages:
            sizes = sorted(sizes, key=lambda size: trained[size[0]].name)
        kinds |= dict.fromkeys(windows(sizes, ranks), kind)
    return list(kinds), kinds
