"""What only a GPU can show; everything else is tested on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parity.jobs import train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: torch sees none here"),
]

STEPS = "--train-iters 10 --global-batch-size 8 --micro-batch-size 4"


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return train("causal", False, f"{STEPS} --device cpu", str(tmp_path_factory.mktemp("cpu") / "run"))


def test_gpu_follows_the_cpu_in_fp32(on_cpu: Any, tmp_path: Path) -> None:
    run = train("causal", False, STEPS, str(tmp_path / "run"))
    torch.testing.assert_close(torch.tensor(run["curve"]), torch.tensor(on_cpu["curve"]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("flags", "tolerance", "dtype"),
    [("--mixed-precision", 2**-9, "float16"), ("--mixed-precision bf16", 2**-6, "bfloat16")],
)
def test_half_precision_on_a_gpu(flags: str, tolerance: float, dtype: str, on_cpu: Any, tmp_path: Path) -> None:
    run = train("causal", False, f"{STEPS} {flags}", str(tmp_path / "run"))
    torch.testing.assert_close(torch.tensor(run["curve"]), torch.tensor(on_cpu["curve"]), rtol=tolerance, atol=0)
    assert dtype in run["summary"]["receipts"]["activation_dtypes"]


def test_tf32_acts_and_is_seen(on_cpu: Any, tmp_path: Path) -> None:
    before = torch.get_float32_matmul_precision()
    try:
        run = train("causal", False, f"{STEPS} --tf32", str(tmp_path / "run"))
    finally:
        torch.set_float32_matmul_precision(before)
    assert run["summary"]["receipts"]["matmul_precision"] == "high"
    torch.testing.assert_close(torch.tensor(run["curve"]), torch.tensor(on_cpu["curve"]), rtol=2**-8, atol=0)


def test_loader_processes_and_pinned_memory(on_cpu: Any, tmp_path: Path) -> None:
    flags = f"{STEPS} --dataloader-num-workers 2 --dataloader-pin-memory"
    run = train("causal", False, flags, str(tmp_path / "run"))
    torch.testing.assert_close(torch.tensor(run["curve"]), torch.tensor(on_cpu["curve"]), rtol=1e-4, atol=1e-5)
    assert run["summary"]["peak_memory_mb"] > 0
