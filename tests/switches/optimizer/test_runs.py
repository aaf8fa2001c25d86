"""Whole runs with each optimizer: several workers compared with one, and resumed runs with uninterrupted ones."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from rapidformer_templates.planning.environment import installed_packages
from rapidformer_templates.planning.optimizers import OPTIMIZERS
from rapidformer_templates.run.checkpoint.format import Reader
from tests.support import parallel_jobs
from tests.support.jobs import OTHERS, VOCABULARY, CausalJob
from tests.support.lines import Died
from tests.support.parity import assert_close, assert_follows, observed, reference
from tests.support.selection import by_default
from tests.support.worker_pool import run_in_workers

STEPS = "--train-iters 6 --global-batch-size 8 --clip-grad 0.5 --lr-decay-style constant --no-export-model"
STEPS += " --micro-batch-size 4"
PACKAGES = installed_packages()
NEW = [
    name
    for name in ("adamw_bnb_8bit", "adamw_torch_8bit", "adamw_torch_4bit", "adamw_anyprecision", "muon", "lion")
    if OPTIMIZERS[name].needs_package in (None, *PACKAGES)
]
OSS, SDP, SHARDED = "--oss-memory-optimization", "--oss-sdp-memory-optimization", "--use-distributed-optimizer"
FSDP = "--fsdp-memory-optimization"
ZERO_1, ZERO_2, ZERO_3 = (f"--zero-{stage}-memory-optimization" for stage in (1, 2, 3))
LAYOUTS = [
    *((name, OSS) for name in NEW),
    ("muon", SDP),
    *((name, SHARDED) for name in NEW if "bit" in name),
    ("adamw_anyprecision", FSDP),
    ("adamw_anyprecision", f"{ZERO_2} --cpu-offload"),
    ("adamw_anyprecision", ZERO_3),
    *(("lion", switch) for switch in ("", SHARDED, FSDP, ZERO_1, f"{ZERO_2} --cpu-offload", ZERO_3)),
]
LAYOUTS = [(name, switch) for name, switch in LAYOUTS if "oss" not in switch or "fairscale" in PACKAGES]
LAYOUTS = [(name, switch) for name, switch in LAYOUTS if "zero" not in switch or "deepspeed" in PACKAGES]
SHORT = {("adamw_bnb_8bit", OSS), ("adamw_torch_8bit", SHARDED), ("muon", SDP)}
"""Layouts that run by default."""


class QuantizedJob(CausalJob):
    """Its matrices are large enough for quantization."""

    dies_after: int | None = None

    def make(self) -> torch.nn.Module:
        sizes = {"vocab_size": VOCABULARY, "n_positions": 64, "n_embd": 64, "n_layer": 1, "n_head": 2}
        return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))

    def on_step_end(self, step: int, result: Any) -> None:
        super().on_step_end(step, result)
        if step == self.dies_after:
            raise Died


OTHERS |= {"quantized": QuantizedJob, **parallel_jobs.JOBS}


@pytest.mark.distributed
@pytest.mark.parametrize(("name", "switch"), by_default(SHORT, LAYOUTS))
def test_two_workers_follow_one_and_share_the_state(name: str, switch: str) -> None:
    flags = f"{STEPS} --optimizer {name}"
    alone = reference("quantized", False, flags)
    # A sum in another order can change a code of a quantized moment to the next one.
    tolerance = 2e-3 if "bit" in name else 1e-4 if name == "muon" else 1e-5
    for run in observed(2, "quantized", False, f"{flags} {switch}"):
        assert_close(run["curve"], alone["curve"], tolerance, 1e-6)
        if switch in (OSS, SDP):
            whole = alone["summary"]["receipts"]["optimizer_state_bytes"]
            held = run["summary"]["receipts"]["held_bytes_by_rank"]
            shares = [worker["optimizer_state_bytes"] for worker in held]
            assert max(shares) < 0.8 * whole
            tables = 2048 if name == "adamw_bnb_8bit" else 0  # each worker has these tables of codes
            assert abs(sum(shares) - whole) <= tables


@pytest.mark.distributed
@pytest.mark.longer
@pytest.mark.parametrize("kind", ["tensor", "pipeline"])
def test_lion_moves_each_weight_of_a_divided_model_as_in_one_process(kind: str) -> None:
    """The model has no biases: the loss does not depend on those of keys, so their gradients are noise of any sign."""
    flags = f"{STEPS} --optimizer lion"
    expected = reference("llama-4-tied", True, flags)
    for run in observed(2, "llama-4-tied", True, f"{flags} --{kind}-model-parallel-size 2"):
        assert_follows(run, expected, 1e-6, 0, weights=(0, 1e-12))


def _run(workers: Any, name: str, switch: str, folder: str, *, dies: bool) -> None:
    """Train a job. It may die after step 5, and go on from its checkpoint of step 3."""
    flags = f"{STEPS} {switch} --optimizer {name} --lr 1e-3 --save {folder} --save-interval 3".split()
    if dies:
        job = QuantizedJob(flags)
        job.dies_after = 5
        # Otherwise a worker ends its process with an error.
        with pytest.raises(Died), mock.patch("rapidformer_templates.system.launch.is_worker", return_value=False):
            job.fit()
        flags.append("--resume")
    QuantizedJob(flags).fit()


def _both(workers: Any, name: str, switch: str, folder: str) -> None:
    for dies in (False, True):
        _run(workers, name, switch, f"{folder}/{dies}", dies=dies)


def _contents(run: Path) -> Mapping[tuple[str, str], torch.Tensor]:
    """Return all tensors of a run's last checkpoint."""
    reader = Reader(run / "checkpoints" / "step-6")
    return {
        (kind, name): reader.read(kind, name, (0,) * len(shape), shape)
        for kind in ("weights", "optimizer")
        for name, shape in reader.names(kind).items()
    }


RESUMED = [*((name, "") for name in NEW), ("adamw_anyprecision", FSDP), ("adamw_torch_8bit", SHARDED)]
CODES = {"adamw_torch_8bit": ("exp_avg.codes", "exp_avg.scale"), "adamw_bnb_8bit": ("state1", "absmax1")}


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "switch"),
    by_default([(name, "") for name in ("adamw_bnb_8bit", "adamw_torch_8bit", "muon")], RESUMED),
)
def test_a_resumed_run_is_bitwise_the_whole_one(name: str, switch: str, tmp_path: Path) -> None:
    if name not in NEW:
        pytest.skip("its package is not installed")
    arguments = (name, switch, str(tmp_path))
    _ = run_in_workers(2, _both, *arguments) if switch else _both(None, *arguments)
    expected, actual = (_contents(tmp_path / str(dies)) for dies in (False, True))
    assert expected.keys() == actual.keys()
    for entry, values in expected.items():
        assert values.dtype == actual[entry].dtype, entry
        assert torch.equal(values, actual[entry]), entry
    if name in CODES:
        matrix = "transformer.h.0.mlp.c_fc.weight"
        codes, scales = (expected["optimizer", f"{matrix}/{part}"] for part in CODES[name])
        assert codes.dtype == torch.uint8
        assert scales.shape == (64 * 256 // 256,)
        kept = json.loads((tmp_path / "False/checkpoints/step-6/state.json").read_text())["engine"]["optimizer"]
        assert kept == OPTIMIZERS[name].implementation.rule
