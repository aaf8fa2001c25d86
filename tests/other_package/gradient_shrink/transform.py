"""The implementation of the switch."""

import functools
from typing import Any

import torch

from rapidformer_templates.engines.assembly import Assembly, Building


class Shrunk:
    """The forward of an embedding with its gradient scaled by ``alpha``: alpha·e + (1 - alpha)·detached e.

    Attributes:
        watching: Whether to record the norms of the gradients, for the receipt.
        norms: Norms of the gradients at the embedding's output ("came") and of those passed to the table ("went").
    """

    def __init__(self, forward: Any, alpha: float) -> None:
        functools.update_wrapper(self, forward)
        self.forward, self.alpha = forward, alpha
        self.watching = False
        self.norms: list[tuple[str, float]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        whole: torch.Tensor = self.forward(*args, **kwargs)
        shrunk = self.alpha * whole + (1 - self.alpha) * whole.detach()
        if self.watching and shrunk.requires_grad:
            shrunk.register_hook(lambda gradient: self.norms.append(("came", float(gradient.norm()))))
            whole.register_hook(lambda gradient: self.norms.append(("went", float(gradient.norm()))))
        return shrunk


def shrink(assembly: Assembly, building: Building) -> None:
    """Wrap the model's word embedding."""
    model: Any = assembly.model
    embedding = model.get_input_embeddings()
    embedding.forward = Shrunk(embedding.forward, building.options.embedding_gradient_shrink)
