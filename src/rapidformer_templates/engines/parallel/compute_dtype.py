"""Converts fp32 parameters of a model to 16 bits: which ones, and how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from rapidformer_templates.engines.forwards import differentiable

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class GradientTypes:
    """Types of the gradients of 16-bit parameters.

    Attributes:
        accumulate: type in which they are accumulated over micro batches.
        reduce: type in which they are summed over replicas.
    """

    accumulate: torch.dtype = torch.float32
    reduce: torch.dtype = torch.float32


IN_FP32 = GradientTypes()


def parameters_with_masters(model: nn.Module) -> set[int]:
    """Return the ids of the parameters for which 16 bits are enough: trained fp32 parameters, except those of norms.

    Norms are the modules whose own parameters all have fewer than two dimensions. Autocast computes them in fp32 for
    inputs of any type, and torch's CPU kernels do not accept fp32 inputs with 16-bit parameters.
    """
    of_norms = {
        id(parameter)
        for module in model.modules()
        if all(parameter.ndim < 2 for parameter in module.parameters(recurse=False))
        for parameter in module.parameters(recurse=False)
    }
    return {
        id(parameter)
        for parameter in model.parameters()
        if parameter.requires_grad and parameter.dtype == torch.float32 and id(parameter) not in of_norms
    }


@torch.no_grad()
def cast_to_compute_dtype(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """Round a parameter to 16 bits in place, so that all references to it see the change."""
    if not isinstance(parameter, DTensor):
        parameter.data = parameter.data.to(dtype)
        return
    # Assigning .data of a DTensor does not change its local part.
    replacement = nn.Parameter(parameter.detach().to(dtype))
    replacement.__dict__.update(parameter.__dict__)
    torch.utils.swap_tensors(parameter, replacement)


def sum_rows_in_fp32(model: nn.Module) -> None:
    """Sum gradients of 16-bit embedding tables on a CPU in fp32 per row, as a GPU does.

    Torch's CPU kernel adds up the tokens of a row in 16 bits. After a few hundred of them the sum stops growing.
    """
    for module in model.modules():
        if isinstance(module, nn.Embedding) and type(module).forward is nn.Embedding.forward:
            weight, plain = module.weight, module.max_norm is None and not module.scale_grad_by_freq
            if plain and weight.device.type == "cpu" and weight.element_size() == 2 and not isinstance(weight, DTensor):
                # Runs before all other hooks, to keep their changes to the rows (such as noise).
                module.register_forward_hook(_look_up_rows, prepend=True, with_kwargs=True)


def _look_up_rows(
    module: nn.Embedding, inputs: tuple[Any, ...], named: dict[str, Any], output: torch.Tensor
) -> torch.Tensor:
    if not output.requires_grad:
        return output
    places, table, padding = inputs[0] if inputs else named["input"], module.weight, module.padding_idx
    shape, dtype = table.shape, table.dtype

    def backward(gradient: torch.Tensor) -> torch.Tensor:
        rows, numbers = places.flatten().unique(return_inverse=True)  # most tables have more rows than a batch uses
        sums = torch.zeros(len(rows), shape[1]).index_add_(0, numbers, gradient.flatten(0, -2).float())
        if padding is not None:
            sums[rows == padding] = 0
        whole = torch.zeros(shape, dtype=dtype)
        whole[rows] = sums.to(dtype)
        return whole

    return differentiable(lambda table: functional.embedding(places, table), backward, table)
