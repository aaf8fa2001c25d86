"""Adapters of peft beside the layers of a model, equal on every worker whatever else is switched on."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers.pytorch_utils import Conv1D

from rapidformer_templates.engines.local import COMPUTE_TYPES
from rapidformer_templates.engines.model_building import Building
from rapidformer_templates.errors import ModelError
from rapidformer_templates.models.adapters import FrozenBase, fingerprint, identity_of, set_frozen_base
from rapidformer_templates.models.blocks import canonical_name
from rapidformer_templates.models.placement import placement_of, whole
from rapidformer_templates.switches.lora.exported import CONFIG
from rapidformer_templates.switches.lora.quantized import QuantizedLinear
from rapidformer_templates.system.replaced_functions import install
from rapidformer_templates.system.workers import Workers

ADAPTER = "default"
"""The name that peft gives to an adapter of which there is one."""
LINEAR = (nn.Linear, Conv1D)
NEW_HEADS = ("classifier", "score", "qa_outputs")
"""What transformers calls heads that a pretrained language model does not have: they are trained whole."""


def add_adapters(model: nn.Module, building: Building) -> nn.Module:
    """Freeze the model and put adapters beside its layers.

    Raises:
        ModelError: no layer is of the asked names or kind.
    """
    options = building.options
    trained_whole = _trained_whole(model, options.lora_modules_to_save)
    targets = _targets(model, options.lora_target_modules, trained_whole)
    config = LoraConfig(
        r=options.lora_rank,
        lora_alpha=options.lora_alpha if options.lora_alpha is not None else 2 * options.lora_rank,
        lora_dropout=options.lora_dropout,
        target_modules=targets,
        modules_to_save=trained_whole or None,
        use_rslora=options.lora_variant == "rslora",
        use_dora=options.lora_variant == "dora",
        fan_in_fan_out=False,
    )
    identity = _identity(model, building.workers) if building.has_values else ""
    with warnings.catch_warnings(), nullcontext() if building.has_values else _moving_nothing():
        warnings.simplefilter("ignore")  # that Conv1D has its matrix the other way round, which peft then heeds
        try:
            inject_adapter_in_model(config, model, ADAPTER)
        except ValueError as error:
            raise ModelError(
                f"{type(model).__name__} cannot get adapters: {error}",
                where="--lora-target-modules",
                hint="name layers of torch.nn.Linear by the ends of their names, such as q_proj,v_proj",
            ) from error
    if options.quantize_base == "half":
        _halve(model, COMPUTE_TYPES[building.plan.precision])
    elif options.quantize_base:
        _quantize(model, options.quantize_base, has_values=building.has_values)
    if building.has_values:
        _initialise(model, torch.initial_seed())
    frozen = frozenset(canonical_name(name) for name, p in model.named_parameters() if not p.requires_grad)
    set_frozen_base(model, FrozenBase(frozen, identity))
    vars(model)[CONFIG] = config
    return model


_planned: ContextVar[bool] = ContextVar("adapters of a model without data", default=False)


@contextmanager
def _moving_nothing() -> Iterator[None]:
    """Of a model whose shapes are planned: torch cannot move fake tensors, and they are where they belong already."""
    install(nn.Module, "to", lambda to, module, *args, **kw: module if _planned.get() else to(module, *args, **kw))
    token = _planned.set(True)
    try:
        yield
    finally:
        _planned.reset(token)


def _trained_whole(model: nn.Module, asked: str | None) -> list[str]:
    if asked is not None:
        names = _names(asked)
        missing = [name for name in names if not _ending_with(model, name)]
        if missing:
            raise ModelError(
                f"{type(model).__name__} has no module that is called {missing[0]}",
                where="--lora-modules-to-save",
                hint=f"its own are {', '.join(name for name, _ in model.named_children())}",
            )
        return names
    return [name for name, _ in model.named_children() if name in NEW_HEADS]


def _targets(model: nn.Module, asked: str, trained_whole: list[str]) -> list[str]:
    """Full names of the layers that get adapters: all linear ones but the head, or those that end as asked."""
    if asked != "all-linear":
        layers = {end: _ending_with(model, end) for end in _names(asked)}
        missing = [end for end, found in layers.items() if not found]
        if missing or not layers:
            raise ModelError(
                f"{type(model).__name__} has no layer that is called {', '.join(missing) or asked}",
                where="--lora-target-modules",
                hint=f"its linear layers end in {', '.join(_ends(model))}",
            )
        return [name for found in layers.values() for name in found]
    find: Any = getattr(model, "get_output_embeddings", lambda: None)
    head = find()
    found = [
        name
        for name, module in model.named_modules()
        if isinstance(module, LINEAR) and module is not head and not _inside(name, trained_whole)
    ]
    if not found:
        raise ModelError(
            f"{type(model).__name__} has no linear layer that could get an adapter", where="--lora-target-modules"
        )
    return found


def _names(asked: str) -> list[str]:
    return [name.strip() for name in asked.split(",") if name.strip()]


def _ending_with(model: nn.Module, end: str) -> list[str]:
    return [name for name, _ in model.named_modules() if name == end or name.endswith(f".{end}")]


def _ends(model: nn.Module) -> list[str]:
    return sorted({name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, LINEAR)})


def _inside(name: str, modules: list[str]) -> bool:
    return any(f".{module}." in f".{name}." for module in modules)


def _identity(model: nn.Module, workers: Workers) -> str:
    """Of the whole model, of which a stage of a pipeline has a part."""
    whole_name = placement_of(model).whole_name
    values: dict[str, str] = {}
    for name, parameter in model.named_parameters():
        with whole(parameter):
            values[whole_name(canonical_name(name))] = fingerprint(parameter)
    return identity_of({name: value for others in workers.gather(values) for name, value in others.items()})


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, LoraLayer]]:
    """The layers that have adapters, by name."""
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            yield name, module


def _halve(model: nn.Module, kind: torch.dtype) -> None:
    """Keep what adapters stand beside in the type that autocast would round it to in each product."""
    for _, layer in adapted_layers(model):
        for parameter in layer.get_base_layer().parameters():
            parameter.data = parameter.data.to(kind)


def _quantize(model: nn.Module, coding: str, *, has_values: bool) -> None:
    """Keep the weights that adapters stand beside in codes."""
    for _, layer in adapted_layers(model):
        quantized = QuantizedLinear(layer.get_base_layer(), coding, has_values=has_values)
        layer.base_layer = quantized


def _initialise(model: nn.Module, seed: int) -> None:
    """Each adapter by its own name, so that it begins alike on workers that have different layers."""
    for name, layer in adapted_layers(model):
        digest = hashlib.sha256(f"{seed} {canonical_name(name)}".encode()).digest()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int.from_bytes(digest[:8], "little"))
            layer.reset_lora_parameters(ADAPTER, init_lora_weights=True)
