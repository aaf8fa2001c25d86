"""Random numbers under tensor parallelism.

All workers of a tensor-parallel group draw from equal generators: what each of them computes whole (residual
dropout, for instance) gets one mask. Inside a divided region each worker draws from a generator of its own, which
starts from a number that all of them draw at the region's beginning. So nothing is kept between regions: a
checkpoint of the equal generators is enough to resume, and a block that is computed again, from the generator's
state before it, draws its masks again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from rapidformer_templates.system import accelerator

OUTSIDE = "random numbers of divided layers come from a stream of this worker's own, which no graph can change to"
"""Why graphs break where something is drawn."""


def draws_random_numbers(model: nn.Module) -> bool:
    """Whether a forward in training may draw: a dropout layer, or a rate in the configuration, above zero."""
    if any(isinstance(module, _DropoutNd) and module.p > 0 for module in model.modules()):
        return True
    settings: Any = getattr(model, "config", None)
    values = settings.to_dict() if hasattr(settings, "to_dict") else {}
    return any(isinstance(value, float) and value > 0 for name, value in values.items() if _is_rate(name))


def _is_rate(name: str) -> bool:
    return ("drop" in name and not name.startswith("summary_")) or "jitter" in name  # a summary's is a layer


class Streams:
    """Switches torch's generators between the stream that a group shares and one of this worker's own."""

    def __init__(self, rank: int, *, active: bool) -> None:
        """``rank``: in the group. ``active``: False where nothing is drawn, so that switching costs nothing."""
        self.rank = rank
        self.active = active
        self._shared: tuple[torch.Tensor, tuple[torch.device, torch.Tensor] | None] | None = None

    def diverge(self) -> None:
        """Go on with a stream of this worker's own.

        It may follow another one without :meth:`rejoin`: a computation that is repeated for the backward pass ends
        as soon as all that is needed is there, and torch puts its generators back then.
        """
        if self.active:
            self._leave()

    @torch.compiler.disable(reason=OUTSIDE)
    def _leave(self) -> None:
        seed = int(torch.randint(2**32 - 2**16, ()))  # the same on all workers
        device = accelerator.in_use()
        self._shared = (torch.get_rng_state(), (device, accelerator.random_state(device)) if device else None)
        torch.manual_seed(seed + self.rank)

    @property
    def apart(self) -> bool:
        """Whether this worker goes on with a stream of its own."""
        return self._shared is not None

    def forget(self) -> None:
        """Take the generators as they are for the shared stream, whatever a computation that was cut short has left."""
        self._shared = None

    def rejoin(self) -> None:
        """Go back to the shared stream, where :meth:`diverge` left it."""
        if self.active:
            self._return()

    @torch.compiler.disable(reason=OUTSIDE)
    def _return(self) -> None:
        if self._shared is None:
            return
        host, device = self._shared
        self._shared = None
        torch.set_rng_state(host)
        if device is not None:
            accelerator.set_random_state(*device)
