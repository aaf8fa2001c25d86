"""What is known of models with adapters: the parts of an adapted layer, and the frozen base.

The base's tensors stay out of checkpoints, which name it instead.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

_ATTRIBUTE = "frozen_base"
_BASE = "base_layer"
_STACKS, _READERS = "stack_adapters", "stack_readers"
SAMPLED = 65_536
"""Elements of a tensor whose order is looked at, too; of the others the sum alone."""


@dataclass(frozen=True)
class FrozenBase:
    """What of a model is never trained, and is found again where the model was found.

    Attributes:
        names: its tensors, by canonical name.
        identity: a digest of their names, shapes and values.
    """

    names: frozenset[str]
    identity: str


@dataclass(frozen=True)
class AdapterParts:
    """Names of the modules in an adapted layer: what it was, and the two matrices beside it.

    Attributes:
        base: the layer itself.
        down, up: to the rank and back, as ``base(x) + up(down(x))``.
        stack: the parameter of the base that they stand beside, if it is a stack of matrices and the base no layer.
    """

    base: str
    down: str
    up: str
    stack: str | None = None


def plain_name(name: str) -> str:
    """The name of a tensor of an adapted layer as it was without adapters.

    >>> plain_name("mlp.experts.base_layer.base_layer.down_proj")
    'mlp.experts.down_proj'
    """
    return ".".join(part for part in name.split(".") if part != _BASE)


def adapter_parts(module: nn.Module) -> AdapterParts | None:
    """The parts of an adapted layer of peft; None of any other module."""
    children = dict(module.named_children())
    if not {_BASE, "lora_A", "lora_B"} <= children.keys():
        return None
    (name,) = dict(children["lora_A"].named_children())
    stack = str(module.parameter_name) if hasattr(module, "factors") else None
    return AdapterParts(_BASE, f"lora_A.{name}", f"lora_B.{name}", stack)


@dataclass(frozen=True)
class Factors:
    """What stands beside a stack of N matrices: ``scaling · x @ down[i] @ up[i]`` beside the product with the i-th.

    Attributes:
        down: [N, in, rank].
        up: [N, rank, out].
    """

    down: torch.Tensor
    up: torch.Tensor
    scaling: float


class _StackAdapter(Protocol):
    def factors(self) -> Factors | None: ...


ReadStack = Callable[[torch.Tensor, torch.dtype], torch.Tensor]
"""From what is stored of a stack, and a type, to [N, in, out]."""


def set_stack_adapter(module: nn.Module, parameter: str, adapter: _StackAdapter) -> None:
    """Note in a module with stacks of matrices what stands beside one of them."""
    vars(module).setdefault(_STACKS, {})[parameter] = adapter


def factors_beside(module: nn.Module, parameter: str) -> Factors | None:
    """What acts beside a stack of matrices now; None of one that has no adapter, or whose adapter is off."""
    adapter: _StackAdapter | None = vars(module).get(_STACKS, {}).get(parameter)
    return adapter.factors() if adapter else None


def set_stack_reader(module: nn.Module, parameter: str, read: ReadStack) -> None:
    """Note in a module how a stack of matrices is read that lies in codes."""
    vars(module).setdefault(_READERS, {})[parameter] = read


def reader_of(module: nn.Module, parameter: str) -> ReadStack | None:
    """How a stack is read; None of one whose numbers lie as they are."""
    read: ReadStack | None = vars(module).get(_READERS, {}).get(parameter)
    return read


def trained_whole(model: nn.Module) -> dict[str, str]:
    """Return the modules that are trained whole in a model with adapters, by the name of the copy that peft trains."""
    copies: dict[str, str] = {}
    for name, module in model.named_modules():
        children = dict(module.named_children())
        if {"original_module", "modules_to_save"} <= children.keys():
            copies |= {
                f"{name}.modules_to_save.{adapter}": name for adapter, _ in children["modules_to_save"].named_children()
            }
    return copies


def base_of(module: nn.Module) -> nn.Module:
    """A module without the adapters around it."""
    while adapter_parts(module):
        module = module.get_submodule(_BASE)
    return module


def frozen_base_of(model: nn.Module) -> FrozenBase | None:
    """The base of a model whose adapters alone are kept; None of all others."""
    base: FrozenBase | None = vars(model).get(_ATTRIBUTE)
    return base


def set_frozen_base(model: nn.Module, base: FrozenBase) -> None:
    """Note the base in the model that stands on it."""
    vars(model)[_ATTRIBUTE] = base


@contextmanager
def without_adapters(model: Any) -> Iterator[Any]:
    """The model as it was before it was given adapters, without dropout: neither they nor copies of heads act.

    Their own switch would also turn their gradients off and on, which engines have taken note of.
    """
    adapted = [module for module in model.modules() if hasattr(module, "_disable_adapters")]
    training = model.training
    for module in adapted:
        module._disable_adapters = True
    model.eval()
    try:
        yield model
    finally:
        model.train(training)
        for module in adapted:
            module._disable_adapters = False


def fingerprint(tensor: torch.Tensor) -> str:
    """Of shape, type and values: the sum of all their bits, and the CRC-32 of evenly spaced ones.

    A changed element changes the sum; a changed order is seen in the sample. As fast as memory is read.
    """
    flat = tensor.detach().flatten()
    whole = flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)
    words = whole[: len(whole) // 4 * 4].view(torch.int32)
    total = int(words.sum(dtype=torch.int64)) + int(whole[len(words) * 4 :].sum(dtype=torch.int64))
    step = max(1, flat.numel() // SAMPLED)
    sample = zlib.crc32(flat[::step].cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return f"{tuple(tensor.shape)} {tensor.dtype} {total} {sample}"


def identity_of(fingerprints: Mapping[str, str]) -> str:
    """One digest of the fingerprints of all tensors by name."""
    told = "\n".join(f"{name} {value}" for name, value in sorted(fingerprints.items()))
    return hashlib.sha256(told.encode()).hexdigest()[:16]
