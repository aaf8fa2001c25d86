"""Cast a model for DeepSpeed, and convert it to ZeRO-3's partitions. The exact fp32 values become its masters."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from rapidformer_templates.engines.construction import ModelUnderConstruction
from rapidformer_templates.models.blocks import canonical_name, is_quantized
from rapidformer_templates.switches.zero.state import ZeroState
from rapidformer_templates.system import accelerator
from rapidformer_templates.system.workers import Workers


class Masters:
    """Exact fp32 values of the trained parameters that are cast. DeepSpeed would round them before it copies them."""

    def __init__(self) -> None:
        self._values: dict[str, tuple[int, torch.Tensor]] = {}

    def keep(self, name: str, values: torch.Tensor, *, first: int = 0) -> None:
        """Keep the values of a flattened parameter from the element ``first`` on."""
        self._values[name] = first, values

    def restore(self, state: ZeroState) -> None:
        """Copy the exact values into DeepSpeed's masters, which it has made from the cast parameters."""
        if not self._values:
            return
        for index, fragments in enumerate(state.fragments):
            with state.partition(index, write=True) as flat:
                for fragment in fragments:
                    if fragment.name in self._values:
                        first, values = self._values[fragment.name]
                        fragment.of(flat).copy_(values[fragment.start - first :][: fragment.count])


def cast(model: nn.Module, dtype: torch.dtype | None, workers: Workers) -> Masters:
    """Cast the parameters of a model in place for ZeRO-1 and ZeRO-2.

    Args:
        dtype: the compute type. None keeps the types.
    """
    masters = Masters()
    for name, parameter in model.named_parameters():
        if not _is_cast(parameter, dtype):
            continue
        if parameter.requires_grad:
            exact = parameter.detach().to(workers.device)
            if workers.world > 1:
                dist.broadcast(exact, src=0)
            masters.keep(canonical_name(name), exact.flatten())
        parameter.data = parameter.data.to(dtype)
    return masters


def partition(
    model: nn.Module,
    config: Mapping[str, Any],
    dtype: torch.dtype | None,
    workers: Workers,
    construction: ModelUnderConstruction | None,
) -> Masters:
    """Move a model to the device and convert it to ZeRO-3's partitions in place. One parameter is whole at a time.

    Args:
        config: DeepSpeed's configuration.
        dtype: the type of the partitions. None keeps the types.
        construction: divides the parameters until they are converted. None if they are whole.
    """
    from deepspeed.runtime.zero.partition_parameters import Init

    # DeepSpeed applies memory_efficient_linear only if it gets a module.
    zero = Init(nn.Module(), config_dict_or_path=config)
    masters = Masters()
    parameter: Any  # gets attributes and methods of DeepSpeed
    with construction.paused() if construction else nullcontext():
        for name, parameter in model.named_parameters():
            if construction:
                construction.use([parameter])
            whole = parameter.data
            if workers.world > 1 and not (construction and construction.is_synchronized(parameter)):
                dist.broadcast(whole, src=0)
            is_cast = _is_cast(parameter, dtype)
            parameter.data = whole.to(workers.device, dtype if is_cast else None)
            zero._convert_to_deepspeed_param(parameter)
            parameter.partition()
            if is_cast and parameter.requires_grad:
                count = parameter.partition_numel()
                first = workers.rank * count
                masters.keep(canonical_name(name), whole.flatten()[first : first + count].clone(), first=first)
            if construction:
                construction.forget([whole])
            del whole
    if construction:
        construction.finish()
    accelerator.move(model, workers.device)  # the buffers
    return masters


def _is_cast(parameter: nn.Parameter, dtype: torch.dtype | None) -> bool:
    return dtype is not None and parameter.dtype != dtype and not is_quantized(parameter)  # codes keep their type
