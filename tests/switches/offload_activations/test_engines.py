"""Every engine trains with activations in another memory as it does without, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.stand_in_host import taken_for_a_gpu
from rapidformer_templates.errors import ModelError, SwitchDidNothing
from rapidformer_templates.planning.environment import installed_packages
from rapidformer_templates.planning.registry import REGISTRY
from rapidformer_templates.planning.resolve import resolve
from tests.support.compiled_jobs import OneLength
from tests.support.jobs import DeepJob
from tests.support.requests import CPU, GPUS, codes, config_of, refusal
from tests.support.selection import by_default
from tests.support.worker_pool import run_in_workers

STEPS = "--train-iters 2 --global-batch-size 8 --log-interval 1 --lr 1e-2"
ENGINES = {
    "ddp": "--micro-batch-size 2",
    "fsdp": "--micro-batch-size 4 --fsdp-memory-optimization --mixed-precision bf16",
    "distributed": "--micro-batch-size 4 --use-distributed-optimizer",
    "tensor": "--micro-batch-size 8 --tensor-model-parallel-size 2 --recompute-activations",
    "sequence": "--micro-batch-size 8 --tensor-model-parallel-size 2 --sequence-parallel",
    "pipeline": "--micro-batch-size 2 --pipeline-model-parallel-size 2",
    "interleaved": "--micro-batch-size 2 --pipeline-model-parallel-size 2 --virtual-pipeline-size 2",
    "compiled": "--micro-batch-size 4 --torch-compile aot_eager",
    "checkpointed": "--micro-batch-size 4 --checkpoint-activations --mixed-precision bf16",
    "experts": "--micro-batch-size 4 --num-experts 4 --expert-parallel",
}
if "deepspeed" in installed_packages():
    ENGINES["zero-2"] = "--micro-batch-size 2 --zero-2-memory-optimization"
    ENGINES["zero-3"] = "--micro-batch-size 4 --zero-3-memory-optimization --recompute-activations"
if "fairscale" in installed_packages():
    ENGINES["sdp"] = "--micro-batch-size 4 --oss-sdp-memory-optimization"
if installed_packages().keys() >= {"onnxruntime", "onnxscript"}:
    ENGINES["onnx"] = "--micro-batch-size 4 --onnx-runtime-training"

LONGER = {
    "experts",
    "ddp",
    "distributed",
    "tensor",
    "sequence",
    "pipeline",
    "checkpointed",
    "compiled",
    "zero-2",
    "zero-3",
    "sdp",
    "onnx",
}
"""For ``make test-longer``. The other engines include one of each kind."""
IN_GRAPHS = {"compiled", "onnx"}
"""Engines that need seconds for each shape of a batch."""
IN_FLIGHT = {"pipeline", "interleaved"}
"""Engines with several micro batches in flight. Which backward comes first is unknown until it begins."""


class OneLengthJob(OneLength, DeepJob):
    pass


def _run(name: str, switch: str) -> tuple[dict[str, Any], list[Any]]:
    kind = OneLengthJob if name in IN_GRAPHS else DeepJob
    job = kind(f"{STEPS} {ENGINES[name]} {switch}".split())
    return job.fit()["receipts"], job.curve


def _both(workers: Any, name: str) -> list[Any]:
    with taken_for_a_gpu(256):
        return [_run(name, switch) for switch in ("", "--offload-activations")]


@pytest.mark.distributed
@pytest.mark.deepspeed
@pytest.mark.parametrize("name", by_default(ENGINES.keys() - LONGER, ENGINES))
def test_every_engine_computes_the_same_bits(name: str) -> None:
    for (before, wanted), (receipts, curve) in run_in_workers(2, _both, name):
        assert curve == wanted
        assert receipts["offloaded_bytes"] > 0
        late = receipts["late_bytes"]
        assert (0 < late < receipts["offloaded_bytes"] / 4) if name in IN_FLIGHT else late == 0
        # Tensors that recomputation keeps count the same on the host.
        assert receipts.get("saved_tensor_bytes") == before.get("saved_tensor_bytes")


def test_a_cpu_is_refused_before_any_worker_starts() -> None:
    text = refusal("--offload-activations --checkpoint-activations", CPU)
    assert "error[RF215]: this run is on a CPU: what blocks keep is in host memory already" in text
    assert "no stream on which a copy runs during the computation" in text
    assert codes("--offload-activations", GPUS) == []
    assert codes("--offload-activations --torch-compile", GPUS) == []
    assert codes("--offload-activations --torch-compile cudagraphs", GPUS) == ["RF216"]


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        ("", "what blocks keep goes"),
        ("--checkpoint-activations", "the inputs of recomputed blocks go"),
        ("--recompute-activations", "the inputs of recomputed blocks, and their products with weights, go"),
    ],
)
def test_the_plan_says_what_goes_and_where_it_waits(flags: str, what: str) -> None:
    plan = resolve(REGISTRY.merge_files(config_of(f"--offload-activations {flags}")), GPUS)
    (note,) = [note for note in plan.notes if note.startswith("offload-activations")]
    assert note.startswith(f"offload-activations: {what} to page-locked host memory while the next block computes")
    assert "it waits" in note
    piped = resolve(config_of("--offload-activations --pipeline-model-parallel-size 2 --num-layers 4"), GPUS)
    assert any("the first backward of a step waits" in note for note in piped.notes)


class Flat(DeepJob):
    layers = 1


class Blockless(DeepJob):
    def make(self) -> torch.nn.Module:
        return torch.nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("job", "error", "told"),
    [
        (Flat, SwitchDidNothing, "what the last block keeps stays"),
        (Blockless, ModelError, "activation offloading found no repeated blocks"),
    ],
)
def test_a_model_with_nothing_to_send_is_told(job: type[DeepJob], error: type[Exception], told: str) -> None:
    with taken_for_a_gpu(256), pytest.raises(error, match=told):
        job([*f"{STEPS} --micro-batch-size 4 --offload-activations".split()]).fit()
