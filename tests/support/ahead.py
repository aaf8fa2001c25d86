"""Jobs whose host runs ahead of the device, and a counter of the host's reads."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from rapidformer_templates import Data, Trainer

FLAGS = ["--lr", "0.1", "--micro-batch-size", "4", "--weight-decay", "0.1"]

READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default, torch.ops.aten.equal.default}


class Line(Trainer):
    """Fits y = 2x + 1 and records weights, loss and norm of each step. Sample ``poisoned`` has an infinite x."""

    poisoned: int | None = None

    def build_data(self) -> Data:
        x = np.random.default_rng(0).normal(size=(40, 1)).astype(np.float32)
        if self.poisoned is not None:
            x[self.poisoned] = np.inf
        return Data(train=[{"x": row, "y": 2 * row + 1} for row in x])

    def build_model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def compute_loss(self, model: Any, batch: dict[str, torch.Tensor]) -> Any:
        return nn.functional.mse_loss(model(batch["x"]), batch["y"])

    def on_step_end(self, step: int, result: Any) -> None:
        self.results = [*getattr(self, "results", []), result]
        self.weights = [*getattr(self, "weights", []), [p.detach().clone() for p in self.model.parameters()]]


class CountReads(TorchDispatchMode):
    """Counts the operations that make the host wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.reads += func in READS
        return func(*args, **(kwargs or {}))
