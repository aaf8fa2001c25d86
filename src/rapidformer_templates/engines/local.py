"""One device, and DDP."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, final

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from rapidformer_templates.data.loader import MicroBatch, to_device
from rapidformer_templates.data.types import Batch
from rapidformer_templates.engines import group_values, weight_average
from rapidformer_templates.engines import pieces as engine_state
from rapidformer_templates.engines.auxiliary_losses import AuxiliaryLosses, auxiliary_losses_of
from rapidformer_templates.engines.contract import ComputeLoss, Piece, StateReader, StepResult
from rapidformer_templates.engines.delayed_outcomes import Outcomes
from rapidformer_templates.engines.embedding_noise import rows_of
from rapidformer_templates.engines.host_optimizer import HostOptimizer, lies_in_host_memory
from rapidformer_templates.engines.loss import Recorder, weighted_loss
from rapidformer_templates.engines.loss_scale import DynamicLossScale
from rapidformer_templates.engines.mask_checks import answered, watch_positions
from rapidformer_templates.engines.reached import come_by_all, reached_parameters
from rapidformer_templates.engines.recipe import OptimizerSpec, name_of_rule
from rapidformer_templates.engines.traces import kept_buffers, without_trace
from rapidformer_templates.errors import NonFiniteLoss, RapidformerError
from rapidformer_templates.models.blocks import canonical_name
from rapidformer_templates.planning.plan import Plan
from rapidformer_templates.system import accelerator
from rapidformer_templates.system.workers import Workers

Named = Sequence[tuple[str, nn.Parameter]]
"""Parameters with their canonical names."""

COMPUTE_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class SingleEngine:
    """One process on one device; the reference that every other engine must follow.

    What is promised of a step (auxiliary losses, the host ahead of the device, targets that are counted later, loss
    scale, what is measured, what happens to parameters that no loss reaches) is kept here for all engines, in final
    methods. An engine fills in its extension points:

    - :meth:`build_context`, :meth:`_build`, :meth:`_shard`, :meth:`_build_optimizer`, :meth:`_distribute`: how the
      model is divided and who optimizes it;
    - :meth:`_schedule`, :meth:`_synchronise`, :meth:`_backward`: the order of micro batches, when gradients travel;
    - :attr:`_averages_over`, :meth:`_missed`, :meth:`_missed_everywhere`: what the exchange makes of gradients;
    - :meth:`_finish_step`, or of it :meth:`_reduce`, :meth:`_grad_norm`, :meth:`_gradients_in_turn`, :meth:`_clip`,
      :meth:`_update`; and :meth:`_drop_gradients`, :meth:`_runs_ahead`.
    """

    _waits_for_gradients = False  # also of what counts for nothing

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

    @final
    def setup(self, model: nn.Module, optimizer: OptimizerSpec, compute_loss: ComputeLoss) -> None:
        self.compute_loss = compute_loss
        self._auxiliary = auxiliary_losses_of(model)
        if not any(self.workers.gather(any(p.requires_grad for p in model.parameters()))):
            raise RapidformerError("the model has no parameter that requires a gradient", where="build_model()")
        self._build(model, optimizer)
        self._callable = self._distribute()
        self._peak_lrs = [group["lr"] for group in self.optimizer.param_groups]
        group_values.remember(self.optimizer)
        if self._runs_ahead():
            self._outcomes = Outcomes(self.workers.device)
            watch_positions(self.model)
        if self.loss_scale is not None:
            self.loss_scale.to(self.workers.device)

    def _build(self, model: nn.Module, recipe: OptimizerSpec) -> None:
        """Bring the model to the device, in parts or whole, and build the optimizer over what is here of it."""
        self.model = accelerator.move(model, self.workers.device).train()
        differing = recipe.differences(_trained(self.model))
        self._shard(self.model)
        trained = _trained(self.model)  # sharding has replaced the parameters
        self._parameters = [parameter for _, parameter in trained]
        self.optimizer = self._build_optimizer(recipe, trained, differing)

    def _shard(self, model: nn.Module) -> None:
        """Divide the parameters over the workers, in place, before there is an optimizer."""

    def _distribute(self) -> nn.Module:
        """What ``compute_loss`` is given: the model, wrapped by what exchanges its gradients."""
        return self.model

    def _runs_ahead(self) -> bool:
        """Whether the host need not wait for the device: there is one, and the optimizer can leave out an update.

        The fused optimizers of torch can, by the protocol of its ``GradScaler``. With others the host reads
        the norm before it calls them.
        """
        can_skip = getattr(self.optimizer, "_step_supports_amp_scaling", False)
        return can_skip and accelerator.computes_apart(self.workers.device)

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

    def precision(self) -> AbstractContextManager[Any]:
        if self.compute_type is None:
            return nullcontext()
        return torch.autocast(self.workers.device.type, dtype=self.compute_type)

    @final
    def train_batch(
        self, microbatches: Sequence[MicroBatch], targets: float, lr_factor: float | Callable[[], float]
    ) -> StepResult:
        if self._outcomes:
            self._outcomes.begin()
        try:
            loss = self._accumulate_gradients(microbatches, max(targets, 1.0))
        except BaseException:
            self._drop_gradients()  # or they would be part of the next step, if somebody goes on
            raise
        self._reduce()
        if self.before_update:
            self.before_update()
        self._set_lr(lr_factor() if callable(lr_factor) else lr_factor)
        norm, skipped = self._finish_step(loss)
        self._drop_gradients()
        return StepResult(loss, norm, skipped, self._measured)

    @final
    def hear_all(self) -> None:
        if self._outcomes:
            self._outcomes.hear()

    def _finish_step(self, loss: torch.Tensor) -> tuple[torch.Tensor, bool | torch.Tensor]:
        """Update, unless something is not finite: the gradient norm before clipping, whether the update was skipped.

        Raises:
            NonFiniteLoss: as ``train_batch``.
        """
        norm = self._grad_norm()
        return norm, self._update_unread(loss, norm) if self._outcomes else self._update_if_finite(loss, norm)

    def _reduce(self) -> None:
        """Leave the gradient as the optimizer is to have it, where the exchange in the backward does not."""

    def _update_if_finite(self, loss: torch.Tensor, norm: torch.Tensor) -> bool:
        """Read loss and norm, and update if they are finite; whether the update was skipped."""
        length = float(norm)
        finite = math.isfinite(length) and math.isfinite(float(loss))
        if not finite and self.loss_scale is None:
            self._drop_gradients()
            raise NonFiniteLoss(f"loss {float(loss)}, gradient norm {length}")
        for _ in self._gradients_in_turn() if finite else ():
            if self.loss_scale is not None:
                for gradients in engine_state.by_mesh(self._gradients()):
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
        for _ in self._gradients_in_turn():
            self._update()
        if self.loss_scale is not None:
            self.loss_scale.update(overflow=skipped)
        return skipped

    def _clip(self, norm: torch.Tensor) -> None:
        for parameters in engine_state.by_mesh(self._parameters):
            clip_grads_with_norm_(parameters, self.clip_grad, norm)

    def _gradients_in_turn(self) -> Iterator[None]:
        """Have the gradients there of what is updated at a time: of all parameters."""
        yield

    def _update(self) -> None:
        """Update the parameters that have a gradient."""
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

    @final
    def _accumulate_gradients(self, microbatches: Sequence[MicroBatch], targets: float) -> torch.Tensor:
        """Leave the gradient of the global mean (times the loss scale) with the engine; return that mean (fp64)."""
        if self._auxiliary:
            self._auxiliary.begin_step(microbatches, self.workers)
        total = self._schedule(microbatches, self._averages_over / targets)
        if self._auxiliary:
            self._measured = self._auxiliary.results(self.workers)
        if not self.workers.speaks:  # the workers of a replica have one and the same loss
            total = torch.zeros_like(total)
        return self._exchange(total) / self._averages_over

    @final
    def _exchange(self, total: torch.Tensor) -> torch.Tensor:
        """The sum of ``total`` over the workers, who hear with it whether somebody has missed a parameter."""
        missed = self._missed()
        if self.workers.world == 1 and not missed:
            return total
        if self._outcomes:  # the hosts tell each other: none of them waits for its device
            missing = self.workers.sum(len(missed))[0] > 0
            total = self.workers.sum_tensor(total)
        else:
            both = self.workers.sum_tensor(torch.stack([total, torch.full_like(total, len(missed))]))
            total, missing = both[0], bool(both[1])
        if missing:
            flags = torch.zeros(len(self._parameters))
            flags[list(missed)] = 1
            counts = self.workers.sum(*flags.tolist())
            self._missed_everywhere([index for index, count in enumerate(counts) if count == self.workers.world])
        return total

    def _missed(self) -> Sequence[int]:
        """Places of the parameters that no loss of this worker has reached, and that were exchanged as zeros."""
        return ()

    def _missed_everywhere(self, indices: Sequence[int]) -> None:
        """Leave out parameters that no worker's loss has reached: zeros for a gradient would let them decay."""
        for index in indices:
            self._parameters[index].grad = None

    @property
    def _averages_over(self) -> float:
        """Workers over which the exchange averages gradients; the mean over targets needs their sum.

        Of the workers of a context group each has the whole loss, and goes back from its share of it.
        """
        return self.workers.world / self.workers.context

    def _schedule(self, microbatches: Sequence[MicroBatch], weight: float) -> torch.Tensor:
        """Run forward and backward of this worker's micro batches: the sum of their losses times ``weight`` (fp64)."""
        total = torch.zeros((), dtype=torch.float64, device=self.workers.device)
        for i, microbatch in enumerate(microbatches):
            with self._synchronise(last=i == len(microbatches) - 1):
                loss = self._loss_of(microbatch, weight)
                self._begin_backward(loss, microbatch)
            total += loss.detach()
            self.micro_steps += 1
        return total

    @final
    def _loss_of(self, microbatch: MicroBatch, weight: float) -> torch.Tensor:
        """The sum of a micro batch's losses times ``weight``, with its graph."""
        batch, zeros = to_device(microbatch.batch, self.workers.device), self._waits_for_gradients
        later = self._outcomes.counted if self._outcomes else None
        # A batch that counts for nothing is no second look at its samples for batch norm.
        kept = kept_buffers(self.model) if microbatch.idle else nullcontext()
        with self.precision(), self._ahead_of(microbatch, batch), kept:
            loss = weighted_loss(self.compute_loss, self._callable, batch, microbatch, weight, later, zeros=zeros)
        if microbatch.targets == 0 and not microbatch.idle:
            self._count_as_reached(reached_parameters(loss))
        return loss

    def _count_as_reached(self, parameters: Sequence[torch.Tensor]) -> None:
        """As in a micro batch with more samples, with a gradient of zero."""
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    @final
    def _begin_backward(self, loss: torch.Tensor, microbatch: MicroBatch) -> None:
        """The backward of a micro batch, from its loss."""
        if self._auxiliary:
            self._auxiliary.follow(loss, microbatch, self._averages_over)
        self._backward(loss if self.loss_scale is None else loss * self.loss_scale.scale)

    @contextmanager
    def _ahead_of(self, microbatch: MicroBatch, batch: Batch) -> Iterator[None]:
        """Around a forward: where the host runs ahead, the model must not wait for the device either."""
        with rows_of(microbatch, batch), answered(microbatch, batch) if self._outcomes else nullcontext():
            yield

    def _backward(self, loss: torch.Tensor) -> None:
        """The backward of one micro batch; ``loss`` has the loss scale in it."""
        loss.backward()

    def _grad_norm(self) -> torch.Tensor:
        """Global norm of the gradient of the loss, before its loss scale."""
        norm = get_total_norm(self._gradients())
        return norm if self.loss_scale is None else norm / self.loss_scale.scale

    def _gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self._parameters if p.grad is not None]

    def _set_lr(self, factor: float) -> None:
        if factor != self._lr_factor:
            self._lr_factor = factor
            for group, peak in zip(self.optimizer.param_groups, self._peak_lrs, strict=True):
                group["lr"] = peak * factor

    def frozen(self, model: nn.Module) -> nn.Module:
        model = accelerator.move(model, self.workers.device).requires_grad_(False).eval()
        self._shard(model)
        return model

    @torch.no_grad()
    def eval_batch(self, microbatch: MicroBatch, compute_loss: ComputeLoss | None = None) -> tuple[float, Any]:
        batch = to_device(microbatch.batch, self.workers.device)
        recorder = Recorder(self._callable)
        with self.precision():
            result = (compute_loss or self.compute_loss)(recorder, batch)
        if microbatch.idle or microbatch.targets == 0:
            return 0.0, recorder.output
        total = result[0] if isinstance(result, tuple) else result * microbatch.targets
        return float(total), recorder.output

    @contextmanager
    def measuring(self) -> Iterator[nn.Module]:
        """The model for a forward that leaves no trace: random numbers, buffers and gradients are as before it."""
        with without_trace(self.model), self.precision():
            yield self.model

    _averages = False

    @final
    def keep_average(self, decay: float) -> None:
        """Keep an exponential moving average of the weights from the next step on; to be asked after :meth:`setup`."""
        weight_average.keep_average(self.optimizer, decay)
        self._averages = True

    @final
    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The averages in the place of the weights, if they are kept; every rank must enter."""
        if self._averages:
            self._exchange_averages()
        try:
            yield
        finally:
            if self._averages:
                self._exchange_averages()

    def _exchange_averages(self) -> None:
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                weight_average.exchange(parameter, self.optimizer.state.get(parameter, {}))
        self._weights_were_set()

    def _weights_were_set(self) -> None:
        """Send the values of what the optimizer updates to whoever has copies of them."""

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
    """A copy of the model on each worker; gradients are averaged while the backward runs.

    Gradients lie in DDP's buckets and nowhere else: each one that comes first in a step is copied into its bucket as
    soon as it is there, in whichever micro batch, and those of later micro batches are added to it in place.
    """

    _missing: Sequence[int] = ()

    def __init__(self, plan: Plan, workers: Workers, *, clip_grad: float) -> None:
        super().__init__(plan, workers, clip_grad=clip_grad)
        self._accumulates = plan.sizes.accumulation > 1

    def _distribute(self) -> nn.Module:
        device = self.workers.device
        ddp = DistributedDataParallel(
            self.model,
            device_ids=[device.index] if accelerator.computes_apart(device) else None,
            gradient_as_bucket_view=True,
        )
        if self._accumulates:
            ddp.register_comm_hook(None, lambda _, bucket: self._average_if_last(bucket))
        return ddp

    def _average_if_last(self, bucket: Any) -> Future[torch.Tensor]:
        """Send a ``GradBucket`` of DDP's in the last micro batch of a step; in those before it, leave it as it is."""
        if self._exchanges:
            return allreduce_hook(self._callable.process_group, bucket)  # type: ignore[arg-type]
        device = self.workers.device
        kept: Future[torch.Tensor] = Future(devices=[device] if accelerator.computes_apart(device) else None)
        kept.set_result(bucket.buffer())
        return kept

    @property
    def _exchanges(self) -> bool:
        """Whether this is the last micro batch of a step."""
        exchanges: bool = self._callable.require_backward_grad_sync  # type: ignore[assignment]
        return exchanges

    def _synchronise(self, *, last: bool) -> AbstractContextManager[Any]:
        ddp: Any = self._callable
        return nullcontext() if last else ddp.no_sync()

    def _backward(self, loss: torch.Tensor) -> None:
        if not isinstance(self._callable, DistributedDataParallel):  # a worker alone, in engines made of this one
            return super()._backward(loss)
        if not self._exchanges:
            self._callable.reducer.prepare_for_backward([])  # which fills buckets, and is left out under no_sync
        # DDP waits until the backward has come to each parameter, and cannot know that one is left out. To
        # search the graph for them in every step would take longer.
        super()._backward(come_by_all(loss, self._parameters, then=self._look_for_missing))
        if not self._exchanges:
            for index in self._missing:  # a later micro batch may reach it
                self._parameters[index].grad = None
        return None

    def _look_for_missing(self) -> None:
        """At the end of the backward; after it, DDP puts its zeros where no gradient is."""
        self._missing = [index for index, p in enumerate(self._parameters) if p.grad is None]

    def _missed(self) -> Sequence[int]:
        return self._missing


def _trained(model: nn.Module) -> Named:
    return [(canonical_name(name), p) for name, p in model.named_parameters() if p.requires_grad]
