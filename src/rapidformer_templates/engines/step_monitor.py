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
from rapidformer_templates.engines.loss import HookCount, wrong_count_error
from rapidformer_templates.errors import NonFiniteLoss
from rapidformer_templates.system.accelerator import HostCopy

MAX_STEPS_IN_FLIGHT = 1
"""Number of unread steps when a new one starts. This keeps the device busy."""


@dataclass
class _StepValues:
    """Values of one step: loss, gradient norm, whether the run must end, and the counts of the user's hook."""

    number: int
    values: HostCopy
    microbatches: list[MicroBatch]


@dataclass
class StepMonitor:
    """Steps whose results the device has and the host has not read yet.

    Attributes:
        hook_counts: counts of the hook in this step's micro batches so far. They are compared on the device.
    """

    device: torch.device
    hook_counts: list[HookCount] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._ended = torch.zeros((), dtype=torch.bool, device=self.device)
        self._unread: deque[_StepValues] = deque()
        self._started = 0

    def begin(self) -> None:
        """Start a step, and read all results except that of the previous step. Raises like :meth:`poll`."""
        self._started += 1
        self.hook_counts = []
        self.poll(MAX_STEPS_IN_FLIGHT)

    def check(self, loss: torch.Tensor, norm: torch.Tensor, *, may_overflow: bool) -> torch.Tensor:
        """Return a device scalar (fp32): 1 if the update of this step must be skipped, else 0.

        Args:
            may_overflow: whether a step that is not finite is only skipped and the run continues (fp16).
        """
        overflow = ~(torch.isfinite(loss) & torch.isfinite(norm))
        wrong = overflow
        if may_overflow:
            wrong = torch.zeros_like(overflow)
        counts = [count.to(torch.float64) for count, _ in self.hook_counts]
        for count, (_, microbatch) in zip(counts, self.hook_counts, strict=True):
            wrong = wrong | (count != microbatch.targets)
        self._ended = self._ended | wrong
        values = torch.stack([loss.to(torch.float64), norm.to(torch.float64), wrong.to(torch.float64), *counts])
        self._unread.append(
            _StepValues(self._started, HostCopy(values), [microbatch for _, microbatch in self.hook_counts])
        )
        return (self._ended | overflow).to(torch.float32)

    def poll(self, running: int = 0) -> None:
        """Read the results of all steps except the last ``running`` ones. All workers read the same steps.

        Raises:
            NonFiniteLoss: a step failed. The ``age`` of the error is the number of steps since.
            RapidformerError: the hook's count of targets differs from ``count_targets``.
        """
        while len(self._unread) > running:
            step = self._unread.popleft()
            loss, norm, wrong, *counts = step.values.values()
            if not wrong:
                continue
            self._unread.clear()  # their updates were skipped
            for count, microbatch in zip(counts, step.microbatches, strict=True):
                if count != microbatch.targets:
                    raise wrong_count_error(count, microbatch)
            raise NonFiniteLoss(f"loss {loss}, gradient norm {norm}", age=self._started - step.number)
