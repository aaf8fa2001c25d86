"""A base in fewer bits in FSDP's and ZeRO-3's shares. Codes are divided, and each step equals one process."""

import importlib.util
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from rapidformer_templates.models.blocks import canonical_name
from rapidformer_templates.planning.registry import REGISTRY
from rapidformer_templates.planning.resolve import resolve
from rapidformer_templates.planning.switch import Measured
from tests.support.parallel_jobs import JOBS
from tests.support.parity import Trained, assert_close, trained, weights_apart
from tests.support.requests import CPU, config_of, on
from tests.support.selection import by_default
from tests.support.worker_pool import run_in_workers

pytest.importorskip("peft", reason="needs peft: pip install 'rapidformer_templates[peft]'")
pytestmark = [pytest.mark.distributed, pytest.mark.deepspeed]

FOUR = "nf4" if importlib.util.find_spec("bitsandbytes") else "int4"
STEPS = (
    "--train-iters 2 --eval-interval 2 --global-batch-size 8 --clip-grad 0.1 --weight-decay 0.1 --no-export-model"
    " --lr 1e-3 --log-interval 1 --lora-rank 3 --lora-alpha 24"
)
FSDP, PAIR = "--fsdp-memory-optimization", "--fsdp-shard-size 2"
ZERO = "--zero-3-memory-optimization --zero-3-param-persistence-threshold 40"
BF16 = "--mixed-precision bf16"
LAYOUTS = {  # name: (workers, job, fp64, base, other flags)
    "4 bits": (2, "gpt2-4-tied", True, FOUR, f"{FSDP} --micro-batch-size 2"),
    "int8": (2, "llama-4-tied", True, "int8", f"{FSDP} --micro-batch-size 2 --no-fsdp-reshard-after-forward"),
    "int8, bf16": (2, "llama-4-tied", False, "int8", f"{FSDP} --micro-batch-size 4 {BF16} --checkpoint-activations"),
    "half": (2, "gpt2-4-tied", False, "half", f"{FSDP} --micro-batch-size 4 {BF16}"),
    "int4, four workers": (4, "neox-4-untied", True, "int4", f"{FSDP} --micro-batch-size 2"),
    "4 bits, copies": (4, "gpt2-4-tied", True, FOUR, f"{FSDP} --micro-batch-size 1 {PAIR} --checkpoint-activations"),
    "int8, zero-3": (2, "llama-4-tied", False, "int8", f"{ZERO} --micro-batch-size 2 --checkpoint-activations"),
    "int4, zero-3, bf16": (2, "gpt2-4-tied", False, "int4", f"{ZERO} --micro-batch-size 4 {BF16}"),
}


class Observed(Trained):
    """A run and its frozen weights in fewer bits.

    Attributes:
        codes: the whole tensors by name, after the last step.
        held: their bytes on this worker.
    """

    codes: dict[str, torch.Tensor]
    held: dict[str, int]


def _observe(layout: str, flags: str) -> Observed:
    """Train a case, and read the frozen weights from the model."""
    _, job, double, base, _ = LAYOUTS[layout]
    kinds = (torch.bfloat16,) if base == "half" else (torch.uint8,)
    whole_codes: dict[str, torch.Tensor] = {}
    held: dict[str, int] = {}

    class Job(JOBS[job]):  # type: ignore[misc]
        def on_step_end(self, step: int, result: Any) -> None:
            super().on_step_end(step, result)
            for name, tensor in self.model.named_parameters():
                if tensor.dtype not in kinds or tensor.requires_grad:
                    continue
                local = tensor.to_local() if isinstance(tensor, DTensor) else getattr(tensor, "ds_tensor", tensor)
                held[canonical_name(name)] = local.untyped_storage().nbytes()
                whole_codes[canonical_name(name)] = _whole(tensor)

    Job.double = double
    run = trained(Job(f"{STEPS} --quantize-base {base} {flags}".split()))
    return {**run, "codes": whole_codes, "held": held}


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, DTensor):
        return tensor.full_tensor().detach().clone()
    if not hasattr(tensor, "ds_tensor"):
        return tensor.detach().clone()
    import deepspeed

    with deepspeed.zero.GatheredParameters([tensor]):
        return tensor.detach().clone()


def _in_workers(workers: Any, layout: str) -> Observed:
    return _observe(layout, LAYOUTS[layout][4])


@pytest.mark.parametrize("layout", by_default(["4 bits"], LAYOUTS))
def test_each_worker_has_its_share_of_the_codes_and_follows_one_process(layout: str) -> None:
    world, _, double, base, flags = LAYOUTS[layout]
    wanted = _observe(layout, f"--micro-batch-size 8 {BF16 if BF16 in flags else ''}")
    assert len({loss for loss, _ in wanted["curve"]}) == 2
    receipts = wanted["summary"]["receipts"]
    if base != "half":
        assert receipts["quantized_layers"] == receipts["adapted_layers"] == len(wanted["codes"]) > 0
    # In bf16, products of half a batch are rounded apart from those of the other half.
    rtol = 1e-10 if double else 2**-7 if BF16 in flags else 1e-5
    same = ["frozen_parameters", "quantized_layers", "quantized_bytes", "trained_parameters"]
    if not (ZERO in flags and BF16 in flags):  # DeepSpeed rounds what is not quantized
        same.append("frozen_bytes")
    for found in run_in_workers(world, _in_workers, layout):
        for key in ("curve", "evaluations"):
            assert_close(found[key], wanted[key], rtol, 1e-12 if double else 1e-6)
        assert found["weights"].keys() == wanted["weights"].keys()
        assert weights_apart(found["weights"], wanted["weights"]) < 10 * rtol
        assert found["codes"].keys() == wanted["codes"].keys()
        for name, codes_of_layer in wanted["codes"].items():
            assert torch.equal(found["codes"][name], codes_of_layer), name
            assert wanted["held"][name] == codes_of_layer.nbytes
            least = codes_of_layer.nbytes / (2 if PAIR in flags else world)
            row = codes_of_layer[0].nbytes if base == "half" else 0  # a matrix in 16 bits is cut between its rows
            assert least <= found["held"][name] < least + row + 1
        assert {name: found["summary"]["receipts"][name] for name in same} == {name: receipts[name] for name in same}


LORA = f"--lora-rank 8 --quantize-base int8 {FSDP}"


@pytest.mark.parametrize(
    ("flags", "bytes_on_workers", "finding"),
    [
        ("", (25, 25, 26, 24), None),
        ("", (25, 25, 100, 25), "codes over 4 workers were expected; a worker has 100 of 100 bytes"),
        (PAIR, (50, 50, 51, 50), None),
        (PAIR, (50, 50, 100, 50), "codes over 2 workers were expected; a worker has 100 of 100 bytes"),
    ],
)
def test_whole_codes_on_any_worker_are_found(
    flags: str, bytes_on_workers: tuple[int, ...], finding: str | None
) -> None:
    config = REGISTRY.complete(config_of(f"{LORA} {flags}"))
    plan = resolve(config, on(CPU, world_size=4, local_world_size=4, packages={"peft": "0.17"}))
    common = {"trained_parameters": 5, "frozen_parameters": 100, "adapted_layers": 2, "adapted_routers": 0}
    common |= {"quantized_layers": 2, "quantized_bytes": 100}
    ranks = [common | {"quantized_bytes_on_worker": size} for size in bytes_on_workers]
    assert REGISTRY["lora"].acted(Measured(plan, config, ranks)) == finding
