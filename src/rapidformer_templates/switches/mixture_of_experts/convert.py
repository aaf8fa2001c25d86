"""Sparse feed-forwards in place of the dense ones of a model that is trained from scratch.

A feed-forward is known by the names and the order of its linear layers, so that one table serves most
architectures of transformers, and models of your own that are built alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rapidformer_templates.errors import ModelError
from rapidformer_templates.models.blocks import shape_of
from rapidformer_templates.models.placement import whole
from rapidformer_templates.switches.mixture_of_experts.experts import Experts
from rapidformer_templates.switches.mixture_of_experts.gate import Gate
from rapidformer_templates.switches.mixture_of_experts.layer import SparseFeedForward
from rapidformer_templates.switches.mixture_of_experts.losses import BalanceLosses


@dataclass(frozen=True)
class MixtureSizes:
    """What a mixture is asked to be.

    Attributes:
        experts: in each layer.
        top_k: that a token visits.
        width: of an expert's inner layer; None is the dense feed-forward's.
        interval: every how many blocks there is a mixture: 2 is the second, the fourth …
        capacity_factor: see :func:`gate.within_capacity`; None drops nothing.
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
class Shape:
    """How an architecture builds a feed-forward: names of its parts; of activation and dropout, those that occur."""

    up: str
    down: str
    gate: str | None = None
    activation: tuple[str, ...] = ("act", "act_fn", "activation_fn", "activation")
    dropout: tuple[str, ...] = ()


SHAPES = (
    Shape("up_proj", "down_proj", gate="gate_proj"),  # llama, mistral, qwen2, qwen3, gemma, olmo2 …
    Shape("c_fc", "c_proj", dropout=("dropout", "residual_dropout")),  # gpt2, gpt_neo, starcoder2
    Shape("dense_h_to_4h", "dense_4h_to_h"),  # gpt_neox, falcon
    Shape("fc_in", "fc_out", dropout=("dropout",)),  # gptj
    Shape("fc1", "fc2"),  # phi
    Shape("up_proj", "down_proj"),  # nemotron
)
"""Feed-forwards that are one module of a block."""

SPLIT = Shape("intermediate.dense", "output.dense", activation=("intermediate.intermediate_act_fn",))
"""Of bert, roberta, electra …: two modules, the second of which also adds the input and normalizes."""

GATE_DEVIATION = 0.02
"""Of a new gate's weights."""


@dataclass(frozen=True)
class FeedForward:
    """A dense feed-forward of a block.

    Attributes:
        block: that it belongs to.
        name: of the module in the block that the sparse one takes the place of.
        module: what ``shape`` is relative to.
        shape: where its parts are.
    """

    block: nn.Module
    name: str
    module: nn.Module
    shape: Shape

    def replace(self, sparse: nn.Module) -> None:
        self.block.set_submodule(self.name, sparse)
        if self.shape is SPLIT:
            self.block.set_submodule(SPLIT.down, nn.Identity())


def find_feed_forward(block: nn.Module) -> FeedForward | None:
    """The dense feed-forward of a block; None if it is of no known shape."""
    if _fits(block, SPLIT):
        return FeedForward(block, "intermediate", block, SPLIT)
    for name, module in block.named_children():
        for shape in SHAPES:
            if _fits(module, shape):
                return FeedForward(block, name, module, shape)
    return None


def _fits(module: nn.Module, shape: Shape) -> bool:
    parts = {name for name, part in module.named_modules() if _is_linear(part)}
    needed = {name for name in (shape.up, shape.down, shape.gate) if name}
    # No other linear layer, except in a block, which has its attention as well.
    return needed <= parts and (shape is SPLIT or needed == parts) and _activation(module, shape) is not None


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _activation(module: nn.Module, shape: Shape) -> Callable[[torch.Tensor], torch.Tensor] | None:
    activations = (_part(module, name) for name in shape.activation)
    return next((part for part in activations if callable(part)), None)


def _dropout(module: nn.Module, shape: Shape) -> nn.Module | None:
    dropout = next((part for part in (_part(module, name) for name in shape.dropout) if part is not None), None)
    return nn.Dropout(dropout) if isinstance(dropout, float) else dropout


def _part(module: nn.Module, name: str) -> Any:
    part: Any = module
    for step in name.split("."):
        part = getattr(part, step, None)
    return part


def make_sparse(model: nn.Module, blocks: Mapping[str, nn.Module], sizes: MixtureSizes) -> BalanceLosses:
    """Replace the feed-forward of every ``sizes.interval``-th block.

    Experts are initialised as the dense one was: matrices from a normal distribution of the same deviation,
    biases to the same values; the gate with :data:`GATE_DEVIATION`.

    Raises:
        ModelError: there are no blocks, or a feed-forward is of no known shape.
    """
    chosen = list(blocks.items())[sizes.interval - 1 :: sizes.interval]
    _check(model, chosen, sizes)
    losses = BalanceLosses(len(chosen), sizes.experts, balance=sizes.balance, z=sizes.z)
    for number, (name, block) in enumerate(chosen):
        feed_forward = find_feed_forward(block)
        if feed_forward is None:
            raise ModelError(
                f"the feed-forward of {name} ({type(block).__name__}) is of no known shape",
                where="--num-experts",
                hint="known are those of gpt2, gpt_neox, gptj, llama, mistral, qwen2, phi, bert, roberta and others "
                "that are built like them; mixtral, qwen2_moe, qwen3_moe … have experts of their own",
            )
        feed_forward.replace(_sparse(feed_forward, sizes, losses, number))
    losses.watch(model)
    return losses


def _check(model: nn.Module, chosen: list[tuple[str, nn.Module]], sizes: MixtureSizes) -> None:
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(
            f"{type(model).__name__} is an encoder-decoder, whose two masks a mixture cannot tell apart",
            where="--num-experts",
            hint="use a decoder such as gpt2 or llama, or an encoder such as bert",
        )
    if not chosen:
        raise ModelError(
            f"{type(model).__name__} has no block to put experts into",
            where="--moe-layer-interval" if sizes.interval > 1 else "--num-experts",
            hint="keep the blocks in an nn.ModuleList, and --moe-layer-interval at most their number",
        )


def _sparse(feed_forward: FeedForward, sizes: MixtureSizes, losses: BalanceLosses, number: int) -> SparseFeedForward:
    module, shape = feed_forward.module, feed_forward.shape
    names = {"up": shape.up, "gate": shape.gate, "down": shape.down}
    dense = {name: _Dense(_part(module, path)) for name, path in names.items() if path}
    up, activation = dense["up"], _activation(module, shape)
    assert activation is not None
    experts = Experts(
        sizes.experts,
        up.inputs,
        sizes.width or up.outputs,
        activation,
        gated=shape.gate is not None,
        bias=up.bias is not None,
    )
    gate = Gate(up.inputs, sizes.experts, sizes.top_k, sizes.capacity_factor)
    with torch.no_grad():
        for name, layer in dense.items():
            layer.initialise(getattr(experts, name), getattr(experts, f"{name}_bias"))
        gate.weight.normal_(std=GATE_DEVIATION)
    sparse = SparseFeedForward(gate, experts, losses, number, _dropout(module, shape))
    return sparse if gate.weight.dtype == up.dtype else sparse.to(dtype=up.dtype)


class _Dense:
    """A linear layer of a dense feed-forward, whatever the order of its matrix; it may be cut by ZeRO-3."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self.weight, self.bias = layer.weight, layer.bias
        self.dtype = layer.weight.dtype
        shape = shape_of(layer.weight)
        self.inputs, self.outputs = shape if type(layer).__name__ == "Conv1D" else shape[::-1]

    def initialise(self, matrices: torch.Tensor, biases: torch.Tensor | None) -> None:
        if self.weight.is_meta:
            return
        with whole(*(p for p in (self.weight, self.bias) if p is not None)):
            deviation = float(self.weight.float().std())
            values = None if self.bias is None else self.bias.clone()
        matrices.normal_(std=deviation)
        if biases is not None and values is not None and biases.shape[1] == self.outputs:
            biases.copy_(values.expand_as(biases))


def sparse_layers(model: nn.Module) -> Iterator[tuple[str, SparseFeedForward]]:
    """The sparse layers of a model with their names."""
    for name, module in model.named_modules():
        if isinstance(module, SparseFeedForward):
            yield name, module
