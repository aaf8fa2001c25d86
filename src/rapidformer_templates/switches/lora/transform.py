"""Transform that adds peft's adapters to layers, equal on all workers, and the receipt of what is trained."""

from __future__ import annotations

import copy
import hashlib
import warnings
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import chain
from typing import NoReturn
from unittest.mock import patch

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from peft.utils.constants import DUMMY_TARGET_MODULES
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rapidformer_templates.engines.assembly import Assembly, Building
from rapidformer_templates.engines.contract import Engine, TrainedAndFrozen, merge_by_name
from rapidformer_templates.engines.local import COMPUTE_TYPES
from rapidformer_templates.engines.shards import local_part
from rapidformer_templates.errors import ModelError
from rapidformer_templates.models.adapters import FrozenBase, fingerprint, fp32_fingerprint, identity_of, new_modules_of
from rapidformer_templates.models.blocks import AbsentModule, SkippedBlock, bytes_of, canonical_name
from rapidformer_templates.models.blocks import is_quantized as holds_codes
from rapidformer_templates.switches.lora import layers as adapted
from rapidformer_templates.switches.lora.declaration import LoraFlags
from rapidformer_templates.switches.lora.exported import ADAPTER
from rapidformer_templates.system.workers import Workers

ALL_LINEAR = "all-linear"
LINEAR = (nn.Linear, Conv1D)
HALF = (torch.bfloat16, torch.float16)
NEW_HEADS = ("classifier", "score", "qa_outputs")
"""transformers' names for heads that a pretrained language model does not have. They are trained in full."""


def add_adapters(assembly: Assembly, building: Building[LoraFlags]) -> None:
    """Freeze the model and add adapters to its layers.

    Raises:
        ModelError: no layer matches the requested names or kinds, or the model has adapters already.
    """
    model, options = assembly.model, building.options
    if any(True for _ in adapted_layers(model)):
        message = f"{type(model).__name__} already has adapters, and --lora-rank adds others"
        hint = "merge them and save the model, and build it from that folder; or leave out --lora-rank"
        raise ModelError(message, where="build_model()", hint=hint)
    targets = targets_of(model, options.lora_target_modules, options.lora_modules_to_save)
    _check_matrices(model, targets, options)
    of_all = targets.of_all(building.workers) if building.has_values else targets
    refuse_missing(model, of_all, options.lora_target_modules, options.lora_modules_to_save)
    identity, fingerprints = _identify(assembly, building.workers, of_all) if building.has_values else ("", {})
    config = _peft_config(targets, options)
    # torch cannot move the fake tensors of a model whose shapes are planned. They are already on the right device.
    moves = nullcontext() if building.has_values else patch.object(nn.Module, "to", lambda module, *_, **__: module)
    with warnings.catch_warnings(), moves:
        warnings.simplefilter("ignore")  # peft warns that Conv1D stores its matrix transposed, and then handles it
        try:
            _inject(config, model)
        except ValueError as error:
            message = f"{type(model).__name__} cannot get adapters: {error}"
            hint = "name layers of torch.nn.Linear by the ends of their names, such as q_proj,v_proj"
            raise ModelError(message, where="--lora-target-modules", hint=hint) from error
    adapted.install(model, ADAPTER)
    widen_trained(model, with_modules=building.plan.precision != "fp32")
    if isinstance(model, PreTrainedModel):
        model.save_pretrained = refuse_to_save  # type: ignore[method-assign]
    if options.quantize_base:
        kind = COMPUTE_TYPES.get(building.plan.precision, torch.float32)
        _quantize(model, options.quantize_base, kind, has_values=building.has_values)
    if building.has_values:
        # Each adapter has a seed of its name, so that it is equal on workers with different layers.
        seed = torch.initial_seed()
        for name, layer in adapted_layers(model):
            digest = hashlib.sha256(f"{seed} {canonical_name(name)}".encode()).digest()
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(int.from_bytes(digest[:8], "little"))
                layer.reset_lora_parameters(ADAPTER, init_lora_weights=True)
    frozen = frozenset(canonical_name(name) for name, p in model.named_parameters() if not p.requires_grad)
    assembly.base = FrozenBase(frozen, identity, fingerprints)
    described = _peft_config(of_all, options)
    assembly.settings |= {"--lora-alpha": float(described.lora_alpha), "--lora-variant": options.lora_variant}
    revision = building.plan.values.get("--revision")
    described.revision = str(revision["value"]) if revision else None
    # peft sets this while it adds adapters to a Conv1D.
    described.fan_in_fan_out = any(building.workers.gather(config.fan_in_fan_out)) if building.has_values else False
    assembly.record(peft_loadable_config(described, model, of_all))


def widen_trained(model: nn.Module, *, with_modules: bool) -> None:
    """Convert 16-bit adapters to fp32. In 16 bits, rounding would lose the small updates.

    peft gives adapters the type of the layer below, which may be 16 bits in a model that a script loads.

    Args:
        with_modules: also convert fully trained modules. They compute with 16-bit layers only under autocast.
    """
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype in HALF and (with_modules or ".lora_" in name):
            parameter.data = parameter.data.to(torch.float32)


def refuse_to_save(*_: object, **__: object) -> NoReturn:
    """Stand in the place of ``save_pretrained``, which would write names that no ``from_pretrained`` knows.

    Raises:
        ModelError: always.
    """
    hint = "use the export of the run, or rapidformer export RUN --merge for a whole model"
    raise ModelError("transformers cannot save a model with these adapters", where="save_pretrained()", hint=hint)


def _peft_config(targets: Targets, options: LoraFlags) -> LoraConfig:
    assert options.lora_rank is not None  # the switch is active
    return LoraConfig(
        r=options.lora_rank,
        # peft declares an integer, and computes with any number.
        lora_alpha=options.lora_alpha if options.lora_alpha is not None else 2 * options.lora_rank,  # type: ignore[arg-type]
        lora_dropout=options.lora_dropout,
        target_modules=targets.layers if targets.layers or targets.matrices else DUMMY_TARGET_MODULES,
        target_parameters=targets.matrices or None,
        modules_to_save=targets.trained_whole or None,
        use_rslora=options.lora_variant == "rslora",
        use_dora=options.lora_variant == "dora",
        fan_in_fan_out=False,
    )


@dataclass(frozen=True)
class Targets:
    """The layers that get adapters, and the modules that are trained in full. A pipeline stage may have neither.

    Attributes:
        layers: full names of linear layers.
        matrices: full names of parameters outside of linear layers: stacks of experts, weights of routers.
        trained_whole: endings of the names of modules.
        matching_names: the names given by the user that match a layer or a matrix.
    """

    layers: list[str]
    matrices: list[str]
    trained_whole: list[str]
    matching_names: list[str]

    def of_all(self, workers: Workers) -> Targets:
        """Merge the targets of all workers into those of the whole model."""
        everyone = [asdict(targets) for targets in workers.gather(self)]
        return Targets(**{key: list(dict.fromkeys(chain(*(each[key] for each in everyone)))) for key in asdict(self)})


def targets_of(model: nn.Module, names: str, modules_to_save: str | None) -> Targets:
    """Find the layers, matrices and modules on this worker. ``all-linear`` selects all linear layers except the head.

    Args:
        names: names of layers, of parts that contain linear layers, and of matrices, separated by commas.
        modules_to_save: names of modules that are trained in full. None selects the head of a fine-tuning task.
            Modules that a pretrained model lacks are always trained in full.
    """
    heads = [name for name, _ in model.named_children() if name in NEW_HEADS]
    # The export has no frozen weights, and nobody else has those of new modules.
    new = [name for name in new_modules_of(model) if not _inside(name, heads)]
    asked_whole = [*(heads if modules_to_save is None else _names(modules_to_save)), *new]
    present = [name for name in asked_whole if _ending_with(model, name)]
    # peft compares letters: classifier is also the end of pre_classifier.
    taken_by_peft = [name for name, _ in model.named_modules() if name.endswith(tuple(present))]
    trained_whole = [*present, *(name for name in taken_by_peft if not _inside(name, present))]
    found_names = []
    layers: dict[str, None] = {}  # in order, each once
    stacks: dict[str, None] = {}
    for end in _names(names):
        if end == ALL_LINEAR:
            layer_names, matrix_names = _linear_in(model, "", trained_whole), []
        else:
            # The name of a part, such as language_model, selects the linear layers in it.
            inner = {name: _linear_in(model, name, trained_whole) for name in _ending_with(model, end)}
            layer_names = [layer for name, layers_in in inner.items() for layer in layers_in or [name]]
            # Matrices that end like this, or whose modules do.
            modules_of = {name: name.rpartition(".")[0] for name in _matrices(model)}
            matrix_names = [n for n, m in modules_of.items() if any(f".{x}".endswith(f".{end}") for x in (n, m))]
        found_names += [end] if layer_names or matrix_names else []
        owners = {name.rpartition(".")[0] for name in matrix_names}
        layers |= dict.fromkeys(name for name in layer_names if name not in owners)
        stacks |= dict.fromkeys(matrix_names)
    return Targets(list(layers), list(stacks), trained_whole, found_names)


def refuse_missing(model: nn.Module, targets: Targets, names: str, modules_to_save: str | None) -> None:
    """Raise a :class:`ModelError` if no worker has a module or matrix with one of the requested names."""
    for name in _names(modules_to_save or ""):
        if name not in targets.trained_whole:
            message = f"{type(model).__name__} has no module called {name}"
            hint = f"its modules are {', '.join(name for name, _ in model.named_children())}"
            raise ModelError(message, where="--lora-modules-to-save", hint=hint)
    for name in _names(names):
        if name not in targets.matching_names:
            raise _no_target(model, name)
    if not targets.layers and not targets.matrices:
        raise _no_target(model, names)


def _no_target(model: nn.Module, name: str) -> ModelError:
    if name == ALL_LINEAR:
        return ModelError(
            f"{type(model).__name__} has no linear layer that could get an adapter", where="--lora-target-modules"
        )
    ends = sorted({name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, LINEAR)})
    others = sorted({".".join(name.split(".")[-2:]) for name in _matrices(model)})
    return ModelError(
        f"{type(model).__name__} has no layer called {name}",
        where="--lora-target-modules",
        hint=f"its linear layers end in {', '.join(ends)}"
        + (f"; its other matrices in {', '.join(others)}" if others else ""),
    )


def _linear_in(model: nn.Module, part: str, trained_whole: list[str]) -> list[str]:
    """Return the linear layers in a part of the model, or in all of it (""), except the head that scores the tokens."""
    find: object = getattr(model, "get_output_embeddings", None)
    try:
        head = find() if callable(find) else None
    except AttributeError:
        if not any(isinstance(module, AbsentModule) for module in model.modules()):
            raise
        head = None  # another pipeline stage has it
    return [
        name
        for name, module in model.get_submodule(part).named_modules(prefix=part)
        if name != part and isinstance(module, LINEAR) and module is not head and not _inside(name, trained_whole)
    ]


def _matrices(model: nn.Module) -> list[str]:
    """Return the names of stacks of matrices, and of single matrices outside of linear and embedding layers."""
    matrices = []
    for name, module in model.named_modules():
        if name and not isinstance(module, (*LINEAR, nn.Embedding)):
            sizes = {key: p.dim() for key, p in module.named_parameters(recurse=False)}
            most = max(sizes.values(), default=0)  # in a module with stacks, two-dimensional parameters are biases
            matrices += [f"{name}.{key}" for key, dimensions in sizes.items() if dimensions == most and most in (2, 3)]
    return matrices


def _check_matrices(model: nn.Module, targets: Targets, options: LoraFlags) -> None:
    """Raise a :class:`ModelError` for options that peft does not support on matrices.

    Rules refuse these options earlier if the names alone show the conflict.
    """
    lacking = {
        "--lora-dropout": options.lora_dropout,
        "--lora-variant dora": options.lora_variant == "dora",
        "layers of the kind Conv1D": any(isinstance(model.get_submodule(name), Conv1D) for name in targets.layers),
    }
    named = next((what for what, is_given in lacking.items() if is_given), None)
    if targets.matrices and named:
        message = f"peft has no adapters with {named} together with matrices that are not layers: {targets.matrices[0]}"
        raise ModelError(message, where="--lora-target-modules", hint="leave out one of the two")


def _inject(config: LoraConfig, model: nn.Module) -> None:
    """Let peft add adapters to exactly the named layers.

    peft maps some layer names to the names that older versions of transformers used in mixtures. It would then add
    adapters to experts instead. It does not rename anything in a module without a configuration, so the model is
    wrapped in one.
    """
    names = config.target_modules
    if isinstance(names, str) or not renamed_by_peft(model, names or ()):  # a string on stages without targets
        inject_adapter_in_model(config, model, ADAPTER)
        return
    holder = nn.Module()
    holder.model = model
    inject_adapter_in_model(config, holder, ADAPTER)
    model.peft_config = holder.peft_config


def renamed_by_peft(model: nn.Module, names: Iterable[str]) -> set[str]:
    """Return the names that peft would map to other layers in this architecture."""
    renamed: set[str] = set()
    for name in names if hasattr(getattr(model, "config", None), "model_type") else ():
        end = name.rpartition(".")[2]
        tried = LoraConfig(target_modules=[end])
        try:
            convert_peft_config_for_transformers(tried, model, None)
        except ValueError:  # the name is one of several that must be given together
            renamed.add(name)
        else:
            renamed |= {name} if set(tried.target_modules or ()) != {end} else set()
    return renamed


def peft_loadable_config(config: LoraConfig, model: nn.Module, targets: Targets) -> LoraConfig:
    """Return a configuration from which peft adds adapters to the same layers after transformers has loaded the model.

    If peft maps the name of a layer to another layer, the weight of that layer is listed as a matrix instead. Adapters
    of a layer and of its weight matrix are the same.
    """
    renamed = renamed_by_peft(model, targets.layers)
    if not renamed:
        return config
    read = copy.copy(config)
    read.target_modules = [name for name in targets.layers if name not in renamed]
    read.target_parameters = [*targets.matrices, *(f"{name}.weight" for name in sorted(renamed))]
    return read


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _ending_with(model: nn.Module, end: str) -> list[str]:
    """Return the modules with that name, except those on other pipeline stages."""
    names = (name for name, module in model.named_modules() if not isinstance(module, (AbsentModule, SkippedBlock)))
    return [name for name in names if name == end or name.endswith(f".{end}")]


def _inside(name: str, modules: list[str]) -> bool:
    return any(f".{module}." in f".{name}." for module in modules)


def _identify(assembly: Assembly, workers: Workers, targets: Targets) -> tuple[str, dict[str, str]]:
    """Return the identity of the model and the fingerprints of its frozen tensors, the same for all pipeline stages."""
    whole_name = assembly.placement.whole_name
    values: dict[str, tuple[str, str]] = {}
    for name, parameter in assembly.model.named_parameters():
        own = fingerprint(parameter)
        in_fp32 = own if parameter.dtype == torch.float32 else fp32_fingerprint(parameter)
        values[whole_name(canonical_name(name))] = own, in_fp32
    gathered = {name: value for others in workers.gather(values) for name, value in others.items()}
    frozen = {name: in_fp32 for name, (_, in_fp32) in gathered.items() if not _inside(name, targets.trained_whole)}
    return identity_of({name: own for name, (own, _) in gathered.items()}), frozen


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, LoraLayer]]:
    """Yield the layers that have adapters, with their names."""
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            yield name, module


def _quantize(model: nn.Module, coding: str, kind: torch.dtype, *, has_values: bool) -> None:
    """Store the weights that have adapters in fewer bits, except those of routers.

    With ``half``, that is the type to which autocast would round them in each product. A router's weight is rounded
    together with the adapter's product.
    """
    for _, layer in adapted_layers(model):
        base = layer.get_base_layer()
        if isinstance(layer, adapted.MatrixAdapter):
            continue
        if isinstance(layer, adapted.StackAdapter) and coding == "half":
            layer.get_param().data = layer.get_param().data.to(kind)
        elif isinstance(layer, adapted.StackAdapter):
            adapted.quantize_stack(base, layer.parameter_name, coding, has_values=has_values)
        elif coding == "half":
            for parameter in base.parameters():
                parameter.data = parameter.data.to(kind)
        else:
            assert isinstance(base, LINEAR)
            layer.base_layer = adapted.QuantizedLinear(base, coding, has_values=has_values)


class TrainedBesideFrozen(TrainedAndFrozen):
    """Adds the number of adapted layers and stacks, and how many of them have quantized weights, in how many bytes."""

    def after_step(self, engine: Engine) -> dict[str, int]:
        local = {canonical_name(name): layer for name, layer in adapted_layers(engine.model)}
        kinds = {name: isinstance(layer, adapted.MatrixAdapter) for name, layer in local.items()}
        routers = merge_by_name(engine, kinds)
        not_coded = {name for name, layer in local.items() if not adapted.is_quantized(layer)}
        codes = [parameter for parameter in engine.model.parameters() if holds_codes(parameter)]
        parts: list[torch.Tensor] = [getattr(each, "ds_tensor", local_part(each)) for each in codes]  # ZeRO-3 has it
        return super().after_step(engine) | {
            "adapted_layers": len(routers),
            "adapted_routers": sum(routers.values()),
            "quantized_layers": len(routers.keys() - set().union(*engine.workers.gather(not_coded))),
            "quantized_bytes": sum(map(bytes_of, codes)),
            "quantized_bytes_on_worker": sum(part.untyped_storage().nbytes() for part in parts),
        }
