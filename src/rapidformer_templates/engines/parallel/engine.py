"""The engine of 3D layouts: data parallelism over replicas, which tensor and pipeline parallelism may shard."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import chain

import torch
import torch.distributed as dist
from torch import nn

from rapidformer_templates.engines import shards as sharding
from rapidformer_templates.engines.assembly import Assembly
from rapidformer_templates.engines.local import SingleEngine
from rapidformer_templates.engines.parallel import replicas
from rapidformer_templates.engines.parallel.buckets import bucket_size_for
from rapidformer_templates.engines.parallel.replicas import ShardedGradients, TrainedParameter, UpdateShard
from rapidformer_templates.engines.recipe import OptimizerSpec
from rapidformer_templates.models.blocks import canonical_name, width_of
from rapidformer_templates.planning.optimizers import updates_elementwise, updates_in_chunks
from rapidformer_templates.planning.plan import Plan
from rapidformer_templates.system.workers import Workers, broadcast


class ParallelEngine(SingleEngine):
    """Each worker trains its part of the model. The replicas of a part share its update.

    Parameters may be whole, or DTensors of a tensor-parallel group. The optimizer updates ordinary tensors in the
    memory of the parameters: the whole local part of each, or runs of it if the optimizer state is sharded over the
    replicas. For 16-bit parameters it updates fp32 masters.
    """

    _divides_gradients = True
    _adds_norms_in_fp64 = True

    def __init__(self, plan: Plan, workers: Workers, *, clip_grad: float) -> None:
        super().__init__(plan, workers, clip_grad=clip_grad)
        self._sharding = plan.engine_options.shard_over_data
        self._device = plan.device  # a planned run has its tensors elsewhere
        types = plan.engine_options.master_weights  # None if parameters keep their type
        kinds = replicas.TYPES
        self._gradient_types = types and replicas.GradientTypes(kinds[types.accumulate], kinds[types.reduce])
        self._sharded_gradients: ShardedGradients
        self.is_last = False  # whether gradients are complete after this micro batch

    def _build(self, model: nn.Module, recipe: OptimizerSpec) -> None:
        self.model = model.train()
        self._shard(self.model)
        for parameter in self.model.parameters():  # updates are runs of the flattened parameter
            if not parameter.is_contiguous():
                parameter.data = parameter.data.contiguous()
        tied = open_groups_of_stages(self.assembly, self.workers)
        send_from_first_stage(self.assembly, tied)
        self._broadcast_from_first_replica(chain(model.parameters(), model.buffers()))
        persistent = model.state_dict(keep_vars=True)
        self._kept_buffers = [buffer for name, buffer in model.named_buffers() if name in persistent]
        placement, trained = self.assembly.placement, []
        with_masters = replicas.parameters_with_masters(model) if self._gradient_types else set()
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                whole = placement.whole_name(canonical_name(name))
                stages, chunk = placement.stages.get(whole, ()), placement.chunks.get(whole)
                narrow = self.compute_type if id(parameter) in with_masters else None
                copies = sharding.copies_of(parameter, self.workers)
                trained.append(TrainedParameter(whole, parameter, copies, stages, chunk, narrow))
        width = max(self.workers.gather(width_of(self.model)))  # the same in all stages
        bucket_size = bucket_size_for(width, self._device)
        self._sharded_gradients = ShardedGradients(
            trained,
            self.workers,
            shards=self._sharding,
            tied=tied,
            bucket_size=bucket_size,
            whole=not updates_elementwise(_path_of(recipe.cls)),
            types=self._gradient_types or replicas.IN_FP32,
        )
        replicas.sum_rows_in_fp32(self.model)
        named = [(unit.of.name, unit.values) for unit in self._sharded_gradients.units]
        differing = recipe.differences([(entry.name, entry.parameter) for entry in trained])
        if not named:  # only frozen blocks, or fewer elements than replicas: optimizers reject an empty list
            named, differing = [("", nn.Parameter(torch.empty(0, 0, device=self.workers.device)))], {"": {}}
        self._parameters = [values for _, values in named]
        self.optimizer = self._build_optimizer(recipe, named, differing)
        shards, units = sharding.model_shards(self.assembly, self.workers), self._sharded_gradients.units
        self._updated_shards = {unit.values: _shard_of_unit(unit, shards[unit.of.name]) for unit in units}
        self._updates_in_chunks = updates_in_chunks(_path_of(type(self.optimizer)))

    def _broadcast_from_first_replica(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            copies = sharding.copies_of(tensor, self.workers)
            if copies.size > 1:
                broadcast(sharding.local_part(tensor), group=copies.group)

    @property
    def gradient_divisor(self) -> float:
        return 1 / self.workers.context  # the shards are sums

    def accumulation(self, *, last: bool) -> AbstractContextManager[object]:
        self.is_last = last
        return nullcontext()

    def _backward(self, loss: torch.Tensor) -> None:
        self._sharded_gradients.begin_backward(last=self.is_last)
        super()._backward(loss)
        self._sharded_gradients.end_backward()

    def _reduce(self) -> None:
        self._sharded_gradients.sync_masters()
        self._sharded_gradients.reduce()
        if self.workers.copies > 1:
            self.receipts["gradient_exchange"] = self._sharded_gradients.exchange()
            # Running statistics, for example, as DDP broadcasts them.
            self._broadcast_from_first_replica(self._kept_buffers)

    def _iter_update_chunks(self) -> Iterator[None]:
        yield from self._sharded_gradients.iter_update_chunks(in_chunks=self._updates_in_chunks)
        self._sharded_gradients.all_gather_parameters()

    def _weights_were_set(self) -> None:
        self._sharded_gradients.all_gather_parameters()

    def drop(self) -> None:
        self._sharded_gradients.drop()

    def local_tensors(self) -> dict[str, list[torch.Tensor]]:
        tensors = super().local_tensors()
        # Without 16-bit parameters, the optimizer updates the parameters themselves.
        masters = [unit.values for unit in self._sharded_gradients.units] if self._gradient_types else []
        return {
            **tensors,
            "gradients": self._sharded_gradients.gradients(),
            "optimizer": [*tensors["optimizer"], *masters],
        }

    def _local_gradients(self) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        return ((unit.values, gradient) for unit, gradient in self._sharded_gradients.reduced_gradients.items())

    def shards(self, kind: sharding.ShardKind) -> Iterator[sharding.Shard]:
        if kind != "gradients":
            self._sharded_gradients.sync_masters()
        if kind != "weights":
            yield from super().shards(kind)
        else:
            with_masters = self._sharded_gradients.with_masters
            shards = sharding.model_shards(self.assembly, self.workers)
            yield from (shard for name, shard in shards.items() if name not in with_masters)
            yield from (shard for shard in self._updated_shards.values() if shard.name in with_masters)

    def load(self, reader: sharding.StateReader, *, optimizer: bool) -> None:
        super().load(reader, optimizer=optimizer)
        self._sharded_gradients.all_gather_parameters()  # 16-bit parameters follow their masters


def open_groups_of_stages(assembly: Assembly, workers: Workers) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Create a process group for each set of stages that hold copies of a parameter."""
    groups, line = {}, workers.copies * workers.tensor
    for stages in sorted(set(assembly.placement.stages.values())):
        group = workers.open_groups([[stage * line + first for stage in stages] for first in range(line)])
        if group is not None:
            groups[stages] = group
    return groups


def send_from_first_stage(assembly: Assembly, tied: Mapping[tuple[int, ...], dist.ProcessGroup]) -> None:
    """Replace the values of a tensor that several stages hold by those of the first one."""
    model, placement = assembly.model, assembly.placement
    tensors = {
        placement.whole_name(canonical_name(name)): tensor.detach()
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }
    for stages, name in sorted((stages, name) for name, stages in placement.stages.items() if name in tensors):
        broadcast(sharding.local_part(tensors[name]), group=tied[stages])


def _shard_of_unit(unit: UpdateShard, parameter: sharding.Shard) -> sharding.Shard:
    """Return what a worker updates of its shard of a parameter."""
    is_whole = unit.values.shape == parameter.values.shape
    return replace(
        parameter,
        index=parameter.index if is_whole else parameter.index.run(unit.start),
        values=unit.values.detach(),
        copies=sharding.NO_COPIES if unit.is_run else parameter.copies,
    )


def _path_of(kind: object) -> str:
    """Return the import path of an optimizer class, or "" for any other factory."""
    return f"{kind.__module__}.{kind.__qualname__}" if isinstance(kind, type) else ""
