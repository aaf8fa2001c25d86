"""Each architecture that transformers can build small trains with divided sequences as one process, or is refused."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from transformers.models.auto import modeling_auto

from rapidformer_templates.switches.layout.context import DivisionTrial
from tests.support import parity
from tests.support.architecture_runs import train
from tests.support.architectures import tiny
from tests.support.selection import by_default
from tests.support.worker_pool import Failure, outcomes_in_workers

pytestmark = pytest.mark.distributed

NAMES = sorted(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
EQUAL = ("gpt2", "llama", "phimoe")
MIXING = ("minimax", "falcon_h1", "jamba", "recurrent_gemma")
"""Architectures with linear attention, state spaces and recurrence."""
REFUSALS = (
    "mixes the positions of a sequence without attention, or counts them in its layers",
    "counts the positions of a sequence in its layers",
    "cannot compute on a part of a sequence",
    "cannot be divided",
    "which ring attention does not support",
    "has an encoder and a decoder, with two sequences",
    "has no repeated blocks",
)
ONE = "--micro-batch-size 8"


def _train(workers: Any, name: str, flags: str, is_tried: bool = True) -> parity.Trained:
    with nullcontext() if is_tried else mock.patch.object(DivisionTrial, "check"):
        return train(workers, name, "causal", f"{ONE} {flags}", pads=is_tried)


def follows_one_process(name: str, *, is_tried: bool = True) -> bool:
    """Train with divided sequences and without; whether it was not refused.

    Args:
        is_tried: without the trial some models compute something else, if they are not given a mask, and others fail.

    Raises:
        AssertionError: the two differ, or end in another error.
    """
    alone = _train(None, name, "", is_tried)
    outcomes = outcomes_in_workers(2, _train, name, "--context-parallel-size 2", is_tried)
    if any(isinstance(outcome, Failure) for outcome in outcomes):
        for outcome in outcomes:
            assert isinstance(outcome, Failure)
            assert outcome.kind == "ModelError", outcome.trace
            assert any(why in outcome.text for why in REFUSALS), outcome.text
        return False
    curve, expected = torch.tensor(outcomes[0]["curve"]), torch.tensor(alone["curve"])
    torch.testing.assert_close(curve, expected, rtol=2e-5, atol=1e-5)
    return True


@pytest.mark.parametrize("name", by_default(EQUAL[:2], EQUAL))
def test_attention_alone_mixes_positions(name: str) -> None:
    tiny(name, may_skip=False)
    assert follows_one_process(name)


@pytest.mark.parametrize("name", by_default(MIXING[:1], MIXING))
def test_other_ways_to_mix_positions_are_refused(name: str) -> None:
    tiny(name)
    assert not follows_one_process(name)


@pytest.mark.parametrize(
    ("name", "layout", "workers"),
    [
        # The temperature of llama4 has no effect on the first positions, and its base model is the model itself.
        ("llama4_text", "", 2),
        ("minimax", "--pipeline-model-parallel-size 2", 4),
    ],
)
def test_a_part_is_tried_too(name: str, layout: str, workers: int) -> None:
    tiny(name, may_skip=False)
    outcomes = outcomes_in_workers(workers, _train, name, f"--context-parallel-size 2 {layout}")
    for outcome in outcomes:
        assert isinstance(outcome, Failure)
        assert outcome.kind == "ModelError", outcome.trace
        assert any(why in outcome.text for why in REFUSALS[:2]), outcome.text


def test_without_the_trial_linear_attention_would_train_something_else() -> None:
    with pytest.raises(AssertionError, match="not close"):
        follows_one_process("minimax", is_tried=False)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", NAMES)
def test_architecture_follows_one_process_or_is_refused(name: str) -> None:
    tiny(name)
    follows_one_process(name)
