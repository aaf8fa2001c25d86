"""A mixture follows its one-process run under every engine: loss, gradient norm, weights. It resumes under another."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support import mixtures, parity
from tests.support.parity import assert_close, assert_follows, observed, reference
from tests.support.selection import by_default
from tests.support.worker_pool import run_in_workers

pytest.importorskip("deepspeed", reason="needs DeepSpeed: pip install 'rapidformer_templates[deepspeed]'")
pytestmark = [pytest.mark.deepspeed, pytest.mark.distributed]

STEPS = "--train-iters 3 --eval-interval 2 --global-batch-size 8 --clip-grad 0.1 --weight-decay 0.1 --no-export-model"
MIXTURE = "--num-experts 4 --moe-loss-coeff 2.5 --moe-z-loss-coeff 0.5"
THEIRS = "--moe-loss-coeff 0.2 --moe-z-loss-coeff 0.02"
CASES = {  # name: (job, flags of the mixture)
    "dropless": ("causal", MIXTURE),
    "capacity": ("masked", f"{MIXTURE} --moe-capacity-factor 1.0 --moe-top-k 1"),
    "gentle": ("causal", f"--num-experts 4 {THEIRS}"),  # in the range of fp16
    "own": ("mixtral", THEIRS),
}
ALONE = "--micro-batch-size 8"
DDP, EXPERTS = "--micro-batch-size 2", "--micro-batch-size 2 --expert-parallel"
RUNS = [
    ("dropless", DDP),
    ("dropless", EXPERTS),
    ("capacity", EXPERTS),
    ("own", "--micro-batch-size 2 --zero-2-memory-optimization"),
]
"""The covering table contains mixtures under every engine."""


def _case(case: str, flags: str) -> tuple[str, bool, str]:
    job, mixture = CASES[case]
    return job, False, f"{STEPS} {mixture} {flags}"


@pytest.mark.longer
@pytest.mark.parametrize(("case", "layout"), RUNS)
def test_layout_follows_one_process(case: str, layout: str) -> None:
    actual, expected = observed(2, *_case(case, layout))[0], reference(*_case(case, ALONE))
    assert_follows(actual, expected)
    for key in ("expert_load", "dropped_choices"):
        assert actual["summary"]["receipts"][key] == expected["summary"]["receipts"][key]
    balance = [mixtures.losses_of(each["lines"]) for each in (actual, expected)]
    assert len(balance[1]) == len(expected["curve"]) == 3
    assert len(expected["evaluations"]) == 2
    assert_close(*balance)


def test_the_mixture_acts() -> None:
    """Otherwise it would be easy to agree: the losses change the gradient, choices are dropped, and each run learns."""
    dropless, capacity = (reference(*_case(case, ALONE)) for case in ("dropless", "capacity"))
    unbalanced = "--num-experts 4 --moe-loss-coeff 0 --moe-z-loss-coeff 0"
    plain = reference("causal", False, f"{STEPS} {ALONE} {unbalanced}")
    assert plain["curve"][0][0] == dropless["curve"][0][0]  # the loss contains only the task
    assert abs(plain["curve"][0][1] / dropless["curve"][0][1] - 1) > 0.01
    assert capacity["summary"]["receipts"]["dropped_choices"] > 0
    assert dropless["summary"]["receipts"]["dropped_choices"] == 0
    line = next(line for line in dropless["lines"] if "loss" in line)
    assert 1.0 < line["balance_loss"] < 4
    assert line["z_loss"] > 0
    assert line["expert_load_min"] < 1 < line["expert_load_max"]


@pytest.mark.longer
def test_workers_hold_their_share_of_the_experts() -> None:
    held, whole = (
        observed(2, *_case("dropless", layout))[0]["summary"]["receipts"]["held_bytes_by_rank"]
        for layout in (EXPERTS, DDP)
    )
    weights = reference(*_case("dropless", ALONE))["weights"]
    experts = sum(weight.numel() for name, weight in weights.items() if ".experts." in name) * 4
    for mine, all_of_it in zip(held, whole, strict=True):
        assert mine["parameter_bytes"] == all_of_it["parameter_bytes"] - experts // 2
        assert mine["optimizer_state_bytes"] < all_of_it["optimizer_state_bytes"] - 0.9 * experts


PRECISIONS = ["--mixed-precision fp16", "--mixed-precision bf16 --expert-parallel"]


@pytest.mark.longer
@pytest.mark.parametrize("flags", PRECISIONS)
def test_half_precision(flags: str) -> None:
    actual = observed(2, *_case("gentle", f"--micro-batch-size 4 {flags}"))[0]
    assert_close(actual["curve"], reference(*_case("gentle", ALONE))["curve"], 0.03, 0)


def _saved(workers: Any, flags: str, folder: str, *more: str) -> parity.Trained:
    return parity.train(
        *_case("dropless", flags), "--save-interval", "2", "--keep-checkpoints", "2", "--save", folder, *more
    )


FSDP = "--micro-batch-size 4 --fsdp-memory-optimization"
MOVES = [(ALONE, EXPERTS), (EXPERTS, ALONE), (ALONE, FSDP), (FSDP, ALONE)]


@pytest.mark.parametrize(("first", "second"), by_default(MOVES[1:2], MOVES))
def test_checkpoints_go_from_one_process_to_a_layout_and_back(first: str, second: str, tmp_path: Path) -> None:
    for flags, more in ((first, ()), (second, ("--resume",))):
        if flags == ALONE:
            run = _saved(None, ALONE, str(tmp_path), *more)
        else:
            run = run_in_workers(2, _saved, flags, str(tmp_path), *more)[0]
        if not more:
            shutil.rmtree(tmp_path / "checkpoints/step-3")  # as if the run had ended after step 2
    expected = reference(*_case("dropless", ALONE))
    assert_close(run["curve"], expected["curve"][2:])
    for key, weight in expected["weights"].items():
        assert_close(run["weights"][key], weight)
