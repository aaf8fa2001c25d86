"""Every engine trains with activations in another memory as it does without, bit for bit."""

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks.stand_in_host import ROOM, taken_for_a_gpu
from rapidformer_templates.errors import ModelError, SwitchDidNothing
from rapidformer_templates.planning.environment import installed_packages
from rapidformer_templates.switches.auto_strategy.layouts import Layout, MemoryOptions
from rapidformer_templates.switches.auto_strategy.memory import predict, variant_of
from rapidformer_templates.switches.auto_strategy.model_shapes import ModelShapes
from rapidformer_templates.switches.auto_strategy.step_seconds import exposed_copies
from rapidformer_templates.switches.auto_strategy.timing import GB
from tests.support.compiled_jobs import OneLength
from tests.support.jobs import DeepJob
from tests.support.messages import Says
from tests.support.model_shapes import shapes
from tests.support.plans import planned
from tests.support.requests import CPU, GPUS, codes, refusal
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
@pytest.mark.parametrize("name", by_default(["interleaved"], ENGINES))
def test_every_engine_computes_the_same_bits(name: str) -> None:
    for (before, wanted), (receipts, curve) in run_in_workers(2, _both, name):
        assert curve == wanted
        assert receipts["offloaded_bytes"] > 0
        late = receipts["late_bytes"]
        assert (0 < late < receipts["offloaded_bytes"] / 4) if name in IN_FLIGHT else late == 0
        # Tensors that recomputation keeps count the same on the host.
        assert receipts.get("saved_tensor_bytes") == before.get("saved_tensor_bytes")


def test_a_cpu_is_refused_before_any_worker_starts(says: Says) -> None:
    says.text(refusal("--offload-activations --checkpoint-activations", CPU))
    assert codes("--offload-activations", GPUS) == []
    assert codes("--offload-activations --torch-compile", GPUS) == []
    assert codes("--offload-activations --torch-compile cudagraphs", GPUS) == ["RF216"]


class Flat(DeepJob):
    layers = 1


class Blockless(DeepJob):
    def make(self) -> torch.nn.Module:
        return torch.nn.Linear(2, 2)


@pytest.mark.parametrize(("job", "error"), [(Flat, SwitchDidNothing), (Blockless, ModelError)])
def test_a_model_with_nothing_to_send_is_told(job: type[DeepJob], error: type[Exception], says: Says) -> None:
    with taken_for_a_gpu(256), says(error):
        job([*f"{STEPS} --micro-batch-size 4 --offload-activations".split()]).fit()


# The prediction of the planner.

HERE, AWAY = MemoryOptions(gpu=True), MemoryOptions(gpu=True, offloads_activations=True)


@pytest.fixture(scope="module")
def model() -> Iterator[ModelShapes]:
    with mock.patch(f"{ROOM}.transform.MIN_BYTES", 1024):
        yield shapes("gpt2", blocks=8)


@pytest.mark.longer
def test_all_but_two_blocks_are_on_the_host(model: ModelShapes) -> None:
    layout = Layout(micro_batch=4)
    here, away = (predict(model, layout, setting) for setting in (HERE, AWAY))
    a_block = model.trace(variant_of(layout, AWAY)).sent / 7
    assert here.host == 0
    assert away.host == pytest.approx(7 * a_block)
    saved = here.total - away.total
    assert 5 * a_block < saved < 7 * a_block
    assert here.parameters + here.optimizer == away.parameters + away.optimizer


@pytest.mark.longer
def test_micro_batches_in_flight_are_on_the_host(model: ModelShapes) -> None:
    """The first of two stages has two micro batches in flight, and also sends what its last block keeps."""
    layout = Layout(pipeline=2, micro_batch=4, accumulation=4)
    here, away = (predict(model, layout, setting) for setting in (HERE, AWAY))
    a_block = model.trace(variant_of(layout, AWAY)).sent / 7
    assert away.host == pytest.approx(8 * a_block, rel=0.05)
    assert here.total - away.total > 4 * a_block


def test_a_step_waits_for_what_the_computation_does_not_hide() -> None:
    """The forward is a third of the computation and hides the outgoing copies. The rest hides the returning copies."""
    assert exposed_copies(1.0, 3.0) == 0
    assert exposed_copies(1.5, 3.0) == pytest.approx(0.5)
    assert exposed_copies(3.0, 3.0) == pytest.approx(2 + 1)


@pytest.mark.longer
def test_the_plan_tells_what_the_link_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = "--model-type gpt2 --num-layers 6 --hidden-size 512 --num-attention-heads 8 --seq-length 512 --device cuda"
    flags = f"--auto-strategy {sizes} --world-size 1 --micro-batch-size 8 --global-batch-size 8"
    flags += " --no-checkpoint-activations"
    (plain,) = planned(flags, 16)["layouts"]
    assert plain["memory_gb"]["host"] == 0
    seconds = []
    for link in ("100000", "10", "5"):
        monkeypatch.setenv("HOST_LINK_GBS", link)
        answer = planned(f"{flags} --offload-activations", 16)
        assert f"{float(link):g} GB/s to the host and back (HOST_LINK_GBS)" in answer["assumed"]
        assert not [unknown for unknown in answer["not_predicted"] if unknown["switch"] == "offload-activations"]
        (layout,) = answer["layouts"]
        assert layout["memory_gb"]["total"] < plain["memory_gb"]["total"]
        seconds.append(layout["step_seconds"])
    copies = layout["memory_gb"]["host"] * GB
    assert seconds[2] - seconds[1] == pytest.approx(2 * copies * (1 / 5 - 1 / 10) / GB, rel=1e-3)
    assert seconds[0] < seconds[1]
