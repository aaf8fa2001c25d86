"""FSDP: torch's ``fully_shard``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from rapidformer_templates.engines.base import Piece, StateReader
from rapidformer_templates.engines.local import SingleEngine
from rapidformer_templates.engines.state import bytes_held
from rapidformer_templates.layout import find_layout
from rapidformer_templates.plan import Plan
from rapidformer_templates.workers import Workers, open_group_alone

REDUCE_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class FSDPEngine(SingleEngine):
    """Parameters, gradients and optimizer state sharded over the workers, block by block.

    Attributes:
        receipts: measured in the first step: ``parameter_bytes_in_backward``, what this rank has of the
            parameters, whole or in shards, when a backward begins.
    """

    def __init__(self, plan: Plan, workers: Workers, *, clip_grad: float) -> None:
        super().__init__(plan, workers, clip_grad=clip_grad)
        self.reshards = plan.engine_options.get("fsdp_reshard_after_forward", True)
        self.reduce_type = REDUCE_TYPES[plan.engine_options.get("fsdp_reduce_dtype") or "fp32"]

    def _wrap(self, model: nn.Module) -> nn.Module:
        for tensor in (*model.parameters(), *model.buffers()):
            if self.workers.world > 1:
                dist.broadcast(tensor.detach(), src=0)
        open_group_alone(self.workers.device)
        mesh = init_device_mesh(self.workers.device.type, (self.workers.world,))
        policy = MixedPrecisionPolicy()
        if self.compute_type is not None:
            # Parameters travel in the compute type; gradients are summed in fp32 unless it is asked otherwise.
            policy = MixedPrecisionPolicy(param_dtype=self.compute_type, reduce_dtype=self.reduce_type)
        # None: all but the root, whose parameters the backward needs first.
        reshard = None if self.reshards else False
        for block in find_layout(model).blocks.values():
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
        return model

    def _synchronise(self, *, last: bool) -> AbstractContextManager[Any]:
        self._callable.set_requires_gradient_sync(last)  # type: ignore[operator]
        if not self.reshards:
            # Parameters stay whole from the first micro batch to the last; there is memory for them.
            self._callable.set_reshard_after_backward(last)  # type: ignore[operator]
        return nullcontext()

    def _backward(self, loss: torch.Tensor) -> None:
        if not self.receipts:
            held = bytes_held({"parameters": list(self.model.parameters())})
            self.receipts["parameter_bytes_in_backward"] = held["parameters"]
        super()._backward(loss)

    def _settle(self) -> None:
        """Give up whole parameters that a forward without a backward (an evaluation) has left behind."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def pieces(self, kind: str) -> Iterator[Piece]:
        self._settle()
        return super().pieces(kind)

    def load(self, reader: StateReader, *, optimizer: bool) -> None:
        self._settle()
        super().load(reader, optimizer=optimizer)

    def full_weights(self) -> dict[str, torch.Tensor] | None:
        self._settle()
        return super().full_weights()
