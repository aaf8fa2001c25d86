"""Receipt that shows which tensors of the vocabulary's width are created."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rapidformer_templates.engines.receipt import Probe, Receipt
from rapidformer_templates.switches.fused_loss.logits import head_of


class WidestRows(TorchDispatchMode):
    """Records the largest floating-point tensor for each size of the last dimension, from any source.

    Views do not count: the transposed weight of the head is one.

    Attributes:
        rows: rows of this tensor, by its last dimension.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rows: Counter[int] = Counter()

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Sequence[object] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        if not getattr(func, "is_view", False):
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.numel():
                    width = leaf.shape[-1:].numel()
                    self.rows[width] = max(self.rows[width], leaf.numel() // width)
        return result


class LogitsInMemory(Receipt):
    """Reports the peak number of rows of logits in memory during a forward, the number without fusing, and the kernel.

    Logits cover all words, or the words that this worker scores.
    """

    def before_step(self, probe: Probe) -> dict[str, object]:
        head = head_of(probe.engine.model)
        if head is None:
            return {}
        # Not compiled: code that meets this mode under the compiler is never compiled again.
        with torch.compiler.set_stance("force_eager"), WidestRows() as widest:
            probe.forward()
        return {
            "logits_rows": max(widest.rows[width] for width in (head.out_features, head.columns)),
            "logits_rows_without": head.rows,
            "fused_loss_kernel": sorted(head.used),
        }
