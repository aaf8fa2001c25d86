"""Reference mixtures of experts, computed token by token."""

import math
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rapidformer_templates.switches.mixture_of_experts.layer import Experts, SparseFeedForward
from tests.support import jobs


def choices(probabilities: list[float], top_k: int) -> tuple[list[int], list[float]]:
    """Return (experts, weights) of one token."""
    order = sorted(range(len(probabilities)), key=lambda i: -probabilities[i])[:top_k]
    weights = [probabilities[i] for i in order]
    if top_k > 1:
        weights = [weight / sum(weights) for weight in weights]
    return order, weights


def output_of(
    layer: SparseFeedForward, rows: torch.Tensor, mask: torch.Tensor | None, capacity_factor: float | None
) -> torch.Tensor:
    """Compute the output of a sparse layer in a loop over rows, tokens and choices."""
    top_k, count = layer.gate.top_k, len(layer.gate.weight)
    result = torch.zeros_like(rows)
    for b in range(rows.shape[0]):
        real = [t for t in range(rows.shape[1]) if mask is None or bool(mask[b, t])]
        room = math.inf if capacity_factor is None else math.ceil(capacity_factor * top_k * len(real) / count)
        taken = [0] * count
        for t in real:
            token = rows[b, t]
            logits = layer.gate.weight @ token
            probabilities = logits.exp() / logits.exp().sum()
            chosen, _ = choices(probabilities.tolist(), top_k)
            total = probabilities[chosen].sum() if top_k > 1 else 1
            for i in chosen:
                taken[i] += 1
                if taken[i] <= room:
                    result[b, t] += probabilities[i] / total * expert(layer.experts, i, token)
    return result


def expert(experts: Experts, i: int, token: torch.Tensor) -> torch.Tensor:
    """Compute the output of expert ``i`` for a token."""

    def project(name: str, inputs: torch.Tensor) -> torch.Tensor:
        offset = getattr(experts, f"{name}_bias")
        return inputs @ getattr(experts, name)[i] + (0 if offset is None else offset[i])

    if experts.gate is None:
        return project("down", experts.activation(project("up", token)))
    return project("down", experts.activation(project("gate", token)) * project("up", token))


def balance_of(logits: torch.Tensor, top_k: int, mask: torch.Tensor) -> list[float]:
    """Return Switch Transformers' balance loss ``N Σ f_i P_i`` of each row. ``f_i`` is a share of all choices."""
    values = []
    for row, real in zip(logits, mask, strict=True):
        tokens = [token for token, is_real in zip(row, real, strict=True) if is_real]
        count, visits, sums = row.shape[-1], [0.0] * row.shape[-1], [0.0] * row.shape[-1]
        for token in tokens:
            probabilities = token.softmax(0).tolist()
            for i in choices(probabilities, top_k)[0]:
                visits[i] += 1 / (top_k * len(tokens))
            sums = [total + p / len(tokens) for total, p in zip(sums, probabilities, strict=True)]
        values.append(count * sum(f * p for f, p in zip(visits, sums, strict=True)))
    return values


def tiny(kind: str, layers: int = 2) -> Any:
    sizes: dict[str, Any] = {
        "vocab_size": 100, "hidden_size": 16, "num_hidden_layers": layers, "num_attention_heads": 2,
        "num_key_value_heads": 2, "intermediate_size": 24, "num_experts_per_tok": 2,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    there = AutoConfig.for_model(kind).to_dict()
    sizes |= {name: 4 for name in ("num_local_experts", "num_experts") if name in there}
    sizes |= {name: 24 for name in ("moe_intermediate_size", "shared_expert_intermediate_size") if name in there}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes)).float()


class MixtralJob(jobs.CausalJob):
    """A mixture of experts from transformers."""

    def make(self) -> torch.nn.Module:
        return tiny("mixtral")


jobs.OTHERS["mixtral"] = MixtralJob


class PretrainedJob(jobs.CausalJob):
    """A mixture of experts from transformers, loaded from a folder."""

    def build_model(self) -> torch.nn.Module:
        return AutoModelForCausalLM.from_pretrained(self.config.model.pretrained_model_name_or_path)


jobs.OTHERS["pretrained"] = PretrainedJob


class WideJob(jobs.CausalJob):
    """A deep mixture of experts from transformers whose routers compute in fp64.

    The original routers compute in fp32, even in fp64 models.
    """

    kind = "mixtral"
    layers = 4

    def make(self) -> torch.nn.Module:
        model = tiny(self.kind, layers=self.layers)
        for layer in model.model.layers:
            layer.mlp.gate.forward = partial(_route, layer.mlp.gate)
        return model


def _route(router: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
    logits = torch.nn.functional.linear(hidden.flatten(0, -2), router.weight)
    weights, chosen = logits.softmax(-1).topk(router.top_k)
    return logits, weights / weights.sum(-1, keepdim=True), chosen


jobs.OTHERS |= {
    f"{kind.replace('_', '-')}-{name}": type(f"{name}-{kind}", (WideJob,), {"kind": kind, "layers": layers})
    for kind in ("mixtral", "qwen3_moe")
    for name, layers in (("wide", 4), ("shallow", 2))
}
"""The shallow jobs are for layouts without pipeline stages."""


def losses_of(lines: Iterable[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """Return (balance loss, z loss) of each step from a run's lines of metrics."""
    return [(line["balance_loss"], line["z_loss"]) for line in lines if "loss" in line]
