"""Engines for a single device and for DDP."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import get_total_norm

from rapidformer_templates.data.loader import MicroBatch, to_device
from rapidformer_templates.data.types import Batch
from rapidformer_templates.engines import backwards, optimizer_state
from rapidformer_templates.engines import shards as sharding
from rapidformer_templates.engines.assembly import Assembly
from rapidformer_templates.engines.construction import ModelUnderConstruction
from rapidformer_templates.engines.current_batch import rows_of, watch_positions
from rapidformer_templates.engines.forwards import preserve_state, restored_buffers
from rapidformer_templates.engines.gather_on_use import divided_construction
from rapidformer_templates.engines.loss import Recorder, loss_and_count
from rapidformer_templates.engines.optimizer_state import is_in_host_memory
from rapidformer_templates.engines.recipe import Differing, OptimizerSpec, name_of_rule, trained_parameters
from rapidformer_templates.engines.step import ComputeLoss, DynamicLossScale, Step, StepMonitor
from rapidformer_templates.errors import NonFiniteLoss, RapidformerError
from rapidformer_templates.models.blocks import norms_with_statistics
from rapidformer_templates.planning.plan import Plan
from rapidformer_templates.system import accelerator
from rapidformer_templates.system.phase_clock import EXCHANGE
from rapidformer_templates.system.workers import Workers

Named = Sequence[tuple[str, nn.Parameter]]
"""Parameters with their canonical names."""

COMPUTE_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class SingleEngine:
    """Trains a model in one process on one device. This is the base of all engines, which must match it.

    An engine owns synchronization, precision, loss scale, clipping, the update and zeroing.

    :class:`Step` owns the order of a step, and calls its phases: :meth:`begin`, :meth:`forward` and :meth:`backward` of
    each micro batch inside its :meth:`accumulation`, then :meth:`reduce`, :meth:`update`, which takes the :meth:`norm`,
    and :meth:`drop`. A subclass overrides these extension points:

    - :meth:`construction`, :meth:`_build`, :meth:`_shard`, :meth:`_build_optimizer`, :meth:`_distribute`: how the model
      is built and sharded, and which optimizer updates it
    - :meth:`step`, :meth:`accumulation`, :meth:`_backward`: the order of micro batches, and when gradients are summed
    - :attr:`gradient_divisor`, :meth:`_unused_here`, :meth:`_drop_unused`: how the exchange changes gradients
    - :meth:`_finish_step`, or its parts :meth:`_reduce`, :meth:`_iter_update_chunks`, :meth:`_update`, together with
      :meth:`drop` and :meth:`_supports_async_step`
    - :meth:`shards`, :attr:`_divides_gradients`: which part of weights, gradients and optimizer state a worker has
    - :attr:`_derivatives_in_loss`, :meth:`_parameters_in_graph`: which backwards ``compute_loss`` may run itself

    Attributes:
        assembly: the model with the facts about it.
        model: the model as built, with its parameters as the engine has changed them.
        optimizer: the optimizer of those parameters.
        compute_loss: the user's hook.
        workers: this process and its peers.
        micro_steps: number of backward passes so far.
        receipts: measurements that the engine itself has taken.
        before_update: functions that are called between the last backward and the update, while the gradients exist.
        monitor: steps that the host has not read yet. None if the host waits for the device.
    """

    needs_zero_gradients = False  # whether even a batch without targets must produce gradients
    _divides_gradients = False  # whether a worker has only a part of the gradients after the exchange
    _adds_norms_in_fp64 = False  # see global_norm
    _derivatives_in_loss = backwards.UNLIMITED

    def __init__(self, plan: Plan, workers: Workers, *, clip_grad: float) -> None:
        self.workers = workers
        self.clip_grad = clip_grad
        self.compute_type = COMPUTE_TYPES.get(plan.precision)
        self.loss_scale = DynamicLossScale() if plan.precision == "fp16" else None
        self.offloads = plan.engine_options.offload == "cpu"
        self.micro_steps = 0
        self.receipts: dict[str, object] = {}
        self.before_update: list[Callable[[], None]] = []
        self.assembly: Assembly
        self.model: nn.Module
        self.optimizer: torch.optim.Optimizer
        self._callable: nn.Module  # the model that compute_loss receives
        self._parameters: list[nn.Parameter]
        self._frozen: list[nn.Parameter]
        self._updated_shards: optimizer_state.Updated
        self._lr_factor = 1.0
        self.monitor: StepMonitor | None = None
        self._accumulates = plan.sizes.accumulation > 1
        self._builds_in_shares = plan.builds_in_shares
        self._construction: ModelUnderConstruction | None = None

    @contextmanager
    def construction(self) -> Iterator[ModelUnderConstruction | None]:
        """Return the context from before ``build_model`` runs until the model is set up, or frozen.

        An engine that divides parameters keeps a worker's memory at its share of the model and its largest module.
        """
        if not self._builds_in_shares or self.workers.world == 1:
            yield None
            return
        self._construction = ModelUnderConstruction()
        try:
            with divided_construction(self._construction):
                yield self._construction
                self._construction.finish()
        finally:
            self._construction = None

    @final
    def setup(self, assembly: Assembly, optimizer: OptimizerSpec, compute_loss: ComputeLoss) -> None:
        """Wrap or shard the model and build the optimizer."""
        self.assembly, self.compute_loss = assembly, compute_loss
        model = assembly.model
        model.zero_grad()  # of backwards in build_model
        if accelerator.swaps_parameters(self.workers.device):
            assembly.built = ()
        if not any(self.workers.gather(any(p.requires_grad for p in model.parameters()))):
            raise RapidformerError("the model has no parameter that requires a gradient", where="build_model()")
        self._build(model, optimizer)
        self._callable = self._distribute()
        self._frozen = [parameter for parameter in self.model.parameters() if not parameter.requires_grad]
        self._peak_lrs = [group["lr"] for group in self.optimizer.param_groups]
        optimizer_state.record_initial_values(self.optimizer)
        if self._supports_async_step():
            self.monitor = StepMonitor(self.workers.device)
            watch_positions(self.model)
        if self.loss_scale is not None:
            self.loss_scale.to(self.workers.device)

    def _build(self, model: nn.Module, recipe: OptimizerSpec) -> None:
        """Move the model to the device, shard it, and build the optimizer over the local parameters."""
        self.model = model.train()
        differing = recipe.differences(self._trained_parameters())
        self._shard(self.model)
        trained = self._trained_parameters()  # sharding replaces the parameters
        self._parameters = [parameter for _, parameter in trained]
        self.optimizer = self._build_optimizer(recipe, trained, differing)
        self._updated_shards = {
            tensor: sharding.shard_of(tensor, name, self.assembly, self.workers).without_values()
            for name, tensor in sharding.named_tensors(self.assembly).items()
            if tensor.requires_grad
        }

    def _trained_parameters(self) -> Named:
        """Return the trained parameters by their names in the whole model, which copies in other stages share."""
        whole_name = self.assembly.placement.whole_name
        return [(whole_name(name), parameter) for name, parameter in trained_parameters(self.model)]

    def _shard(self, model: nn.Module) -> None:
        """Move a model to the device in place, and shard its parameters if the engine does so."""
        if self._construction:
            self._construction.finish()
        accelerator.move(model, self.workers.device)

    def _distribute(self) -> nn.Module:
        """Return the model for ``compute_loss``, wrapped if a wrapper exchanges its gradients."""
        return self.model

    def _supports_async_step(self) -> bool:
        """Whether the host can run ahead: the device is asynchronous, and the optimizer can skip an update on it.

        Torch's fused optimizers can skip one, through the protocol of ``GradScaler``. For other optimizers the host
        reads the norm before the update.
        """
        can_skip = getattr(self.optimizer, "_step_supports_amp_scaling", False)
        return can_skip and accelerator.is_asynchronous(self.workers.device)

    def _build_optimizer(self, recipe: OptimizerSpec, trainable: Named, differing: Differing) -> torch.optim.Optimizer:
        if self.offloads and not is_in_host_memory(self.workers.device):
            return optimizer_state.HostOptimizer(recipe, trainable, differing)
        return recipe.build(trainable, differing)

    @property
    def update_rule(self) -> type[torch.optim.Optimizer]:
        """The optimizer class that computes the updates, regardless of where its state is stored."""
        optimizer = self.optimizer
        return type(optimizer.inner if isinstance(optimizer, optimizer_state.HostOptimizer) else optimizer)

    def accumulation(self, *, last: bool) -> AbstractContextManager[object]:
        """Context for the forward and backward of a micro batch. The last one exchanges gradients."""
        return nullcontext()

    def precision(self) -> AbstractContextManager[object]:
        """Return the context for calls of ``compute_loss``: autocast if the engine computes in 16 bits."""
        if self.compute_type is None:
            return nullcontext()
        return torch.autocast(self.workers.device.type, dtype=self.compute_type)

    def step(self, microbatches: Sequence[MicroBatch], targets: float) -> Step:
        """Begin an optimizer step. ``step(…).run(lr_factor)`` makes it.

        Args:
            microbatches: the micro batches of this rank.
            targets: number of targets in the global batch, over all ranks and micro batches.

        Raises:
            NonFiniteLoss: an earlier step, which the host only reads now, was not finite. The weights are as before
                that step.
        """
        return Step(self, microbatches, targets)

    @final
    def begin(self, microbatches: Sequence[MicroBatch]) -> None:
        """Drop gradients of other backwards (a hook's, or another session's), and prepare for the first micro batch.

        Raises:
            RapidformerError: a parameter that the optimizer does not have is trained now.
        """
        if self.assembly.losses:
            self.assembly.losses.begin_step(microbatches, self.workers)
        if any(parameter.requires_grad for parameter in self._frozen):
            message = "a parameter that was frozen when the optimizer was built requires a gradient now"
            hint = "train it in build_model, and freeze it in on_train_start for the first steps (not under ZeRO)"
            raise RapidformerError(message, where="requires_grad_(True)", hint=hint)
        self.drop()

    @final
    def raise_pending_errors(self) -> None:
        """Check all steps so far, before their results are written or saved. Raises like :meth:`step`."""
        if self.monitor:
            self.monitor.poll()

    @final
    def update(self, loss: torch.Tensor, lr_factor: float) -> tuple[torch.Tensor, bool | torch.Tensor]:
        """Update the parameters. Returns the norm of the gradient before clipping, and whether the update was skipped.

        Raises:
            NonFiniteLoss: see :meth:`Step.update`.
        """
        for hook in self.before_update:
            hook()
        if lr_factor != self._lr_factor:
            self._lr_factor = lr_factor
            for group, peak in zip(self.optimizer.param_groups, self._peak_lrs, strict=True):
                group["lr"] = peak * lr_factor
        norm, skipped = self._finish_step(loss)
        if self._weight_average:
            self._weight_average.end_step(skipped)
        return norm, skipped

    def _finish_step(self, loss: torch.Tensor) -> tuple[torch.Tensor, bool | torch.Tensor]:
        """Update if loss and gradient are finite. Returns the norm before clipping and whether the update was skipped.

        Raises:
            NonFiniteLoss: see :meth:`Step.update`.
        """
        norm = self.norm()
        return norm, self._update_without_sync(loss, norm) if self.monitor else self._update_after_sync(loss, norm)

    @final
    def reduce(self, total: torch.Tensor) -> torch.Tensor:
        """Sum the losses of all workers, and complete the gradients for the optimizer.

        The exchange of the losses also finds parameters that received no gradient on any worker.
        """
        total, unused = backwards.sum_with_unused(
            total, self._unused_here(), len(self._parameters), self.workers, on_host=self.monitor is not None
        )
        self._drop_unused(unused)
        self._reduce()
        return total if self.gradient_divisor == 1.0 else total / self.gradient_divisor

    def _reduce(self) -> None:
        """Reduce the gradients for the optimizer, unless the exchange in the backward has done so."""

    def _update_after_sync(self, loss: torch.Tensor, norm: torch.Tensor) -> bool:
        """Read loss and norm, and update if they are finite. Returns whether the update was skipped."""
        length = float(norm)
        finite = math.isfinite(length) and math.isfinite(float(loss))
        if not finite and self.loss_scale is None:
            raise NonFiniteLoss(f"loss {float(loss)}, gradient norm {length}")
        for _ in self._iter_update_chunks() if finite else ():
            if self.loss_scale is not None:
                self._multiply_gradients(self.loss_scale.scale.reciprocal())
            if 0 < self.clip_grad < length + 1e-6:  # otherwise the factor is one
                self._multiply_gradients(torch.clamp(self.clip_grad / (norm + 1e-6), max=1.0))
            self._update()
        if self.loss_scale is not None:
            self.loss_scale.update(overflow=not finite)
        return not finite

    def _update_without_sync(self, loss: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        """Update without waiting for the device. The fused kernel divides the gradients or skips the update itself.

        Loss scale and clipping are one division inside the update, which reads the gradients anyway.
        """
        assert self.monitor is not None
        skipped = self.monitor.check(loss, norm, may_overflow=self.loss_scale is not None)
        divisor = self.loss_scale.scale if self.loss_scale is not None else None
        if self.clip_grad > 0:
            excess = ((norm.to(torch.float32) + 1e-6) / self.clip_grad).clamp_(min=1.0)
            divisor = excess if divisor is None else excess * divisor
        self.optimizer.grad_scale, self.optimizer.found_inf = divisor, skipped  # type: ignore[attr-defined]
        for _ in self._iter_update_chunks():
            self._update()
        if self.loss_scale is not None:
            self.loss_scale.update(overflow=skipped)
        return skipped

    def _multiply_gradients(self, factor: torch.Tensor) -> None:
        """Multiply this worker's parts of the gradients. Operations on whole DTensors are first planned in Python."""
        if gradients := [sharding.local_part(p.grad) for p in self._parameters if p.grad is not None]:
            torch._foreach_mul_(gradients, factor)

    def _iter_update_chunks(self) -> Iterator[None]:
        """Yield once per group of parameters that is updated together. By default, all parameters are one group."""
        yield

    def _update(self) -> None:
        """Update the parameters that have a gradient."""
        self.optimizer.step()

    def local_tensors(self) -> dict[str, list[torch.Tensor]]:
        """Return the tensors on this rank: ``parameters``, ``gradients``, ``optimizer`` state and send ``buckets``."""
        return {
            "parameters": list(self.model.parameters()),
            "gradients": self._gradients(),
            "optimizer": optimizer_state.state_tensors(self.optimizer),
        }

    def drop(self) -> None:
        """Clear the gradients as ``optimizer.zero_grad`` does, in a tenth of the time: it skips the profiler hooks."""
        for parameter in self._parameters:
            parameter.grad = None

    def _unused_here(self) -> Sequence[int]:
        """Indices of parameters that received no gradient on this worker and were exchanged as zeros."""
        return ()

    def _drop_unused(self, indices: Sequence[int]) -> None:
        """Drop the gradients of parameters that no worker used: with a zero gradient, weight decay would apply."""
        for index in indices:
            self._parameters[index].grad = None

    @property
    def gradient_divisor(self) -> float:
        """Number of workers over which the exchange averages. The mean over targets needs the sum instead.

        Each worker of a context group has the full loss, and computes the backward of its share of it.
        """
        return self.workers.world / self.workers.context

    @contextmanager
    def forward(self, microbatch: MicroBatch) -> Iterator[tuple[nn.Module | Recorder, Batch]]:
        """Context for the forward of a micro batch. Yields the model that computes the loss, and the batch there."""
        batch = to_device(microbatch.batch, self.workers.device)
        # An idle batch repeats samples, so batch norm must not count them a second time.
        buffers = restored_buffers(self.model) if microbatch.idle else nullcontext()
        with self._computing(microbatch, batch), buffers:
            yield Recorder(self._callable) if microbatch.idle or microbatch.targets == 0 else self._callable, batch

    @contextmanager
    def _computing(self, microbatch: MicroBatch, batch: Batch) -> Iterator[None]:
        """Context for a loss. If the host runs ahead, the model must not wait for the device either."""
        rows = rows_of(microbatch, batch, answers=self.monitor is not None)
        limit = min(self._derivatives_in_loss, self.assembly.derivatives_in_loss)
        with self.precision(), rows, backwards.checked_backwards(self._parameters_in_graph, limit):
            yield

    @final
    def check_loss(self, loss: torch.Tensor, microbatch: MicroBatch) -> None:
        """Inspect the graph of a loss: the first one for wrong parameters, and one without targets for what it reaches.

        Raises:
            RapidformerError: it uses parameters that the model does not have, or has only for the forward of a module.
        """
        wrong = set(map(id, self._wrong_leaves())) if self.micro_steps == 0 else set()
        if wrong and not wrong.isdisjoint(map(id, backwards.reached_parameters(loss))):
            message = "the loss uses a parameter outside of the forward of its module, where a worker has only its part"
            raise RapidformerError(message, where="compute_loss(model, batch)", hint=backwards.WHOLE_WEIGHTS)
        if microbatch.targets == 0 and not microbatch.idle:
            self._fill_zero_gradients(backwards.reached_parameters(loss))

    def _wrong_leaves(self) -> Iterable[torch.Tensor]:
        """Return parameters that a loss must not use: those of ``build_model`` that the run has replaced."""
        own = set(map(id, self._parameters_in_graph()))
        return [p for reference in self.assembly.built if (p := reference()) is not None and id(p) not in own]

    def _parameters_in_graph(self) -> Iterable[torch.Tensor]:
        """Return the parameters as the graph of a forward has them."""
        return self.model.parameters()

    def _fill_zero_gradients(self, parameters: Sequence[torch.Tensor]) -> None:
        """Give these parameters a zero gradient if they have none, as in a micro batch that also has targets."""
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = sharding.zero_gradient(parameter)

    @final
    def backward(self, loss: torch.Tensor, microbatch: MicroBatch) -> None:
        """Run the backward of one micro batch, and with it that of the model's auxiliary losses."""
        if self.assembly.losses:
            self.assembly.losses.follow(loss, microbatch, self.gradient_divisor)
        self._backward(loss if self.loss_scale is None else loss * self.loss_scale.scale)

    def _backward(self, loss: torch.Tensor) -> None:
        """Run the backward of one micro batch. ``loss`` includes the loss scale."""
        loss.backward()

    @final
    def norm(self) -> torch.Tensor:
        """Return the global norm of the gradient, without the loss scale."""
        if self._divides_gradients:
            gradients = [(self._norm_copies.get(tensor), gradient) for tensor, gradient in self._local_gradients()]
            norm = sharding.global_norm(gradients, self.workers, in_fp64=self._adds_norms_in_fp64)
        else:
            norm = get_total_norm(self._gradients())
        return norm if self.loss_scale is None else norm / self.loss_scale.scale

    def _local_gradients(self) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each updated tensor that has a gradient, with this worker's part of the gradient."""
        return ((p, sharding.local_part(p.grad)) for p in self._parameters if p.grad is not None)

    def _gradient_copies(self, shard: sharding.Shard) -> sharding.Copies:
        """Return the workers that have the same gradient for an updated shard after the exchange."""
        return shard.copies

    @cached_property
    def _norm_copies(self) -> Mapping[torch.Tensor, sharding.Copies]:
        """The updated tensors whose gradients this worker counts in the global norm, with the copies of each gradient.

        It is computed once, because a step of a small model would take longer to build shards than to add norms.
        """
        updated = self._updated_shards.items()
        shards = {tensor: replace(shard, copies=self._gradient_copies(shard)) for tensor, shard in updated}
        return {tensor: shard.copies for tensor, shard in shards.items() if shard.counts_once}

    def _gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self._parameters if p.grad is not None]

    def frozen(self, model: nn.Module) -> nn.Module:
        """Prepare a second model that is never trained. It is sharded like the trained model."""
        model.requires_grad_(False).eval()
        self._shard(model)
        return model

    @torch.no_grad()
    def eval_batch(self, microbatch: MicroBatch, compute_loss: ComputeLoss | None = None) -> tuple[torch.Tensor, Any]:
        """Compute (sum of the losses over the targets, model output) without gradients.

        The sum stays on the device, so that the host need not wait.

        Args:
            compute_loss: replaces the user's hook.
        """
        batch = to_device(microbatch.batch, self.workers.device)
        recorder = Recorder(self._callable)
        with self._computing(microbatch, batch):
            loss, count = loss_and_count((compute_loss or self.compute_loss)(recorder, batch))
        if microbatch.idle or microbatch.targets == 0:
            return torch.zeros(()), recorder.output
        return (loss if count is not None else loss * microbatch.targets), recorder.output

    def share_statistics(self) -> None:
        """Give all replicas the statistics of batch norms that the first one has, as the export does.

        Call it on every worker before an evaluation. Each replica has seen other samples.
        """
        for norm in norms_with_statistics(self.model) if self.workers.copies > 1 else ():
            for buffer in norm.buffers(recurse=False):
                dist.broadcast(buffer, group=self.workers.copies_group, group_src=0)

    @contextmanager
    def measuring(self) -> Iterator[nn.Module]:
        """Yield the model for a forward without side effects: random state, buffers and gradients are preserved.

        It ends at the first backward that the loss runs itself.
        """
        with preserve_state(self.model), self.precision(), backwards.until_first_backward(self._parameters_in_graph):
            yield self.model

    _weight_average: optimizer_state.WeightAverage | None = None

    @final
    def keep_average(self, decay: float) -> None:
        """Keep an exponential moving average of the weights from the next step on. Call this after :meth:`setup`."""
        self._weight_average = optimizer_state.WeightAverage(self.optimizer, decay)

    @final
    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Use the averaged weights, if they are kept, inside the context. Every rank must enter it."""
        if self._weight_average:
            self._exchange_averages()
        try:
            yield
        finally:
            self.end_forwards()
            if self._weight_average:
                self._exchange_averages()

    def end_forwards(self) -> None:
        """Free what forwards without a backward have gathered. Hooks get the parameters that are trained again."""

    def _exchange_averages(self) -> None:
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                optimizer_state.exchange_with_average(parameter, self.optimizer.state.get(parameter, {}))
        self._weights_were_set()

    def _weights_were_set(self) -> None:
        """Send updated values to all workers that hold copies of them, after the weights were replaced."""

    def shards(self, kind: sharding.ShardKind) -> Iterator[sharding.Shard]:
        """Yield this worker's part of all ``weights``, of the ``optimizer`` state or of the ``gradients``.

        A shard of weights or optimizer state may be valid only until the next one is taken. Gradients exist between the
        last backward of a step and its update. They are multiplied by :attr:`gradient_scale`.
        """
        if kind == "weights":
            yield from sharding.model_shards(self.assembly, self.workers).values()
        elif kind == "optimizer":
            yield from optimizer_state.optimizer_shards(self._updated_shards, self.optimizer)
        else:
            for tensor, gradient in self._local_gradients():
                shard = self._updated_shards[tensor]
                yield replace(shard, values=gradient, copies=self._gradient_copies(shard))

    @property
    def gradient_scale(self) -> float | torch.Tensor:
        """The loss scale of fp16, which the gradients contain until the update. 1 in other types."""
        return 1.0 if self.loss_scale is None else self.loss_scale.scale

    def load(self, reader: sharding.StateReader, *, optimizer: bool) -> None:
        """Load the weights and, if requested, the optimizer state from a checkpoint.

        Raises:
            CheckpointError: names, shapes or the kind of optimizer differ. Nothing has been changed.
        """
        sharding.check_names(self.assembly, reader, self.workers, optimizer=optimizer)
        if optimizer:
            optimizer_state.load_optimizer(self._updated_shards, self.optimizer, reader)
        sharding.load_weights(self.shards("weights"), reader)

    def state(self) -> dict[str, Any]:
        """Return the remaining state for a checkpoint as plain values for JSON."""
        scale = {"loss_scale": self.loss_scale.state()} if self.loss_scale else {}
        return {"optimizer": name_of_rule(self.update_rule), **scale}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state that :meth:`state` returned."""
        if self.loss_scale is not None and "loss_scale" in state:
            self.loss_scale.load_state(state["loss_scale"])

    def whole_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, whole weight) on the host of rank 0 for the export, one at a time. Other ranks yield nothing.

        Every rank must iterate to the end. A tensor is valid until the next one is taken, and must not be changed.
        """
        return sharding.gather_whole(self.shards("weights"), self.workers)


class DDPEngine(SingleEngine):
    """Data parallelism with a copy of the model on each worker. Gradients are averaged during the backward.

    Gradients are stored only in DDP's buckets. The first gradient of each parameter in a step is copied to its bucket
    as soon as it is ready, in any micro batch. Later micro batches add to it in place.
    """

    _unused: Sequence[int] = ()
    _exchanges = True  # whether this is the last micro batch of a step, in which gradients are exchanged

    def _distribute(self) -> nn.Module:
        device = self.workers.device
        sharding.send_first_values(self.model, self.workers)
        ddp = DistributedDataParallel(
            self.model,
            device_ids=[device.index] if accelerator.is_asynchronous(device) else None,
            gradient_as_bucket_view=True,
            init_sync=False,
        )
        if self._accumulates:
            ddp.register_comm_hook(None, lambda _, bucket: self._average_if_last(bucket))
        return ddp

    def _average_if_last(self, bucket: Any) -> Future[torch.Tensor]:
        """All-reduce a ``GradBucket`` of DDP in the last micro batch of a step. Leave it unchanged before that."""
        if self._exchanges:
            return allreduce_hook(self._callable.process_group, bucket)  # type: ignore[arg-type]
        device = self.workers.device
        unchanged: Future[torch.Tensor] = Future(devices=[device] if accelerator.is_asynchronous(device) else None)
        unchanged.set_result(bucket.buffer())
        return unchanged

    def accumulation(self, *, last: bool) -> AbstractContextManager[object]:
        self._exchanges = last
        if last or not isinstance(self._callable, DistributedDataParallel):
            return nullcontext()
        return self._callable.no_sync()

    def _backward(self, loss: torch.Tensor) -> None:
        if not isinstance(self._callable, DistributedDataParallel):  # single worker, in a subclass
            return super()._backward(loss)
        if not self._exchanges:
            self._callable.reducer.prepare_for_backward([])  # fills the buckets, which DDP skips under no_sync
        # DDP waits until the backward has reached every parameter, and does not know which ones are unused.
        # Searching the graph for them in every step would be slower.
        frozen = [p for p in self._parameters if not p.requires_grad]  # since DDP has wrapped the model
        for parameter in frozen:
            parameter.requires_grad_(True)  # the graph must reach it
        loss = backwards.with_unused_parameters(loss, self._parameters, then=self._find_unused)
        for parameter in frozen:
            parameter.requires_grad_(False)
        super()._backward(loss)
        if not self._exchanges:
            for index in self._unused:  # a later micro batch may use it
                self._parameters[index].grad = None
        return None

    def _find_unused(self) -> None:
        """List parameters without a gradient at the end of the backward, before DDP fills them with zeros."""
        self._unused = [index for index, p in enumerate(self._parameters) if p.grad is None]
        self.workers.clock.enter(EXCHANGE)  # DDP now waits for its buckets in C++

    def _unused_here(self) -> Sequence[int]:
        return self._unused
