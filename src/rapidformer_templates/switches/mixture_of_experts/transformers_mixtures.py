"""Mixtures that are part of transformers: mixtral, qwen2_moe, qwen3_moe, olmoe and others.

Their experts are already stacked. This module adds grouped products, which also support mixed precision and fp64, and
the losses. transformers adds its balance loss to the model's loss only if ``config.output_router_logits`` is set, and
never if the loss is computed outside of the model. Here it is always part of the gradient, and the reported loss
contains only the task.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from rapidformer_templates.errors import ModelError
from rapidformer_templates.models.model_files import OWN_EXPERTS
from rapidformer_templates.switches.mixture_of_experts.layer import group_by_expert, stack_product, ungroup
from rapidformer_templates.switches.mixture_of_experts.losses import BalanceLosses

IMPLEMENTATION = "rapidformer_grouped"
"""The name under which transformers registers :func:`grouped_experts`."""


def has_own_experts(model: nn.Module) -> bool:
    """Return whether the architecture of a model has its own experts."""
    return getattr(getattr(model, "config", None), "model_type", None) in OWN_EXPERTS


def patch_native_experts(model: Any, *, balance: float | None, z: float) -> BalanceLosses:
    """Compute the experts with grouped products, and add the losses to the gradient.

    Args:
        model: a transformers model with experts.
        balance: coefficient. None uses the model's ``config.router_aux_loss_coef``.
        z: coefficient.

    Raises:
        ModelError: the routers of the model are not found.
    """
    config = model.config
    routers = routers_of(model)
    if not routers:
        raise ModelError(
            f"found no router in {type(model).__name__}",
            where="mixture of experts",
            hint=f"known are the routers of {', '.join(sorted(OWN_EXPERTS))}",
        )
    config.output_router_logits = False  # otherwise the model's loss would include them, too
    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, grouped_experts)
    model.set_experts_implementation(IMPLEMENTATION)
    configured = float(getattr(config, "router_aux_loss_coef", None) or 0.0)
    experts = routers[0].weight.shape[0]
    losses = BalanceLosses(len(routers), experts, balance=configured if balance is None else balance, z=z)
    losses.watch(model)
    for layer, router in enumerate(routers):
        router.register_forward_hook(_Attached(losses, layer))
    return losses


def own_experts(model: nn.Module) -> list[Any]:
    """Return the stacks of experts in an architecture that has its own."""
    return [module for module in model.modules() if has_own_experts(model) and hasattr(module, "_apply_gate")]


def routers_of(model: nn.Module) -> list[Any]:
    """Return the routers of transformers' mixtures, one for each stack of experts."""
    kinds = {
        recorder.target_class
        for part in model.modules()
        if isinstance(part, PreTrainedModel)
        for name, recorder in (getattr(part, "_can_record_outputs", None) or {}).items()
        if name == "router_logits"
    }
    return [module for module in model.modules() if type(module) in kinds]


class _Attached:
    """A hook after a router, whose output is (logits, weights, experts) of all tokens, flattened."""

    def __init__(self, losses: BalanceLosses, layer: int) -> None:
        self.losses = losses
        self.layer = layer

    def __call__(self, router: nn.Module, args: object, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        logits, weights, chosen = output
        rows = self.losses.rows_of(logits)
        mask = self.losses.mask_of(rows)
        attached = self.losses.attach(weights, rows, self.losses.rows_of(chosen), None, mask, self.layer)
        return logits, attached, chosen


class Dispatcher(Protocol):
    """Sends tokens to experts on other workers."""

    def run(
        self,
        tokens: torch.Tensor,
        counts: torch.Tensor,
        experts: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        *,
        all_routed: bool,
    ) -> torch.Tensor:
        """Return the outputs for these tokens. ``experts`` computes those of this worker's experts."""


def grouped_experts(
    experts: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    *,
    dispatcher: Dispatcher | None = None,
    share: int = 0,
) -> torch.Tensor:
    """Compute transformers' experts with grouped products. Has the signature of its ``ExpertsInterface``.

    Args:
        dispatcher: sends tokens to experts on other workers, if the experts are divided.
        share: which share of the experts this worker has.
    """
    product = partial(stack_product, experts, share=share)
    grouped = group_by_expert(hidden_states, top_k_index, None, experts.num_experts)

    def compute(tokens: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        if experts.has_gate:
            inner = experts._apply_gate(product("gate_up_proj", tokens, counts))
        else:
            inner = experts.act_fn(product("up_proj", tokens, counts))
        return product("down_proj", inner, counts)

    if dispatcher is None:
        outputs = compute(grouped.tokens, grouped.counts)
    else:
        outputs = dispatcher.run(grouped.tokens, grouped.counts, compute, all_routed=True)
    return ungroup(outputs, grouped, top_k_weights).to(hidden_states.dtype)
