"""Adapters trained by a loop over peft's model, and weights read from codes of fewer bits."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

QUANTILES = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634),
    *(0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""Quantiles of NormalFloat, as listed in the appendix of the paper."""


class Recording:
    """A mixin of jobs that keeps the batches on which it trains."""

    def compute_loss(self, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if model.training and torch.is_grad_enabled() and hasattr(self, "model"):
            self.batches = [*getattr(self, "batches", []), batch]
        loss: torch.Tensor = super().compute_loss(model, batch)  # type: ignore[misc]
        return loss


def _own_loss(model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    loss = model(**batch).loss
    return loss, loss


def train_by_hand(
    model: Any,
    batches: Iterable[dict[str, torch.Tensor]],
    losses_of: Callable[[Any, dict[str, torch.Tensor]], tuple[torch.Tensor, torch.Tensor]] = _own_loss,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train the adapters of a model of peft, one batch per step. Return the losses, and the weights by our names.

    Args:
        losses_of: returns (loss to report, loss to minimize).
    """
    trained = {name.removeprefix("base_model.model."): p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2, weight_decay=0)
    losses = []
    for batch in batches:
        task, objective = losses_of(model, batch)
        objective.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(task.detach()))
    return losses, {name: parameter.detach() for name, parameter in trained.items()}


def read_codes(weight: torch.Tensor, coding: str) -> torch.Tensor:
    """Return the dequantized weight: the nearest multiple of a step, or quantile, of its row or block of 64."""
    read = []
    for part in weight.flatten().split(weight.shape[-1] if coding == "int8" else 64):
        if coding == "nf4":
            code = torch.tensor(QUANTILES)
            nearest = (part[:, None] / part.abs().max() - code).abs().argmin(1)
            read.append(code[nearest] * part.abs().max())
        else:
            lowest, highest = (-127, 127) if coding == "int8" else (-8, 7)
            step = part.abs().max() / ((highest - lowest) / 2)
            # The greatest number is midway between two integers, and torchao multiplies by the inverse.
            read.append((part * (1 / step)).round().clamp(lowest, highest) * step)
    return torch.cat(read).view(weight.shape)
