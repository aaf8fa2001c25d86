"""Runs with divided sequences follow the one-process run: loss, gradient norm, weights, evaluations and resumes."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from rapidformer_templates.switches.layout.context import DivisionTrial
from tests.support import parity
from tests.support.architecture_runs import train
from tests.support.architectures import tiny
from tests.support.parallel_jobs import begin, resumed
from tests.support.parity import EXACT, Trained, assert_close, assert_follows, observed, reference
from tests.support.selection import by_default
from tests.support.worker_pool import Failure, outcomes_in_workers, run_in_workers

pytestmark = pytest.mark.distributed

STEPS = "--train-iters 3 --eval-interval 2 --global-batch-size 8 --clip-grad 0.1 --weight-decay 0.1 --no-export-model"
ALONE = f"{STEPS} --micro-batch-size 8"
CONTEXT, RING = "--context-parallel-size 2", "--context-parallel-kind ring"
TENSOR, PIPELINE = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
FUSED, AGAIN = "--fused-linear-cross-entropy", "--checkpoint-activations"
TO_ALL = (2, "gpt2-4-tied", f"{CONTEXT} --micro-batch-size 4 --zero-2-memory-optimization")
IN_A_RING = (2, "llama-4-untied", f"{CONTEXT} {RING} --micro-batch-size 8")
ONE_HEAD = (4, "gpt2-4-tied", f"{CONTEXT} {TENSOR} --micro-batch-size 4 --zero-1-memory-optimization")
CASES = [  # (workers, job, flags), on padded batches whose lengths they do not divide
    TO_ALL,
    IN_A_RING,
    ONE_HEAD,  # on each worker, so it is a ring
    (4, "llama-4-untied", f"--context-parallel-size 4 --micro-batch-size 4 --use-distributed-optimizer {AGAIN}"),
    (4, "bert-4-untied", f"{CONTEXT} --micro-batch-size 2 {AGAIN} --recompute-granularity selective"),
    (4, "llama-4-tied", f"{CONTEXT} {TENSOR} --micro-batch-size 4 --sequence-parallel {FUSED}"),
    (4, "neox-8-untied", f"{CONTEXT} {PIPELINE} --virtual-pipeline-size 2 --micro-batch-size 2 --use-flash-attn"),
    (4, "bert-4-untied", f"{CONTEXT} {RING} {PIPELINE} --micro-batch-size 2"),
    (4, "own-loss", f"{CONTEXT} {RING} --micro-batch-size 2 --zero-2-memory-optimization"),
    (4, "llama-4-untied", f"{CONTEXT} --micro-batch-size 2 --fsdp-memory-optimization"),
]
"""The first two run by default. The covering table also contains these pairs of switches."""


def _run(workers: int, job: str, flags: str) -> Trained:
    return observed(workers, job, True, f"{STEPS} {flags}")[0]


@pytest.mark.parametrize(("workers", "job", "flags"), by_default(CASES[:2], CASES))
def test_divided_sequences_follow_one_process(workers: int, job: str, flags: str) -> None:
    expected = reference(job, True, ALONE)
    assert_follows(_run(workers, job, flags), expected, *EXACT)
    assert len({loss for loss, _ in expected["curve"]}) == 3
    assert max(norm for _, norm in expected["curve"]) > 0.2


@pytest.mark.longer
@pytest.mark.parametrize("more", ["", f" {RING} --keep-fp32-parameters"], ids=["all-to-all", "ring"])
def test_bf16_follows_one_process_within_its_rounding(more: str) -> None:
    narrow = f"--mixed-precision bf16{more}"
    found = observed(2, "llama-4-untied", False, f"{STEPS} {CONTEXT} --micro-batch-size 2 {narrow}")[0]
    assert_close(
        found["curve"], reference("llama-4-untied", False, f"{ALONE} {narrow.replace(RING, '')}")["curve"], 2**-8, 0
    )


def test_receipts_show_the_shards_and_the_ring() -> None:
    receipts = _run(*TO_ALL)["summary"]["receipts"]
    held, whole = receipts["context_tokens"]
    assert held == -(-whole // 2)
    assert receipts["context_attention"] is True
    assert receipts["context_kind"] == "all-to-all"
    assert _run(*IN_A_RING)["summary"]["receipts"]["context_kind"] == "ring"


RESUMED = "--train-iters 6 --save-interval 2 --global-batch-size 8 --clip-grad 0.1 --no-export-model --lr 1e-3"
CHAIN = (
    (f"--micro-batch-size 2 {CONTEXT} --zero-2-memory-optimization", 3),
    (f"--micro-batch-size 2 {CONTEXT} {PIPELINE} --resume", 5),
)


@pytest.mark.longer
def test_a_run_goes_on_in_any_layout_and_in_one_process(tmp_path: Path) -> None:
    job, folder = "gpt2-8-tied", str(tmp_path / "chain")
    first = run_in_workers(4, resumed, job, folder, RESUMED, CHAIN)[0]
    end = begin(job, folder, f"{RESUMED} --micro-batch-size 2 --resume")
    whole = begin(job, str(tmp_path / "whole"), f"{RESUMED} --micro-batch-size 8")
    assert_close([*first[:-1], *end], whole)


# Architectures: each that transformers can build small trains with divided sequences as in one process, or is refused.

pytestmark = pytest.mark.distributed

MIXING = ("minimax", "jamba", "recurrent_gemma")
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


@pytest.mark.parametrize("name", by_default(MIXING[:1], MIXING))
def test_other_ways_to_mix_positions_are_refused(name: str) -> None:
    tiny(name)
    assert not follows_one_process(name)


@pytest.mark.longer
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


@pytest.mark.longer
def test_without_the_trial_linear_attention_would_train_something_else() -> None:
    with pytest.raises(AssertionError, match="not close"):
        follows_one_process("minimax", is_tried=False)
