"""Replaces the dense feed-forwards of a new model with sparse ones, adds losses to a mixture, and loads saved mixtures.

A feed-forward is recognized by the names and the order of its linear layers. So one table serves most architectures of
transformers, and your own models if they are built in the same way.

The folder of a saved mixture has the format of transformers, except for the ``model_type`` in its ``config.json``,
which begins with ``moe-``. So ``from_pretrained`` refuses it instead of filling feed-forwards with random numbers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rapidformer_templates.engines.assembly import Assembly, Building
from rapidformer_templates.errors import ModelError, counted
from rapidformer_templates.models.blocks import find_blocks
from rapidformer_templates.models.loading import LoadingInfo
from rapidformer_templates.models.model_files import CONVERTED, is_converted
from rapidformer_templates.models.weight_files import tensors_in
from rapidformer_templates.switches.mixture_of_experts import layer as mixture
from rapidformer_templates.switches.mixture_of_experts.declaration import MixtureOfExpertsFlags
from rapidformer_templates.switches.mixture_of_experts.losses import BalanceLosses
from rapidformer_templates.system.files import write_json

BALANCE, Z = 0.01, 0.001
"""Coefficients of Fedus et al. (2021) and of Zoph et al. (2022)."""

KEY = "mixture_of_experts"
"""The key in ``config.json`` with the fields of :class:`MixtureSizes`."""


def mixture_of_experts(assembly: Assembly, building: Building[MixtureOfExpertsFlags]) -> None:
    """Replace feed-forwards with mixtures, or add the losses to a model that already has experts.

    Raises:
        ModelError: the kind of a feed-forward or router is unknown.
    """
    model, options = assembly.model, building.options
    balance, z = options.moe_loss_coeff, options.moe_z_loss_coeff
    if mixture.has_own_experts(model):
        assembly.losses = mixture.patch_native_experts(model, balance=balance, z=0.0 if z is None else z)
        return
    balance, z = BALANCE if balance is None else balance, Z if z is None else z
    exported = [layer for _, layer in sparse_layers(model)]  # by this library
    if exported:
        losses = exported[0].losses  # of all layers
        losses.balance, losses.z = balance, z
        return
    if "lora" in building.plan.switches:
        message = "adapters leave the rest of a model unchanged, but new experts are untrained"
        hint = "train the whole mixture first, then adapters on its export/"
        raise ModelError(message, where="--num-experts", hint=hint)
    if options.num_experts is None:
        raise ModelError("this model has no experts", where="--moe-loss-coeff", hint="give --num-experts")
    top_k, width = min(options.moe_top_k or 2, options.num_experts), options.moe_ffn_hidden_size
    interval, capacity = options.moe_layer_interval, options.moe_capacity_factor
    sizes = MixtureSizes(options.num_experts, top_k, width, interval, capacity, balance, z)
    assembly.losses = make_sparse(model, assembly.blocks, sizes)
    assembly.settings |= {"--moe-top-k": top_k, "--moe-capacity-factor": capacity}
    config = getattr(model, "config", None)
    if config is not None:
        setattr(config, KEY, asdict(sizes))


@dataclass(frozen=True)
class MixtureSizes:
    """The sizes and loss coefficients of a mixture.

    Attributes:
        experts: number of experts in each layer.
        top_k: number of experts that process a token.
        width: width of an expert's inner layer. None means the width of the dense feed-forward.
        interval: one block in ``interval`` has a mixture. 2 means the second, the fourth, and so on.
        capacity_factor: see :func:`within_capacity`. None drops nothing.
        balance, z: coefficients of the losses.
    """

    experts: int
    top_k: int
    width: int | None = None
    interval: int = 1
    capacity_factor: float | None = None
    balance: float = 0.01
    z: float = 0.001


@dataclass(frozen=True)
class FeedForwardNames:
    """The submodule names of a feed-forward in an architecture.

    ``activation`` and ``dropout`` list alternative names.
    """

    up: str
    down: str
    gate: str | None = None
    activation: tuple[str, ...] = ("act", "act_fn", "activation_fn", "activation")
    dropout: tuple[str, ...] = ()


SHAPES = (
    FeedForwardNames("up_proj", "down_proj", gate="gate_proj"),  # llama, mistral, qwen2, qwen3, gemma, olmo2 …
    FeedForwardNames("c_fc", "c_proj", dropout=("dropout", "residual_dropout")),  # gpt2, gpt_neo, starcoder2
    FeedForwardNames("dense_h_to_4h", "dense_4h_to_h"),  # gpt_neox, falcon
    FeedForwardNames("fc_in", "fc_out", dropout=("dropout",)),  # gptj
    FeedForwardNames("fc1", "fc2"),  # phi
    FeedForwardNames("up_proj", "down_proj"),  # nemotron
)
"""Feed-forwards that are a single module of a block."""

SPLIT = FeedForwardNames("intermediate.dense", "output.dense", activation=("intermediate.intermediate_act_fn",))
"""The feed-forward of bert, roberta, electra …: two modules. The second also adds the input and normalizes."""

GATE_DEVIATION = 0.02
"""Standard deviation of the initial weights of a gate."""


@dataclass(frozen=True)
class FeedForward:
    """A dense feed-forward of a block.

    Attributes:
        name: name of the module in the block that the sparse layer replaces.
        module: the module to which the names in ``shape`` are relative.
        shape: the names of its parts.
    """

    name: str
    module: nn.Module
    shape: FeedForwardNames


def find_feed_forward(block: nn.Module) -> FeedForward | None:
    """Return the dense feed-forward of a block, or None if its shape is unknown."""
    if _fits(block, SPLIT):
        return FeedForward("intermediate", block, SPLIT)
    for name, module in block.named_children():
        for shape in SHAPES:
            if _fits(module, shape):
                return FeedForward(name, module, shape)
    return None


def _fits(module: nn.Module, shape: FeedForwardNames) -> bool:
    parts = {n for n, part in module.named_modules() if isinstance(part, nn.Linear) or type(part).__name__ == "Conv1D"}
    needed = {name for name in (shape.up, shape.down, shape.gate) if name}
    # There is no other linear layer, except in a block, which also contains its attention.
    return needed <= parts and (shape is SPLIT or needed == parts) and _activation(module, shape) is not None


def _activation(module: nn.Module, shape: FeedForwardNames) -> Callable[[torch.Tensor], torch.Tensor] | None:
    activations = (_part(module, name) for name in shape.activation)
    return next((part for part in activations if callable(part)), None)


def _part(module: nn.Module, name: str) -> Any:
    part: object = module
    for step in name.split("."):
        part = getattr(part, step, None)
    return part


def make_sparse(model: nn.Module, blocks: Mapping[str, nn.Module], sizes: MixtureSizes) -> BalanceLosses:
    """Replace the feed-forward of every ``sizes.interval``-th block.

    Experts are initialized like the dense feed-forward: matrices from a normal distribution with the same deviation,
    and biases with the same values. The gate has a deviation of :data:`GATE_DEVIATION`.

    Raises:
        ModelError: there are no blocks, or the shape of a feed-forward is unknown.
    """
    chosen = list(blocks.items())[sizes.interval - 1 :: sizes.interval]
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        message = f"{type(model).__name__} is an encoder-decoder, whose two masks a mixture cannot tell apart"
        hint = "use a decoder such as gpt2 or llama, or an encoder such as bert"
        raise ModelError(message, where="--num-experts", hint=hint)
    if not chosen:
        message = f"{type(model).__name__} has no block to put experts into"
        hint = "keep the blocks in an nn.ModuleList, and --moe-layer-interval at most their number"
        raise ModelError(message, where="--moe-layer-interval" if sizes.interval > 1 else "--num-experts", hint=hint)
    losses = BalanceLosses(len(chosen), sizes.experts, balance=sizes.balance, z=sizes.z)
    for number, (name, block) in enumerate(chosen):
        feed_forward = find_feed_forward(block)
        if feed_forward is None:
            raise ModelError(
                f"the feed-forward of {name} ({type(block).__name__}) has an unknown structure",
                where="--num-experts",
                hint="supported are the blocks of gpt2, gpt_neox, gptj, llama, mistral, qwen2, phi, bert, roberta and "
                "others built like them; mixtral, qwen2_moe, qwen3_moe … already have experts",
            )
        block.set_submodule(feed_forward.name, _sparse(feed_forward, sizes, losses, number))
        if feed_forward.shape is SPLIT:
            block.set_submodule(SPLIT.down, nn.Identity())
    losses.watch(model)
    return losses


def _sparse(
    feed_forward: FeedForward, sizes: MixtureSizes, losses: BalanceLosses, number: int
) -> mixture.SparseFeedForward:
    module, shape = feed_forward.module, feed_forward.shape
    names = {"up": shape.up, "gate": shape.gate, "down": shape.down}
    dense: dict[str, nn.Linear | Conv1D] = {name: _part(module, path) for name, path in names.items() if path}
    up, activation = dense["up"], _activation(module, shape)
    assert activation is not None
    outputs, inputs = _matrix(up).shape
    is_gated, has_bias = shape.gate is not None, up.bias is not None
    experts = mixture.Experts(sizes.experts, inputs, sizes.width or outputs, activation, gated=is_gated, bias=has_bias)
    gate = mixture.Gate(inputs, sizes.experts, sizes.top_k, sizes.capacity_factor)
    with torch.no_grad():
        for name, layer in dense.items():
            biases = getattr(experts, f"{name}_bias")
            if not layer.weight.is_meta:
                getattr(experts, name).normal_(std=float(layer.weight.float().std()))
                if biases is not None and layer.bias is not None and biases.shape[1] == len(_matrix(layer)):
                    biases.copy_(layer.bias.expand_as(biases))
        gate.weight.normal_(std=GATE_DEVIATION)
    dropout = next((part for part in (_part(module, name) for name in shape.dropout) if part is not None), None)
    dropout = nn.Dropout(dropout) if isinstance(dropout, float) else dropout
    sparse = mixture.SparseFeedForward(gate, experts, losses, number, dropout)
    return sparse if gate.weight.dtype == up.weight.dtype else sparse.to(dtype=up.weight.dtype)


def _matrix(layer: nn.Linear | Conv1D) -> torch.Tensor:
    """Return the weight as [outputs, inputs]."""
    return layer.weight.T if type(layer).__name__ == "Conv1D" else layer.weight


def sparse_layers(model: nn.Module) -> Iterator[tuple[str, mixture.SparseFeedForward]]:
    """Yield the sparse layers of a model with their names."""
    for name, module in model.named_modules():
        if isinstance(module, mixture.SparseFeedForward):
            yield name, module


def mark(folder: Path) -> None:
    """Mark a saved folder if its model has mixtures."""
    file = folder / "config.json"
    saved = json.loads(file.read_text(encoding="utf-8"))
    if KEY in saved:
        write_json(file, saved | {"model_type": CONVERTED + saved["model_type"], "num_experts": saved[KEY]["experts"]})


def is_marked(folder: Path) -> bool:
    """Return whether a folder contains a model with mixtures."""
    return (folder / "config.json").is_file() and is_converted(folder)


def read_config(folder: Path) -> PreTrainedConfig:
    """Read the configuration of the dense architecture, with the sizes of the mixtures as an attribute."""
    saved = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    kind = saved.pop("model_type").removeprefix(CONVERTED)
    saved.pop("num_experts")
    return AutoConfig.for_model(kind, **saved)


def rebuild(model: PreTrainedModel) -> None:
    """Put mixtures into a model if its configuration describes them. The caller must load their values."""
    sizes = getattr(model.config, KEY, None)
    if sizes:
        make_sparse(model, find_blocks(model), MixtureSizes(**sizes))


def read_model(
    factory: Any, folder: Path, config: PreTrainedConfig, *, base_folder: str | None = None
) -> tuple[PreTrainedModel, LoadingInfo]:
    """Load the model in a marked folder. Also return the loading info that ``from_pretrained`` would give.

    Args:
        factory: transformers' class for the task, such as ``AutoModelForCausalLM``, or a model class.
        folder: a folder that :func:`mark` has marked.
        config: from :func:`read_config`.
        base_folder: unused, because the folder has all weights.
    """
    build = getattr(factory, "from_config", factory)  # a model class builds from its own constructor
    model: PreTrainedModel = build(config).float()
    rebuild(model)
    model.config.name_or_path = str(folder)  # from_pretrained does so, and adapters record it as base
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        weights |= tensors_in(file)
    tensors = model.state_dict(keep_vars=True)  # tied weights are one object
    wrong = [(n, w.shape, tensors[n].shape) for n, w in weights.items() if n in tensors and w.shape != tensors[n].shape]
    for name, _, _ in wrong:
        del weights[name]
    absent, unexpected = model.load_state_dict(weights, strict=False)
    missing = set(absent) - {name for name, _, _ in wrong}
    read = {id(tensors[name]) for name in weights if name in tensors}
    untied = {name for name in missing if id(tensors[name]) not in read}
    return model, {"missing_keys": untied, "mismatched_keys": set(wrong), "unexpected_keys": set(unexpected)}


def load_mixture(folder: str | Path, auto_class: str = "AutoModelForCausalLM") -> PreTrainedModel:
    """Load a model with mixtures from an exported folder, for use outside of this library.

    Args:
        folder: ``export/`` of a run with ``--num-experts``.
        auto_class: transformers' class for the task.

    Raises:
        ValueError: the folder is not marked, so ``from_pretrained`` loads it. Or weights are missing.
    """
    import transformers

    folder = Path(folder)
    if not is_marked(folder):
        raise ValueError(f"{folder} does not hold a mixture of this library: use {auto_class}.from_pretrained")
    model, info = read_model(getattr(transformers, auto_class), folder, read_config(folder))
    if missing := info["missing_keys"] | {name for name, _, _ in info["mismatched_keys"]}:
        lacking = f"{counted(len(missing), 'weight')} of a {type(model).__name__}"
        raise ValueError(f"{folder} lacks {lacking}, such as {min(missing)}")
    return model.eval()
