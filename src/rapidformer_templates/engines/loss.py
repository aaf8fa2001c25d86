"""The losses of a step: the user's, converted to the mean over the global batch, and auxiliary ones of the model."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Number
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from rapidformer_templates.data.loader import MicroBatch
from rapidformer_templates.engines.current_batch import is_gathered
from rapidformer_templates.engines.forwards import differentiable
from rapidformer_templates.errors import RapidformerError
from rapidformer_templates.system.workers import Workers

HookCount = tuple[torch.Tensor, MicroBatch]
"""Targets that the user's hook counted on the device, and their micro batch."""


def weighted_loss(
    result: object,
    model: nn.Module | Recorder,
    microbatch: MicroBatch,
    weight: float,
    later: list[HookCount] | None = None,
    *,
    zeros: bool = False,
) -> torch.Tensor:
    """Return the sum of the losses over the targets of one micro batch times ``weight``, with its graph.

    A mean is multiplied by its number of targets. A micro batch without targets, or an idle one without samples,
    returns a zero. Its backward still reaches every parameter, because other ranks wait for this rank's gradients.

    Args:
        result: what ``compute_loss`` returned for the batch.
        model: the model that it called, in a :class:`Recorder` for a batch without targets or an idle one.
        later: collects counts that are tensors, if it would be slow to read them now.
        zeros: whether a batch without targets sends zero gradients through the model, for an engine that waits for
            them. Otherwise it sends none, which is exact even where a derivative is infinite.

    Raises:
        RapidformerError: the hook did not return a scalar, or its count differs from ``count_targets``.
    """
    if isinstance(model, Recorder):
        return _zero_loss(result, model.output, zeros)
    loss, count = loss_and_count(result)
    if not isinstance(loss, torch.Tensor) or loss.ndim != 0:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(result).__name__
        hint = "return the mean loss as a scalar tensor, or (sum, number of targets)"
        raise RapidformerError(f"compute_loss returned {what}", where="compute_loss(model, batch)", hint=hint)
    if torch.is_grad_enabled() and not loss.requires_grad:
        message = "compute_loss returned a loss that does not depend on the trained parameters"
        hint = "compute it from the model's output without .detach(), .item() or torch.no_grad()"
        raise RapidformerError(message, where="compute_loss(model, batch)", hint=hint)
    if count is None:
        weight *= microbatch.targets
        return loss if weight == 1.0 else loss * weight
    if later is not None and isinstance(count, torch.Tensor):
        later.append((count.detach(), microbatch))
    elif differs(float(count), microbatch):
        raise wrong_count_error(float(count), microbatch)
    return loss * weight


def loss_and_count(result: Any) -> tuple[Any, Any]:
    """Return the loss and the number of targets that it is summed over, or None if it is a mean.

    Args:
        result: what ``compute_loss`` returned: a mean, (sum, number of targets), or (mean, model output), as
            transformers' ``Trainer.compute_loss`` returns it.
    """
    if not isinstance(result, tuple) or len(result) != 2:
        return result, None
    loss, second = result
    is_count = second.ndim == 0 if isinstance(second, torch.Tensor) else isinstance(second, Number)
    return loss, second if is_count else None


def differs(count: Any, microbatch: MicroBatch) -> Any:
    """Whether a hook's count of targets (a number, or a tensor on the device) is another one than ``count_targets``.

    Sums of fractions, such as weights of classes, may differ in their last digits.
    """
    return abs(count - microbatch.targets) > min(0.5, 1e-3 * microbatch.targets)


def wrong_count_error(count: float, microbatch: MicroBatch) -> RapidformerError:
    """Return the error for a hook whose count of targets differs from ``count_targets``."""
    message = f"compute_loss summed over {count:g} targets, count_targets counted {microbatch.targets:g}"
    hint = "override count_targets(batch) so that both counts are the same"
    return RapidformerError(message, where=f"samples {list(microbatch.samples)[:8]}", hint=hint)


def _zero_loss(result: object, output: object, zeros: bool) -> torch.Tensor:
    """Return a zero whose backward reaches everything that the loss depends on, without a gradient for any of it.

    It depends neither on the loss (0/0 without a target) nor on the model output (which may be infinite).
    """
    loss, _ = loss_and_count(result)
    # False if a hook itself handles a batch without targets.
    has_graph = isinstance(loss, torch.Tensor) and loss.requires_grad
    graph = [loss] if has_graph and (not zeros or is_gathered()) else []
    outputs = _outputs(output) if zeros or not graph else []
    sources = [*graph, *outputs]
    if not sources:
        return torch.zeros((), requires_grad=True)
    without = len(graph) if zeros else len(sources)
    like = [(source.shape, source.dtype, source.device) for source in sources[without:]]

    def backward(gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Autograd propagates "no gradient", which cannot become NaN."""
        return (*[None] * without, *(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in like))

    return differentiable(lambda *inputs: torch.zeros((), device=inputs[0].device), backward, *sources)


def _outputs(output: object) -> list[torch.Tensor]:
    """Return the tensors in a model output, without its loss (the 0/0) unless it is the only one."""
    leaves = tree_leaves(output)
    # A placeholder for logits that were not computed knows what they would depend on.
    fused = [leaf.zero_through_model() for leaf in leaves if hasattr(leaf, "zero_through_model")]
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    return [*fused, *(tensor for tensor in tensors if tensor.ndim > 0)] or tensors


class Recorder:
    """Wraps a model and remembers its output, so that one forward gives both the loss and the predictions."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.output: Any = None

    def __call__(self, *args: object, **kwargs: object) -> object:
        self.output = self._model(*args, **kwargs)
        return self.output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class DividedSequences(Protocol):
    """Sequences that are divided over workers inside the blocks of a model.

    Attributes:
        length: number of tokens of the whole sequence while inside a block, otherwise None.
    """

    length: int | None

    def shard(self, tensor: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """Return this worker's part of a whole tensor along ``dim``. The last part is padded with zeros."""

    def gather(self, shard: torch.Tensor, length: int) -> torch.Tensor:
        """Gather [B, ``length``, …] from parts [B, S, …]. Call it on every worker that shares the sequences."""


class AuxiliaryLosses(Protocol):
    """Losses that layers add to the gradient in their backward. The user's hook does not see them.

    A step computes the gradient of the mean of the user's loss over the targets of the global batch, plus the
    gradient of the mean of these losses over its tokens.

    Attributes:
        sequences: the division of the sequences that the layers see. None if they see whole sequences.
    """

    sequences: DividedSequences | None

    def begin_step(self, microbatches: Sequence[MicroBatch], workers: Workers) -> None:
        """Inspect the micro batches of this rank. Call it on every rank."""

    def follow(self, loss: torch.Tensor, microbatch: MicroBatch, scale: float) -> None:
        """Add these losses to the backward of ``loss``, which is the loss of this micro batch times ``scale``."""

    def follow_without_loss(self, microbatch: MicroBatch, scale: torch.Tensor) -> None:
        """Add these losses to the backward of a stage without the loss, which starts with the gradient ``scale``."""

    def recorded(self) -> Any:
        """Return what the latest forward has recorded of its batch. :meth:`recall` it before a later backward."""

    def recall(self, recorded: Any) -> None:
        """Restore the result of :meth:`recorded`, for a backward that recomputes activations."""

    def results(self, workers: Workers) -> dict[str, torch.Tensor]:
        """Return values of this step for the metrics, the same on every rank. Call it on every rank."""

    def receipts(self, workers: Workers) -> dict[str, object]:
        """Return measurements of the whole run for the summary. Call it on every rank."""


class LossLayer(nn.Module):
    """A layer that adds auxiliary losses to the gradient.

    Attributes:
        losses: the auxiliary losses of the whole model.
    """

    losses: AuxiliaryLosses


def notes_about(model: nn.Module) -> list[str]:
    """Return a note if a model of transformers adds its router loss to its own loss.

    transformers computes it over all tokens of a forward (``load_balancing_loss_func``). It is a product of two means,
    so its mean over micro batches differs from its value over the whole batch.
    """
    names: dict[int, str] = {}
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and getattr(part.config, "output_router_logits", False):
            names.setdefault(id(part.config), type(part).__name__)  # an inner model shares the outer one's config
    return [
        f"{name} adds a router loss per micro batch, so its loss depends on --micro-batch-size and the number of "
        "workers; with --moe-loss-coeff C, the loss is per sample"
        for name in names.values()
    ]
