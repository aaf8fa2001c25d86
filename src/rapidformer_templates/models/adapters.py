"""Facts about models with adapters: the parts of an adapted layer, and the frozen base.

Checkpoints do not contain the tensors of the base. They name it instead.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn

from rapidformer_templates.models.blocks import in_eval_mode

ModelT = TypeVar("ModelT", bound=nn.Module)

_NEW_MODULES: WeakKeyDictionary[nn.Module, tuple[str, ...]] = WeakKeyDictionary()
"""Names of the modules that lack pretrained weights, by model, from loading to the transforms."""
_BASE = "base_layer"
_STACKS, _READERS = "stack_adapters", "stack_readers"
SETTINGS = "adapter_config.json"
"""peft's file in a folder of adapters."""
SAMPLED = 65_536
"""Number of elements per tensor whose order is checked. The sum covers all elements."""
SUMMED = 4 << 20
"""Number of elements that are summed at a time."""


@dataclass(frozen=True)
class FrozenBase:
    """The frozen weights of a model. They are loaded again from where the model came from.

    Attributes:
        names: canonical names of the frozen tensors.
        identity: a digest of the names, shapes and values of all tensors of the model.
        fingerprints: fingerprints of the frozen tensors in fp32, by the name that each has in the base.
    """

    names: frozenset[str]
    identity: str
    fingerprints: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class AdapterParts:
    """Names of the modules in an adapted layer: the original layer, and the two low-rank matrices.

    Attributes:
        base: the original layer.
        down, up: the projections to the rank and back, as in ``base(x) + up(down(x))``.
        stack: the parameter that the adapter belongs to, if it is a stack of matrices and ``base`` is not a layer.
    """

    base: str
    down: str
    up: str
    stack: str | None = None


def name_without_adapters(name: str) -> str:
    """Return the name that a tensor of an adapted layer had without adapters.

    >>> name_without_adapters("mlp.experts.base_layer.base_layer.down_proj")
    'mlp.experts.down_proj'
    """
    return ".".join(part for part in name.split(".") if part != _BASE)


def adapter_parts(module: nn.Module) -> AdapterParts | None:
    """Return the parts of a layer that peft has adapted, or None for any other module."""
    children = dict(module.named_children())
    if not {_BASE, "lora_A", "lora_B"} <= children.keys():
        return None
    (name,) = dict(children["lora_A"].named_children())
    stack = str(module.parameter_name) if hasattr(module, "factors") else None
    return AdapterParts(_BASE, f"lora_A.{name}", f"lora_B.{name}", stack)


@dataclass(frozen=True)
class Factors:
    """Low-rank factors of a stack of N matrices. ``scaling · x @ down[i] @ up[i]`` is added to the i-th product.

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
"""Maps a stored stack and a dtype to a tensor of shape [N, in, out]."""


def set_stack_adapter(module: nn.Module, parameter: str, adapter: _StackAdapter) -> None:
    """Register the adapter of a stack of matrices in its module."""
    vars(module).setdefault(_STACKS, {})[parameter] = adapter


def stack_factors(module: nn.Module, parameter: str) -> Factors | None:
    """Return the active factors of a stack of matrices, or None if it has no adapter or the adapter is off."""
    adapter: _StackAdapter | None = vars(module).get(_STACKS, {}).get(parameter)
    return adapter.factors() if adapter else None


def set_stack_reader(module: nn.Module, parameter: str, read: ReadStack) -> None:
    """Register the function that dequantizes a stack of matrices in its module."""
    vars(module).setdefault(_READERS, {})[parameter] = read


def reader_of(module: nn.Module, parameter: str) -> ReadStack | None:
    """Return the function that dequantizes a stack, or None if the stack is not quantized."""
    read: ReadStack | None = vars(module).get(_READERS, {}).get(parameter)
    return read


def trained_whole(model: nn.Module) -> dict[str, str]:
    """Map peft's trained copies to the fully trained modules of a model with adapters."""
    copies: dict[str, str] = {}
    for name, module in model.named_modules():
        children = dict(module.named_children())
        if {"original_module", "modules_to_save"} <= children.keys():
            for adapter, _ in children["modules_to_save"].named_children():
                copies[f"{name}.modules_to_save.{adapter}"] = name
    return copies


def base_of(module: nn.Module) -> nn.Module:
    """Return a module without the adapters around it."""
    while adapter_parts(module):
        module = module.get_submodule(_BASE)
    return module


def new_modules_of(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the modules whose weights a pretrained model lacks. They start with random values."""
    return _NEW_MODULES.get(model, ())


def set_new_modules(model: nn.Module, weights: Collection[str]) -> None:
    """Record which modules lack pretrained weights, except modules that also contain pretrained ones.

    Args:
        weights: names of the weights that the model's files lack.
    """
    owners = sorted({name.rpartition(".")[0] for name in weights} - {""})
    _NEW_MODULES[model] = tuple(
        owner
        for owner in owners
        if all(f"{owner}.{name}" in weights for name, _ in model.get_submodule(owner).named_parameters())
    )


@contextmanager
def without_adapters(model: ModelT) -> Iterator[ModelT]:
    """Use the model without adapters, trained head copies and dropout inside the context.

    peft's own switch also changes ``requires_grad``, which engines have already recorded.
    """
    adapted: list[Any] = [module for module in model.modules() if hasattr(module, "_disable_adapters")]
    for module in adapted:
        module._disable_adapters = True
    try:
        with in_eval_mode(model):
            yield model
    finally:
        for module in adapted:
            module._disable_adapters = False


def fingerprint(tensor: torch.Tensor) -> str:
    """Fingerprint shape, type and values: the sum of all bits, and the CRC-32 of evenly spaced elements.

    A changed element changes the sum. The sample detects a changed order. Reading the memory limits the speed.
    """
    flat = tensor.detach().flatten()
    whole = flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)
    words = whole[: len(whole) // 4 * 4].view(torch.int32)
    # A sum in another type copies what it adds.
    total = sum(int(part.sum(dtype=torch.int64)) for part in (*words.split(SUMMED), whole[len(words) * 4 :]))
    step = max(1, flat.numel() // SAMPLED)
    sample = zlib.crc32(flat[::step].cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return f"{tuple(tensor.shape)} {tensor.dtype} {total} {sample}"


def fp32_fingerprint(tensor: torch.Tensor) -> str:
    """Fingerprint the values in fp32, which are the same if a model is stored in 16 bits."""
    return fingerprint(tensor.float())


def identity_of(fingerprints: Mapping[str, str]) -> str:
    """Return one digest of the fingerprints of all tensors by name."""
    text = "\n".join(f"{name} {value}" for name, value in sorted(fingerprints.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
