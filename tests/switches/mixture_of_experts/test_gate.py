"""The experts that tokens visit, compared with a loop over tokens."""

from __future__ import annotations

import pytest
import torch

from rapidformer_templates.switches.mixture_of_experts.layer import Gate, choose, within_capacity
from tests.support.mixtures import choices


@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_weights_are_those_of_the_most_probable_experts(top_k: int) -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, 6, 5, dtype=torch.float64)
    weights, chosen = choose(logits, top_k)
    for token in range(24):
        experts, expected = choices(logits.flatten(0, 1)[token].softmax(0).tolist(), top_k)
        assert chosen.flatten(0, 1)[token].tolist() == experts
        torch.testing.assert_close(weights.flatten(0, 1)[token].tolist(), expected, rtol=1e-14, atol=0)


def test_a_single_weight_teaches_the_gate() -> None:
    """A single weight that is normalized to a sum of one would be one, and would have no gradient."""
    logits = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    choose(logits, 1)[0].sum().backward()
    assert (logits.grad.abs().sum(-1) > 1e-3).all()


def test_an_expert_is_full_after_its_share() -> None:
    """Four tokens, two choices each, three experts: a factor of 1 leaves room for ceil(8 / 3) = 3."""
    chosen = torch.tensor([[[0, 1], [0, 1], [0, 2], [0, 1]]])
    fits = within_capacity(chosen, None, 3, 1.0)
    assert fits.tolist() == [[[True, True], [True, True], [True, True], [False, True]]]
    fits = within_capacity(chosen, None, 3, 0.5)  # room for 2
    assert fits.tolist() == [[[True, True], [True, True], [False, True], [False, False]]]


def test_padding_takes_no_room_and_gives_none() -> None:
    chosen = torch.tensor([[[0], [0], [0], [0]], [[0], [0], [1], [0]]])
    real = torch.tensor([[True, True, True, True], [False, True, True, True]])
    fits = within_capacity(chosen, real.unsqueeze(-1), 2, 1.0)  # room for 2, and for ceil(3 / 2) = 2
    assert fits.squeeze(-1).tolist() == [[True, True, False, False], [False, True, True, True]]


def test_what_follows_changes_nothing_before_it() -> None:
    """A causal model must not see in the dropped choices which tokens follow."""
    torch.manual_seed(1)
    gate = Gate(8, 4, 2, capacity_factor=0.75)
    torch.nn.init.normal_(gate.weight)
    rows = torch.randn(2, 12, 8)
    other = torch.cat([rows[:, :7], torch.randn(2, 5, 8)], 1)
    first, second = gate.route(gate(rows), None), gate.route(gate(other), None)
    assert not first.is_kept.all()
    assert torch.equal(first.is_kept[:, :7], second.is_kept[:, :7])


def test_the_gate_computes_in_fp32_under_autocast() -> None:
    gate = Gate(64, 4, 2)
    torch.nn.init.normal_(gate.weight)
    rows = torch.randn(2, 3, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = gate(rows)
    torch.testing.assert_close(logits, rows @ gate.weight.T)
