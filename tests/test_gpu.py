"""Everything that only a GPU can show. All other tests run on the CPU."""

import gc
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from rapidformer_templates.errors import DataError, NonFiniteLoss
from rapidformer_templates.run.folder import read_metrics
from tests.support.ahead import FLAGS, Line
from tests.support.index_jobs import Job as IndexJob
from tests.support.jobs import VOCABULARY, CausalJob
from tests.support.mask_hooks import HOOKS, job_of
from tests.support.parity import train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: torch sees none here"),
]

STEPS = "--train-iters 10 --global-batch-size 8 --micro-batch-size 4"


@pytest.fixture(scope="module")
def on_cpu() -> Any:
    return train("causal", False, f"{STEPS} --device cpu")


def test_gpu_follows_the_cpu_in_fp32(on_cpu: Any) -> None:
    run = train("causal", False, STEPS)
    torch.testing.assert_close(torch.tensor(run["curve"]), torch.tensor(on_cpu["curve"]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("flags", "tolerance", "dtype"),
    [("--mixed-precision", 2**-9, "float16"), ("--mixed-precision bf16", 2**-6, "bfloat16")],
)
def test_half_precision_on_a_gpu(flags: str, tolerance: float, dtype: str, on_cpu: Any) -> None:
    run = train("causal", False, f"{STEPS} {flags}")
    torch.testing.assert_close(torch.tensor(run["curve"]), torch.tensor(on_cpu["curve"]), rtol=tolerance, atol=0)
    assert dtype in run["summary"]["receipts"]["activation_dtypes"]


def test_tf32_acts_and_is_seen(on_cpu: Any) -> None:
    before = torch.get_float32_matmul_precision()
    try:
        run = train("causal", False, f"{STEPS} --tf32")
    finally:
        torch.set_float32_matmul_precision(before)
    assert run["summary"]["receipts"]["matmul_precision"] == "high"
    torch.testing.assert_close(torch.tensor(run["curve"]), torch.tensor(on_cpu["curve"]), rtol=2**-8, atol=0)


def test_loader_processes_and_pinned_memory(on_cpu: Any) -> None:
    flags = f"{STEPS} --dataloader-num-workers 2 --dataloader-pin-memory"
    run = train("causal", False, flags)
    torch.testing.assert_close(torch.tensor(run["curve"]), torch.tensor(on_cpu["curve"]), rtol=1e-4, atol=1e-5)
    assert run["summary"]["peak_memory_mb"] > 0


@pytest.mark.parametrize("flags", ["", "--mixed-precision bf16", "--mixed-precision fp16", "--clip-grad 0"])
def test_the_host_waits_for_nothing_between_two_logs(flags: str, tmp_path: Path) -> None:
    """torch warns about each operation that makes the host wait for the device."""

    class Watched(CausalJob):
        def on_step_end(self, step: int, result: Any) -> None:
            torch.cuda.set_sync_debug_mode("warn" if 5 <= step < 19 else "default")

    job = Watched(f"{STEPS} {flags} --train-iters 20 --log-interval 100 --lr 1e-3 --save {tmp_path / 'run'}".split())
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            job.fit()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [f"{w.filename}:{w.lineno}: {w.message}" for w in seen if "called a synchronizing" in str(w.message)]
    assert waits == []


def test_fused_update_is_the_one_that_acts(tmp_path: Path) -> None:
    job = CausalJob(f"{STEPS} --lr 1e-3 --save {tmp_path / 'run'}".split())
    summary = job.fit()
    assert "AdamW" in summary["receipts"]["optimizer_class"]
    assert job.plan.optimizer_implementation == "torch.optim.AdamW (fused)"


def test_clipping_on_the_device_is_that_of_the_cpu() -> None:
    flags = f"{STEPS} --clip-grad 0.3"
    runs = [train("causal", False, f"{flags} {more}") for more in ("", "--device cpu")]
    for name, weight in runs[0]["weights"].items():
        torch.testing.assert_close(weight, runs[1]["weights"][name], rtol=1e-3, atol=1e-4)


def test_a_broken_step_leaves_the_weights_and_is_named(tmp_path: Path) -> None:
    job = Line([*FLAGS, "--epochs", "2", "--save", str(tmp_path / "run"), "--save-interval", "3"])
    job.poisoned = 7
    with pytest.raises(NonFiniteLoss) as caught:
        job.fit()
    step = int(caught.value.message.split()[1].rstrip(":"))
    assert "7" in caught.value.where.replace("[", " ").replace(",", " ").replace("]", " ").split()
    assert len(job.weights) <= step + 1
    for kept in job.weights[step - 1 :]:
        assert all(torch.equal(a, b) for a, b in zip(kept, job.weights[step - 2], strict=True))


def test_a_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    flags = f"{STEPS} --save-interval 5 --mixed-precision bf16 --keep-checkpoints 9"
    whole = train("causal", False, f"{flags} --save {tmp_path / 'whole'}")
    CausalJob(f"{flags} --lr 1e-3 --train-iters 5 --lr-decay-iters 10 --save {tmp_path / 'cut'}".split()).fit()
    more = f"{flags} --lr 1e-3 --log-interval 1 --save {tmp_path / 'cut'} --resume"
    resumed = CausalJob(more.split())
    resumed.fit()
    lines = [line for line in read_metrics(tmp_path / "cut/metrics.jsonl") if "loss" in line and line["step"] > 5]
    expected = [loss for loss, _ in whole["curve"][5:]]
    torch.testing.assert_close(
        torch.tensor([line["loss"] for line in lines]), torch.tensor(expected), rtol=1e-3, atol=0
    )


def test_profile_sees_the_device(tmp_path: Path) -> None:
    flags = "--train-iters 12 --micro-batch-size 4 --profile 5 --lr 1e-3"
    CausalJob([*flags.split(), "--save", str(tmp_path / "run")]).fit()
    found = json.loads((tmp_path / "run/profile/summary.json").read_text())
    assert found["device_busy_ms"] > 0
    assert 0 <= found["device_idle_share"] < 1


@pytest.mark.parametrize("flags", ["--torch-compile", "--use-flash-attn --mixed-precision bf16", "--cpu-offload"])
def test_switches_follow_plain_eager(flags: str, on_cpu: Any) -> None:
    run = train("causal", False, f"{STEPS} {flags}")
    tolerance = 2**-6 if "bf16" in flags else 1e-3
    torch.testing.assert_close(torch.tensor(run["curve"]), torch.tensor(on_cpu["curve"]), rtol=tolerance, atol=0)


class Wide(CausalJob):
    """A model whose memory is mostly activations."""

    def make(self) -> torch.nn.Module:
        sizes: dict[str, Any] = {"n_positions": 64, "n_embd": 256, "n_layer": 12, "n_head": 4}
        return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **sizes))


MANY = 256
"""Samples per micro batch. With 32, the gradients of all blocks are larger than the inputs of all blocks, and the peak
is at the end of a backward, when all inputs have been freed."""


def _trained_wide(flags: str) -> tuple[Any, int, dict[str, Any]]:
    """Return the curve, the peak memory in bytes and the receipts."""
    gc.collect()  # frees the model of the previous run
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    job = Wide([*f"--train-iters 4 --micro-batch-size {MANY} --lr 1e-3 --log-interval 1 {flags}".split()])
    receipts = job.fit()["receipts"]
    return job.curve, torch.cuda.max_memory_allocated(), receipts


@pytest.fixture
def is_deterministic() -> Iterator[None]:
    """Let torch choose kernels without atomic additions. Otherwise two equal runs differ in the last bit of a norm."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("is_deterministic")
@pytest.mark.parametrize("more", ["", "--checkpoint-activations", "--recompute-activations --mixed-precision bf16"])
def test_activations_on_the_host_leave_the_same_bits_and_less_memory(more: str) -> None:
    wanted, plain, _ = _trained_wide(more)
    curve, offloaded, receipts = _trained_wide(f"{more} --offload-activations")
    assert curve == wanted
    assert receipts["offloaded_bytes"] == receipts["offloaded_bytes_at_a_time"] > 0
    assert receipts["late_bytes"] == 0
    assert offloaded < plain - receipts["offloaded_bytes"] / 2


@pytest.mark.parametrize("hook", HOOKS)
def test_what_a_hook_gives_the_model_counts_on_a_gpu(hook: str) -> None:
    runs = [job_of(hook, flags) for flags in ("", "--device cpu")]
    assert runs[0].losses == pytest.approx(runs[1].losses, rel=1e-4)


@pytest.mark.parametrize("bad", [{"input_ids": [1, 57, 2, 99]}, {"labels": 7}], ids=str)
@pytest.mark.parametrize("part", ["train", "valid"])
def test_a_number_beyond_its_table_is_found_before_the_device_sees_it(part: str, bad: dict[str, Any]) -> None:
    """A kernel that gets such a number ends the process, so the last line can only run if none did."""
    changes = {part: {4: {name: np.asarray(value) for name, value in bad.items()}}}
    flags = ["--lr", "0.1", "--micro-batch-size", "2", "--epochs", "1", "--no-save", "--device", "cuda"]
    with pytest.raises(DataError, match="is not one of the") as caught:
        type("Changed", (IndexJob,), {"changes": changes})(flags).fit()
    assert str(caught.value.where).endswith("samples [4]")
    torch.cuda.synchronize()
    assert float(torch.ones(2, device="cuda").sum()) == 2
