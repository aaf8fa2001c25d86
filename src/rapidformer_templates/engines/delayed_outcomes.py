"""Results of asynchronous steps. The device checks them immediately, and the host reads them later.

Reading a loss in every step makes the host wait for the device, and then the device for the host. Instead, the device
itself skips the update of a failed step and of all later steps. The host reads the result while the next step is
computed. So the weights are as before the failed step when it does.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch

from rapidformer_templates.data.loader import MicroBatch
from rapidformer_templates.engines.loss import Counted, miscounted
from rapidformer_templates.errors import NonFiniteLoss
from rapidformer_templates.system.host_copy import HostCopy

MAX_STEPS_IN_FLIGHT = 1
"""Number of unread steps when a new one starts. This keeps the device busy."""


@dataclass
class _Outcome:
    """Values of one step: loss, gradient norm, whether the run must end, and the counts of the user's hook."""

    number: int
    values: HostCopy
    counted: list[MicroBatch]


@dataclass
class StepMonitor:
    """Steps whose results the device has and the host has not read yet.

    Attributes:
        counted: counts of the hook in this step's micro batches so far. They are compared on the device.
    """

    device: torch.device
    counted: list[Counted] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._ended = torch.zeros((), dtype=torch.bool, device=self.device)
        self._waiting: deque[_Outcome] = deque()
        self._begun = 0

    def begin(self) -> None:
        """Start a step, and read all results except that of the previous step. Raises like :meth:`hear`."""
        self._begun += 1
        self.counted = []
        self.hear(MAX_STEPS_IN_FLIGHT)

    def judge(self, loss: torch.Tensor, norm: torch.Tensor, *, may_overflow: bool) -> torch.Tensor:
        """Return a device scalar (fp32): 1 if the update of this step must be skipped, else 0.

        Args:
            may_overflow: whether a step that is not finite is only skipped and the run continues (fp16).
        """
        overflow = ~(torch.isfinite(loss) & torch.isfinite(norm))
        wrong = overflow
        if may_overflow:
            wrong = torch.zeros_like(overflow)
        counts = [count.to(torch.float64) for count, _ in self.counted]
        for count, (_, microbatch) in zip(counts, self.counted, strict=True):
            wrong = wrong | (count != microbatch.targets)
        self._ended = self._ended | wrong
        values = torch.stack([loss.to(torch.float64), norm.to(torch.float64), wrong.to(torch.float64), *counts])
        self._waiting.append(_Outcome(self._begun, HostCopy(values), [microbatch for _, microbatch in self.counted]))
        return (self._ended | overflow).to(torch.float32)

    def hear(self, running: int = 0) -> None:
        """Read the results of all steps except the last ``running`` ones. All workers read the same steps.

        Raises:
            NonFiniteLoss: a step failed. The ``age`` of the error is the number of steps since.
            RapidformerError: the hook's count of targets differs from ``count_targets``.
        """
        while len(self._waiting) > running:
            outcome = self._waiting.popleft()
            loss, norm, wrong, *counts = outcome.values.values()
            if not wrong:
                continue
            self._waiting.clear()  # their updates were skipped
            for count, microbatch in zip(counts, outcome.counted, strict=True):
                if count != microbatch.targets:
                    raise miscounted(count, microbatch)
            raise NonFiniteLoss(f"loss {loss}, gradient norm {norm}", age=self._begun - outcome.number)
