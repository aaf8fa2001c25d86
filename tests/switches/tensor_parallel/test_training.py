"""A divided model trains as the whole one does: every architecture with a plan, on two and four workers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.selection import by_default, selected
from tests.support.tensor_jobs import CLIP, MODELS, Case, divided, train
from tests.support.worker_pool import run_in_workers

STEPS = 5
ALL = {"sequence": True, "checkpointed": True, "tied": False}
CASES = [
    *(Case(model, 2, kind="float64") for model in ("llama", "gpt_neox", "gpt2", "bert", "t5")),
    *(Case(model, 2, kind="float64", **ALL) for model in MODELS),
    *(Case(model, 2, own_loss=True, sequence=True) for model in ("llama", "bert")),
    *(Case(model, 2, kind="float64", fused=True) for model in ("gpt2", "bert", "t5")),
    Case("llama", 2, kind="float64", fused=True, **ALL),
    Case("roberta", 2, kind="float64", fused=True, own_loss=True, **ALL),
    Case("own", 2, kind="float64", checkpointed=True),
    Case("gpt2", 4, kind="float64", sequence=True),
    Case("gpt2", 4, kind="float64", sequence=True, fused=True),
    Case("llama", 4, own_loss=True, tied=False),
]
SHORT = [
    *(Case(model, 2, kind="float64", **ALL) for model in MODELS),
    Case("gpt2", 2, kind="float64", fused=True),
    Case("bert", 2, own_loss=True, sequence=True),
    Case("roberta", 2, kind="float64", fused=True, own_loss=True, **ALL),
    Case("own", 2, kind="float64", checkpointed=True),
    Case("gpt2", 4, kind="float64", sequence=True, fused=True),
]
"""Cases that run by default: every architecture, and every other property once."""
BF16 = [
    Case("llama", 2, kind="bfloat16", own_loss=True, sequence=True),
    Case("bert", 2, kind="bfloat16", own_loss=True),
    Case("llama", 2, kind="bfloat16", own_loss=True, sequence=True, fused=True),
]


def _train_all(workers: Any, cases: list[Case]) -> dict[Case, Any]:
    """Train in a group of four. With tensor size 2, each half of the group trains half of the cases."""
    results: dict[Case, Any] = {}
    for size in sorted({case.tensor for case in cases}):
        place = divided(workers, size)
        for number, case in enumerate(case for case in cases if case.tensor == size):
            if number % place.data == place.data_rank:
                results[case] = train(case, place, STEPS)
    return results


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> dict[Case, Any]:
    first, _, third, _ = run_in_workers(4, _train_all, selected(request, "case"))
    return third | first


@pytest.fixture(scope="module")
def references() -> dict[Case, Any]:
    return {}


def _reference(case: Case, references: dict[Case, Any]) -> Any:
    if case.whole not in references:
        references[case.whole] = train(case.whole, steps=STEPS)
    return references[case.whole]


@pytest.mark.distributed
@pytest.mark.parametrize("case", by_default(SHORT, CASES), ids=str)
def test_it_follows_one_worker(case: Case, runs: Any, references: Any) -> None:
    actual, expected = runs[case], _reference(case, references)
    # The router of Mixtral computes in fp32, independent of the model's type.
    exact = case.kind == "float64" and case.model != "mixtral"
    np.testing.assert_allclose(actual["curve"], expected["curve"], rtol=1e-10 if exact else 1e-5)
    assert actual["weights"].keys() == expected["weights"].keys()
    for name, weight in expected["weights"].items():
        np.testing.assert_allclose(actual["weights"][name], weight, rtol=0, atol=1e-10 if exact else 1e-5, err_msg=name)


@pytest.mark.distributed
@pytest.mark.parametrize("case", by_default(BF16[-1:], BF16), ids=str)
def test_bf16_follows_one_worker_within_its_rounding(case: Case, runs: Any, references: Any) -> None:
    losses, norms = np.transpose(runs[case]["curve"])
    expected_losses, expected_norms = np.transpose(_reference(case, references)["curve"])
    np.testing.assert_allclose(losses, expected_losses, rtol=5e-3)
    np.testing.assert_allclose(norms, expected_norms, rtol=3e-2)


@pytest.mark.distributed
def test_the_references_move(runs: Any, references: Any) -> None:
    """A curve that is constant, or is never clipped, would agree with anything."""
    for case in runs.keys() - {*BF16}:
        losses, norms = np.transpose(_reference(case, references)["curve"])
        assert len(set(losses)) == STEPS
        assert max(norms) > 1.5 * CLIP
