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
from rapidformer_templates.layout import find_layout


class FSDPEngine(SingleEngine):
    """Parameters, gradients and optimizer state sharded over the workers, block by block."""

    def _wrap(self, model: nn.Module) -> nn.Module:
        for tensor in (*model.parameters(), *model.buffers()):
            if self.workers.world > 1:
                dist.broadcast(tensor.detach(), src=0)
        mesh = init_device_mesh(self.workers.device.type, (self.workers.world,))
        policy = MixedPrecisionPolicy()
        if self.compute_type is not None:
            # Parameters travel in the compute type; gradients are summed in fp32.
            policy = MixedPrecisionPolicy(param_dtype=self.compute_type, reduce_dtype=torch.float32)
        for block in find_layout(model).blocks.values():
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        return model

    def _synchronise(self, *, last: bool) -> AbstractContextManager[Any]:
        self._callable.set_requires_gradient_sync(last)  # type: ignore[operator]
        return nullcontext()

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
