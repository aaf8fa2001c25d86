"""Parameters of 16 bits in the place of fp32 ones: which of a model, and how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class GradientTypes:
    """Of the gradients of parameters of 16 bits.

    Attributes:
        accumulate: what they are added up in, over micro batches.
        reduce: what they are summed in, over replicas.
    """

    accumulate: torch.dtype = torch.float32
    reduce: torch.dtype = torch.float32


IN_FP32 = GradientTypes()


def narrowed_parameters(model: nn.Module) -> set[int]:
    """Identities of the parameters that 16 bits are enough for: fp32 ones that are trained, but for those of norms.

    Norms are the modules whose own parameters all have fewer than two dimensions. Autocast computes them in fp32, of
    inputs of any type, and torch's kernels for a CPU take no fp32 input beside parameters of 16 bits.
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
def narrow(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """Round a parameter to 16 bits, in place: whoever has it, has the narrow one."""
    if not isinstance(parameter, DTensor):
        parameter.data = parameter.data.to(dtype)
        return
    replacement = nn.Parameter(parameter.detach().to(dtype))  # the data of a DTensor is not that of its local part
    replacement.__dict__.update(parameter.__dict__)
    torch.utils.swap_tensors(parameter, replacement)


def sum_rows_in_fp32(model: nn.Module) -> None:
    """Let gradients of narrow tables on a CPU be summed in fp32, row by row of the table, as on a GPU.

    torch's kernel for a CPU adds up the tokens of a row in 16 bits: after some hundreds of them the sum stands still.
    """
    for module in model.modules():
        if isinstance(module, nn.Embedding) and type(module).forward is nn.Embedding.forward:
            weight, plain = module.weight, module.max_norm is None and not module.scale_grad_by_freq
            if plain and weight.device.type == "cpu" and weight.element_size() == 2 and not isinstance(weight, DTensor):
                # Before all other hooks: what they make of the rows (noise, for one) is to stay.
                module.register_forward_hook(_look_up, prepend=True, with_kwargs=True)


def _look_up(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: torch.Tensor) -> torch.Tensor:
    if not output.requires_grad:
        return output
    rows: torch.Tensor = _Rows.apply(module.weight, inputs[0] if inputs else named["input"], module.padding_idx)
    return rows


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: torch.Tensor, places: torch.Tensor, padding: int | None) -> torch.Tensor:
        ctx.save_for_backward(places)
        ctx.table, ctx.padding = (table.shape, table.dtype), padding
        return functional.embedding(places, table)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        (places,), (shape, dtype) = ctx.saved_tensors, ctx.table
        found, numbers = places.flatten().unique(return_inverse=True)  # most tables have more rows than a batch names
        sums = torch.zeros(len(found), shape[1]).index_add_(0, numbers, gradients[0].flatten(0, -2).float())
        if ctx.padding is not None:
            sums[found == ctx.padding] = 0
        whole = torch.zeros(shape, dtype=dtype)
        whole[found] = sums.to(dtype)
        return whole, None, None
