"""The transform of the mixture-of-experts switch: put sparse layers into a dense model, or losses onto a mixture."""

from __future__ import annotations

from rapidformer_templates.engines.assembly import Assembly, Building
from rapidformer_templates.errors import ModelError
from rapidformer_templates.switches.mixture_of_experts.convert import MixtureSizes, make_sparse, sparse_layers
from rapidformer_templates.switches.mixture_of_experts.declaration import MixtureOfExpertsFlags
from rapidformer_templates.switches.mixture_of_experts.exported import describe
from rapidformer_templates.switches.mixture_of_experts.transformers_mixtures import (
    has_own_experts,
    patch_native_experts,
)

BALANCE, Z = 0.01, 0.001
"""Coefficients of Fedus et al. (2021) and of Zoph et al. (2022)."""


def mixture_of_experts(assembly: Assembly, building: Building[MixtureOfExpertsFlags]) -> None:
    """Replace feed-forwards with mixtures, or add the losses to a model that already has experts.

    Raises:
        ModelError: the kind of a feed-forward or router is unknown.
    """
    model, options = assembly.model, building.options
    balance, z = options.moe_loss_coeff, options.moe_z_loss_coeff
    if has_own_experts(model):
        assembly.losses = patch_native_experts(model, balance=balance, z=0.0 if z is None else z)
        return
    balance, z = BALANCE if balance is None else balance, Z if z is None else z
    exported = [layer for _, layer in sparse_layers(model)]  # by this library
    if exported:
        losses = exported[0].losses  # of all layers
        losses.balance, losses.z = balance, z
    else:
        if "lora" in building.plan.switches:
            raise ModelError(
                "adapters leave the rest of a model unchanged, but new experts are untrained",
                where="--num-experts",
                hint="train the whole mixture first, then adapters on its export/",
            )
        sizes = _sizes(options, balance, z)
        assembly.losses = make_sparse(model, assembly.blocks, sizes)
        describe(model, sizes)


def _sizes(options: MixtureOfExpertsFlags, balance: float, z: float) -> MixtureSizes:
    if options.num_experts is None:
        raise ModelError("this model has no experts", where="--moe-loss-coeff", hint="give --num-experts")
    return MixtureSizes(
        options.num_experts,
        min(options.moe_top_k or 2, options.num_experts),
        width=options.moe_ffn_hidden_size,
        interval=options.moe_layer_interval,
        capacity_factor=options.moe_capacity_factor,
        balance=balance,
        z=z,
    )
