"""3D layouts follow the one-process run: loss, gradient norm, weights and evaluations."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.support.parallel_jobs import resumed
from tests.support.parity import EXACT, Trained, assert_close, assert_follows, observed, reference, train
from tests.support.selection import by_default
from tests.support.worker_pool import run_in_workers

pytestmark = pytest.mark.distributed

CLIP = 0.1
STEPS = (
    f"--train-iters 3 --eval-interval 2 --global-batch-size 8 --clip-grad {CLIP} --weight-decay 0.1 --no-export-model"
)
TENSOR, PIPELINE, VIRTUAL = (
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--virtual-pipeline-size",
)
ZERO_1, ZERO_2 = "--zero-1-memory-optimization", "--zero-2-memory-optimization"
SHARDS = "--use-distributed-optimizer --data-parallel-sharding-strategy optim_grads_params"
DISTRIBUTED, CHECKPOINTED = "--use-distributed-optimizer", "--checkpoint-activations"

# (job, double precision, flags), each with four workers.
FOUR = {
    "pp4-uneven": ("gpt2-8-tied", True, f"--micro-batch-size 2 {PIPELINE} 4 --pipeline-stages 1,3,2,2"),
    "pp4-few-micro-batches": ("bert-8-untied", True, f"--micro-batch-size 4 {PIPELINE} 4 {CHECKPOINTED}"),
    "pp2-dp2-zero-2": ("unreached-4", True, f"--micro-batch-size 1 {PIPELINE} 2 {ZERO_2}"),
    "pp2-dp2-interleaved-zero-1": ("neox-8-untied", True, f"--micro-batch-size 1 {PIPELINE} 2 {VIRTUAL} 2 {ZERO_1}"),
    "tp2-pp2": ("llama-4-tied", False, f"--micro-batch-size 4 {TENSOR} 2 {PIPELINE} 2 --sequence-parallel"),
    "tp2-dp2-zero-2": ("bert-4-untied", True, f"--micro-batch-size 2 {TENSOR} 2 {ZERO_2}"),
    "dp4-distributed-optimizer": ("unreached-4", True, f"--micro-batch-size 2 {DISTRIBUTED}"),
    "pp2-dp2-frozen": ("frozen-8", True, f"--micro-batch-size 2 {PIPELINE} 2 {ZERO_2}"),
    "pp2-dp2-outputs-kept": ("tanh-4", True, f"--micro-batch-size 1 {PIPELINE} 2 {ZERO_1}"),
    "pp4-fused": ("gpt2-8-tied", True, f"--micro-batch-size 2 {PIPELINE} 4 --fused-linear-cross-entropy"),
    "tp2-dp2-shards": ("llama-4-tied", True, f"--micro-batch-size 2 {TENSOR} 2 --sequence-parallel {SHARDS}"),
    "tp2-dp2-shards-once": (
        "bert-4-untied",
        True,
        f"--micro-batch-size 2 {TENSOR} 2 {SHARDS} --no-fsdp-reduce-every-micro-batch",
    ),
    "dp4-shards-in-groups": ("gpt2-4-tied", True, f"--micro-batch-size 2 {SHARDS} --fsdp-shard-size 2"),
    "pp2-dp2-shards": ("unreached-4", True, f"--micro-batch-size 1 {PIPELINE} 2 {SHARDS} --fsdp-reshard-after-forward"),
    "pp2-dp2-shards-interleaved": ("neox-8-untied", True, f"--micro-batch-size 1 {PIPELINE} 2 {VIRTUAL} 2 {SHARDS}"),
    "pp2-dp2-shards-once": (
        "gpt2-8-tied",
        True,
        f"--micro-batch-size 1 {PIPELINE} 2 {VIRTUAL} 2 {SHARDS} --no-fsdp-reduce-every-micro-batch",
    ),
    "pp2-dp2-shards-frozen": ("frozen-8", True, f"--micro-batch-size 2 {PIPELINE} 2 {SHARDS}"),
    "pp2-dp2-shards-outputs-kept": ("tanh-4", True, f"--micro-batch-size 1 {PIPELINE} 2 {SHARDS}"),
    "own-loss": ("own-loss", True, f"--micro-batch-size 2 {PIPELINE} 2 {DISTRIBUTED}"),
}
SHORT = ("pp2-dp2-zero-2", "tp2-dp2-shards", "pp2-dp2-shards-interleaved")
"""For ``make test``. Rows of the covering table have other layouts, frozen parameters and the fused loss."""
HOLDS = {"pp2-dp2-zero-2", "pp2-dp2-interleaved-zero-1"}
"""Layouts of which each worker has half of the gradients and of the state of its stage."""
EACH_SHARE = {"tp2-dp2-shards", "pp2-dp2-shards-interleaved"}
"""Layouts of which each worker has half of the parameters of its part, too."""
HALF = {
    "bf16": ("gpt2-4-tied", False, f"--micro-batch-size 2 --mixed-precision bf16 {PIPELINE} 2 {ZERO_1}"),
    "fp16": ("gpt2-4-tied", False, f"--micro-batch-size 2 --mixed-precision fp16 {PIPELINE} 2 {ZERO_2}"),
    "fp16-shards": ("gpt2-4-tied", False, f"--micro-batch-size 2 --mixed-precision fp16 {PIPELINE} 2 {SHARDS}"),
}
OFFLOADED = ("unreached-4", True, f"--micro-batch-size 1 {PIPELINE} 2 {ZERO_1} --cpu-offload")


def _whole(layout: str) -> Trained:
    """Train the same job in one process, with micro batches of the same size: some models round to fp32 inside."""
    job, double, flags = (FOUR | HALF)[layout]
    words = flags.split()
    size = words[words.index("--micro-batch-size") + 1]
    precision = "".join(f" --mixed-precision {kind}" for kind in HALF if kind in words)
    return reference(job, double, f"{STEPS} --micro-batch-size {size}{precision}")


# A run that dies and resumes in another layout, several times: (flags, the step after which it dies).
RESUMED = "--train-iters 8 --global-batch-size 8 --clip-grad 0.1 --weight-decay 0.1 --lr 1e-3 --no-export-model"
CHAIN = (
    (f"--micro-batch-size 4 {TENSOR} 2 {PIPELINE} 2", 2),
    (f"--micro-batch-size 2 {PIPELINE} 4 --resume", 3),
    (f"--micro-batch-size 2 {TENSOR} 2 {SHARDS} --resume", 4),
    (f"--micro-batch-size 1 {PIPELINE} 2 {VIRTUAL} 2 {ZERO_2} --resume", 5),
    (f"--micro-batch-size 1 {PIPELINE} 2 {SHARDS} --resume", 6),
)


def _offloaded(workers: Any) -> Trained:
    with mock.patch("rapidformer_templates.engines.local.is_in_host_memory", return_value=False):
        return train(*OFFLOADED[:2], f"{STEPS} {OFFLOADED[2]}")


def _run(layout: str) -> Trained:
    job, double, flags = (FOUR | HALF)[layout]
    return observed(4, job, double, f"{STEPS} {flags}")[0]


def _assert_follows(actual: Trained, expected: Trained, double: bool) -> None:
    # The bound of weights in fp32 is a hundredth of one update, because the learning rate is 1e-3.
    assert_follows(actual, expected, *(EXACT if double else ()), weights=None if double else (1e-5, 1e-5))
    assert actual["summary"]["parameters"] == expected["summary"]["parameters"]


@pytest.mark.parametrize("layout", by_default(SHORT, FOUR))
def test_layout_follows_one_process(layout: str) -> None:
    expected = _whole(layout)
    _assert_follows(_run(layout), expected, FOUR[layout][1])
    # A constant curve, or one that is never clipped, would agree with anything.
    assert len({loss for loss, _ in expected["curve"]}) == 3
    assert max(norm for _, norm in expected["curve"]) > 2 * CLIP


@pytest.mark.longer
@pytest.mark.parametrize(
    ("kind", "dtype", "bits"), [("bf16", "bfloat16", 8), ("fp16", "float16", 11), ("fp16-shards", "float16", 11)]
)
def test_half_precision_follows_one_process_within_its_rounding(kind: str, dtype: str, bits: int) -> None:
    found = _run(kind)
    assert_close(found["curve"], _whole(kind)["curve"], 2**-bits, 0)
    receipts = found["summary"]["receipts"]
    assert dtype in receipts["activation_dtypes"]
    narrow = [] if SHARDS in HALF[kind][2] else [dtype]  # matrices, and norms in fp32; shards are fp32
    assert receipts["parameter_dtypes"] == sorted([*narrow, "float32"])


@pytest.mark.longer
def test_offload_moves_the_state_and_nothing_else() -> None:
    """The engine treats host memory as separate from the device. The job belongs to another layout."""
    _assert_follows(run_in_workers(4, _offloaded)[0], _whole("pp2-dp2-zero-2"), double=True)


@pytest.mark.parametrize("layout", by_default(SHORT, sorted(HOLDS)))
def test_receipts_show_what_each_worker_holds(layout: str) -> None:
    runs = _run(layout), _whole(layout)
    held, whole = (run["summary"]["receipts"]["held_bytes_by_rank"] for run in runs)
    for place in held:
        assert place["parameter_bytes"] < 0.65 * whole[0]["parameter_bytes"]  # a stage, and a copy of the embedding
        # Half of a stage, over two replicas. ZeRO-1 has whole gradients until the last backward, and then the shares.
        # The state adds a count for each run of a parameter.
        assert place["gradient_bytes"] == pytest.approx(place["parameter_bytes"] / 2, abs=16)
        assert place["optimizer_state_bytes"] == pytest.approx(place["parameter_bytes"], rel=0.01)


@pytest.mark.parametrize("layout", by_default(EACH_SHARE, sorted(EACH_SHARE)))
def test_a_worker_holds_its_shards_of_its_part(layout: str) -> None:
    runs = _run(layout), _whole(layout)
    held, whole = (run["summary"]["receipts"]["held_bytes_by_rank"] for run in runs)
    for place in held:  # half of a part, with the embedding and what tensor parallelism leaves whole
        assert place["parameter_bytes"] < 0.33 * whole[0]["parameter_bytes"]
        assert place["gradient_bytes"] == pytest.approx(place["parameter_bytes"], rel=0.05)  # without padding
        assert place["optimizer_state_bytes"] == pytest.approx(2 * place["parameter_bytes"], rel=0.05)


@pytest.mark.longer
@pytest.mark.deepspeed
def test_a_run_goes_through_all_engines(tmp_path: Path) -> None:
    """3D, pipelines alone and interleaved, shards of parts and stages, ZeRO-2 of DeepSpeed, one process, FSDP."""
    pytest.importorskip("deepspeed", reason="needs DeepSpeed: pip install 'rapidformer_templates[deepspeed]'")
    run = "gpt2-8-tied", str(tmp_path), f"{RESUMED} --save-interval 1"
    curve = run_in_workers(4, resumed, *run, CHAIN)[0][:-1]
    curve += run_in_workers(2, resumed, *run, [(f"--micro-batch-size 4 {ZERO_2} --resume", 7)])[0][:-1]
    # One more step in one process. The run dies in its last step, and FSDP takes over before it.
    curve += resumed(None, *run, [("--micro-batch-size 4 --resume", 8)])[:-1]
    curve += run_in_workers(2, resumed, *run, [("--micro-batch-size 4 --fsdp-memory-optimization --resume", None)])[0]
    whole = reference(run[0], False, f"{RESUMED} --micro-batch-size 8", lr=None)["curve"]
    assert_close(curve, whole)
