"""Label smoothing for any cross-entropy that a model computes internally."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from rapidformer_templates.errors import ModelError


class _Smoothing(TorchFunctionMode):
    """Sets ``label_smoothing`` in every call of ``torch.nn.functional.cross_entropy``."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share
        self.acted = False

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        arguments: Mapping[str, Any] = kwargs or {}
        if function is not functional.cross_entropy:
            return function(*args, **arguments)
        self.acted = True
        return function(*args, **{**arguments, "label_smoothing": self.share})


@contextmanager
def smoothed_labels(share: float) -> Iterator[None]:
    """Spread ``share`` of each target evenly over all classes in every cross-entropy inside the context, as torch does.

    This also smooths logits that are sharded over workers or never computed, because their loss uses the same function.
    Without gradients nothing is smoothed. An evaluation reports the loss of the original targets.

    Raises:
        ModelError: no cross-entropy was computed inside the context.
    """
    if not share or not torch.is_grad_enabled():
        yield
        return
    with _Smoothing(share) as smoothing:
        yield
    if not smoothing.acted:
        raise ModelError(
            "the model's loss is not torch's cross-entropy, the only one that can be smoothed",
            where="--label-smoothing",
            hint="leave it out, or smooth the labels in compute_loss() of your own script",
        )
