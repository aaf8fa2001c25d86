"""One optimizer step. Its guarantees are the same for all engines, and for losses that come from a user's own loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, final

import torch
from torch import nn

from rapidformer_templates.data.loader import MicroBatch
from rapidformer_templates.data.types import Batch
from rapidformer_templates.engines.contract import StepResult
from rapidformer_templates.engines.loss import Recorder, weighted_loss
from rapidformer_templates.engines.unused_parameters import reached_parameters

if TYPE_CHECKING:
    from rapidformer_templates.engines.local import SingleEngine


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
        self._weight = engine._gradient_divisor / max(targets, 1.0)
        self._total = torch.zeros((), dtype=torch.float64, device=engine.workers.device)  # of the weighted losses
        self._finished = 0  # micro batches
        self._measured: Mapping[str, torch.Tensor] = {}
        self._cleanup = ExitStack()
        self._cleanup.callback(engine._drop_gradients)
        self._micro_batch_context = self._cleanup.enter_context(ExitStack())
        self._forward_context = self._cleanup.enter_context(ExitStack())
        self._microbatch: MicroBatch
        self._model: nn.Module | Recorder  # what the current loss is computed with
        self._loss: torch.Tensor  # the mean over the global batch (fp64)
        if engine._monitor:
            engine._monitor.begin()
        if engine._auxiliary:
            engine._auxiliary.begin_step(microbatches, engine.workers)
        engine._begin_step()

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
        self._micro_batch_context.enter_context(self._engine._accumulation_context(last=is_last))
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
        engine = self._engine
        for hook in engine.before_update:
            hook()
        engine._set_lr(lr_factor)
        norm, skipped = engine._finish_step(self._loss)
        if engine._weight_average:
            engine._weight_average.end_step(skipped)
        self._cleanup.close()
        self.result = StepResult(self._loss, norm, skipped, self._measured)
        return self.result

    def __enter__(self) -> Step:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cleanup.__exit__(kind, error, trace)

    @final
    def _begin_forward(self, microbatch: MicroBatch) -> tuple[nn.Module | Recorder, Batch]:
        """Enter the context of a forward."""
        batch = self._forward_context.enter_context(self._engine._forward_context(microbatch))
        self._microbatch, self._model = microbatch, self._engine._callable
        if microbatch.idle or microbatch.targets == 0:
            self._model = Recorder(self._model)
        return self._model, batch

    @final
    def _end_forward(self, result: object) -> torch.Tensor:
        """Return the sum of a micro batch's losses times the weight of the step, with its graph."""
        engine, microbatch = self._engine, self._microbatch
        later = engine._monitor.hook_counts if engine._monitor else None
        zeros = engine._needs_zero_gradients
        loss = weighted_loss(result, self._model, microbatch, self._weight, later, zeros=zeros)
        self._forward_context.close()
        self._model = engine._callable  # frees a recorded output
        if microbatch.targets == 0 and not microbatch.idle:
            engine._fill_zero_gradients(reached_parameters(loss))
        return loss

    @final
    def _begin_backward(self, loss: torch.Tensor, microbatch: MicroBatch) -> None:
        """Start the backward of a micro batch from its loss."""
        engine = self._engine
        if engine._auxiliary:
            engine._auxiliary.follow(loss, microbatch, engine._gradient_divisor)
        engine._backward(loss if engine.loss_scale is None else loss * engine.loss_scale.scale)

    @final
    def _end_micro_batch(self, loss: torch.Tensor) -> None:
        """Run the backward of the current micro batch, and complete the gradients after the last one."""
        self._begin_backward(loss, self._microbatch)
        self._micro_batch_context.close()
        self._total += loss.detach()
        self._engine.micro_steps += 1
        self._finished += 1
        if self._finished == len(self.microbatches):
            self._complete_gradients()

    @final
    def _complete_gradients(self) -> None:
        """Exchange the loss and what the backward has not exchanged of the gradients."""
        engine, workers = self._engine, self._engine.workers
        if engine._auxiliary:
            self._measured = engine._auxiliary.results(workers)
        if not workers.is_replica_leader:  # all workers of a replica compute the same loss
            self._total = torch.zeros_like(self._total)
        self._loss = self._exchange(self._total) / engine._gradient_divisor
        engine._reduce()

    @final
    def _exchange(self, total: torch.Tensor) -> torch.Tensor:
        """Sum ``total`` over the workers. The same exchange finds parameters that received no gradient."""
        engine, workers = self._engine, self._engine.workers
        unused = engine._unused_here()
        if workers.world == 1 and not unused:
            return total
        if engine._monitor:  # an exchange between hosts, so that no host waits for its device
            any_unused = workers.sum(len(unused))[0] > 0
            total = workers.sum_tensor(total)
        else:
            both = workers.sum_tensor(torch.stack([total, torch.full_like(total, len(unused))]))
            total, any_unused = both[0], bool(both[1])
        if any_unused:
            flags = torch.zeros(len(engine._parameters))
            flags[list(unused)] = 1
            counts = workers.sum(*flags.tolist())
            engine._drop_unused([index for index, count in enumerate(counts) if count == workers.world])
        return total
