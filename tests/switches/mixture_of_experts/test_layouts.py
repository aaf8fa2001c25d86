"""Mixtures in models that are divided over stages and shards follow one process, in fp64 and step by step."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support import mixtures, parity
from tests.support import parallel_jobs as _parallel_jobs  # noqa: F401 - registers them
from tests.support.parity import assert_close, assert_follows, observed, reference
from tests.support.selection import by_default
from tests.support.worker_pool import run_in_workers

pytestmark = pytest.mark.distributed

STEPS = (
    "--train-iters 3 --eval-interval 2 --global-batch-size 12 --clip-grad 0.1 --weight-decay 0.1"
    " --optimizer adamw_torch"
)
PLAIN = f"{STEPS} --no-export-model"
OURS = "--num-experts 4 --moe-loss-coeff 2.5 --moe-z-loss-coeff 0.5"
CAPACITY = f"{OURS} --moe-capacity-factor 1.0"
THEIRS = "--moe-loss-coeff 0.2 --moe-z-loss-coeff 0.02"
CONTEXT, RING = "--context-parallel-size 2", "--context-parallel-kind ring"
PIPELINE, TENSOR = "--pipeline-model-parallel-size 2", "--tensor-model-parallel-size 2"
GROUPS, ALL = "--expert-model-parallel-size 2", "--expert-parallel"
FSDP, ZERO_2, SHARDED = "--fsdp-memory-optimization", "--zero-2-memory-optimization", "--use-distributed-optimizer"
AGAIN, STRETCHES = "--checkpoint-activations", f"{TENSOR} --sequence-parallel"
ALONE = "--micro-batch-size 12"
WITHIN = 1e-10, 1e-10
"""Bounds (rtol, atol) in fp64."""
JOBS = {  # name: (job, flags of the mixture). Four blocks for stages, otherwise two
    "gpt2": ("causal", CAPACITY),
    "llama": ("llama-4-untied", f"{OURS} --moe-layer-interval 2"),
    "mixtral": ("mixtral-shallow", THEIRS),
    "deep mixtral": ("mixtral-wide", THEIRS),
    "qwen3": ("qwen3-moe-shallow", THEIRS),
}
STAGES_AND_SHARDS = ("deep mixtral", f"{PIPELINE} {TENSOR} --micro-batch-size 3")
ALL_SHARDED = ("gpt2", f"{GROUPS} --micro-batch-size 3 {AGAIN} {FSDP}")
GRADIENTS_DIVIDED = ("gpt2", f"{GROUPS} --micro-batch-size 1 {AGAIN} {ZERO_2}")
OF_A_CONTEXT = ("mixtral", f"--num-experts 4 {GROUPS} {CONTEXT} --micro-batch-size 3 {FSDP}")
WHOLE_GROUPS = ("gpt2", f"{GROUPS} --micro-batch-size 3")
LAYOUTS = [  # (job, flags of the layout)
    STAGES_AND_SHARDS,
    ALL_SHARDED,
    GRADIENTS_DIVIDED,
    OF_A_CONTEXT,
    WHOLE_GROUPS,
    ("llama", f"{PIPELINE} --virtual-pipeline-size 2 {GROUPS} --micro-batch-size 1 {SHARDED}"),
    ("qwen3", f"--num-experts 4 {ALL} {CONTEXT} {STRETCHES} --micro-batch-size 6"),
    ("llama", f"{ALL} {CONTEXT} {RING} {PIPELINE} --micro-batch-size 2 {SHARDED}"),
]


def _reference(case: str) -> parity.Trained:
    job, mixture = JOBS[case]
    return reference(job, True, f"{PLAIN} {mixture} {ALONE}")


@pytest.mark.parametrize(("case", "layout"), by_default([WHOLE_GROUPS], LAYOUTS))
def test_layout_follows_one_process(case: str, layout: str) -> None:
    job, mixture = JOBS[case]
    actual, expected = observed(4, job, True, f"{PLAIN} {mixture} {layout}")[0], _reference(case)
    assert_follows(actual, expected, *WITHIN)
    assert (len(actual["curve"]), len(actual["evaluations"])) == (3, 2)
    receipts = expected["summary"]["receipts"]
    for name in ("expert_load_by_layer", "dropped_choices"):
        assert actual["summary"]["receipts"][name] == receipts[name]
    losses = mixtures.losses_of(expected["lines"])
    assert_close(mixtures.losses_of(actual["lines"]), losses, *WITHIN)
    # Choices are dropped and all gradients are clipped. Otherwise it would be easy to agree.
    assert (receipts["dropped_choices"] > 0) == ("--moe-capacity-factor" in mixture)
    assert all(norm > 0.1 for _, norm in expected["curve"])
    assert all(value > 0 for step in losses for value in step)


def _held(case: str, layout: str) -> Any:
    job, mixture = JOBS[case]
    run = observed(4, job, True, f"{PLAIN} {mixture} {layout}")[0]
    return run["summary"]["receipts"]["held_bytes_by_rank"]


def test_a_group_of_workers_has_one_copy_of_the_experts() -> None:
    weights = _reference("gpt2")["weights"]
    experts = 8 * sum(w.numel() for name, w in weights.items() if ".experts." in name)
    whole = _reference("gpt2")["summary"]["receipts"]["parameter_bytes"]
    assert [held["parameter_bytes"] for held in _held(*WHOLE_GROUPS)] == [whole - experts // 2] * 4


@pytest.mark.longer
def test_the_states_of_experts_are_shared_out_among_their_copies() -> None:
    whole = sum(weight.numel() for weight in _reference("gpt2")["weights"].values())
    for kind, copies in (("gradient_bytes", 8), ("optimizer_state_bytes", 16)):
        states = sum(of_rank[kind] for of_rank in _held(*GRADIENTS_DIVIDED))
        assert copies * whole <= states <= copies * whole * 1.01, kind


def test_the_mixture_acts() -> None:
    """Otherwise it would be easy to agree: its losses change the gradient, and not the reported loss of the task."""
    mixture = _reference("gpt2")
    plain = reference("causal", True, f"{PLAIN} {CAPACITY} --moe-loss-coeff 0 --moe-z-loss-coeff 0 {ALONE}")
    assert plain["curve"][0][0] == mixture["curve"][0][0]
    assert abs(plain["curve"][0][1] / mixture["curve"][0][1] - 1) > 0.01
    line = next(line for line in mixture["lines"] if "loss" in line)
    assert 1.0 < line["balance_loss"] < 4
    assert line["z_loss"] > 0
    assert line["expert_load_min"] < 1 < line["expert_load_max"]


@pytest.mark.longer
@pytest.mark.parametrize("flags", [f"--mixed-precision fp16 {PIPELINE}", f"--mixed-precision bf16 {ALL}"])
def test_half_precision_follows_fp32(flags: str) -> None:
    """The losses of the mixture are in the range of fp16. Its loss scale must reach those of every stage."""
    gentle = f"{PLAIN} --num-experts 4 {THEIRS}"
    actual = observed(4, "gpt2-4-tied", False, f"{gentle} --micro-batch-size 3 {flags}")[0]
    assert_close(actual["curve"], reference("gpt2-4-tied", False, f"{gentle} {ALONE}")["curve"], 0.03, 0)


@pytest.mark.longer
def test_the_experts_of_a_pretrained_model_are_divided(tmp_path: Path) -> None:
    mixtures.tiny("qwen2_moe").save_pretrained(tmp_path)
    flags = f"{PLAIN} --pretrained-model-name-or-path {tmp_path}"
    divided = f"{flags} {GROUPS} --zero-1-memory-optimization --micro-batch-size 3"
    actual = observed(4, "pretrained", False, divided)[0]
    expected = parity.train("pretrained", False, f"{flags} {ALONE}")
    assert_follows(actual, expected, 1e-5, 1e-5)
    held, whole = (run["summary"]["receipts"]["parameter_bytes"] for run in (actual, expected))
    experts = 4 * sum(w.numel() for name, w in expected["weights"].items() if ".mlp.experts." in name)
    assert held == whole - experts // 2


# Checkpoints and exports.


def _saved(workers: Any, case: str, layout: str, folder: str, *more: str) -> parity.Trained:
    job, mixture = JOBS[case]
    flags = f"{STEPS} --save-interval 2 --keep-checkpoints 2 {mixture} {layout}"
    return parity.train(job, True, flags, "--save", folder, *more)


SAVED = [(2, "gpt2", f"{ALL} --micro-batch-size 3"), (4, *STAGES_AND_SHARDS), (4, *ALL_SHARDED), (4, *OF_A_CONTEXT)]


@pytest.mark.parametrize(("workers", "case", "layout"), by_default((), SAVED))
def test_a_divided_run_goes_on_in_one_process_and_its_export_has_its_weights(
    workers: int, case: str, layout: str, tmp_path: Path
) -> None:
    folder, expected = str(tmp_path / "run"), _reference(case)
    divided = run_in_workers(workers, _saved, case, layout, folder)[0]
    if "mixtral" in case:
        model = AutoModelForCausalLM.from_pretrained(f"{folder}/export", dtype=torch.float64).state_dict()
        assert model.keys() >= divided["weights"].keys()
        for name, weight in divided["weights"].items():
            assert_close(model[name], weight, 1e-6, 1e-6)
    shutil.rmtree(f"{folder}/checkpoints/step-3")  # as if the run had ended after step 2
    _assert_end(_saved(None, case, ALONE, folder, "--resume"), expected)


@pytest.mark.longer
def test_a_run_of_one_process_goes_on_divided(tmp_path: Path) -> None:
    _saved(None, "gpt2", ALONE, str(tmp_path))
    shutil.rmtree(tmp_path / "checkpoints/step-3")
    divided = run_in_workers(4, _saved, *GRADIENTS_DIVIDED, str(tmp_path), "--resume")[0]
    _assert_end(divided, _reference("gpt2"))


def _assert_end(resumed: parity.Trained, expected: parity.Trained) -> None:
    assert_close(resumed["curve"], expected["curve"][2:], *WITHIN)
    for name, weight in expected["weights"].items():
        assert_close(resumed["weights"][name], weight, *WITHIN)
