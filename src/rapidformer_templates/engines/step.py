"""One optimizer step: its parts, the results that the host reads later, and the loss scale of fp16.

Its guarantees are the same for all engines, and for losses that come from a user's own loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, final

import numpy as np
import torch
from torch import nn

from rapidformer_templates.data.loader import MicroBatch
from rapidformer_templates.data.types import Batch
from rapidformer_templates.engines.loss import HookCount, Recorder, differs, weighted_loss, wrong_count_error
from rapidformer_templates.errors import NonFiniteLoss
from rapidformer_templates.system.accelerator import HostCopy
from rapidformer_templates.system.phase_clock import BACKWARD, EXCHANGE, FORWARD, UPDATE
from rapidformer_templates.system.process_state import seed_torch

if TYPE_CHECKING:
    from rapidformer_templates.engines.local import SingleEngine

T = TypeVar("T")

MAX_STEPS_IN_FLIGHT = 1
"""Number of unread steps when a new one starts. This keeps the device busy."""

ComputeLoss = Callable[[Any, Batch], Any]
"""The user's hook. It returns the mean loss of the batch, (sum of losses, number of targets) or (mean, output)."""


@dataclass
class StepResult:
    """The result of an optimizer step, the same on every rank.

    Attributes:
        loss: mean over the targets of the global batch, a scalar tensor.
        grad_norm: global norm of the gradient of that loss, before clipping.
        skipped: whether the update was skipped because the scaled gradient overflowed (fp16).
        measured: further values for the metrics, such as the model's auxiliary losses.

    On a GPU these values are computed asynchronously. Reading one waits for the device.
    """

    loss: torch.Tensor
    grad_norm: torch.Tensor
    skipped: bool | torch.Tensor = False
    measured: Mapping[str, torch.Tensor] = field(default_factory=dict)


class Step:
    """An optimizer step of an engine: forward and backward of each micro batch, then the update.

    :meth:`run` makes the whole step with the user's ``compute_loss``. A loop that computes its losses itself calls
    :meth:`forward` and :meth:`backward` for each micro batch, and then :meth:`update`. The final methods implement the
    guarantees of both ways: auxiliary losses, a host that runs ahead of the device, targets that are counted later,
    loss scaling, measured values and parameters without a gradient. A pipeline overrides :meth:`accumulate`.

    On exit, the context manager drops the gradients of a step without an update, for example after an error. They would
    leak into the next step otherwise.

    Attributes:
        microbatches: the micro batches of this rank.
        result: the result, after the update.
    """

    def __init__(self, engine: SingleEngine, microbatches: Sequence[MicroBatch], targets: float) -> None:
        self.microbatches = microbatches
        self.result: StepResult | None = None
        self._engine = engine
        self._weight = engine.gradient_divisor / (targets or 1.0)
        self._total: torch.Tensor | None = None  # of the weighted losses on this worker (fp64)
        self._finished = 0  # micro batches
        self._losses_here: _Losses = []
        self._measured: Mapping[str, torch.Tensor] = {}
        self._contexts: list[AbstractContextManager[object]] = []  # those of the current micro batch that are open
        self._microbatch: MicroBatch
        self._model: nn.Module | Recorder  # what the current loss is computed with
        self._loss: torch.Tensor  # the mean over the global batch (fp64)
        if engine.monitor:
            engine.workers.clock.enter(EXCHANGE)  # the device may wait for other workers
            engine.monitor.begin(self._losses_here)
        engine.begin(microbatches)

    @final
    def run(self, lr_factor: float | Callable[[], float]) -> StepResult:
        """Make the whole step.

        Args:
            lr_factor: fraction of the peak learning rate, or a function that returns it right before the update.

        Raises:
            NonFiniteLoss: see :meth:`update`.
        """
        with self:
            self.accumulate()
            return self.update(lr_factor() if callable(lr_factor) else lr_factor)

    def accumulate(self) -> None:
        """Run forward and backward of the remaining micro batches with the user's ``compute_loss``."""
        for microbatch in self.microbatches[self._finished :]:
            loss = self._end_forward(self._engine.compute_loss(*self.forward(microbatch)))
            self._end_micro_batch(loss)

    @final
    def forward(self, microbatch: MicroBatch) -> tuple[nn.Module | Recorder, Batch]:
        """Begin a micro batch. Returns the model that computes the loss, and the batch on the device.

        Until :meth:`backward`, torch computes in the precision of the engine.
        """
        is_last = self._finished == len(self.microbatches) - 1
        self._enter(self._engine.accumulation(last=is_last))
        return self._begin_forward(microbatch)

    @final
    def backward(self, loss: object) -> None:
        """Run the backward of the micro batch that :meth:`forward` began. The last one completes the gradients.

        Args:
            loss: what ``compute_loss`` may return.
        """
        self._end_micro_batch(self._end_forward(loss))

    @final
    def update(self, lr_factor: float) -> StepResult:
        """Update the parameters after the last micro batch, and drop the gradients.

        Args:
            lr_factor: fraction of the peak learning rate.

        Raises:
            NonFiniteLoss: loss or gradient is infinite or NaN, in this step or in an earlier one that the host only
                reads now. The weights are as before that step.
        """
        self._engine.workers.clock.enter(UPDATE)
        try:
            norm, skipped = self._engine.update(self._loss, lr_factor)
        except NonFiniteLoss as error:
            error.samples = _not_finite(self._losses_here)
            raise
        self._engine.drop()
        self.result = StepResult(self._loss, norm, skipped, self._measured)
        return self.result

    def __enter__(self) -> Step:
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            while self._contexts:
                self._contexts.pop().__exit__(*error)
        finally:
            if self.result is None:
                self._engine.drop()

    def _enter(self, context: AbstractContextManager[T]) -> T:
        value = context.__enter__()
        self._contexts.append(context)
        return value

    def _leave(self) -> None:
        self._contexts.pop().__exit__(None, None, None)

    @final
    def _begin_forward(self, microbatch: MicroBatch, stage: int = 0) -> tuple[nn.Module | Recorder, Batch]:
        """Enter the context of a forward.

        Args:
            stage: the pipeline stage that computes the loss.
        """
        seed_forward(microbatch, stage)
        self._engine.workers.clock.enter(FORWARD)
        self._microbatch = microbatch
        self._model, batch = self._enter(self._engine.forward(microbatch))
        return self._model, batch

    @final
    def _end_forward(self, result: object) -> torch.Tensor:
        """Return the sum of a micro batch's losses times the weight of the step, with its graph."""
        engine, microbatch = self._engine, self._microbatch
        later = engine.monitor.hook_counts if engine.monitor else None
        zeros = engine.needs_zero_gradients
        loss = weighted_loss(result, self._model, microbatch, self._weight, later, zeros=zeros)
        del self._model  # frees a recorded output
        self._leave()
        engine.check_loss(loss, microbatch)
        value = loss.detach()
        self._losses_here.append((value, microbatch.samples))
        # A copy, because workers sum it in place.
        self._total = value.to(torch.float64, copy=True) if self._total is None else self._total + value
        return loss

    @final
    def _begin_backward(self, loss: torch.Tensor, microbatch: MicroBatch) -> None:
        """Start the backward of a micro batch from its loss."""
        self._engine.workers.clock.enter(BACKWARD)
        self._engine.backward(loss, microbatch)

    @final
    def _end_micro_batch(self, loss: torch.Tensor) -> None:
        """Run the backward of the current micro batch, and complete the gradients after the last one."""
        self._begin_backward(loss, self._microbatch)
        self._leave()
        self._engine.micro_steps += 1
        self._finished += 1
        if self._finished == len(self.microbatches):
            self._complete_gradients()

    @final
    def _complete_gradients(self) -> None:
        """Exchange the loss and what the backward has not exchanged of the gradients."""
        engine, workers = self._engine, self._engine.workers
        workers.clock.enter(EXCHANGE)
        if engine.assembly.losses:
            self._measured = engine.assembly.losses.results(workers)
        total = self._total
        if total is None or not workers.is_replica_leader:  # all workers of a replica compute the same loss
            total = torch.zeros((), dtype=torch.float64, device=workers.device)
        self._loss = engine.reduce(total)


def seed_forward(microbatch: MicroBatch, stage: int) -> None:
    """Seed torch's generators for a forward if its random numbers depend on the micro batch and the stage only."""
    if microbatch.random_key is not None:
        seed_torch(int(np.random.SeedSequence((*microbatch.random_key, stage)).generate_state(1)[0]))


_Losses: TypeAlias = "list[tuple[torch.Tensor, Sequence[int]]]"
"""The losses that this worker has computed for micro batches, on the device, each with its samples."""


def _not_finite(losses: _Losses) -> list[int]:
    """Return the samples of the micro batches whose losses are not finite. The host waits for the device."""
    return sorted({sample for loss, samples in losses if not torch.isfinite(loss) for sample in samples})


class StepMonitor:
    """Steps whose results the device has and the host has not read yet.

    Reading a loss in every step makes the host wait for the device, and then the device for the host. Instead, the
    device itself skips the update of a failed step and of all later steps. The host reads the result while the next
    step is computed. So the weights are as before the failed step when it does.

    Attributes:
        hook_counts: counts of the hook in this step's micro batches so far. They are compared on the device.
    """

    def __init__(self, device: torch.device) -> None:
        self.hook_counts: list[HookCount] = []
        self._ended = torch.zeros((), dtype=torch.bool, device=device)
        # For each step: its number, the values on the device, the micro batches of the hook's counts, and the losses.
        self._unread: deque[tuple[int, HostCopy, list[MicroBatch], _Losses]] = deque()
        self._started = 0
        self._losses: _Losses = []

    def begin(self, losses: _Losses) -> None:
        """Start a step, and read all results except that of the previous step. Raises like :meth:`poll`.

        Args:
            losses: the losses of this worker, which the step adds when it computes them.
        """
        self._started += 1
        self.hook_counts, self._losses = [], losses
        self.poll(MAX_STEPS_IN_FLIGHT)

    def check(self, loss: torch.Tensor, norm: torch.Tensor, *, may_overflow: bool) -> torch.Tensor:
        """Return a device scalar (fp32): 1 if the update of this step must be skipped, else 0.

        Args:
            may_overflow: whether a step that is not finite is only skipped and the run continues (fp16).
        """
        overflow = ~(torch.isfinite(loss) & torch.isfinite(norm))
        wrong = torch.zeros_like(overflow) if may_overflow else overflow
        counts = [count.to(torch.float64) for count, _ in self.hook_counts]
        for count, (_, microbatch) in zip(counts, self.hook_counts, strict=True):
            wrong = wrong | differs(count, microbatch)
        self._ended = self._ended | wrong
        values = torch.stack([loss.to(torch.float64), norm.to(torch.float64), wrong.to(torch.float64), *counts])
        microbatches = [microbatch for _, microbatch in self.hook_counts]
        self._unread.append((self._started, HostCopy(values), microbatches, self._losses))
        return (self._ended | overflow).to(torch.float32)

    def poll(self, running: int = 0) -> None:
        """Read the results of all steps except the last ``running`` ones. All workers read the same steps.

        Raises:
            NonFiniteLoss: a step failed. The ``age`` of the error is the number of steps since.
            RapidformerError: the hook's count of targets differs from ``count_targets``.
        """
        while len(self._unread) > running:
            number, values, microbatches, losses = self._unread.popleft()
            loss, norm, wrong, *counts = values.values()
            if not wrong:
                continue
            self._unread.clear()  # their updates were skipped
            for count, microbatch in zip(counts, microbatches, strict=True):
                if differs(count, microbatch):
                    raise wrong_count_error(count, microbatch)
            message = f"loss {loss}, gradient norm {norm}"
            raise NonFiniteLoss(message, age=self._started - number, samples=_not_finite(losses))


class DynamicLossScale:
    """Grows after steps without overflow, and halves on an overflow (Micikevicius et al., 2018).

    Torch's ``GradScaler`` checks the gradients on one rank. With sharded gradients, ranks would disagree. This class
    uses the global gradient norm instead, which is the same on every rank.

    Attributes:
        scale: a device scalar (fp32), so that the host need not wait for it.
    """

    def __init__(self, scale: float = 65536.0, growth_interval: int = 2000) -> None:
        self.scale = torch.tensor(scale, dtype=torch.float32)
        self.growth_interval = growth_interval
        self._good_steps = torch.zeros((), dtype=torch.int32)

    def to(self, device: torch.device) -> None:
        """Move the scale to ``device``."""
        self.scale, self._good_steps = self.scale.to(device), self._good_steps.to(device)

    def update(self, *, overflow: bool | torch.Tensor) -> None:
        """Update the scale after a step. A tensor is 1 (fp32, on the device) for an overflow, else 0."""
        overflowed = torch.as_tensor(overflow, dtype=torch.float32, device=self.scale.device)
        torch._amp_update_scale_(self.scale, self._good_steps, overflowed, 2.0, 0.5, self.growth_interval)
        self.scale.clamp_(min=1.0)

    def state(self) -> dict[str, float]:
        return {"scale": float(self.scale), "good_steps": int(self._good_steps)}

    def load_state(self, state: Mapping[str, float]) -> None:
        self.scale.fill_(float(state["scale"]))
        self._good_steps.fill_(int(state["good_steps"]))
