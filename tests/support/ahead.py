"""Jobs whose host runs ahead of the device, and a counter of the host's reads."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support import lines

FLAGS = ["--lr", "0.1", "--micro-batch-size", "4", "--weight-decay", "0.1"]

READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default, torch.ops.aten.equal.default}


class Line(lines.Line):
    """Records weights, loss and norm of each step."""

    samples = 40

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
