"""The files of the DeepSpeed guide of Transformers 4.37 [D], unchanged, follow one process.

The reference is one process with the optimizer and the schedule of the file, built by hand. The guide's fp16 is fp16
on a CPU as well.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rapidformer_templates.engines.recipe import OptimizerSpec
from tests.support.jobs import OTHERS, CausalJob
from tests.support.parity import train, weights_apart
from tests.support.selection import by_default, selected
from tests.support.worker_pool import run_in_workers

pytest.importorskip("deepspeed", reason="needs DeepSpeed: pip install 'rapidformer_templates[deepspeed]'")
pytestmark = [pytest.mark.deepspeed, pytest.mark.distributed]

FILES: dict[str, dict[str, Any]] = {
    file.stem: json.loads(file.read_text(encoding="utf-8")) for file in Path(__file__).with_name("guide").glob("*.json")
}
MANUAL = FILES["zero-2-manual"]
# The guide's rates hardly move a model in a few steps. The same file with other rates, in fp32, shows every option.
LOUDER = {
    "fp16": {"enabled": False},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.6, 0.8], "eps": 1e-4, "weight_decay": 0.3}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-4, "warmup_max_lr": 1e-3, "warmup_num_steps": 4}},
}
SMALL = {"allgather_bucket_size": 2e6, "reduce_bucket_size": 2e6}  # those of the guide take 1.6 GB of each worker
FILES["zero-2-louder"] = {**MANUAL, **LOUDER, "zero_optimization": MANUAL["zero_optimization"] | SMALL}
STEPS = "--train-iters 5 --global-batch-size 8"
FLAGS = {"auto": f"{STEPS} --lr 1e-3 --weight-decay 0.1 --lr-warmup-iters 3", "manual": STEPS, "louder": STEPS}


def _train_all(workers: Any, folder: str, names: list[str]) -> dict[str, Any]:
    def flags(name: str) -> str:
        return f"{FLAGS[name.rpartition('-')[2]]} --micro-batch-size 2 --deepspeed-config {folder}/{name}.json"

    return {name: train("causal", False, flags(name), lr=None) for name in names}


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("runs")
    for name, file in FILES.items():
        text = json.dumps(file, indent=4).replace("\n    }\n", "\n    },\n")  # some files of the guide have such commas
        (folder / f"{name}.json").write_text(text)
    found: dict[str, Any] = run_in_workers(2, _train_all, str(folder), selected(request, "name"))[0]
    return found


def _by_hand(*, lr: float, warmup: dict[str, Any], **options: Any) -> type[CausalJob]:
    """Return a job for one process with torch's AdamW and DeepSpeed's schedule."""

    class ByHand(CausalJob):
        def build_optimizer(self) -> OptimizerSpec:
            return OptimizerSpec(torch.optim.AdamW, {"lr": lr, **options})

        def build_scheduler(self, total_steps: int) -> Callable[[int], float]:
            from deepspeed.runtime.lr_schedules import WarmupLR

            optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
            schedule, rates = WarmupLR(optimizer, **warmup), []
            for _ in range(total_steps):
                rates.append(optimizer.param_groups[0]["lr"])
                schedule.step()
            return lambda step: float(rates[step] / lr)

    return ByHand


AS_AUTO = _by_hand(lr=1e-3, weight_decay=0.1, warmup={"warmup_min_lr": 0, "warmup_max_lr": 1e-3, "warmup_num_steps": 3})
REFERENCES = {
    "auto": (AS_AUTO, ""),
    "manual": (
        _by_hand(warmup=MANUAL["scheduler"]["params"], **MANUAL["optimizer"]["params"]),
        "--mixed-precision fp16 --clip-grad 1.0",
    ),
    "louder": (_by_hand(warmup=LOUDER["scheduler"]["params"], **LOUDER["optimizer"]["params"]), ""),
}


@pytest.fixture(scope="module")
def references() -> dict[str, Any]:
    found = {}
    for name, (job, flags) in REFERENCES.items():
        OTHERS["by-hand"] = job
        found[name] = train("by-hand", False, f"{STEPS} --micro-batch-size 8 {flags}")
    del OTHERS["by-hand"]
    return found


@pytest.mark.parametrize("name", by_default(["zero-2-manual", "zero-3-auto", "zero-2-louder"], FILES))
def test_a_file_of_the_guide_follows_one_process(name: str, references: Any, runs: Any) -> None:
    kind = name.rpartition("-")[2]
    expected, actual = references[kind], runs[name]
    _assert_like(expected, actual, 2**-9 if kind == "manual" else 1e-5, moved=kind != "manual")
    assert actual["summary"]["receipts"]["optimizer_class"].endswith("DeepSpeedCPUAdam")
    assert actual["summary"]["receipts"]["parameter_dtypes"] == ["float16" if kind == "manual" else "float32"]


def _assert_like(expected: Any, actual: Any, rtol: float, *, moved: bool) -> None:
    torch.testing.assert_close(torch.tensor(actual["curve"]), torch.tensor(expected["curve"]), rtol=rtol, atol=1e-6)
    assert actual["weights"].keys() == expected["weights"].keys()
    # Compare the norm: Adam turns rounding errors into steps if a gradient is about zero, 2 % of one in a few elements.
    assert weights_apart(actual["weights"], expected["weights"]) < 1e-5
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(actual["weights"][name], weight, rtol=1e-5, atol=2e-5)
    if moved:  # much more than this tolerance, so that other options of the optimizer would show
        assert max(float(weight.abs().max()) for name, weight in expected["weights"].items() if "bias" in name) > 1e-3
