"""Data parallelism inside a 3D layout: gradients are summed over the replicas, and the replicas share the update.

ZeRO-1 and ZeRO-2 follow Rajbhandari et al., 2020. Each of N replicas keeps the optimizer state (and, in ZeRO-2, the
summed gradients) of one N-th of its parameters. It updates that part and sends it to the others.

Parameters may have 16 bits, with fp32 masters that the optimizer updates instead (Micikevicius et al., 2018). The
masters are sharded like the optimizer state, and gradients are accumulated in fp32 as they arrive.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from rapidformer_templates.engines.forwards import differentiable
from rapidformer_templates.engines.parallel.buckets import Bucket, buckets_by_key, update_chunks
from rapidformer_templates.engines.shards import NO_COPIES, Copies, local_part
from rapidformer_templates.errors import RapidformerError
from rapidformer_templates.system.workers import Workers, all_gather, reduce_scatter

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class GradientTypes:
    """Types of the gradients of 16-bit parameters.

    Attributes:
        accumulate: type in which they are accumulated over micro batches.
        reduce: type in which they are summed over replicas.
    """

    accumulate: torch.dtype = torch.float32
    reduce: torch.dtype = torch.float32


IN_FP32 = GradientTypes()


@dataclass(frozen=True, eq=False)
class TrainedParameter:
    """A parameter that this worker trains.

    Attributes:
        name: canonical name in the whole model.
        parameter: the parameter of the model, a DTensor under tensor parallelism.
        copies: the workers of all replicas that hold the same values.
        compute_dtype: 16-bit type of the parameter, which then has a master in its original type. None keeps its type.
        stages: pipeline ranks that hold a copy of it. Empty if this is the only one.
        chunk: the local pipeline chunk whose backward produces its gradient. None means any chunk.
    """

    name: str
    parameter: nn.Parameter
    copies: Copies = NO_COPIES
    stages: tuple[int, ...] = ()
    chunk: int | None = None
    compute_dtype: torch.dtype | None = None

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
    :meth:`reduce`, the optimizer's update of the ``units`` :meth:`iter_update_chunks`, :meth:`all_gather_parameters`
    and :meth:`drop`. Gradients are exchanged during the last backward. ZeRO-2 exchanges them in every backward, because
    no worker keeps them whole. A parameter is summed and sharded only among the workers that have copies of it.

    Args:
        trained: the parameters.
        workers: this process and its peers.
        shards: ``None``, ``optimizer`` (ZeRO-1) or ``gradients`` (ZeRO-2).
        tied: process group of the workers that hold copies of a parameter, by their pipeline ranks.
        bucket_size: number of elements that are exchanged, or converted, at a time.
        whole: whether each parameter has a single owner, for updates that need the whole parameter.
        types: gradient types of 16-bit parameters. Other gradients have the type of their parameter.

    Attributes:
        units: what the optimizer of this rank updates.
        with_masters: names of the 16-bit parameters that have masters.
        reduced_gradients: the summed gradient of each unit that has one, between :meth:`reduce` and the update.
    """

    def __init__(
        self,
        trained: Sequence[TrainedParameter],
        workers: Workers,
        *,
        shards: str | None,
        tied: Mapping[tuple[int, ...], dist.ProcessGroup],
        bucket_size: int,
        whole: bool = False,
        types: GradientTypes = IN_FP32,
    ) -> None:
        self.trained = trained
        self.tied = tied
        self.replicas = workers.copies
        self.group = workers.mesh.get_group("copies") if workers.mesh else None
        sharded = shards is not None and self.replicas > 1
        self.reduce_every_micro_batch = sharded and shards == "gradients"
        self._types = types
        self._bucket_size = bucket_size
        self._buckets, self._keys = _build_buckets(trained, bucket_size, whole=whole and sharded)
        # Only buckets with several workers are sharded.
        self._runs: dict[Bucket, list[tuple[UpdateShard, int]]] = {
            w: [] for w in self._buckets if sharded and w.ranks > 1
        }
        runs = []
        for bucket in self._runs:
            for (index, start, count), offset in bucket.owned(self._keys[bucket].copies.rank):
                entry = trained[index]
                run = entry.local if bucket.owner is not None else entry.local.view(-1)[start : start + count]
                unit = UpdateShard(entry, start, nn.Parameter(run.clone() if entry.compute_dtype else run), True)
                self._runs[bucket].append((unit, offset))
                runs.append(unit)
        self._shared = {segment.parameter for bucket in self._runs for segment in bucket.segments}
        self._exchanged = {segment.parameter for bucket in self._buckets for segment in bucket.segments}
        # Sending experts to other workers makes replicas wait for each other within a backward.
        self._collectives_in_backward = any(entry.copies.size < self.replicas for entry in trained)
        self._unsharded = {
            index: UpdateShard(entry, 0, nn.Parameter(entry.local), False)
            for index, entry in enumerate(trained)
            if index not in self._shared
        }
        self.units = [*runs, *self._unsharded.values()]
        self.with_masters = {entry.name for entry in trained if entry.compute_dtype}
        for entry in trained:
            if entry.compute_dtype:
                cast_to_compute_dtype(entry.parameter, entry.compute_dtype)
        self._sums: dict[Bucket, torch.Tensor] = {}  # this rank's share of the summed gradients
        self.reduced_gradients: dict[UpdateShard, torch.Tensor] = {}
        self._fp32_accumulated: dict[int, torch.Tensor] = {}  # gradients of 16-bit parameters accumulated so far
        self._used = [False] * len(trained)
        self._exchanging = False  # whether the current backward exchanges gradients
        self._ready: set[int] = set()
        self._sent_gradients: set[int] = set()
        self._queue: deque[Bucket] = deque()
        self._sent_buckets: set[Bucket] = set()
        self._pending: _PendingReduce | None = None
        self._sends = self._sends_in_backward = 0
        self._wait_seconds = 0.0  # seconds that the host has waited in this step
        self._synced_versions = self._versions()
        for index, entry in enumerate(trained):
            if entry.compute_dtype or self.replicas > 1:
                entry.parameter.register_post_accumulate_grad_hook(
                    lambda _, index=index: self._on_gradient_ready(index)
                )

    # Backward passes.

    def begin_backward(self, chunk: int | None = None, *, last: bool) -> None:
        """Prepare a backward pass.

        Args:
            chunk: the local pipeline chunk of this pass. None is the whole model.
            last: whether this is the last pass of the step for these parameters.
        """
        self._exchanging = self.reduce_every_micro_batch or (last and self.replicas > 1)
        self._ready.clear()
        self._sent_gradients.clear()
        if self._exchanging:
            # A parameter used by several chunks is complete only after the last of them.
            chunks = (None, chunk) if self.reduce_every_micro_batch or chunk is None else (chunk,)
            self._queue = deque(w for w in self._buckets if self._keys[w].chunk in chunks)

    def end_backward(self) -> None:
        """Finish a backward pass. Unused parameters count as zero, because other ranks may have used them."""
        while self._queue:
            self._start(self._queue.popleft())
        if self.reduce_every_micro_batch:
            self._finish()
        self._exchanging = False
        self._sent_gradients.clear()

    def _on_gradient_ready(self, index: int) -> None:
        """Queue a gradient. All ranks send buckets in the same order, each as soon as it is complete."""
        if index in self._sent_gradients:
            name = self.trained[index].name
            message = f"the gradient of {name} was ready twice in one backward, and had already been sent"
            hint = "checkpoint with use_reentrant=False, or with --checkpoint-activations"
            raise RapidformerError(message, where="compute_loss()", hint=hint)
        is_sent_at_once = self._exchanging and index in self._shared and index not in self._fp32_accumulated
        if self.trained[index].compute_dtype and not is_sent_at_once:
            gradient = self.trained[index].gradient
            if index in self._fp32_accumulated and gradient is not None:
                self._fp32_accumulated[index] += gradient
            elif gradient is not None:  # None in a micro batch that does not count
                self._fp32_accumulated[index] = gradient.to(self._types.accumulate)
            self.trained[index].parameter.grad = None
        if self._exchanging:
            self._ready.add(index)
            while self._queue and self._may_send(self._queue[0]):
                self._start(self._queue.popleft())
                self._sends_in_backward += 1

    def _may_send(self, bucket: Bucket) -> bool:
        """Whether a bucket is complete and can be sent without a possible deadlock.

        The loss may use a parameter on this rank but not on others, where its bucket is sent after the backward. If the
        backward exchanges tokens between ranks, theirs ends only if this one continues, so it must not wait here for
        the previous bucket.
        """
        work = self._pending.work if self._pending else None
        if self._collectives_in_backward and work is not None and not work.is_completed():
            return False
        return all(segment.parameter in self._ready for segment in bucket.segments)

    def _gradient(self, index: int) -> torch.Tensor | None:
        """Return the gradient that this worker's backward passes have accumulated for a parameter."""
        return self._fp32_accumulated[index] if index in self._fp32_accumulated else self.trained[index].gradient

    # Exchange.

    def reduce(self) -> None:
        """Complete the sums of the gradients over the replicas. Parameters that no loss used have none."""
        if self.replicas > 1 or self.tied:
            if not self.reduce_every_micro_batch:
                for bucket in self._buckets:
                    if bucket not in self._sent_buckets:
                        self._start(bucket)
                self._finish()
            # Sum the gradients of parameters that have copies in several stages.
            for bucket in [w for w in self._buckets if self._keys[w].stages]:
                dist.all_reduce(self._sums[bucket], group=self.tied[self._keys[bucket].stages])
                if bucket not in self._runs:
                    self._unpack(bucket)
            used = self._used_anywhere()
        else:
            used = [self._gradient(index) is not None for index in range(len(self.trained))]
        self.reduced_gradients = {unit: self._summed(index) for index, unit in self._unsharded.items() if used[index]}
        used_parameters = {id(entry) for entry, flag in zip(self.trained, used, strict=True) if flag}
        for bucket, runs in self._runs.items():
            for unit, offset in runs:
                if id(unit.of) in used_parameters:
                    gradient = self._sums[bucket][offset : offset + unit.values.numel()]
                    self.reduced_gradients[unit] = gradient.view(unit.values.shape)

    def _start(self, bucket: Bucket) -> None:
        """Start the reduction of a bucket, and finish that of the previous one."""
        self._sent_buckets.add(bucket)
        self._sends += 1
        flat, copies = self._pack(bucket), self._keys[bucket].copies
        received, work = flat, None
        if bucket.owner is not None:
            received = flat if bucket.owner == copies.rank else flat.new_empty(0)
            work = dist.reduce(flat, group=copies.group, group_dst=bucket.owner, async_op=True)
        elif bucket in self._runs:
            received = flat.new_empty(bucket.share)
            work = reduce_scatter(received, flat, group=copies.group, async_op=True)
        elif copies.size > 1:
            work = dist.all_reduce(flat, group=copies.group, async_op=True)
        self._finish()
        self._pending = _PendingReduce(bucket, flat, received, work)

    def _pack(self, bucket: Bucket) -> torch.Tensor:
        """Pack the gradients of a bucket end to end, and free those that are complete. Missing gradients are zeros."""
        like = self.trained[bucket.segments[0].parameter]
        dtype = self._types.reduce if like.compute_dtype else like.local.dtype
        flat = like.local.new_zeros(bucket.packed, dtype=dtype)
        for (index, start, count), offset in bucket.with_offsets():
            gradient = self._gradient(index)
            if gradient is not None:
                self._used[index] = True
                flat[offset : offset + count] = gradient.reshape(-1)[start : start + count]
                self._sent_gradients.add(index)
                if bucket in self._runs and start + count == gradient.numel():
                    self.trained[index].parameter.grad = None
                    self._fp32_accumulated.pop(index, None)
        return flat

    def _finish(self) -> None:
        """Wait for the pending bucket."""
        if self._pending is None:
            return
        bucket, _, received, work = self._pending
        self._pending = None
        if work is not None:
            begin = time.perf_counter()
            work.wait()
            self._wait_seconds += time.perf_counter() - begin
        if self._keys[bucket].compute_dtype:
            received = received.to(self._types.accumulate)
        if self.reduce_every_micro_batch and bucket in self._sums:
            self._sums[bucket] += received
        else:
            self._sums[bucket] = received
        if bucket not in self._runs and not self._keys[bucket].stages:
            self._unpack(bucket)

    def _unpack(self, bucket: Bucket) -> None:
        """Copy the sums back into the gradients of the model."""
        flat = self._sums.pop(bucket)
        for (index, start, count), offset in bucket.with_offsets():
            self._summed(index).view(-1)[start : start + count] = flat[offset : offset + count]

    def _summed(self, index: int) -> torch.Tensor:
        """Return the tensor for the summed gradient of a parameter."""
        entry = self.trained[index]
        if entry.compute_dtype:
            if index not in self._fp32_accumulated:
                self._fp32_accumulated[index] = torch.zeros_like(entry.local, dtype=self._types.accumulate)
            return self._fp32_accumulated[index]
        if entry.parameter.grad is None:
            entry.parameter.grad = torch.zeros_like(entry.parameter)
        return local_part(entry.parameter.grad)

    def _used_anywhere(self) -> list[bool]:
        """For each parameter, whether the loss of any replica, or of any stage that has it, used it."""
        # An exchanged gradient is a sum by now. It is zero if no loss used the parameter.
        local_use = [
            sent if index in self._exchanged else self._gradient(index) is not None
            for index, sent in enumerate(self._used)
        ]
        flags = torch.tensor(local_use, dtype=torch.float32)  # known on the host, so no device wait
        if self.replicas > 1:
            dist.all_reduce(flags, group=self.group)
        for stages, group in self.tied.items():
            # The stages may have them in another order: a tied head stands at the end, its embedding at the beginning.
            offsets = [index for index, entry in enumerate(self.trained) if entry.stages == stages]
            offsets.sort(key=lambda index: self.trained[index].name)
            part = flags[offsets]
            dist.all_reduce(part, group=group)
            flags[offsets] = part
        return [flag > 0 for flag in flags.tolist()]

    # Update.

    def iter_update_chunks(self, *, in_chunks: bool) -> Iterator[None]:
        """Yield while units have their gradients, in their own type. The caller then updates those units.

        Args:
            in_chunks: whether units may be updated separately. If so, 16-bit gradients are converted bucket by bucket.
                All of them in fp32 would need twice the memory that was saved.
        """
        for units in self._update_chunks if in_chunks else [self.units]:
            for unit in units:
                gradient = self.reduced_gradients.get(unit)
                unit.values.grad = None if gradient is None else gradient.to(unit.values.dtype)
            yield
            for unit in units:
                unit.values.grad = None

    @cached_property
    def _update_chunks(self) -> list[list[UpdateShard]]:
        """Groups of units that are updated together. A single group if no gradient is converted."""
        if self._types.accumulate == torch.float32 or not self.with_masters:
            return [self.units]
        of_windows = [[unit for unit, _ in runs] for runs in self._runs.values()]
        whole = list(self._unsharded.values())
        sizes = [unit.values.numel() for unit in whole]
        return [
            *of_windows,
            *([whole[place] for place in places] for places in update_chunks(sizes, self._bucket_size)),
        ]

    def _versions(self) -> dict[str, int]:
        """In-place modification counts of 16-bit parameters, from autograd."""
        return {entry.name: entry.parameter._version for entry in self.trained if entry.compute_dtype}

    @torch.no_grad()
    def sync_masters(self) -> None:
        """Copy external changes of 16-bit parameters, for example by a masking hook, to their masters."""
        versions = self._versions()
        for unit in self.units:
            if unit.of.compute_dtype and versions[unit.of.name] != self._synced_versions[unit.of.name]:
                master = unit.values.detach().view(-1)
                weight = unit.of.local.reshape(-1)[unit.start : unit.start + master.numel()]
                master.copy_(torch.where(weight == master.to(weight.dtype), master, weight.to(master.dtype)))
        self._synced_versions = versions

    @torch.no_grad()
    def all_gather_parameters(self) -> None:
        """Send this rank's updates to all replicas. While a bucket arrives, others are packed and unpacked."""
        for unit in self._unsharded.values():
            if unit.of.compute_dtype:
                unit.of.local.copy_(unit.values)
        arriving: deque[tuple[Bucket, torch.Tensor, dist.Work]] = deque()
        for bucket in self._runs:
            arriving.append((bucket, *self._gather(bucket)))
            if len(arriving) > 1:
                self._unpack_gathered(*arriving.popleft())
        while arriving:
            self._unpack_gathered(*arriving.popleft())
        self._synced_versions = self._versions()

    def _gather(self, bucket: Bucket) -> tuple[torch.Tensor, dist.Work]:
        """Start to gather the updated parameters of a bucket. Return where they arrive, and the handle."""
        share = self.trained[bucket.segments[0].parameter].local.new_zeros(bucket.share)
        for unit, offset in self._runs[bucket]:
            share[offset : offset + unit.values.numel()] = unit.values.detach().view(-1)
        group = self._keys[bucket].copies.group
        if bucket.owner is not None:
            return share, dist.broadcast(share, group=group, group_src=bucket.owner, async_op=True)
        flat = share.new_empty(bucket.packed)
        return flat, all_gather(flat, share, group=group, async_op=True)

    def _unpack_gathered(self, bucket: Bucket, flat: torch.Tensor, gathering: dist.Work) -> None:
        gathering.wait()
        for (index, start, count), offset in bucket.with_offsets():
            self.trained[index].local.view(-1)[start : start + count] = flat[offset : offset + count]

    def drop(self) -> None:
        """Free the gradients, including those that an error has left pending."""
        self._pending = None  # does not wait, because the other workers may be gone
        self._queue.clear()
        self._sums.clear()
        self.reduced_gradients.clear()
        self._fp32_accumulated.clear()
        self._sent_buckets.clear()
        self._sends = self._sends_in_backward = 0
        self._wait_seconds = 0.0
        self._used = [False] * len(self.trained)
        for unit in self.units:
            unit.values.grad = None
        for entry in self.trained:
            entry.parameter.grad = None

    def exchange(self) -> dict[str, float]:
        """Return statistics of the gradient exchange in this step.

        They are the number of buckets that were exchanged, the number of them that were sent during a backward, and the
        seconds in which this worker's host only waited for them (zero if a device does the waiting).
        """
        return {
            "windows": self._sends,
            "sent_in_backward": self._sends_in_backward,
            "waited_seconds": round(self._wait_seconds, 6),
        }

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients on this rank, after pending buckets have arrived."""
        self._finish()
        whole = [entry.gradient for entry in self.trained]
        return [
            *(gradient for gradient in whole if gradient is not None),
            *self._fp32_accumulated.values(),
            *self._sums.values(),
        ]


class _PendingReduce(NamedTuple):
    """A bucket that is being reduced.

    Attributes:
        flat: the data to send.
        received: buffer for this worker's share of the sum.
        work: handle of the collective. None if there is nothing to wait for.
    """

    bucket: Bucket
    flat: torch.Tensor
    received: torch.Tensor
    work: dist.Work | None


@dataclass(frozen=True)
class _BucketKey:
    """The properties that all parameters of a bucket share."""

    copies: Copies
    dtype: torch.dtype
    compute_dtype: torch.dtype | None
    stages: tuple[int, ...]
    chunk: int | None


def _build_buckets(
    trained: Sequence[TrainedParameter], limit: int, *, whole: bool
) -> tuple[list[Bucket], dict[Bucket, _BucketKey]]:
    """Build the buckets in the order in which a backward completes them, about the reverse order of the model.

    Parameters without copies on other workers are in no bucket.

    Parameters with copies in other stages come last, sorted by name. This gives every worker with a copy the same
    order.
    """
    members: dict[_BucketKey, list[tuple[int, int]]] = defaultdict(list)
    for index, entry in reversed(list(enumerate(trained))):
        key = _BucketKey(entry.copies, entry.parameter.dtype, entry.compute_dtype, entry.stages, entry.chunk)
        if entry.copies.size > 1 or entry.stages:
            members[key].append((index, entry.local.numel()))
    for key in (key for key in members if key.stages):
        members[key].sort(key=lambda size: trained[size[0]].name)
    by_stages = {key: members[key] for key in sorted(members, key=lambda key: key.stages)}
    keys = buckets_by_key(
        by_stages, limit, ranks=lambda key: key.copies.size, whole=whole, is_tied=lambda key: key.stages != ()
    )

    def sort_key(bucket: Bucket) -> tuple[bool, int]:
        is_tied = keys[bucket].stages != ()
        return is_tied, 0 if is_tied else -min(segment.parameter for segment in bucket.segments)

    return sorted(keys, key=sort_key), keys


def parameters_with_masters(model: nn.Module) -> set[int]:
    """Return the ids of the parameters for which 16 bits are enough: trained fp32 parameters, except those of norms.

    Norms are the modules whose own parameters all have fewer than two dimensions. Autocast computes them in fp32 for
    inputs of any type, and torch's CPU kernels do not accept fp32 inputs with 16-bit parameters.
    """
    of_norms = {
        id(parameter)
        for module in model.modules()
        if all(parameter.ndim < 2 for parameter in module.parameters(recurse=False))
        for parameter in module.parameters(recurse=False)
    }
    return {
        id(parameter)
        for parameter in model.parameters()
        if parameter.requires_grad and parameter.dtype == torch.float32 and id(parameter) not in of_norms
    }


@torch.no_grad()
def cast_to_compute_dtype(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """Round a parameter to 16 bits in place, so that all references to it see the change."""
    if not isinstance(parameter, DTensor):
        parameter.data = parameter.data.to(dtype)
        return
    # Assigning .data of a DTensor does not change its local part.
    replacement = nn.Parameter(parameter.detach().to(dtype))
    replacement.__dict__.update(parameter.__dict__)
    torch.utils.swap_tensors(parameter, replacement)


def sum_rows_in_fp32(model: nn.Module) -> None:
    """Sum gradients of 16-bit embedding tables on a CPU in fp32 per row, as a GPU does.

    Torch's CPU kernel adds up the tokens of a row in 16 bits. After a few hundred of them the sum stops growing.
    """
    for module in model.modules():
        if isinstance(module, nn.Embedding) and type(module).forward is nn.Embedding.forward:
            weight, plain = module.weight, module.max_norm is None and not module.scale_grad_by_freq
            if plain and weight.device.type == "cpu" and weight.element_size() == 2 and not isinstance(weight, DTensor):
                # Runs before all other hooks, to keep their changes to the rows (such as noise).
                module.register_forward_hook(_look_up_rows, prepend=True, with_kwargs=True)


def _look_up_rows(
    module: nn.Embedding, inputs: tuple[Any, ...], named: dict[str, Any], output: torch.Tensor
) -> torch.Tensor:
    if not output.requires_grad:
        return output
    places, table, padding = inputs[0] if inputs else named["input"], module.weight, module.padding_idx
    shape, dtype = table.shape, table.dtype

    def backward(gradient: torch.Tensor) -> torch.Tensor:
        rows, numbers = places.flatten().unique(return_inverse=True)  # most tables have more rows than a batch uses
        sums = torch.zeros(len(rows), shape[1]).index_add_(0, numbers, gradient.flatten(0, -2).float())
        if padding is not None:
            sums[rows == padding] = 0
        whole = torch.zeros(shape, dtype=dtype)
        whole[rows] = sums.to(dtype)
        return whole

    return differentiable(lambda table: functional.embedding(places, table), backward, table)
