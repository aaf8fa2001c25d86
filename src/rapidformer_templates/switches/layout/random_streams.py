"""Random numbers under tensor parallelism.

All workers of a tensor-parallel group draw from equal generators. So everything that each of them computes whole, such
as residual dropout, gets the same mask. Inside a divided region, each worker draws from a separate generator. Its seed
is a number that all of them draw when the region begins. So nothing has to be kept between regions: a checkpoint of the
equal generators is enough to resume. A block that is recomputed from the state of the generator before it draws the
same masks again.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from rapidformer_templates.system import accelerator

OUTSIDE = "random numbers of divided layers come from a stream of this worker's own, which no graph can change to"
"""The reason for a graph break where random numbers are drawn."""


def draws_random_numbers(model: nn.Module) -> bool:
    """Return whether a forward in training may draw: a dropout layer, or a rate above zero in the configuration."""
    if any(isinstance(module, _DropoutNd) and module.p > 0 for module in model.modules()):
        return True
    settings: object = getattr(model, "config", None)
    values = settings.to_dict() if hasattr(settings, "to_dict") else {}
    # The dropout of a summary is a layer.
    rates = [name for name in values if ("drop" in name and not name.startswith("summary_")) or "jitter" in name]
    return any(isinstance(values[name], float) and values[name] > 0 for name in rates)


class Streams:
    """Switches torch's generators between the stream that a group shares and one for this worker alone."""

    def __init__(self, rank: int, *, active: bool) -> None:
        """``rank`` is the rank in the group. If ``active`` is False, nothing is drawn and switching costs nothing."""
        self.rank = rank
        self.active = active
        self._shared: tuple[torch.Tensor, tuple[torch.device, torch.Tensor] | None] | None = None

    def enter_local_rng(self) -> None:
        """Switch to this worker's separate stream.

        It may be called again without :meth:`leave_local_rng`. A forward that is recomputed for the backward pass stops
        as soon as it has computed everything needed, and torch then restores its generators.
        """
        if self.active:
            self._switch_to_local()

    @torch.compiler.disable(reason=OUTSIDE)
    def _switch_to_local(self) -> None:
        seed = int(torch.randint(2**32 - 2**16, ()))  # the same on all workers
        device = accelerator.in_use()
        self._shared = (torch.get_rng_state(), (device, accelerator.random_state(device)) if device else None)
        torch.manual_seed(seed + self.rank)

    @property
    def is_local(self) -> bool:
        """Whether this worker currently draws from its separate stream."""
        return self._shared is not None

    def reset(self) -> None:
        """Use the current generators as the shared stream, even if an interrupted forward has not rejoined it."""
        self._shared = None

    def leave_local_rng(self) -> None:
        """Return to the shared stream, in the state where :meth:`enter_local_rng` left it."""
        if self.active:
            self._switch_to_shared()

    @torch.compiler.disable(reason=OUTSIDE)
    def _switch_to_shared(self) -> None:
        if self._shared is None:
            return
        host, device = self._shared
        self._shared = None
        torch.set_rng_state(host)
        if device is not None:
            accelerator.set_random_state(*device)
