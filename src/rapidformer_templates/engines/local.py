"""One device, and DDP."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from rapidformer_templates.data.loader import MicroBatch, to_device
from rapidformer_templates.engines import state as engine_state
from rapidformer_templates.engines.auxiliary import AuxiliaryLosses, auxiliary_losses_of
from rapidformer_templates.engines.base import ComputeLoss, Piece, StateReader, StepResult
from rapidformer_templates.engines.loss import Recorder, reached_parameters, weighted_loss
from rapidformer_templates.engines.loss_scale import DynamicLossScale
from rapidformer_templates.engines.mask_checks import answered
from rapidformer_templates.engines.offload import HostOptimizer, lies_in_host_memory
from rapidformer_templates.engines.outcomes import Outcomes
from rapidformer_templates.errors import NonFiniteLoss, RapidformerError
from rapidformer_templates.layout import canonical_name
from rapidformer_templates.optimizer import OptimizerSpec, name_of_rule
from rapidformer_templates.plan import Plan
from rapidformer_templates.workers import Workers

Named = Sequence[tuple[str, nn.Parameter]]
"""Parameters with their canonical names."""

COMPUTE_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class SingleEngine:
    """One process on one device; the reference that every other engine must follow."""

    def __init__(self, plan: Plan, workers: Workers, *, clip_grad: float) -> None:
        self.workers = workers
        self.clip_grad = clip_grad
        self.compute_type = COMPUTE_TYPES.get(plan.precision)
        self.loss_scale = DynamicLossScale() if plan.precision == "fp16" else None
        self.offloads = plan.engine_options.get("offload") == "cpu"
        self.micro_steps = 0
        self.receipts: dict[str, Any] = {}
        self.before_update: Callable[[], None] | None = None
        self.model: nn.Module
        self.optimizer: torch.optim.Optimizer
        self._callable: nn.Module  # what compute_loss is given
        self._parameters: list[nn.Parameter]
        self._lr_factor = 1.0
        self._outcomes: Outcomes | None = None  # where the host runs ahead of the device
        self._auxiliary: AuxiliaryLosses | None = None
        self._measured: Mapping[str, torch.Tensor] = {}

    def build_context(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def setup(self, model: nn.Module, optimizer: OptimizerSpec, compute_loss: ComputeLoss) -> None:
        self.compute_loss = compute_loss
        self._auxiliary = auxiliary_losses_of(model)
        self.model = model.to(self.workers.device).train()
        trainable = [(canonical_name(n), p) for n, p in model.named_parameters() if p.requires_grad]
        if not trainable:
            raise RapidformerError("the model has no parameter that requires a gradient", where="build_model()")
        differing = optimizer.differences(trainable)
        self._callable = self._wrap(self.model)
        # Sharding replaces the parameters: ask the model again.
        trainable = [(canonical_name(n), p) for n, p in self.model.named_parameters() if p.requires_grad]
        self._parameters = [p for _, p in trainable]
        self.optimizer = self._build_optimizer(optimizer, trainable, differing)
        self._peak_lrs = [group["lr"] for group in self.optimizer.param_groups]
        if self._runs_ahead():
            self._outcomes = Outcomes(self.workers.device)
        if self.loss_scale is not None:
            self.loss_scale.to(self.workers.device)

    def _runs_ahead(self) -> bool:
        """Whether the host need not wait for the device: there is one, and the optimizer can leave out an update.

        The fused optimizers of torch can, by the protocol of its ``GradScaler``. With others the host reads
        the norm before it calls them.
        """
        can_skip = getattr(self.optimizer, "_step_supports_amp_scaling", False)
        return can_skip and self.workers.device.type != "cpu"

    def _wrap(self, model: nn.Module) -> nn.Module:
        return model

    def _build_optimizer(
        self, recipe: OptimizerSpec, trainable: Named, differing: Mapping[str, Mapping[str, Any]]
    ) -> torch.optim.Optimizer:
        if self.offloads and not lies_in_host_memory(self.workers.device):
            return HostOptimizer(recipe, trainable, differing)
        return recipe.build(trainable, differing)

    @property
    def update_rule(self) -> type[torch.optim.Optimizer]:
        """The class that makes the updates, wherever its state lies."""
        return type(self.optimizer.inner if isinstance(self.optimizer, HostOptimizer) else self.optimizer)

    def _synchronise(self, *, last: bool) -> AbstractContextManager[Any]:
        """Around the forward and backward of a micro batch; gradients are exchanged in the last one."""
        return nullcontext()

    def _precision(self) -> AbstractContextManager[Any]:
        if self.compute_type is None:
            return nullcontext()
        return torch.autocast(self.workers.device.type, dtype=self.compute_type)

    def train_batch(self, microbatches: Sequence[MicroBatch], targets: float, lr_factor: float) -> StepResult:
        if self._outcomes:
            self._outcomes.begin()
        loss = self._accumulate_gradients(microbatches, max(targets, 1.0))
        if self.before_update:
            self.before_update()
        norm = self._grad_norm()
        self._set_lr(lr_factor)
        skipped = self._update_unread(loss, norm) if self._outcomes else self._update_if_finite(loss, norm)
        self._drop_gradients()
        return StepResult(loss, norm, skipped, self._measured)

    def settle(self) -> None:
        if self._outcomes:
            self._outcomes.hear()

    def _update_if_finite(self, loss: torch.Tensor, norm: torch.Tensor) -> bool:
        """Read loss and norm, and update if they are finite; whether the update was skipped."""
        length = float(norm)
        finite = math.isfinite(length) and math.isfinite(float(loss))
        if not finite and self.loss_scale is None:
            self._drop_gradients()
            raise NonFiniteLoss(f"loss {float(loss)}, gradient norm {length}")
        if finite:
            if self.loss_scale is not None and (gradients := self._gradients()):
                torch._foreach_mul_(gradients, self.loss_scale.scale.reciprocal())
            if 0 < self.clip_grad < length + 1e-6:  # else torch would multiply everything by one
                self._clip(norm)
            self._update()
        if self.loss_scale is not None:
            self.loss_scale.update(overflow=not finite)
        return not finite

    def _update_unread(self, loss: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        """Update without reading anything; the fused kernel divides the gradients, or does nothing, as it is told.

        Loss scale and clipping are one division inside the update, which reads the gradients anyway.
        """
        assert self._outcomes is not None
        skipped = self._outcomes.judge(loss, norm, may_overflow=self.loss_scale is not None)
        divisor = self.loss_scale.scale if self.loss_scale is not None else None
        if self.clip_grad > 0:
            excess = ((norm.to(torch.float32) + 1e-6) / self.clip_grad).clamp_(min=1.0)
            divisor = excess if divisor is None else excess * divisor
        self.optimizer.grad_scale, self.optimizer.found_inf = divisor, skipped  # type: ignore[attr-defined]
        self._update()
        if self.loss_scale is not None:
            self.loss_scale.update(overflow=skipped)
        return skipped

    def _clip(self, norm: torch.Tensor) -> None:
        clip_grads_with_norm_(self._parameters, self.clip_grad, norm)

    def _update(self) -> None:
        self.optimizer.step()

    def held(self) -> dict[str, list[torch.Tensor]]:
        return {
            "parameters": list(self.model.parameters()),
            "gradients": self._gradients(),
            "optimizer": engine_state.state_tensors(self.optimizer),
        }

    def _drop_gradients(self) -> None:
        """What ``optimizer.zero_grad`` does, without its profiler hooks: a tenth of the time."""
        for parameter in self._parameters:
            parameter.grad = None

    def _accumulate_gradients(self, microbatches: Sequence[MicroBatch], targets: float) -> torch.Tensor:
        """Leave the gradient of the global mean (times the loss scale) in ``.grad``; return that mean."""
        # DDP and FSDP average over the workers, while the mean over targets needs their sum.
        weight = self.workers.world / targets
        later = self._outcomes.counted if self._outcomes else None
        total: torch.Tensor | None = None
        if self._auxiliary:
            self._auxiliary.begin_step(microbatches, self.workers)
        for i, microbatch in enumerate(microbatches):
            batch = to_device(microbatch.batch, self.workers.device)
            with self._synchronise(last=i == len(microbatches) - 1):
                with self._precision(), self._ahead_of(microbatch):
                    part = weighted_loss(self.compute_loss, self._callable, batch, microbatch, weight, later)
                if self._auxiliary:
                    self._auxiliary.follow(part, microbatch, self.workers.world)
                self._backward(part if self.loss_scale is None else part * self.loss_scale.scale)
            total = part.detach() if total is None else total + part.detach()
            self.micro_steps += 1
        assert total is not None
        if self._auxiliary:
            self._measured = self._auxiliary.results(self.workers)
        # One type for all: the zero of an idle worker has another one than the others' losses may have.
        return self.workers.sum_tensor(total.to(torch.float64)) / self.workers.world

    def _ahead_of(self, microbatch: MicroBatch) -> AbstractContextManager[Any]:
        """Around a forward: where the host runs ahead, the model must not wait for the device either."""
        return answered(microbatch) if self._outcomes else nullcontext()

    def _backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def _grad_norm(self) -> torch.Tensor:
        """Global norm of the gradient of the loss, before its loss scale."""
        norm = get_total_norm(self._gradients())
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        return norm if self.loss_scale is None else norm / self.loss_scale.scale

    def _gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self._parameters if p.grad is not None]

    def _set_lr(self, factor: float) -> None:
        if factor != self._lr_factor:
            self._lr_factor = factor
            for group, peak in zip(self.optimizer.param_groups, self._peak_lrs, strict=True):
                group["lr"] = peak * factor

    @torch.no_grad()
    def eval_batch(self, microbatch: MicroBatch) -> tuple[float, Any]:
        batch = to_device(microbatch.batch, self.workers.device)
        recorder = Recorder(self._callable)
        with self._precision():
            result = self.compute_loss(recorder, batch)
        if microbatch.idle or microbatch.targets == 0:
            return 0.0, recorder.output
        total = result[0] if isinstance(result, tuple) else result * microbatch.targets
        return float(total), recorder.output

    @contextmanager
    def measuring(self) -> Iterator[nn.Module]:
        """The model for a forward that leaves no trace: no random numbers drawn, no gradients exchanged."""
        devices = [self.workers.device] if self.workers.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), self._precision():
            yield self.model

    def _missed_by_loss(self, microbatch: MicroBatch) -> list[bool]:
        """For each trained parameter, whether the loss of this batch does not reach it on this rank."""
        with self.measuring() as model:
            loss = self.compute_loss(model, to_device(microbatch.batch, self.workers.device))
        reached = reached_parameters(loss[0] if isinstance(loss, tuple) else loss)
        return [id(parameter) not in reached for parameter in self._parameters]

    def pieces(self, kind: str) -> Iterator[Piece]:
        return engine_state.pieces(self.model, self.optimizer, kind, self.workers)

    def load(self, reader: StateReader, *, optimizer: bool) -> None:
        engine_state.load(self.model, self.optimizer, reader, optimizer_state=optimizer)

    def state(self) -> dict[str, Any]:
        scale = {"loss_scale": self.loss_scale.state()} if self.loss_scale else {}
        return {"optimizer": name_of_rule(self.update_rule), **scale}

    def load_state(self, state: Mapping[str, Any]) -> None:
        if self.loss_scale is not None and "loss_scale" in state:
            self.loss_scale.load_state(state["loss_scale"])

    def full_weights(self) -> dict[str, torch.Tensor] | None:
        return engine_state.full_weights(self.model, self.workers)


class DDPEngine(SingleEngine):
    """A copy of the model on each worker; gradients are averaged while the backward runs."""

    _ddp: DistributedDataParallel | None = None

    def train_batch(self, microbatches: Sequence[MicroBatch], targets: float, lr_factor: float) -> StepResult:
        if self._ddp is None:
            self._distribute(microbatches[0])
        return super().train_batch(microbatches, targets, lr_factor)

    def _distribute(self, microbatch: MicroBatch) -> None:
        """Wrap the model, once a batch has shown whether the loss reaches every parameter.

        DDP waits for the gradient of each parameter unless it searches for unused ones in every
        step, which costs time and is needed for few models.
        """
        (unused,) = self.workers.sum(any(self._missed_by_loss(microbatch)))
        on_gpu = self.workers.device.type == "cuda"
        self._callable = self._ddp = DistributedDataParallel(
            self.model,
            device_ids=[self.workers.local_rank] if on_gpu else None,
            gradient_as_bucket_view=True,
            find_unused_parameters=unused > 0,
        )

    def _synchronise(self, *, last: bool) -> AbstractContextManager[Any]:
        assert self._ddp is not None
        return nullcontext() if last else self._ddp.no_sync()
