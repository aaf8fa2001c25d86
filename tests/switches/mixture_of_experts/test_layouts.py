"""Mixtures in models that are divided over stages and shards follow one process, in fp64 and step by step."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support import mixtures, parity
from tests.support import parallel_jobs as _parallel_jobs  # noqa: F401 - registers them
from tests.support.parity import assert_close, assert_follows
from tests.support.selection import by_default, selected
from tests.support.worker_pool import run_in_workers

pytestmark = pytest.mark.distributed

STEPS = (
    "--train-iters 3 --eval-interval 2 --global-batch-size 12 --clip-grad 0.1 --weight-decay 0.1"
    " --optimizer adamw_torch"
)
PLAIN = f"{STEPS} --no-export-model"
SAVED = f"{STEPS} --save-interval 2 --keep-checkpoints 2"
OURS = "--num-experts 4 --moe-loss-coeff 2.5 --moe-z-loss-coeff 0.5"
CAPACITY = f"{OURS} --moe-capacity-factor 1.0"
THEIRS = "--moe-loss-coeff 0.2 --moe-z-loss-coeff 0.02"
CONTEXT, PIPELINE, TENSOR, GROUPS = (
    "--context-parallel-size",
    "--pipeline-model-parallel-size 2",
    "--tensor-model-parallel-size 2",
    "--expert-model-parallel-size 2",
)
ALONE = "--micro-batch-size 12"
WITHIN = 1e-10, 1e-10
"""Bounds (rtol, atol) in fp64."""
JOBS = {  # name: (job, flags of the mixture). Four blocks for stages, otherwise two
    "gpt2": ("causal", CAPACITY),
    "deep gpt2": ("gpt2-4-tied", CAPACITY),
    "llama": ("llama-4-untied", f"{OURS} --moe-layer-interval 2"),
    "bert": ("masked", OURS),
    "mixtral": ("mixtral-shallow", THEIRS),
    "deep mixtral": ("mixtral-wide", THEIRS),
    "qwen3": ("qwen3-moe-shallow", THEIRS),
    "deep qwen3": ("qwen3-moe-wide", THEIRS),
}
LAYOUTS = {  # name: (job, flags of the layout)
    "stages, computed again": ("deep gpt2", f"{PIPELINE} --micro-batch-size 1 --checkpoint-activations"),
    "stages in turn": (
        "llama",
        f"{PIPELINE} --virtual-pipeline-size 2 --micro-batch-size 2 --use-distributed-optimizer",
    ),
    "shards": ("gpt2", f"{TENSOR} --micro-batch-size 2 --zero-2-memory-optimization"),
    "stretches": ("bert", f"{TENSOR} --sequence-parallel --micro-batch-size 3"),
    "context": ("gpt2", f"{CONTEXT} 4 --micro-batch-size 6 --checkpoint-activations --zero-2-memory-optimization"),
    "context in a ring, in stages": (
        "llama",
        f"{CONTEXT} 2 --context-parallel-kind ring {PIPELINE} --micro-batch-size 2 --use-distributed-optimizer",
    ),
    "context and stretches": ("qwen3", f"{CONTEXT} 2 {TENSOR} --sequence-parallel --micro-batch-size 6"),
    "groups": ("gpt2", f"{GROUPS} --micro-batch-size 1 --checkpoint-activations"),
    "groups, gradients divided": (
        "gpt2",
        f"{GROUPS} --micro-batch-size 1 --checkpoint-activations --zero-2-memory-optimization",
    ),
    "groups, states divided": ("llama", f"{GROUPS} --micro-batch-size 3 --zero-1-memory-optimization --cpu-offload"),
    "groups, states on the host": ("gpt2", f"{GROUPS} --micro-batch-size 3 --cpu-offload"),
    "one expert each, states divided": ("bert", "--expert-parallel --micro-batch-size 1 --use-distributed-optimizer"),
    "groups of shards": ("gpt2", f"{TENSOR} --expert-parallel --micro-batch-size 3 --zero-2-memory-optimization"),
    "groups of stretches": ("bert", f"{TENSOR} --sequence-parallel {GROUPS} --micro-batch-size 3"),
    "groups of stages, in turn": (
        "llama",
        f"{PIPELINE} --virtual-pipeline-size 2 {GROUPS} --micro-batch-size 1 --use-distributed-optimizer",
    ),
    "groups, everything sharded": (
        "gpt2",
        f"{GROUPS} --micro-batch-size 3 --checkpoint-activations --fsdp-memory-optimization",
    ),
    "groups, sharded inside groups": (
        "llama",
        f"{GROUPS} --micro-batch-size 1 --fsdp-memory-optimization --fsdp-shard-size 2",
    ),
    "over all, sharded inside groups": (
        "qwen3",
        "--num-experts 4 --expert-parallel --micro-batch-size 3 --fsdp-memory-optimization --fsdp-shard-size 2"
        " --no-fsdp-reshard-after-forward",
    ),
    "groups of a context, everything sharded": (
        "mixtral",
        f"--num-experts 4 {GROUPS} {CONTEXT} 2 --micro-batch-size 3 --fsdp-memory-optimization",
    ),
    "over a context of shards": (
        "qwen3",
        f"--num-experts 4 --expert-parallel {CONTEXT} 2 {TENSOR} --sequence-parallel --micro-batch-size 6",
    ),
    "over a ring, in stages": (
        "llama",
        f"--expert-parallel {CONTEXT} 2 --context-parallel-kind ring {PIPELINE} --micro-batch-size 2"
        " --use-distributed-optimizer",
    ),
    "own experts in groups": (
        "mixtral",
        f"--num-experts 4 {GROUPS} --micro-batch-size 1 --checkpoint-activations --zero-2-memory-optimization",
    ),
    "own experts over all": ("qwen3", "--num-experts 4 --expert-parallel --micro-batch-size 3"),
    "own experts in groups of shards": ("mixtral", f"--num-experts 4 {TENSOR} --expert-parallel --micro-batch-size 3"),
    "stages and shards": ("deep mixtral", f"{PIPELINE} {TENSOR} --micro-batch-size 3"),
    "stages and stretches": (
        "deep qwen3",
        f"{PIPELINE} {TENSOR} --sequence-parallel --checkpoint-activations --micro-batch-size 4",
    ),
}
LONGER = {
    "stages, computed again",
    "stages in turn",
    "context and stretches",
    "context in a ring, in stages",
    "stretches",
    "one expert each, states divided",
    "groups of shards",
    "shards",
    "context",
    "groups, states divided",
    "groups, states on the host",
    "groups of stretches",
    "groups of stages, in turn",
    "groups, sharded inside groups",
    "over a context of shards",
    "over a ring, in stages",
    "over all, sharded inside groups",
    "own experts in groups",
    "own experts over all",
    "own experts in groups of shards",
    "stages and stretches",
}
"""For ``make test-longer``. Another layout covers each way to divide a model and each kind of experts."""
RESUMED = ("stages and shards", "groups, everything sharded", "groups, gradients divided")
"""Runs that start on four workers and resume on one."""
EXPORTED = ("stages and shards", "groups of a context, everything sharded", "own experts in groups")


def _flags(case: str, layout: str) -> tuple[str, bool, str]:
    job, mixture = JOBS[case]
    return job, True, f"{PLAIN} {mixture} {layout}"


def _train(name: str, folder: str) -> parity.Trained:
    """Train a layout, with files if a test reads them."""
    case, layout = LAYOUTS[name]
    if name not in (*RESUMED, *EXPORTED):
        return parity.train(*_flags(case, layout))
    return _saved(case, layout, f"{folder}/{name}")


def _saved(case: str, layout: str, folder: str, *more: str) -> parity.Trained:
    job, mixture = JOBS[case]
    return parity.train(job, True, f"{SAVED} {mixture} {layout}", "--save", folder, *more)


def _forget_last_step(folder: str) -> None:
    """Make a run look as if it had ended between its two checkpoints."""
    shutil.rmtree(f"{folder}/checkpoints/step-3")


def _in_four_workers(workers: Any, layouts: list[str], folder: str) -> dict[str, Any]:
    runs = {name: _train(name, folder) for name in layouts}
    runs["divided"] = _saved(*LAYOUTS["groups, gradients divided"], f"{folder}/whole", "--resume")
    return runs


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Train everything that the selected tests read. All runs of four workers share one group."""
    folder = tmp_path_factory.mktemp("layouts")
    _saved("gpt2", ALONE, f"{folder}/whole")
    _forget_last_step(f"{folder}/whole")
    layouts = sorted({*selected(request, "layout"), "groups", *RESUMED})
    found = run_in_workers(4, _in_four_workers, layouts, str(folder))[0]
    for case in {LAYOUTS[layout][0] for layout in layouts}:
        found[f"{case} alone"] = parity.reference(*_flags(case, ALONE))
    for name in RESUMED:
        _forget_last_step(f"{folder}/{name}")
        found[f"{name}, alone"] = _saved(LAYOUTS[name][0], ALONE, f"{folder}/{name}", "--resume")
    found["folder"] = folder
    return found


@pytest.mark.parametrize("layout", by_default(LAYOUTS.keys() - LONGER, LAYOUTS))
def test_layout_follows_one_process(layout: str, runs: Any) -> None:
    actual, expected = runs[layout], runs[f"{LAYOUTS[layout][0]} alone"]
    assert_follows(actual, expected, *WITHIN)
    assert (len(actual["curve"]), len(actual["evaluations"])) == (3, 2)
    for name in ("expert_load_by_layer", "dropped_choices"):
        assert actual["summary"]["receipts"][name] == expected["summary"]["receipts"][name]


@pytest.mark.parametrize("case", by_default({LAYOUTS[name][0] for name in LAYOUTS.keys() - LONGER}, JOBS))
def test_choices_are_dropped_and_all_gradients_are_clipped(case: str) -> None:
    """Otherwise it would be easy to agree."""
    run = parity.reference(*_flags(case, ALONE))
    assert (run["summary"]["receipts"]["dropped_choices"] > 0) == ("--moe-capacity-factor" in JOBS[case][1])
    assert all(norm > 0.1 for _, norm in run["curve"])
    assert all(value > 0 for losses in mixtures.losses_of(run["lines"]) for value in losses)


def test_the_reported_losses_are_those_of_one_process(runs: Any) -> None:
    for layout in LAYOUTS.keys() & runs.keys():
        reference = f"{LAYOUTS[layout][0]} alone"
        one, other = (mixtures.losses_of(runs[name]["lines"]) for name in (layout, reference))
        assert len(one) == 3
        assert_close(one, other, *WITHIN)


def _train_one(workers: Any, job: str, flags: str) -> parity.Trained:
    return parity.train(job, False, flags)


@pytest.mark.longer
def test_the_loss_scale_reaches_the_losses_of_every_stage() -> None:
    gentle = f"{PLAIN} --num-experts 4 --moe-loss-coeff 0.2 --moe-z-loss-coeff 0.02"  # in the range of fp16
    half = f"{gentle} --mixed-precision fp16 --micro-batch-size 3 {PIPELINE}"
    actual = run_in_workers(4, _train_one, "gpt2-4-tied", half)[0]
    expected = parity.reference("gpt2-4-tied", False, f"{gentle} {ALONE}")
    torch.testing.assert_close(*(torch.tensor(run["curve"]) for run in (actual, expected)), rtol=0.03, atol=0)


def test_a_group_of_workers_has_one_copy_of_the_experts(runs: Any) -> None:
    weights, receipts = runs["gpt2 alone"]["weights"], runs["groups"]["summary"]["receipts"]
    experts = 8 * sum(w.numel() for name, w in weights.items() if ".experts." in name)
    whole = runs["gpt2 alone"]["summary"]["receipts"]["parameter_bytes"]
    assert [held["parameter_bytes"] for held in receipts["held_bytes_by_rank"]] == [whole - experts // 2] * 4


@pytest.mark.longer
def test_the_experts_of_a_pretrained_model_are_divided(tmp_path: Path) -> None:
    mixtures.tiny("qwen2_moe").save_pretrained(tmp_path)
    flags = f"{PLAIN} --pretrained-model-name-or-path {tmp_path}"
    divided = f"{flags} {GROUPS} --zero-1-memory-optimization --micro-batch-size 3"
    actual = run_in_workers(4, _train_one, "pretrained", divided)[0]
    expected = parity.train("pretrained", False, f"{flags} {ALONE}")
    assert_close(actual["curve"], expected["curve"], 1e-5, 1e-5)
    for name, weight in expected["weights"].items():
        assert_close(actual["weights"][name], weight, 1e-5, 1e-5)
    held, whole = (run["summary"]["receipts"]["parameter_bytes"] for run in (actual, expected))
    experts = 4 * sum(w.numel() for name, w in expected["weights"].items() if ".mlp.experts." in name)
    assert held == whole - experts // 2


@pytest.mark.parametrize(
    ("case", "resumed"), [("gpt2", "divided"), *((LAYOUTS[name][0], f"{name}, alone") for name in RESUMED)]
)
def test_checkpoints_go_from_a_divided_run_to_one_process_and_back(case: str, resumed: str, runs: Any) -> None:
    expected = runs[f"{case} alone"]
    assert_close(runs[resumed]["curve"], expected["curve"][2:], *WITHIN)
    for name, weight in expected["weights"].items():
        assert_close(runs[resumed]["weights"][name], weight, *WITHIN)


def test_the_states_of_experts_are_shared_out_among_their_copies(runs: Any) -> None:
    held = runs["groups, gradients divided"]["summary"]["receipts"]["held_bytes_by_rank"]
    whole = sum(weight.numel() for weight in runs["gpt2 alone"]["weights"].values())
    for kind, copies in (("gradient_bytes", 8), ("optimizer_state_bytes", 16)):
        states = sum(of_rank[kind] for of_rank in held)
        assert copies * whole <= states <= copies * whole * 1.01, kind


@pytest.mark.parametrize("layout", by_default(EXPORTED[:2], EXPORTED))
def test_transformers_reads_the_export_of_a_divided_run(layout: str, runs: Any) -> None:
    folder: Path = runs["folder"] / layout / "export"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    weights = runs[layout]["weights"]
    state = model.state_dict()
    assert state.keys() >= weights.keys()
    for name, weight in weights.items():
        assert_close(state[name], weight, 1e-6, 1e-6)
