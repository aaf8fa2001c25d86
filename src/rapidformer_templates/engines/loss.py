"""From the user's loss to the gradient of the mean over the whole global batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from rapidformer_templates.data.loader import MicroBatch
from rapidformer_templates.data.types import Batch
from rapidformer_templates.engines.base import ComputeLoss
from rapidformer_templates.errors import RapidformerError
from rapidformer_templates.fused_loss.logits import Logits

Counted = tuple[torch.Tensor, MicroBatch]
"""Targets that the user's hook counted on the device, and where."""


def weighted_loss(
    compute_loss: ComputeLoss,
    model: Any,
    batch: Batch,
    microbatch: MicroBatch,
    weight: float,
    later: list[Counted] | None = None,
) -> torch.Tensor:
    """The sum of the losses over the targets of one micro batch times ``weight``, with its graph.

    A mean is multiplied by the number of targets that it is a mean over. A micro batch that counts
    for nothing (no target in it, or no sample left for this rank) gives a zero that still reaches
    every parameter, because other ranks wait for this one's gradients.

    Args:
        later: takes the counts that are tensors, for whom it would cost time to read them now.

    Raises:
        RapidformerError: the hook returned no scalar, or counted other targets than ``count_targets``.
    """
    if microbatch.idle or microbatch.targets == 0:
        return _zero_through(compute_loss, model, batch)
    result = compute_loss(model, batch)
    if isinstance(result, tuple):
        total, counted = result
        if later is not None and isinstance(counted, torch.Tensor):
            later.append((counted.detach(), microbatch))
        elif float(counted) != microbatch.targets:
            raise miscounted(float(counted), microbatch)
        return total * weight
    if not isinstance(result, torch.Tensor) or result.ndim != 0:
        what = f"a tensor of shape {tuple(result.shape)}" if isinstance(result, torch.Tensor) else type(result).__name__
        raise RapidformerError(
            f"compute_loss returned {what}",
            where="compute_loss(model, batch)",
            hint="return the mean loss as a scalar tensor, or (sum, number of targets)",
        )
    weight *= microbatch.targets
    return result if weight == 1.0 else result * weight


def miscounted(counted: float, microbatch: MicroBatch) -> RapidformerError:
    """The error of a hook that counts other targets than ``count_targets``."""
    return RapidformerError(
        f"compute_loss summed over {counted:g} targets, count_targets counted {microbatch.targets:g}",
        where=f"samples {list(microbatch.samples)[:8]}",
        hint="override count_targets(batch) so that both count alike",
    )


def _zero_through(compute_loss: ComputeLoss, model: Any, batch: Batch) -> torch.Tensor:
    """Zero times everything that the model put out; the loss itself may be 0/0 here."""
    recorder = Recorder(model)
    compute_loss(recorder, batch)
    outputs = tree_leaves(recorder.output)
    leaves = [leaf for leaf in outputs if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    # The loss in the output is the very 0/0 that must not be used.
    terms = [
        torch.zeros((), device=leaf.device) * leaf.sum() for leaf in leaves if leaf.requires_grad and leaf.ndim > 0
    ]
    terms += [leaf.zero() for leaf in outputs if isinstance(leaf, Logits)]
    return torch.stack([term.float() for term in terms]).sum()


def reached_parameters(loss: torch.Tensor) -> set[int]:
    """Identities of the parameters that a backward from ``loss`` would reach."""
    reached: set[int] = set()
    seen: set[Any] = set()
    waiting = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            reached.add(id(variable))
        waiting.extend(following for following, _ in node.next_functions)
    return reached


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
