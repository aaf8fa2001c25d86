"""Parameters of 16 bits in the place of fp32 ones: which of a model, and how."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

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
