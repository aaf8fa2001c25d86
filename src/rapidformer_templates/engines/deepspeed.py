"""ZeRO-1, -2 and -3 with offload to the host and to NVMe, by DeepSpeed."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from rapidformer_templates.data.loader import MicroBatch
from rapidformer_templates.deepspeed_parts import leave_out_shm_comm, prepare
from rapidformer_templates.engines import zero_state
from rapidformer_templates.engines.auxiliary import auxiliary_losses_of
from rapidformer_templates.engines.base import ComputeLoss, Piece, StateReader, StepResult
from rapidformer_templates.engines.local import SingleEngine
from rapidformer_templates.errors import NonFiniteLoss, RapidformerError
from rapidformer_templates.layout import canonical_name
from rapidformer_templates.optimizer import OptimizerSpec
from rapidformer_templates.plan import Plan
from rapidformer_templates.workers import Workers, open_group_alone


class DeepSpeedEngine(SingleEngine):
    """Accumulation, clipping, precision and schedule are ours in meaning and DeepSpeed's in execution.

    DeepSpeed keeps the model in the type that it computes in, and fp32 masters of its share beside it.
    """

    def __init__(self, plan: Plan, workers: Workers, *, clip_grad: float) -> None:
        super().__init__(plan, workers, clip_grad=clip_grad)
        self.loss_scale = None  # DeepSpeed's own, with the same rule
        self.config: dict[str, Any] = dict(plan.engine_options["deepspeed"])
        self.stage = int(self.config["zero_optimization"]["stage"])
        prepare(plan)
        _join(workers)
        self._deepspeed: Any
        self._state: zero_state.ZeroState
        self._looked = False

    def build_context(self) -> AbstractContextManager[Any]:
        if self.stage < 3 or self.workers.world == 1:
            return contextlib.nullcontext()
        from rapidformer_templates.engines.zero_build import partitioned_construction

        return partitioned_construction(self.config)

    def setup(self, model: nn.Module, optimizer: OptimizerSpec, compute_loss: ComputeLoss) -> None:
        import deepspeed

        self.compute_loss = compute_loss
        self._auxiliary = auxiliary_losses_of(model)
        named = [(canonical_name(n), p) for n, p in model.named_parameters() if p.requires_grad]
        if not named:
            raise RapidformerError("the model has no parameter that requires a gradient", where="build_model()")
        differing = optimizer.differences((name, zero_state.as_built(p)) for name, p in named)
        self._parameters = [p for _, p in named]
        masters = None
        if self.compute_type is not None:
            if any(p.dtype != self.compute_type for _, p in named):  # on a disk they are of that type already
                masters = Masters(model, self.compute_type, self.workers)
            _compute_in(model, self.compute_type)
        for buffer in model.buffers():
            if self.workers.world > 1:
                dist.broadcast(buffer, src=0)
        recipe = optimizer.build(named, differing)
        self._deepspeed, _, _, _ = deepspeed.initialize(
            model=model, optimizer=recipe, config=self.config, dist_init_required=False
        )
        self.model, self.optimizer = model.train(), self._deepspeed.basic_optimizer
        self._callable = self._deepspeed
        kind = zero_state.CutParameters if self.stage == 3 else zero_state.FlatGroups
        self._state = kind(self._deepspeed.optimizer, model, self.workers)
        if masters is not None:
            masters.restore(self._state)
        self._peak_lrs = [group["lr"] for group in self.optimizer.param_groups]

    def train_batch(self, microbatches: Sequence[MicroBatch], targets: float, lr_factor: float) -> StepResult:
        if not self._looked:
            self._refuse_unreached(microbatches[0])
        loss = self._accumulate_gradients(microbatches, max(targets, 1.0))
        fp16 = self.compute_type == torch.float16
        if not fp16 and not math.isfinite(float(loss)):
            raise NonFiniteLoss(f"loss {float(loss)}")
        self._set_lr(lr_factor)
        if self.before_update:
            self.before_update()
        self._deepspeed.step()
        norm = torch.as_tensor(self._deepspeed.get_global_grad_norm())
        overflow = bool(self._deepspeed.optimizer.overflow)
        if overflow and not fp16:
            raise NonFiniteLoss(f"loss {float(loss)}, gradient norm {float(norm)}")
        return StepResult(loss, norm, skipped=overflow, measured=self._measured)

    def _synchronise(self, *, last: bool) -> AbstractContextManager[Any]:
        self._deepspeed.set_gradient_accumulation_boundary(last)
        return contextlib.nullcontext()

    def _backward(self, loss: torch.Tensor) -> None:
        self._deepspeed.backward(loss, scale_wrt_gas=False)

    def _refuse_unreached(self, microbatch: MicroBatch) -> None:
        """ZeRO updates all parameters of a partition; one without a gradient would only decay.

        Raises:
            RapidformerError: the loss does not reach a parameter that is to be trained.
        """
        self._looked = True
        missed = self.workers.sum(*self._missed_by_loss(microbatch))
        names = {id(p): canonical_name(n) for n, p in self.model.named_parameters()}
        unreached = [names[id(p)] for p, n in zip(self._parameters, missed, strict=True) if n == self.workers.world]
        if unreached:
            raise RapidformerError(
                f"the loss does not reach {len(unreached)} parameters: {', '.join(unreached[:6])}",
                where=f"ZeRO-{self.stage}, which would let them decay",
                hint="set requires_grad = False for them in build_model, or leave them out of the model",
            )

    @contextlib.contextmanager
    def measuring(self) -> Iterator[nn.Module]:
        with super().measuring() as model:
            yield model
        self._state.forget_forward()

    def held(self) -> dict[str, list[torch.Tensor]]:
        return self._state.held()

    def pieces(self, kind: str) -> Iterator[Piece]:
        return self._state.pieces(kind)

    def load(self, reader: StateReader, *, optimizer: bool) -> None:
        self._state.load(reader, optimizer_state=optimizer)

    def state(self) -> dict[str, Any]:
        state = super().state()
        if self.compute_type == torch.float16:
            scaler = self._deepspeed.optimizer.loss_scaler
            good_steps = scaler.cur_iter - scaler.last_overflow_iter - 1
            state["loss_scale"] = {"scale": float(scaler.cur_scale), "good_steps": good_steps}
        return state

    def load_state(self, state: Mapping[str, Any]) -> None:
        if self.compute_type == torch.float16 and "loss_scale" in state:
            scaler = self._deepspeed.optimizer.loss_scaler
            scaler.cur_scale = float(state["loss_scale"]["scale"])
            scaler.last_overflow_iter = scaler.cur_iter - int(state["loss_scale"]["good_steps"]) - 1

    def full_weights(self) -> dict[str, torch.Tensor] | None:
        return self._state.full_weights()


def _join(workers: Workers) -> None:
    """Let DeepSpeed find the process group and the device; a worker alone gets a group of its own."""
    os.environ.setdefault("LOCAL_RANK", str(workers.local_rank))
    # It calls collectives by the names that torch is about to retire.
    warnings.filterwarnings("ignore", message=r".*torch\.distributed\..*is deprecated", category=FutureWarning)
    logger = logging.getLogger("DeepSpeed")
    logger.setLevel(logging.ERROR)  # what it says while it is imported is of no use to a run
    import deepspeed

    logger.setLevel(logging.WARNING if workers.is_main else logging.ERROR)
    if workers.device.type == "cpu":
        leave_out_shm_comm()
    open_group_alone(workers.device)
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed()


class Masters:
    """The fp32 values of the model as it was built, which DeepSpeed would round before it copies them.

    The parameters are cast here; :meth:`restore` puts the exact values into the masters.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, workers: Workers) -> None:
        self._values: dict[str, torch.Tensor] = {}
        self._cut: set[str] = set()
        for name, parameter in model.named_parameters():
            here = canonical_name(name)
            if hasattr(parameter, "ds_tensor"):  # built in parts
                self._cut.add(here)
                self._values[here] = parameter.ds_tensor.detach().clone()
                parameter.ds_tensor.data = parameter.ds_tensor.data.to(dtype)
            else:
                self._values[here] = parameter.detach().to(workers.device)
                if workers.world > 1:
                    dist.broadcast(self._values[here], src=0)
            parameter.data = parameter.data.to(dtype)

    def restore(self, state: zero_state.ZeroState) -> None:
        for index, fragments in enumerate(state.fragments):
            with state.partition(index, write=True) as flat:
                for fragment in fragments:
                    values = self._values[fragment.name].flatten()
                    begin = 0 if fragment.name in self._cut else fragment.start
                    fragment.of(flat).copy_(values[begin : begin + fragment.count])


def _compute_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Have the forward choose types as autocast does, also inside DeepSpeed, which turns it off there.

    The parameters are of the narrow type already; norms, softmax and losses are still computed in
    fp32, as in every other engine.
    """
    forward = model.forward

    def in_type(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(next(model.parameters()).device.type, dtype=dtype):
            return forward(*args, **kwargs)

    model.forward = in_type
