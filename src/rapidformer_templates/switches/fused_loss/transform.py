"""The output layer that computes its own loss, the transform that puts it there, and the receipt of its logits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import cast

import torch
from torch import nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rapidformer_templates.engines.assembly import Assembly, Building
from rapidformer_templates.engines.receipt import Probe, Receipt
from rapidformer_templates.errors import ModelError
from rapidformer_templates.models.divided_tensor import LossHead, VocabularyShard
from rapidformer_templates.switches.fused_loss.linear_cross_entropy import Cast, LossRecipe, linear_cross_entropy
from rapidformer_templates.switches.fused_loss.logits import SWITCH_FLAG, Logits


def fuse_loss(assembly: Assembly, building: Building[object]) -> None:
    """Make the layer that scores the words compute the loss. Its parameters keep their names.

    In a pipeline, only the last stage changes.

    Raises:
        ModelError: the model has no such layer, or it is not a plain ``torch.nn.Linear``.
    """
    if not building.workers.ends_pipeline:
        return
    model = assembly.model
    find: object = getattr(model, "get_output_embeddings", None)
    head = find() if callable(find) else None
    if type(head) is not nn.Linear:
        what = "none" if head is None else f"a {type(head).__name__}"
        raise ModelError(
            f"the fused loss needs a torch.nn.Linear that scores the words, and {type(model).__name__} has {what}",
            where=SWITCH_FLAG,
            hint=f"leave {SWITCH_FLAG} out; in your own model, let get_output_embeddings() return that layer",
        )
    head.__class__ = FusedHead
    assert isinstance(head, FusedHead)
    on_gpu = building.workers.device.type == "cuda"
    head.kernel = "liger" if on_gpu and find_spec("liger_kernel") else "torch"
    head.used, head.rows, head.columns = set(), 0, 0


class FusedHead(LossHead):
    """A language model's last layer. In training, it delays its product until the loss is computed.

    In evaluation, it is a normal linear layer. In training, it returns :class:`Logits`. It is called again when
    their cross-entropy is taken, so that an engine that shards parameters gathers the weight for the time
    of the loss, as it does for any layer.

    Attributes:
        kernel: which kernel should compute the loss, ``torch`` or ``liger``.
        used: kernels that have computed a loss.
        rows: highest number of rows in a loss so far.
        columns: number of words that this worker scored in the latest loss.
    """

    kernel: str
    used: set[str]
    rows: int
    columns: int

    @torch.compiler.disable
    def __call__(self, hidden: torch.Tensor) -> torch.Tensor | Logits:
        if self.training and torch.is_grad_enabled():
            return Logits.of(self, hidden)
        return super().__call__(hidden)

    def loss(self, hidden: torch.Tensor, target: torch.Tensor, recipe: LossRecipe) -> torch.Tensor:
        """Return the sum of the losses of all rows. See :func:`linear_cross_entropy`."""
        return cast(torch.Tensor, super().__call__(hidden, target, recipe))

    def forward(
        self,
        hidden: torch.Tensor,
        target: torch.Tensor | None = None,
        recipe: LossRecipe | None = None,
        words: VocabularyShard | None = None,
    ) -> torch.Tensor:
        if target is None or recipe is None:
            return super().forward(hidden)
        self.rows, self.columns = max(self.rows, len(target)), len(self.weight)
        casts_only = all(isinstance(step, Cast) for step in recipe.pointwise)
        if self.kernel == "liger" and casts_only and words is None and hidden.dtype != torch.float64:
            from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

            self.used.add("liger")
            loss = LigerFusedLinearCrossEntropyLoss(
                ignore_index=recipe.ignored,
                label_smoothing=recipe.smoothing,
                reduction="sum",
                accum_dtype=torch.float32,
            )
            return cast(torch.Tensor, loss(self.weight, hidden, target, self.bias))
        self.used.add("torch")
        return linear_cross_entropy(hidden, self.weight, self.bias, target, recipe, words)


def head_of(model: nn.Module) -> FusedHead | None:
    """Return the fused head of a model, or None."""
    return next((module for module in model.modules() if isinstance(module, FusedHead)), None)


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
