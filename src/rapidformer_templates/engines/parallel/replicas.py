"""Data parallelism inside a 3D layout: gradients are summed over the replicas, and the replicas share the update.

ZeRO-1 and ZeRO-2 follow Rajbhandari et al., 2020. Each of N replicas keeps the optimizer state (and, in ZeRO-2, the
summed gradients) of one N-th of its parameters. It updates that part and sends it to the others.

Parameters may have 16 bits, with fp32 masters that the optimizer updates instead (Micikevicius et al., 2018). The
masters are sharded like the optimizer state, and gradients are accumulated in fp32 as they arrive.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from rapidformer_templates.engines.parallel.copies import NONE, Copies
from rapidformer_templates.engines.parallel.narrowing import IN_FP32, GradientTypes, narrow
from rapidformer_templates.engines.parallel.windows import Window, turns, windows_of_kinds
from rapidformer_templates.engines.pieces import local_part
from rapidformer_templates.errors import RapidformerError
from rapidformer_templates.system.workers import Workers, all_gather, reduce_scatter


@dataclass(frozen=True, eq=False)
class TrainedParameter:
    """A parameter that this worker trains.

    Attributes:
        name: canonical name in the whole model.
        parameter: the parameter of the model, a DTensor under tensor parallelism.
        copies: the workers of all replicas that hold the same values.
        narrow: 16-bit type of the parameter, which then has a master in its original type. None keeps its type.
        stages: pipeline ranks that hold a copy of it. Empty if this is the only one.
        chunk: the local pipeline chunk whose backward produces its gradient. None means any chunk.
    """

    name: str
    parameter: nn.Parameter
    copies: Copies = NONE
    stages: tuple[int, ...] = ()
    chunk: int | None = None
    narrow: torch.dtype | None = None

    @property
    def local(self) -> torch.Tensor:
        """The local part of the parameter."""
        return local_part(self.parameter).detach()

    @property
    def gradient(self) -> torch.Tensor | None:
        """The local part of its gradient, as the backward leaves it."""
        return None if self.parameter.grad is None else local_part(self.parameter.grad)


@dataclass(frozen=True, eq=False)
class UpdateShard:
    """The unit of an update: a run of a flattened parameter, or the whole parameter if replicas do not share it.

    Attributes:
        of: the parameter.
        start: first element of the run in the parameter's flattened local part.
        values: the run, or a whole parameter in its shape. It is a view of the parameter's memory, or the master of
            a 16-bit parameter.
        is_run: whether no other replica updates it.
    """

    of: TrainedParameter
    start: int
    values: nn.Parameter
    is_run: bool


class ShardedGradients:
    """Exchanges the gradients and updates of a worker's parameters among the replicas of the model.

    A step consists of backward passes (each between :meth:`begin_backward` and :meth:`end_backward`),
    :meth:`reduce`, the optimizer's update of the ``units`` :meth:`iter_update_chunks`, :meth:`gather` and :meth:`drop`.
    Gradients are exchanged during the last backward. ZeRO-2 exchanges them in every backward, because no worker keeps
    them whole. A parameter is summed and sharded only among the workers that have copies of it.

    Args:
        trained: the parameters.
        workers: this process and its peers.
        shards: ``None``, ``optimizer`` (ZeRO-1) or ``gradients`` (ZeRO-2).
        tied: process group of the workers that hold copies of a parameter, by their pipeline ranks.
        window: number of elements that are exchanged, or converted, at a time.
        whole: whether each parameter has a single owner, for updates that need the whole parameter.
        types: gradient types of 16-bit parameters. Other gradients have the type of their parameter.

    Attributes:
        units: what the optimizer of this rank updates.
        narrow: names of the 16-bit parameters that have masters.
    """

    def __init__(
        self,
        trained: Sequence[TrainedParameter],
        workers: Workers,
        *,
        shards: str | None,
        tied: Mapping[tuple[int, ...], dist.ProcessGroup],
        window: int,
        whole: bool = False,
        types: GradientTypes = IN_FP32,
    ) -> None:
        self.trained = trained
        self.tied = tied
        self.replicas = workers.copies
        self.group = workers.mesh.get_group("copies") if workers.mesh else None
        sharded = shards is not None and self.replicas > 1
        self.early = sharded and shards == "gradients"
        self._types = types
        self._window = window
        self._windows, self._kind = _windows(trained, window, whole=whole and sharded)
        # Only windows with several workers are sharded.
        self._runs: dict[Window, list[tuple[UpdateShard, int]]] = {
            w: [] for w in self._windows if sharded and w.ranks > 1
        }
        runs = self._divide()
        self._shared = {segment.parameter for window in self._runs for segment in window.segments}
        self._exchanged = {segment.parameter for window in self._windows for segment in window.segments}
        # Sending experts to other workers makes replicas wait for each other within a backward.
        self._collectives_in_backward = any(entry.copies.size < self.replicas for entry in trained)
        self._whole = {
            index: UpdateShard(entry, 0, nn.Parameter(entry.local), False)
            for index, entry in enumerate(trained)
            if index not in self._shared
        }
        self.units = [*runs, *self._whole.values()]
        self.narrow = {entry.name for entry in trained if entry.narrow}
        for entry in trained:
            if entry.narrow:
                narrow(entry.parameter, entry.narrow)
        self._sums: dict[Window, torch.Tensor] = {}  # this rank's share of the summed gradients
        self._complete: dict[UpdateShard, torch.Tensor] = {}  # the summed gradients of units
        self._fp32_accumulated: dict[int, torch.Tensor] = {}  # gradients of 16-bit parameters accumulated so far
        self._reached = [False] * len(trained)
        self._exchanging = False  # whether the current backward exchanges gradients
        self._ready: set[int] = set()
        self._left: set[int] = set()
        self._queue: deque[Window] = deque()
        self._sent: set[Window] = set()
        self._pending: _PendingReduce | None = None
        self._starts = self._early_starts = 0
        self._waited = 0.0  # seconds that the host has waited in this step
        self._seen = self._versions()
        for index, entry in enumerate(trained):
            if entry.narrow or self.replicas > 1:
                entry.parameter.register_post_accumulate_grad_hook(
                    lambda _, index=index: self._on_gradient_ready(index)
                )

    def _divide(self) -> list[UpdateShard]:
        units = []
        for window in self._runs:
            for (index, start, count), offset in window.owned(self._kind[window].copies.rank):
                entry = self.trained[index]
                run = entry.local if window.owner is not None else entry.local.view(-1)[start : start + count]
                unit = UpdateShard(entry, start, nn.Parameter(run.clone() if entry.narrow else run), True)
                self._runs[window].append((unit, offset))
                units.append(unit)
        return units

    # Backward passes.

    def begin_backward(self, chunk: int | None = None, *, last: bool) -> None:
        """Prepare a backward pass.

        Args:
            chunk: the local pipeline chunk of this pass. None is the whole model.
            last: whether this is the last pass of the step for these parameters.
        """
        self._exchanging = self.early or (last and self.replicas > 1)
        self._ready.clear()
        self._left.clear()
        if self._exchanging:
            # A parameter used by several chunks is complete only after the last of them.
            chunks = (None, chunk) if self.early or chunk is None else (chunk,)
            self._queue = deque(w for w in self._windows if self._kind[w].chunk in chunks)

    def end_backward(self) -> None:
        """Finish a backward pass. Unused parameters count as zero, because other ranks may have used them."""
        while self._queue:
            self._start(self._queue.popleft())
        if self.early:
            self._finish()
        self._exchanging = False
        self._left.clear()

    def _on_gradient_ready(self, index: int) -> None:
        """Queue a gradient. All ranks send windows in the same order, each as soon as it is complete."""
        if index in self._left:
            raise RapidformerError(
                f"the gradient of {self.trained[index].name} was ready twice in one backward, and had "
                "already been sent",
                where="compute_loss()",
                hint="checkpoint with use_reentrant=False, or with --checkpoint-activations",
            )
        leaves_at_once = self._exchanging and index in self._shared and index not in self._fp32_accumulated
        if self.trained[index].narrow and not leaves_at_once:
            self._widen(index)
        if self._exchanging:
            self._ready.add(index)
            while self._queue and self._may_leave(self._queue[0]):
                self._start(self._queue.popleft())
                self._early_starts += 1

    def _may_leave(self, window: Window) -> bool:
        """Whether a window is complete and can be sent without a possible deadlock.

        The loss may use a parameter on this rank but not on others, where its window is sent after the backward. If the
        backward exchanges tokens between ranks, theirs ends only if this one continues, so it must not wait here for
        the previous window.
        """
        if self._collectives_in_backward and self._pending is not None and not self._pending.has_come:
            return False
        return all(segment.parameter in self._ready for segment in window.segments)

    def _widen(self, index: int) -> None:
        """Add a 16-bit gradient to the accumulated one, and free it."""
        gradient = self.trained[index].gradient
        assert gradient is not None
        if index in self._fp32_accumulated:
            self._fp32_accumulated[index] += gradient
        else:
            self._fp32_accumulated[index] = gradient.to(self._types.accumulate)
        self.trained[index].parameter.grad = None

    def _gradient(self, index: int) -> torch.Tensor | None:
        """Return the gradient that this worker's backward passes have accumulated for a parameter."""
        return self._fp32_accumulated[index] if index in self._fp32_accumulated else self.trained[index].gradient

    # Exchange.

    def reduce(self) -> None:
        """Complete the sums of the gradients over the replicas. Parameters that no loss used have none."""
        if self.replicas > 1 or self.tied:
            if not self.early:
                for window in self._windows:
                    if window not in self._sent:
                        self._start(window)
                self._finish()
            self._sum_tied()
            reached = self._reached_anywhere()
        else:
            reached = [self._gradient(index) is not None for index in range(len(self.trained))]
        self._complete = dict(self._gradients_of_units(reached))

    def _gradients_of_units(self, reached: Sequence[bool]) -> Iterator[tuple[UpdateShard, torch.Tensor]]:
        for index, unit in self._whole.items():
            if reached[index]:
                yield unit, self._summed(index)
        there = {id(entry) for entry, flag in zip(self.trained, reached, strict=True) if flag}
        for window, runs in self._runs.items():
            for unit, offset in runs:
                if id(unit.of) in there:
                    yield unit, self._sums[window][offset : offset + unit.values.numel()].view(unit.values.shape)

    def _start(self, window: Window) -> None:
        """Start the reduction of a window, and finish that of the previous one."""
        self._sent.add(window)
        self._starts += 1
        flat, copies = self._pack(window), self._kind[window].copies
        received, work = flat, None
        if window.owner is not None:
            received = flat if window.owner == copies.rank else flat.new_empty(0)
            work = dist.reduce(flat, group=copies.group, group_dst=window.owner, async_op=True)
        elif window in self._runs:
            received = flat.new_empty(window.share)
            work = reduce_scatter(received, flat, group=copies.group, async_op=True)
        elif copies.size > 1:
            work = dist.all_reduce(flat, group=copies.group, async_op=True)
        self._finish()
        self._pending = _PendingReduce(window, flat, received, work)

    def _pack(self, window: Window) -> torch.Tensor:
        """Pack the gradients of a window end to end. Missing gradients are zeros."""
        like = self.trained[window.segments[0].parameter]
        dtype = self._types.reduce if like.narrow else like.local.dtype
        flat = like.local.new_zeros(window.packed, dtype=dtype)
        for (index, start, count), offset in window.with_offsets():
            gradient = self._gradient(index)
            if gradient is not None:
                self._reached[index] = True
                flat[offset : offset + count] = gradient.reshape(-1)[start : start + count]
                self._left.add(index)
                if window in self._runs and start + count == gradient.numel():
                    self.trained[index].parameter.grad = None
                    self._fp32_accumulated.pop(index, None)
        return flat

    def _finish(self) -> None:
        """Wait for the pending window."""
        if self._pending is None:
            return
        window, _, received, work = self._pending
        self._pending = None
        if work is not None:
            begin = time.perf_counter()
            work.wait()
            self._waited += time.perf_counter() - begin
        if self._kind[window].narrow:
            received = received.to(self._types.accumulate)
        if self.early and window in self._sums:
            self._sums[window] += received
        else:
            self._sums[window] = received
        if window not in self._runs and not self._kind[window].stages:
            self._unpack(window)

    def _unpack(self, window: Window) -> None:
        """Copy the sums back into the gradients of the model."""
        flat = self._sums.pop(window)
        for (index, start, count), offset in window.with_offsets():
            self._summed(index).view(-1)[start : start + count] = flat[offset : offset + count]

    def _summed(self, index: int) -> torch.Tensor:
        """Return the tensor for the summed gradient of a parameter."""
        entry = self.trained[index]
        if entry.narrow:
            if index not in self._fp32_accumulated:
                self._fp32_accumulated[index] = torch.zeros_like(entry.local, dtype=self._types.accumulate)
            return self._fp32_accumulated[index]
        if entry.parameter.grad is None:
            entry.parameter.grad = torch.zeros_like(entry.parameter)
        return local_part(entry.parameter.grad)

    def _sum_tied(self) -> None:
        """Sum the gradients of parameters that have copies in several stages."""
        for window in [w for w in self._windows if self._kind[w].stages]:
            dist.all_reduce(self._sums[window], group=self.tied[self._kind[window].stages])
            if window not in self._runs:
                self._unpack(window)

    def _reached_anywhere(self) -> list[bool]:
        """For each parameter, whether the loss of any replica, or of any stage that has it, used it."""
        # An exchanged gradient is a sum by now. It is zero if no loss used the parameter.
        here = [
            sent if index in self._exchanged else self._gradient(index) is not None
            for index, sent in enumerate(self._reached)
        ]
        flags = torch.tensor(here, dtype=torch.float32)  # known on the host, so no device wait
        if self.replicas > 1:
            dist.all_reduce(flags, group=self.group)
        for stages, group in self.tied.items():
            offsets = [index for index, entry in enumerate(self.trained) if entry.stages == stages]
            part = flags[offsets]
            dist.all_reduce(part, group=group)
            flags[offsets] = part
        return [flag > 0 for flag in flags.tolist()]

    # Update.

    def norms(self, units: Iterable[UpdateShard]) -> list[torch.Tensor]:
        """Return the gradient norm of each unit that has a gradient, in the unit's type."""
        by_types: dict[tuple[torch.dtype, torch.dtype], list[torch.Tensor]] = defaultdict(list)
        for unit in units:
            if unit in self._complete:
                gradient = self._complete[unit]
                by_types[unit.values.dtype, gradient.dtype].append(gradient)
        groups = by_types.items()
        return [norm for (dtype, _), values in groups for norm in torch._foreach_norm(values, dtype=dtype)]

    def iter_update_chunks(self, *, apart: bool) -> Iterator[None]:
        """Yield while units have their gradients, in their own type. The caller then updates those units.

        Args:
            apart: whether units may be updated separately. If so, 16-bit gradients are converted window by window. All
                of them in fp32 would need twice the memory that was saved.
        """
        for units in self._turns if apart else [self.units]:
            for unit in units:
                gradient = self._complete.get(unit)
                unit.values.grad = None if gradient is None else gradient.to(unit.values.dtype)
            yield
            for unit in units:
                unit.values.grad = None

    @cached_property
    def _turns(self) -> list[list[UpdateShard]]:
        """Groups of units that are updated together. A single group if no gradient is converted."""
        if self._types.accumulate == torch.float32 or not self.narrow:
            return [self.units]
        of_windows = [[unit for unit, _ in runs] for runs in self._runs.values()]
        whole = list(self._whole.values())
        sizes = [unit.values.numel() for unit in whole]
        return [*of_windows, *([whole[place] for place in places] for places in turns(sizes, self._window))]

    def _versions(self) -> dict[str, int]:
        """In-place modification counts of 16-bit parameters, from autograd."""
        return {entry.name: entry.parameter._version for entry in self.trained if entry.narrow}

    @torch.no_grad()
    def adopt(self) -> None:
        """Copy external changes of 16-bit parameters, for example by a masking hook, to their masters."""
        found = self._versions()
        for unit in self.units:
            if unit.of.narrow and found[unit.of.name] != self._seen[unit.of.name]:
                master = unit.values.detach().view(-1)
                here = unit.of.local.reshape(-1)[unit.start : unit.start + master.numel()]
                master.copy_(torch.where(here == master.to(here.dtype), master, here.to(master.dtype)))
        self._seen = found

    @torch.no_grad()
    def gather(self) -> None:
        """Send this rank's updates to all replicas."""
        self._all_gather_parameters()
        self._seen = self._versions()

    def _all_gather_parameters(self) -> None:
        for unit in self._whole.values():
            if unit.of.narrow:
                unit.of.local.copy_(unit.values)
        for window in self._runs:
            like = self.trained[window.segments[0].parameter].local
            flat = self._gather_bucket(window, like.dtype)
            for (index, start, count), offset in window.with_offsets():
                self.trained[index].local.view(-1)[start : start + count] = flat[offset : offset + count]

    def _gather_bucket(self, window: Window, dtype: torch.dtype) -> torch.Tensor:
        """Gather a window's units from all replicas, packed end to end."""
        share = self.trained[window.segments[0].parameter].local.new_zeros(window.share, dtype=dtype)
        for unit, offset in self._runs[window]:
            share[offset : offset + unit.values.numel()] = unit.values.detach().view(-1)
        group = self._kind[window].copies.group
        if window.owner is not None:
            dist.broadcast(share, group=group, group_src=window.owner)
            return share
        flat = share.new_empty(window.packed)
        all_gather(flat, share, group=group)
        return flat

    @torch.no_grad()
    def masters(self) -> dict[str, torch.Tensor]:
        """Return the local part of each 16-bit parameter in fp32 on its first copy. Call it on every worker."""
        whole = {unit.of.name: unit.values.detach() for unit in self._whole.values() if unit.of.narrow}
        for window in (window for window in self._runs if self._kind[window].narrow):
            flat = self._gather_bucket(window, torch.float32)
            is_first = self._kind[window].copies.rank == 0
            for (index, start, count), offset in window.with_offsets() if is_first else ():
                entry = self.trained[index]
                values = whole.setdefault(entry.name, torch.empty(entry.local.shape))  # on the host
                values.view(-1)[start : start + count] = flat[offset : offset + count]
        return whole

    def drop(self) -> None:
        """Free the gradients, including those that an error has left pending."""
        self._pending = None  # does not wait, because the other workers may be gone
        self._queue.clear()
        self._sums.clear()
        self._complete.clear()
        self._fp32_accumulated.clear()
        self._sent.clear()
        self._starts = self._early_starts = 0
        self._waited = 0.0
        self._reached = [False] * len(self.trained)
        for unit in self.units:
            unit.values.grad = None
        for entry in self.trained:
            entry.parameter.grad = None

    def exchange(self) -> dict[str, Any]:
        """Return statistics of the gradient exchange in this step.

        They are the number of windows that were exchanged, the number of them that were sent during a backward, and the
        seconds in which this worker's host only waited for them (zero if a device does the waiting).
        """
        return {
            "windows": self._starts,
            "sent_in_backward": self._early_starts,
            "waited_seconds": round(self._waited, 6),
        }

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients on this rank, after pending windows have arrived."""
        self._finish()
        whole = [entry.gradient for entry in self.trained]
        return [
            *(gradient for gradient in whole if gradient is not None),
            *self._fp32_accumulated.values(),
            *self._sums.values(),
        ]


class _PendingReduce(NamedTuple):
    """A window that is being reduced.

    Attributes:
        flat: the data to send.
        received: buffer for this worker's share of the sum.
        work: handle of the collective. None if there is nothing to wait for.
    """

    window: Window
    flat: torch.Tensor
    received: torch.Tensor
    work: Any

    @property
    def has_come(self) -> bool:
        return self.work is None or bool(self.work.is_completed())


@dataclass(frozen=True)
class _Kind:
    """The properties that all parameters of a window share."""

    copies: Copies
    dtype: torch.dtype
    narrow: torch.dtype | None
    stages: tuple[int, ...]
    chunk: int | None


def _windows(
    trained: Sequence[TrainedParameter], limit: int, *, whole: bool
) -> tuple[list[Window], dict[Window, _Kind]]:
    """Build the windows in the order in which a backward completes them, about the reverse order of the model.

    Parameters without copies on other workers are in no window.

    Parameters with copies in other stages come last, sorted by name. This gives every worker with a copy the same
    order.
    """
    members: dict[_Kind, list[tuple[int, int]]] = defaultdict(list)
    for index, entry in reversed(list(enumerate(trained))):
        kind = _Kind(entry.copies, entry.parameter.dtype, entry.narrow, entry.stages, entry.chunk)
        if entry.copies.size > 1 or entry.stages:
            members[kind].append((index, entry.local.numel()))
    for kind in (kind for kind in members if kind.stages):
        members[kind].sort(key=lambda size: trained[size[0]].name)
    by_stages = {kind: members[kind] for kind in sorted(members, key=lambda kind: kind.stages)}
    kinds = windows_of_kinds(
        by_stages,
        limit,
        ranks=lambda kind: kind.copies.size,
        whole=whole,
        is_tied=lambda kind: kind.stages != (),
    )

    def comes(window: Window) -> tuple[bool, int]:
        there = kinds[window].stages != ()
        return there, 0 if there else -min(segment.parameter for segment in window.segments)

    return sorted(kinds, key=comes), kinds
