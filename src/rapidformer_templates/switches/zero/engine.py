"""ZeRO-1, -2 and -3 with offload to the host and to NVMe, by DeepSpeed."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rapidformer_templates.engines import backwards
from rapidformer_templates.engines.construction import ModelUnderConstruction
from rapidformer_templates.engines.local import SingleEngine
from rapidformer_templates.engines.recipe import OptimizerSpec, trained_parameters
from rapidformer_templates.engines.shards import Shard, ShardKind, StateReader
from rapidformer_templates.errors import NonFiniteLoss, RapidformerError
from rapidformer_templates.models.blocks import canonical_name, is_quantized, width_of
from rapidformer_templates.planning.deepspeed_file.settings import LOUD, fill_bucket_sizes
from rapidformer_templates.planning.plan import Plan
from rapidformer_templates.switches.zero import state as zero_state
from rapidformer_templates.switches.zero.compiled_parts import ask_processor_once, leave_out_shm_comm, prepare
from rapidformer_templates.system import accelerator
from rapidformer_templates.system.replaced_functions import patch_function
from rapidformer_templates.system.workers import Workers, broadcast, close_group_by, open_group_alone


def cast(model: nn.Module, dtype: torch.dtype | None, workers: Workers) -> zero_state.Masters:
    """Cast the parameters of a model in place for ZeRO-1 and ZeRO-2. The exact values wait in host memory.

    Args:
        dtype: the compute type. None keeps the types.
    """
    masters: zero_state.Masters = {}
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.contiguous()
        if not _is_cast(parameter, dtype):
            continue
        if parameter.requires_grad:
            exact = parameter.detach()
            if workers.world > 1:
                exact = exact.to(workers.device)
                broadcast(exact)
            masters[canonical_name(name)] = 0, exact.to(accelerator.HOST).flatten()
        parameter.data = parameter.data.to(dtype)
    return masters


def partition(
    model: nn.Module,
    config: Mapping[str, Any],
    dtype: torch.dtype | None,
    workers: Workers,
    construction: ModelUnderConstruction | None,
) -> zero_state.Masters:
    """Move a model to the device and convert it to ZeRO-3's partitions in place. One parameter is whole at a time.

    Args:
        config: DeepSpeed's configuration.
        dtype: the type of the partitions. None keeps the types.
        construction: divides the parameters until they are converted. None if they are whole.
    """
    from deepspeed.runtime.zero.partition_parameters import Init

    # DeepSpeed applies memory_efficient_linear only if it gets a module.
    zero = Init(nn.Module(), config_dict_or_path=config)
    masters: zero_state.Masters = {}
    parameter: Any  # gets attributes and methods of DeepSpeed
    with construction.paused() if construction else contextlib.nullcontext():
        for name, parameter in model.named_parameters():
            if construction:
                construction.use([parameter])
            whole = parameter.data
            if workers.world > 1 and not (construction and construction.is_synchronized(parameter)):
                broadcast(whole)
            is_cast = _is_cast(parameter, dtype)
            parameter.data = whole.to(workers.device, dtype if is_cast else None)
            zero._convert_to_deepspeed_param(parameter)
            parameter.partition()
            if is_cast and parameter.requires_grad:
                count = parameter.partition_numel()
                first = workers.rank * count
                masters[canonical_name(name)] = first, whole.flatten()[first : first + count].clone()
            if construction:
                construction.forget([whole])
            del whole
    if construction:
        construction.finish()
    accelerator.move(model, workers.device)  # the buffers
    return masters


def _broadcast_with_scalars(broadcast: Callable[[Any], None], engine: Any) -> None:
    """Broadcast the parameters of DeepSpeed's engine. It views each as bytes, which takes a dimension."""
    scalars = [parameter for parameter in engine.module.parameters() if parameter.ndim == 0]
    for parameter in scalars:
        parameter.data = parameter.data[None]
    broadcast(engine)
    for parameter in scalars:
        parameter.data = parameter.data[0]


@contextlib.contextmanager
def _without_gathers(parameters: Sequence[Any]) -> Iterator[None]:
    """Do not gather and partition these parameters inside the context.

    DeepSpeed gathers each one when it registers a hook for its gradient. Only versions of torch before 2.1 need that.
    """
    methods = [(p, p.all_gather, p.partition) for p in parameters if hasattr(p, "all_gather")]
    for parameter, _, _ in methods:
        parameter.all_gather = parameter.partition = lambda: None
    try:
        yield
    finally:
        for parameter, all_gather, partition_again in methods:
            parameter.all_gather, parameter.partition = all_gather, partition_again


def _is_cast(parameter: nn.Parameter, dtype: torch.dtype | None) -> bool:
    return dtype is not None and parameter.dtype != dtype and not is_quantized(parameter)  # codes keep their type


class DeepSpeedEngine(SingleEngine):
    """Trains with DeepSpeed. Accumulation, clipping, precision and schedule mean the same as in the other engines.

    DeepSpeed keeps the model in the compute type, and fp32 masters of this worker's share of it.
    """

    def __init__(self, plan: Plan, workers: Workers, *, clip_grad: float) -> None:
        super().__init__(plan, workers, clip_grad=clip_grad)
        self.loss_scale = None  # DeepSpeed has its own, with the same rule
        self.config: dict[str, Any] = dict(plan.engine_options.deepspeed)
        self.zero_stage = int(self.config["zero_optimization"]["stage"])
        self._derivatives_in_loss = backwards.Derivatives(0, f"ZeRO-{self.zero_stage}")  # any backward reduces them
        prepare(None, plan)
        # Connect DeepSpeed to the process group and the device. A single worker gets a new group.
        os.environ["LOCAL_RANK"] = str(workers.local_rank)
        # DeepSpeed calls collectives by names that torch has deprecated.
        warnings.filterwarnings("ignore", message=r".*torch\.distributed\..*is deprecated", category=FutureWarning)
        logger = logging.getLogger("DeepSpeed")
        logger.setLevel(logging.ERROR)  # messages during the import do not matter to a run
        import deepspeed

        level = logging.INFO if any(map(self.config.get, LOUD)) else logging.WARNING
        logger.setLevel(level if workers.is_main else logging.ERROR)
        ask_processor_once()
        if workers.device.type == "cpu":
            leave_out_shm_comm()
            # DeepSpeed requires fast kernels, but torch computes in fp16 on any CPU.
            deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
        open_group_alone(workers.device)
        patch_function(deepspeed.DeepSpeedEngine, "_broadcast_model", _broadcast_with_scalars)
        if not deepspeed.comm.is_initialized():
            deepspeed.init_distributed()
        close_group_by(deepspeed.comm.destroy_process_group)
        self._deepspeed: Any
        self._state: zero_state.ZeroState

    def _config_for(self, model: nn.Module) -> dict[str, Any]:
        """Return DeepSpeed's configuration for a model of this width."""
        sizes = fill_bucket_sizes(self.config["zero_optimization"], width_of(model), self.workers.device.type)
        return {**self.config, "zero_optimization": sizes}

    def _build(self, model: nn.Module, recipe: OptimizerSpec) -> None:
        import deepspeed

        self.config = self._config_for(model)
        named = trained_parameters(model)
        self._parameters = [p for _, p in named]
        # DeepSpeed cannot put these end to end: several types, complex numbers, and nothing at all.
        types = {p.dtype for p in self._parameters if self.compute_type is None or p.is_complex()}
        empty = [name for name, p in model.named_parameters() if p.numel() == 0]
        if len(types) > 1 or any(dtype.is_complex for dtype in types) or empty:
            names = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in types))
            raise RapidformerError(
                f"this model trains {names}" if not empty else f"{empty[0]} has no elements",
                where=f"ZeRO-{self.zero_stage}, which joins parameters of one real type",
                hint="change it in build_model(), or train with --fsdp-memory-optimization or "
                "--use-distributed-optimizer",
            )
        differing = recipe.differences(named)
        masters = self._convert(model, self.config)
        with _without_gathers(self._parameters):
            self._deepspeed, _, _, _ = deepspeed.initialize(
                model=model, optimizer=recipe.build(named, differing), config=self.config, dist_init_required=False
            )
        self.model, self.optimizer = model.train(), self._deepspeed.basic_optimizer
        kind = zero_state.PartitionedParameters if self.zero_stage == 3 else zero_state.FlatGroups
        self._state = kind(self._deepspeed.optimizer, self.assembly, self.workers)
        if self.compute_type == torch.float16:  # at its minimum the loss scale stays, as in the other engines
            self._deepspeed.optimizer.loss_scaler.raise_error_at_min_scale = False
        self._state.restore_masters(masters)
        self._sequence_check = self._state.sequence_check()
        self.needs_zero_gradients = self.zero_stage == 3
        send = self._state.hook_gradients(self._parameters, self._on_gradient_ready)
        self._sequence = backwards.GradientSequence(len(self._parameters), send)
        settings = self._deepspeed._config.zero_config.model_dump().items()
        self.receipts["zero_optimization"] = {key: v for key, v in settings if isinstance(v, (bool, int, float))}

    def frozen(self, model: nn.Module) -> nn.Module:
        """Prepare a frozen model like the trained one: in the compute type, partitioned in stage 3, no optimizer."""
        import deepspeed

        model.requires_grad_(False).eval()
        config = self._config_for(model)
        settings = {name: value for name, value in config.items() if name not in ("optimizer", "scheduler")}
        self._convert(model, settings)
        if self.zero_stage < 3:
            return accelerator.move(model, self.workers.device)
        divided, _, _, _ = deepspeed.initialize(model=model, config=settings, dist_init_required=False)
        divided.eval()
        return divided

    def _convert(self, model: nn.Module, config: Mapping[str, Any]) -> zero_state.Masters:
        """Cast a model to the compute type, and partition it in stage 3. All workers get the values of the first."""
        if self.compute_type is not None:
            _autocast_forward(model, self.compute_type)
        if self.workers.world > 1:
            for buffer in model.buffers():
                broadcast(buffer)
        if self.zero_stage < 3:
            return cast(model, self.compute_type, self.workers)
        return partition(model, config, self.compute_type, self.workers, self._construction)

    def _distribute(self) -> nn.Module:
        return self._deepspeed

    def _supports_async_step(self) -> bool:
        return False  # DeepSpeed reads the norm on the host

    def _finish_step(self, loss: torch.Tensor) -> tuple[torch.Tensor, bool | torch.Tensor]:
        fp16 = self.compute_type == torch.float16
        if not fp16 and not math.isfinite(float(loss)):
            raise NonFiniteLoss(f"loss {float(loss)}")
        self._deepspeed.step()
        norm = torch.as_tensor(self._deepspeed.get_global_grad_norm())
        overflow = bool(self._deepspeed.optimizer.overflow)
        if overflow and not fp16:
            raise NonFiniteLoss(f"loss {float(loss)}, gradient norm {float(norm)}")
        return norm, overflow

    def accumulation(self, *, last: bool) -> AbstractContextManager[object]:
        self._deepspeed.set_gradient_accumulation_boundary(last)
        return self._sequence_check.checked() if self._sequence_check else contextlib.nullcontext()

    def drop(self) -> None:
        super().drop()
        self._state.drop_gradients()
        self._used: set[int] = set()

    def _backward(self, loss: torch.Tensor) -> None:
        if self._sequence_check and not self._sequence_check.is_known:
            used = set(map(id, backwards.reached_parameters(loss)))
            self._sequence_check.forward_done(self._names(p for p in self._parameters if id(p) not in used))
        self._sequence.begin()
        loss = backwards.with_unused_parameters(loss, (), then=self._sequence.finish)
        self._deepspeed.backward(loss, scale_wrt_gas=False)

    def _on_gradient_ready(self, index: int) -> None:
        if self._parameters[index].grad is not None:
            self._used.add(index)
        self._sequence.add(index)

    def _fill_zero_gradients(self, parameters: Sequence[torch.Tensor]) -> None:
        those = set(map(id, parameters))
        self._used |= {index for index, parameter in enumerate(self._parameters) if id(parameter) in those}

    def _unused_here(self) -> Sequence[int]:
        return [index for index in range(len(self._parameters)) if index not in self._used]

    def _names(self, parameters: Iterable[torch.Tensor]) -> list[str]:
        return [self._state.names[id(parameter)] for parameter in parameters]

    def _drop_unused(self, indices: Sequence[int]) -> None:
        """Refuse parameters without a gradient on any worker, because ZeRO would still apply weight decay to them.

        Raises:
            RapidformerError: the loss of no worker reaches a trainable parameter.
        """
        if unused := self._names(self._parameters[index] for index in indices):
            message = f"the loss does not reach {len(unused)} parameters: {', '.join(unused[:6])}"
            hint = "set requires_grad = False for them in build_model, or leave them out of the model"
            raise RapidformerError(message, where=f"ZeRO-{self.zero_stage}, which would let them decay", hint=hint)

    @contextlib.contextmanager
    def measuring(self) -> Iterator[nn.Module]:
        with super().measuring() as model:
            forgetting = model.register_forward_hook(lambda *_: self._state.forget_forward())
            try:
                yield model
            finally:
                forgetting.remove()

    def _exchange_averages(self) -> None:
        self._state.exchange_averages()

    def local_tensors(self) -> dict[str, list[torch.Tensor]]:
        return self._state.local_tensors()

    @property
    def swapped_bytes(self) -> int:
        """Number of bytes of optimizer state that this rank stores in files."""
        swapper = getattr(self._deepspeed.optimizer, "optimizer_swapper", None)
        infos = swapper.swap_params_info.values() if swapper else ()
        files = [Path(path) for info in infos for path in info.get_swap_paths()]
        return sum(file.stat().st_size for file in files if file.is_file())

    def shards(self, kind: ShardKind) -> Iterator[Shard]:
        return self._state.shards(kind)

    @property
    def gradient_scale(self) -> float:
        return float(self._deepspeed.optimizer.loss_scale)

    def load(self, reader: StateReader, *, optimizer: bool) -> None:
        self._state.load(reader, optimizer_state=optimizer)

    def state(self) -> dict[str, Any]:
        state = super().state()
        if self.compute_type == torch.float16:
            state["loss_scale"] = loss_scale_state(self._deepspeed.optimizer.loss_scaler)
        return state

    def load_state(self, state: Mapping[str, Any]) -> None:
        if self.compute_type == torch.float16 and "loss_scale" in state:
            restore_loss_scale(self._deepspeed.optimizer.loss_scaler, state["loss_scale"])

    def whole_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._state.whole_weights()


def loss_scale_state(scaler: Any) -> dict[str, float]:
    """Return the state of DeepSpeed's fixed or dynamic loss scale, in the format of a checkpoint."""
    state = {"scale": float(scaler.cur_scale), "good_steps": 0}
    if scaler.dynamic:
        state["good_steps"] = scaler.cur_iter - scaler.last_overflow_iter - 1
        state["hysteresis"] = scaler.cur_hysteresis
    return state


def restore_loss_scale(scaler: Any, saved: Mapping[str, float]) -> None:
    """Restore the loss scale of a checkpoint. A fixed scale does not change."""
    if not scaler.dynamic:
        return
    scaler.cur_scale = float(saved["scale"])
    scaler.last_overflow_iter = scaler.cur_iter - int(saved["good_steps"]) - 1
    scaler.cur_hysteresis = min(int(saved.get("hysteresis", scaler.delayed_shift)), scaler.delayed_shift)


def _autocast_forward(model: nn.Module, dtype: torch.dtype) -> None:
    """Run the forward under autocast, also inside DeepSpeed, which disables autocast there.

    The parameters already have the 16-bit type. Norms, softmax and losses are still computed in fp32, as in all other
    engines.
    """
    forward = model.forward

    @functools.wraps(forward)  # keep the signature of the model's forward
    def autocast_forward(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(next(model.parameters()).device.type, dtype=dtype):
            return forward(*args, **kwargs)

    model.forward = autocast_forward
