"""What the steps on a device came to: judged there at once, heard of by the host later.

Reading a loss makes the host wait for the device, and then the device for the host, in every step. Here
the device itself leaves out the updates of a step that went wrong and of all that follow, and the host
hears of it while the next step is computed. So the weights are as before the step when it does.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch

from rapidformer_templates.data.loader import MicroBatch
from rapidformer_templates.engines.loss import Counted, miscounted
from rapidformer_templates.errors import NonFiniteLoss
from rapidformer_templates.system.host_copy import HostCopy

RUNNING = 1
"""Steps of which the host has not heard when it begins another one: the device always has one to compute."""


@dataclass
class _Outcome:
    """One step's values: loss, gradient norm, whether the run must end, and the counts of the user's hook."""

    number: int
    values: HostCopy
    counted: list[MicroBatch]


@dataclass
class Outcomes:
    """Those of the steps of one engine.

    Attributes:
        counted: what the hook counted in this step's micro batches so far, to be compared on the device.
    """

    device: torch.device
    counted: list[Counted] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._ended = torch.zeros((), dtype=torch.bool, device=self.device)
        self._waiting: deque[_Outcome] = deque()
        self._begun = 0

    def begin(self) -> None:
        """A step begins; hear of those before the last one. Errors as :meth:`hear`."""
        self._begun += 1
        self.counted = []
        self.hear(RUNNING)

    def judge(self, loss: torch.Tensor, norm: torch.Tensor, *, may_overflow: bool) -> torch.Tensor:
        """1 if the update of this step must be left out, else 0: a number on the device (fp32).

        Args:
            may_overflow: a step that is not finite is skipped, and the run goes on (fp16).
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
        """Hear of all steps but the last ``running`` ones; all workers hear of the same steps.

        Raises:
            NonFiniteLoss: of a step; its ``age`` says which.
            RapidformerError: the hook counted other targets than ``count_targets``.
        """
        while len(self._waiting) > running:
            outcome = self._waiting.popleft()
            loss, norm, wrong, *counts = outcome.values.values()
            if not wrong:
                continue
            self._waiting.clear()  # they were left out
            for count, microbatch in zip(counts, outcome.counted, strict=True):
                if count != microbatch.targets:
                    raise miscounted(count, microbatch)
            raise NonFiniteLoss(f"loss {loss}, gradient norm {norm}", age=self._begun - outcome.number)
