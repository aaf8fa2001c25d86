"""Data parallelism inside a 3D layout: gradients summed over the replicas, the update shared out among them.

ZeRO-1 and ZeRO-2 as Rajbhandari et al., 2020, describe them: each of N replicas keeps the optimizer state
(and, in ZeRO-2, the summed gradients) of one N-th of its parameters, updates that and sends it to the others.

Parameters may be of 16 bits, with fp32 masters that are updated in their place (Micikevicius et al., 2018): the
masters are divided as the optimizer's state is, and gradients are added up in fp32 as they come.
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
class Trained:
    """A parameter that is trained on this worker.

    Attributes:
        name: canonical, in the whole model.
        parameter: the model's; under tensor parallelism a DTensor.
        copies: the replicas' workers that hold the same of it.
        narrow: the type of 16 bits that it is to be of, with a master in its own; None leaves it as it is.
        stages: pipeline ranks that hold a copy of it; empty if this is the only one.
        chunk: the local part of the pipeline whose backward brings its gradient; None is any.
    """

    name: str
    parameter: nn.Parameter
    copies: Copies = NONE
    stages: tuple[int, ...] = ()
    chunk: int | None = None
    narrow: torch.dtype | None = None

    @property
    def local(self) -> torch.Tensor:
        """What this worker has of it."""
        return local_part(self.parameter).detach()

    @property
    def gradient(self) -> torch.Tensor | None:
        """What this worker has of its gradient, as the backward leaves it."""
        return None if self.parameter.grad is None else local_part(self.parameter.grad)


@dataclass(frozen=True, eq=False)
class Unit:
    """What the optimizer updates at a time: a run of a flattened parameter, or, where it is not shared out, all of it.

    Attributes:
        of: the parameter.
        start: first element of the run in the parameter's flattened local part.
        values: the run (a whole parameter in its shape), in the memory of the parameter itself, or, of a parameter of
            16 bits, its master.
        is_run: no other replica updates it.
    """

    of: Trained
    start: int
    values: nn.Parameter
    is_run: bool


class DataShards:
    """The gradients and updates of a worker's parameters, among the replicas of the model.

    Every step is: backward passes (each between :meth:`begin_backward` and :meth:`end_backward`),
    :meth:`reduce`, the optimizer's update of the ``units`` :meth:`in_turn`, :meth:`gather`, :meth:`drop`. Gradients
    travel while the last backward runs; those of ZeRO-2, which no worker keeps whole, in each. What is summed and
    shared out of a parameter, is so among those that have copies of it.

    Args:
        trained: the parameters.
        workers: this process among its peers.
        shards: ``None``, ``optimizer`` (ZeRO-1) or ``gradients`` (ZeRO-2).
        tied: the process group of the workers that hold copies of a parameter, by their pipeline ranks.
        window: elements that are exchanged, or converted, at a time.
        whole: whether parameters are shared out whole, for an update that needs more of them than a run.
        types: those of the gradients of narrow parameters; others have one type throughout.

    Attributes:
        units: what this rank's optimizer is over.
        narrow: names of the parameters that are of 16 bits and have masters.
    """

    def __init__(
        self,
        trained: Sequence[Trained],
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
        # Only of those that several workers have there are shares.
        self._runs: dict[Window, list[tuple[Unit, int]]] = {w: [] for w in self._windows if sharded and w.ranks > 1}
        runs = self._divide()
        self._shared = {segment.parameter for window in self._runs for segment in window.segments}
        self._exchanged = {segment.parameter for window in self._windows for segment in window.segments}
        # Experts on their way to other workers let replicas wait for each other within a backward.
        self._meet = any(entry.copies.size < self.replicas for entry in trained)
        self._whole = {
            index: Unit(entry, 0, nn.Parameter(entry.local), False)
            for index, entry in enumerate(trained)
            if index not in self._shared
        }
        self.units = [*runs, *self._whole.values()]
        self.narrow = {entry.name for entry in trained if entry.narrow}
        for entry in trained:
            if entry.narrow:
                narrow(entry.parameter, entry.narrow)
        self._sums: dict[Window, torch.Tensor] = {}  # this rank's share of the summed gradients
        self._complete: dict[Unit, torch.Tensor] = {}  # the gradients of units, as they were added up
        self._wide: dict[int, torch.Tensor] = {}  # of narrow parameters, what their gradients have come to so far
        self._reached = [False] * len(trained)
        self._exchanging = False  # in this backward
        self._ready: set[int] = set()
        self._left: set[int] = set()
        self._queue: deque[Window] = deque()
        self._sent: set[Window] = set()
        self._pending: _Flight | None = None
        self._starts = self._early_starts = 0
        self._waited = 0.0  # seconds of the host in this step
        self._seen = self._versions()
        for index, entry in enumerate(trained):
            if entry.narrow or self.replicas > 1:
                entry.parameter.register_post_accumulate_grad_hook(lambda _, index=index: self._came(index))

    def _divide(self) -> list[Unit]:
        units = []
        for window in self._runs:
            for (index, start, count), offset in window.owned(self._kind[window].copies.rank):
                entry = self.trained[index]
                run = entry.local if window.owner is not None else entry.local.view(-1)[start : start + count]
                unit = Unit(entry, start, nn.Parameter(run.clone() if entry.narrow else run), True)
                self._runs[window].append((unit, offset))
                units.append(unit)
        return units

    # The backward passes.

    def begin_backward(self, chunk: int | None = None, *, last: bool) -> None:
        """Before a backward pass.

        Args:
            chunk: the local part of the pipeline whose pass it is; None is the whole model.
            last: of this step, for what it comes to.
        """
        self._exchanging = self.early or (last and self.replicas > 1)
        self._ready.clear()
        self._left.clear()
        if self._exchanging:
            # What several parts may come to is complete only after the last of them.
            chunks = (None, chunk) if self.early or chunk is None else (chunk,)
            self._queue = deque(w for w in self._windows if self._kind[w].chunk in chunks)

    def end_backward(self) -> None:
        """After it: what the loss did not reach counts as zero, because other ranks may have reached it."""
        while self._queue:
            self._start(self._queue.popleft())
        if self.early:
            self._finish()
        self._exchanging = False
        self._left.clear()

    def _came(self, index: int) -> None:
        """A gradient is there. Windows leave in one order on all ranks, each as soon as it is complete."""
        if index in self._left:
            raise RapidformerError(
                f"the gradient of {self.trained[index].name} came twice in one backward, and had been sent by then",
                where="compute_loss()",
                hint="checkpoint with use_reentrant=False, or with --checkpoint-activations",
            )
        leaves_at_once = self._exchanging and index in self._shared and index not in self._wide
        if self.trained[index].narrow and not leaves_at_once:
            self._widen(index)
        if self._exchanging:
            self._ready.add(index)
            while self._queue and self._may_leave(self._queue[0]):
                self._start(self._queue.popleft())
                self._early_starts += 1

    def _may_leave(self, window: Window) -> bool:
        """Whether a window is complete, and need not wait here for the one before where that could be for ever.

        A loss may reach a parameter here that it does not reach elsewhere: there its window leaves after the backward,
        which comes to its end only if this one goes on, where the two exchange tokens.
        """
        if self._meet and self._pending is not None and not self._pending.has_come:
            return False
        return all(segment.parameter in self._ready for segment in window.segments)

    def _widen(self, index: int) -> None:
        """Add a gradient of 16 bits to those before it, and free it."""
        gradient = self.trained[index].gradient
        assert gradient is not None
        if index in self._wide:
            self._wide[index] += gradient
        else:
            self._wide[index] = gradient.to(self._types.accumulate)
        self.trained[index].parameter.grad = None

    def _gradient(self, index: int) -> torch.Tensor | None:
        """What this worker's backward passes have come to for a parameter."""
        return self._wide[index] if index in self._wide else self.trained[index].gradient

    # The exchange.

    def reduce(self) -> None:
        """Complete the sums of the gradients over the replicas; a parameter that no loss reached has none."""
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

    def _gradients_of_units(self, reached: Sequence[bool]) -> Iterator[tuple[Unit, torch.Tensor]]:
        for index, unit in self._whole.items():
            if reached[index]:
                yield unit, self._summed(index)
        there = {id(entry) for entry, flag in zip(self.trained, reached, strict=True) if flag}
        for window, runs in self._runs.items():
            for unit, offset in runs:
                if id(unit.of) in there:
                    yield unit, self._sums[window][offset : offset + unit.values.numel()].view(unit.values.shape)

    def _start(self, window: Window) -> None:
        """Send a window's gradients on their way, and take in those of the one before."""
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
        self._pending = _Flight(window, flat, received, work)

    def _pack(self, window: Window) -> torch.Tensor:
        """The gradients of a window, laid end to end; where there is none, zeros."""
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
                    self._wide.pop(index, None)
        return flat

    def _finish(self) -> None:
        """Wait for the window that is on its way."""
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
        """Put the sums where the model's gradients are."""
        flat = self._sums.pop(window)
        for (index, start, count), offset in window.with_offsets():
            self._summed(index).view(-1)[start : start + count] = flat[offset : offset + count]

    def _summed(self, index: int) -> torch.Tensor:
        """Where the summed gradient of a parameter is to lie."""
        entry = self.trained[index]
        if entry.narrow:
            if index not in self._wide:
                self._wide[index] = torch.zeros_like(entry.local, dtype=self._types.accumulate)
            return self._wide[index]
        if entry.parameter.grad is None:
            entry.parameter.grad = torch.zeros_like(entry.parameter)
        return local_part(entry.parameter.grad)

    def _sum_tied(self) -> None:
        """Add up what the copies of a parameter in several stages have got."""
        for window in [w for w in self._windows if self._kind[w].stages]:
            dist.all_reduce(self._sums[window], group=self.tied[self._kind[window].stages])
            if window not in self._runs:
                self._unpack(window)

    def _reached_anywhere(self) -> list[bool]:
        """For each parameter, whether the loss of any replica or of any stage that has it reached it."""
        # The gradient of what was exchanged is a sum by now, of zeros where no loss reached the parameter.
        here = [
            sent if index in self._exchanged else self._gradient(index) is not None
            for index, sent in enumerate(self._reached)
        ]
        flags = torch.tensor(here, dtype=torch.float32)  # the hosts know it, and no device is waited for
        if self.replicas > 1:
            dist.all_reduce(flags, group=self.group)
        for stages, group in self.tied.items():
            offsets = [index for index, entry in enumerate(self.trained) if entry.stages == stages]
            part = flags[offsets]
            dist.all_reduce(part, group=group)
            flags[offsets] = part
        return [flag > 0 for flag in flags.tolist()]

    # The update.

    def norms(self, units: Iterable[Unit]) -> list[torch.Tensor]:
        """The norm of the gradient of each of ``units`` that has one, in the unit's type."""
        by_types: dict[tuple[torch.dtype, torch.dtype], list[torch.Tensor]] = defaultdict(list)
        for unit in units:
            if unit in self._complete:
                gradient = self._complete[unit]
                by_types[unit.values.dtype, gradient.dtype].append(gradient)
        groups = by_types.items()
        return [norm for (dtype, _), values in groups for norm in torch._foreach_norm(values, dtype=dtype)]

    def in_turn(self, *, apart: bool) -> Iterator[None]:
        """Let units have their gradients, in their own type, while the caller updates those that have one.

        Args:
            apart: whether one unit may be updated before another. Then gradients of 16 bits are converted by the
                window, for all of them in fp32 would be twice what was saved.
        """
        for units in self._turns if apart else [self.units]:
            for unit in units:
                gradient = self._complete.get(unit)
                unit.values.grad = None if gradient is None else gradient.to(unit.values.dtype)
            yield
            for unit in units:
                unit.values.grad = None

    @cached_property
    def _turns(self) -> list[list[Unit]]:
        """The units by when they are updated: all at once, where no gradient is converted."""
        if self._types.accumulate == torch.float32 or not self.narrow:
            return [self.units]
        of_windows = [[unit for unit, _ in runs] for runs in self._runs.values()]
        whole = list(self._whole.values())
        sizes = [unit.values.numel() for unit in whole]
        return [*of_windows, *([whole[place] for place in places] for places in turns(sizes, self._window))]

    def _versions(self) -> dict[str, int]:
        """How often narrow parameters have been changed in place, as autograd counts it."""
        return {entry.name: entry.parameter._version for entry in self.trained if entry.narrow}

    @torch.no_grad()
    def adopt(self) -> None:
        """Take over into the masters what somebody else has set of narrow parameters, as by a hook that masks them."""
        found = self._versions()
        for unit in self.units:
            if unit.of.narrow and found[unit.of.name] != self._seen[unit.of.name]:
                master = unit.values.detach().view(-1)
                here = unit.of.local.reshape(-1)[unit.start : unit.start + master.numel()]
                master.copy_(torch.where(here == master.to(here.dtype), master, here.to(master.dtype)))
        self._seen = found

    @torch.no_grad()
    def gather(self) -> None:
        """Give every replica what the others have updated."""
        self._send_updated()
        self._seen = self._versions()

    def _send_updated(self) -> None:
        for unit in self._whole.values():
            if unit.of.narrow:
                unit.of.local.copy_(unit.values)
        for window in self._runs:
            like = self.trained[window.segments[0].parameter].local
            flat = self._all_of(window, like.dtype)
            for (index, start, count), offset in window.with_offsets():
                self.trained[index].local.view(-1)[start : start + count] = flat[offset : offset + count]

    def _all_of(self, window: Window, dtype: torch.dtype) -> torch.Tensor:
        """What all replicas have of a window's units, laid end to end."""
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
        """On the first of its copies what a worker has of each narrow parameter, in fp32; every worker must ask."""
        whole = {unit.of.name: unit.values.detach() for unit in self._whole.values() if unit.of.narrow}
        for window in (window for window in self._runs if self._kind[window].narrow):
            flat = self._all_of(window, torch.float32)
            is_first = self._kind[window].copies.rank == 0
            for (index, start, count), offset in window.with_offsets() if is_first else ():
                entry = self.trained[index]
                values = whole.setdefault(entry.name, torch.empty(entry.local.shape))  # on the host
                values.view(-1)[start : start + count] = flat[offset : offset + count]
        return whole

    def drop(self) -> None:
        """Forget the gradients, and those that an error has left on their way."""
        self._pending = None  # not waited for: the other workers may be gone
        self._queue.clear()
        self._sums.clear()
        self._complete.clear()
        self._wide.clear()
        self._sent.clear()
        self._starts = self._early_starts = 0
        self._waited = 0.0
        self._reached = [False] * len(self.trained)
        for unit in self.units:
            unit.values.grad = None
        for entry in self.trained:
            entry.parameter.grad = None

    def exchange(self) -> dict[str, Any]:
        """Of this step: how many windows were exchanged, how many of them left while a backward was still at work, and
        the seconds in which this worker's host did nothing but wait for them (none, where a device does the waiting).
        """
        return {
            "windows": self._starts,
            "sent_in_backward": self._early_starts,
            "waited_seconds": round(self._waited, 6),
        }

    def gradients(self) -> list[torch.Tensor]:
        """What this rank has of gradients now, when what is on its way has come."""
        self._finish()
        whole = [entry.gradient for entry in self.trained]
        return [*(gradient for gradient in whole if gradient is not None), *self._wide.values(), *self._sums.values()]


class _Flight(NamedTuple):
    """A window on its way.

    Attributes:
        flat: what is sent.
        received: where comes what this worker is to have of the sum.
        work: what brings it; None where there is nobody to wait for.
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
    """What parameters must have in common to lie in one window."""

    copies: Copies
    dtype: torch.dtype
    narrow: torch.dtype | None
    stages: tuple[int, ...]
    chunk: int | None


def _windows(trained: Sequence[Trained], limit: int, *, whole: bool) -> tuple[list[Window], dict[Window, _Kind]]:
    """The windows in the order in which a backward completes them; it comes to a model in about the reverse order.

    What no other worker has is in none.

    Those of parameters with copies elsewhere come last, by the names of the parameters: in the same order
    on every worker that has a copy.
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
