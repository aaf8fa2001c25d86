"""From the user's loss to the gradient of the mean over the whole global batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from rapidformer_templates.data.loader import MicroBatch
from rapidformer_templates.data.types import Batch
from rapidformer_templates.engines.contract import ComputeLoss
from rapidformer_templates.errors import RapidformerError

Counted = tuple[torch.Tensor, MicroBatch]
"""Targets that the user's hook counted on the device, and where."""


def weighted_loss(
    compute_loss: ComputeLoss,
    model: Any,
    batch: Batch,
    microbatch: MicroBatch,
    weight: float,
    later: list[Counted] | None = None,
    *,
    zeros: bool = False,
) -> torch.Tensor:
    """The sum of the losses over the targets of one micro batch times ``weight``, with its graph.

    A mean is multiplied by the number of targets that it is a mean over. A micro batch that counts
    for nothing (no target in it, or no sample left for this rank) gives a zero whose backward still comes
    to every parameter, because other ranks wait for this one's gradients.

    Args:
        later: takes the counts that are tensors, for whom it would cost time to read them now.
        zeros: what counts for nothing sends gradients of zero through the model, for an engine that waits for them;
            else it sends none, which is exact also where a derivative is infinite.

    Raises:
        RapidformerError: the hook returned no scalar, or counted other targets than ``count_targets``.
    """
    if microbatch.idle or microbatch.targets == 0:
        return _nothing_through(compute_loss, model, batch, zeros)
    result = compute_loss(model, batch)
    counted = None
    loss = result
    if isinstance(result, tuple) and len(result) == 2:
        loss, counted = result
    if not isinstance(loss, torch.Tensor) or loss.ndim != 0:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(result).__name__
        raise RapidformerError(
            f"compute_loss returned {what}",
            where="compute_loss(model, batch)",
            hint="return the mean loss as a scalar tensor, or (sum, number of targets)",
        )
    if counted is None:
        weight *= microbatch.targets
        return loss if weight == 1.0 else loss * weight
    if later is not None and isinstance(counted, torch.Tensor):
        later.append((counted.detach(), microbatch))
    elif float(counted) != microbatch.targets:
        raise miscounted(float(counted), microbatch)
    return loss * weight


def miscounted(counted: float, microbatch: MicroBatch) -> RapidformerError:
    """The error of a hook that counts other targets than ``count_targets``."""
    return RapidformerError(
        f"compute_loss summed over {counted:g} targets, count_targets counted {microbatch.targets:g}",
        where=f"samples {list(microbatch.samples)[:8]}",
        hint="override count_targets(batch) so that both count alike",
    )


def _nothing_through(compute_loss: ComputeLoss, model: Any, batch: Batch, zeros: bool) -> torch.Tensor:
    """A zero whose backward comes by all that the loss would come to, and brings no gradient to any of it.

    Neither the loss (0/0 without a target) nor what the model puts out (it may be infinite) has a part in it.
    """
    recorder = Recorder(model)
    result = compute_loss(recorder, batch)
    loss = result[0] if isinstance(result, tuple) else result
    has_graph = isinstance(loss, torch.Tensor) and loss.requires_grad  # not where a hook sees that nothing counts
    sources = [loss] if has_graph and not zeros else _outputs(recorder.output)
    nothing: torch.Tensor = _Nothing.apply(zeros, *sources) if sources else torch.zeros((), requires_grad=True)
    return nothing


def _outputs(output: Any) -> list[torch.Tensor]:
    """What a model puts out, without a loss among it (the 0/0), unless that is all that there is."""
    leaves = tree_leaves(output)
    # What stands for logits that nobody has computed knows itself what they would depend on.
    fused = [leaf.zero_through_model() for leaf in leaves if hasattr(leaf, "zero_through_model")]
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    return [*fused, *(tensor for tensor in tensors if tensor.ndim > 0)] or tensors


class _Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, zeros: bool, *sources: torch.Tensor) -> torch.Tensor:
        ctx.zeros, ctx.like = zeros, [(source.shape, source.dtype, source.device) for source in sources]
        return torch.zeros((), device=sources[0].device)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.zeros:
            return (None, *(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like))
        return (None,) * (1 + len(ctx.like))  # autograd goes on with "no gradient": nothing can turn it into a NaN


class Recorder:
    """A model that remembers what it put out, so that one forward serves loss and predictions."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.output: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.output = self._model(*args, **kwargs)
        return self.output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)
