"""Balance and z loss compared with their formulas, and how they enter the gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rapidformer_templates.data.loader import MicroBatch
from rapidformer_templates.errors import RapidformerError
from rapidformer_templates.switches.mixture_of_experts.layer import choose
from rapidformer_templates.switches.mixture_of_experts.losses import BalanceLosses, balance_loss, z_loss
from tests.support.messages import Says
from tests.support.mixtures import balance_of
from tests.support.worker_pool import alone

LOGITS = torch.randn(3, 7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(5)) * 2
MASK = torch.tensor([[1] * 7, [1] * 4 + [0] * 3, [1] * 6 + [0]], dtype=torch.bool)


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_balance_loss_is_the_formula(top_k: int) -> None:
    chosen = choose(LOGITS, top_k)[1]
    value = balance_loss(LOGITS, chosen, MASK)
    torch.testing.assert_close(value.tolist(), balance_of(LOGITS, top_k, MASK), rtol=1e-13, atol=0)


def test_z_loss_is_the_formula() -> None:
    expected = LOGITS.exp().sum(-1).log() ** 2
    torch.testing.assert_close(z_loss(LOGITS), expected, rtol=1e-13, atol=0)


def _micro_batch(rows: slice, *, idle: bool = False) -> MicroBatch:
    ids = torch.zeros(MASK[rows].shape, dtype=torch.long)
    return MicroBatch({"input_ids": ids, "attention_mask": MASK[rows].long()}, [0], idle=idle)


def _gradient(parts: list[MicroBatch], rows: list[slice], loss_scale: float) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return the gradient of two layers' losses for the logits, and the reported values, for a batch in parts."""
    losses = BalanceLosses(2, 5, balance=0.3, z=0.02)
    logits = LOGITS.clone().requires_grad_()
    losses.begin_step(parts, alone())
    for part, cut in zip(parts, rows, strict=True):
        own, mask = logits[cut], MASK[cut]
        weights, chosen = choose(own, 2)
        total = torch.zeros((), dtype=torch.float64)
        for layer in range(2):
            total = total + losses.attach(weights, own, chosen, None, mask, layer).sum() * 0
        losses.follow(total, part, scale=8.0)
        (total * loss_scale).backward()  # as an engine with its own loss scale does
    return logits.grad, losses.results(alone())


@pytest.mark.parametrize("cuts", [[slice(0, 3)], [slice(0, 1), slice(1, 3)], [slice(0, 2), slice(2, 3)]])
def test_the_gradient_is_that_of_the_mean_over_all_tokens(cuts: list[slice]) -> None:
    logits = LOGITS.clone().requires_grad_()
    real, tokens = MASK.double(), int(MASK.sum())
    balance = (balance_loss(logits, choose(LOGITS, 2)[1], MASK) * real.sum(1)).sum() / tokens
    z = (z_loss(logits) * real).sum() / tokens
    (2 * (0.3 * balance + 0.02 * z)).backward()  # two layers
    gradient, results = _gradient([_micro_batch(cut) for cut in cuts], cuts, loss_scale=4.0)
    torch.testing.assert_close(gradient, logits.grad * 8 * 4, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(float(results["balance_loss"]), balance.item(), rtol=1e-12, atol=0)
    torch.testing.assert_close(float(results["z_loss"]), z.item(), rtol=1e-12, atol=0)


def test_an_idle_batch_counts_for_nothing() -> None:
    cuts = [slice(0, 3), slice(0, 2)]
    idle, seen = _gradient([_micro_batch(cuts[0]), _micro_batch(cuts[1], idle=True)], cuts, 1.0)
    gradient, expected = _gradient([_micro_batch(cuts[0])], cuts[:1], 1.0)
    assert torch.equal(idle, gradient)
    assert seen == expected


def test_load_and_drops_are_counted() -> None:
    losses = BalanceLosses(1, 4, balance=0.0, z=0.0)
    logits = torch.zeros(1, 4, 4, requires_grad=True)
    chosen = torch.tensor([[[0], [0], [0], [1]]])
    kept = torch.tensor([[[True], [True], [False], [True]]])
    losses.attach(logits[..., :1], logits, chosen, kept, None, 0).sum().backward()
    results, receipts = losses.results(alone()), losses.receipts(alone())
    assert float(results["expert_load_max"]) == 3.0
    assert float(results["expert_load_min"]) == 0.0
    assert receipts["expert_load_by_layer"] == [[3.0, 1.0, 0.0, 0.0]]
    assert (receipts["dropped_choices"], receipts["dropped_share"]) == (1, 0.25)


def test_batches_without_tokens_are_refused(says: Says) -> None:
    losses = BalanceLosses(1, 4, balance=0.1, z=0.0)
    with says(RapidformerError):
        losses.begin_step([MicroBatch({"pixels": torch.zeros(2, 3)}, [0, 1])], alone())
