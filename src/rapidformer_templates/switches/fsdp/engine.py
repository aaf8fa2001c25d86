"""FSDP: torch's ``fully_shard``, over all workers or inside groups of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from rapidformer_templates.data.loader import MicroBatch
from rapidformer_templates.engines.contract import Piece, StateReader
from rapidformer_templates.engines.local import SingleEngine
from rapidformer_templates.engines.pieces import bytes_held
from rapidformer_templates.engines.reached import Route
from rapidformer_templates.models.blocks import canonical_name, find_blocks
from rapidformer_templates.planning.plan import Plan
from rapidformer_templates.system import accelerator
from rapidformer_templates.system.workers import Workers, open_group_alone

COPIES, SHARDS = "copies", "shards"
REDUCE_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class FSDPEngine(SingleEngine):
    """Parameters, gradients and optimizer state sharded over the workers, block by block.

    With a shard size of N they are sharded inside groups of N neighbours (hybrid sharding); each group has a copy of
    all of them, and workers with the same shard sum its gradient.

    Attributes:
        group: workers that share one copy.
        receipts: measured in the first step: ``parameter_bytes_in_backward``, what this rank has of the
            parameters, whole or in shards, when a backward begins; ``whole_in_backward``, the share that is whole
            then; ``gradients_summed_in``, the types of the sums.
    """

    def __init__(self, plan: Plan, workers: Workers, *, clip_grad: float) -> None:
        super().__init__(plan, workers, clip_grad=clip_grad)
        self.group = int(plan.engine_options.get("fsdp_shard_size", workers.world))
        self.reshards = plan.engine_options.get("fsdp_reshard_after_forward", True)
        self.reduce_type = REDUCE_TYPES[plan.engine_options.get("fsdp_reduce_dtype") or "fp32"]

    def _shard(self, model: nn.Module) -> None:
        # None: all but the root, whose parameters the backward needs first.
        self._divide(model, None if self.reshards else False)

    def frozen(self, model: nn.Module) -> nn.Module:
        model = accelerator.move(model, self.workers.device).requires_grad_(False).eval()
        self._divide(model, True)  # there is no backward that would need the root's parameters again
        return model

    def _divide(self, model: nn.Module, reshard: bool | None) -> None:
        for tensor in (*model.parameters(), *model.buffers()):
            if self.workers.world > 1:
                dist.broadcast(tensor.detach(), src=0)
        policy = MixedPrecisionPolicy()
        if self.compute_type is not None:
            # Parameters travel in the compute type; gradients are summed in fp32 unless it is asked otherwise.
            policy = MixedPrecisionPolicy(param_dtype=self.compute_type, reduce_dtype=self.reduce_type)
        for block in find_blocks(model).values():
            fully_shard(block, mesh=self._mesh, mp_policy=policy, reshard_after_forward=reshard)
        fully_shard(model, mesh=self._mesh, mp_policy=policy, reshard_after_forward=reshard)

    @cached_property
    def _mesh(self) -> DeviceMesh:
        """The workers; where there are copies, by copy and shard. Neighbours share one, and lie in one node."""
        open_group_alone(self.workers.device)
        copies = self.workers.world // self.group
        shape, names = ((copies, self.group), (COPIES, SHARDS)) if copies > 1 else ((self.group,), (SHARDS,))
        return init_device_mesh(self.workers.device.type, shape, mesh_dim_names=names)

    def _distribute(self) -> nn.Module:
        units: dict[str, Any] = {n: m for n, m in self.model.named_modules() if isinstance(m, FSDPModule)}
        names = {id(p): canonical_name(n) for n, p in self.model.named_parameters()}
        trained: dict[str, list[str]] = {}
        for name, unit in units.items():
            groups = _groups(unit)
            trained[name] = [names[id(p.sharded_param)] for g in groups for p in g.fsdp_params if _is_trained(p)]
            for group in groups:
                self._reduce_all_of(group)
        self._route = Route(units, trained, self.workers, "FSDP") if self.workers.world > 1 else None
        return self.model

    def _reduce_all_of(self, group: Any) -> None:
        """Have every trained parameter in each reduction of a group, with zeros where there is no gradient."""
        post_backward = group.post_backward

        def reduce_all(*unused: Any) -> None:
            if group.reduce_grads:
                trained = [p for p in group.fsdp_params if _is_trained(p)]
                accumulated = any(p.unsharded_accumulated_grad is not None for p in trained)
                for parameter in trained:
                    unsharded = parameter.unsharded_param
                    if parameter.unsharded_accumulated_grad is not None:
                        self._reached.add(id(parameter.sharded_param))
                        continue
                    if unsharded.grad is not None:
                        self._reached.add(id(parameter.sharded_param))
                    else:
                        unsharded.grad = torch.zeros_like(unsharded)
                    if accumulated:  # in the type of the others
                        parameter.to_accumulated_grad_if_needed()
            post_backward(*unused)

        group.post_backward = reduce_all

    def _schedule(self, microbatches: Sequence[MicroBatch], weight: float) -> torch.Tensor:
        self._reached: set[int] = set()
        return super()._schedule(microbatches, weight)

    def _missed(self) -> Sequence[int]:
        return [index for index, p in enumerate(self._parameters) if id(p) not in self._reached]

    def _synchronise(self, *, last: bool) -> AbstractContextManager[Any]:
        self._callable.set_requires_gradient_sync(last)  # type: ignore[operator]
        if not self.reshards:
            # Parameters stay whole from the first micro batch to the last; there is memory for them.
            self._callable.set_reshard_after_backward(last)  # type: ignore[operator]
        return self._route.followed() if self._route else nullcontext()

    def _backward(self, loss: torch.Tensor) -> None:
        if not self.receipts:
            held = bytes_held({"parameters": list(self.model.parameters())})
            self.receipts["parameter_bytes_in_backward"] = held["parameters"]
            self.receipts["whole_in_backward"] = self._whole_now()
            self.receipts["gradients_summed_in"] = self._summed_in()
        if self._route:
            self._route.forward_done()
        super()._backward(loss)

    def _grad_norm(self) -> torch.Tensor:
        norm = super()._grad_norm()
        if self._mesh.ndim > 1:
            # Each group adds up the shards in an order of its own; another last bit would be clipped into its copy.
            dist.broadcast(norm, group=self._mesh.get_group(COPIES), group_src=0)
        return norm

    def _whole_now(self) -> float:
        """The share of the parameters' elements that are whole on this rank."""
        sizes = [(p.numel(), isinstance(p, DTensor)) for p in self.model.parameters()]
        return sum(count for count, divided in sizes if not divided) / sum(count for count, _ in sizes)

    def _summed_in(self) -> list[str]:
        """The types in which FSDP sums gradients over the workers."""
        units = (module for module in self.model.modules() if isinstance(module, FSDPModule))
        groups = [group for unit in units for group in _groups(unit)]
        # None where nothing need be cast: then in the type of the gradients, which is that of the computation.
        types = {group._reduce_dtype or self.compute_type or group._orig_dtype for group in groups}
        return [name for name, known in REDUCE_TYPES.items() if known in types]

    def _reshard(self) -> None:
        """Give up whole parameters that a forward without a backward (an evaluation) has left behind."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _exchange_averages(self) -> None:
        self._reshard()
        super()._exchange_averages()

    def pieces(self, kind: str) -> Iterator[Piece]:
        self._reshard()
        return super().pieces(kind)

    def load(self, reader: StateReader, *, optimizer: bool) -> None:
        self._reshard()
        super().load(reader, optimizer=optimizer)

    def full_weights(self) -> dict[str, torch.Tensor] | None:
        self._reshard()
        return super().full_weights()


def _groups(unit: FSDPModule) -> list[Any]:
    """The groups of parameters that a unit gathers and reduces at a time."""
    state: Any = unit._get_fsdp_state()
    groups: list[Any] = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def _is_trained(parameter: Any) -> bool:
    trained: bool = parameter.sharded_param.requires_grad
    return trained
