"""A base in fewer bits in FSDP's and ZeRO-3's shares. Codes are divided, and each step equals one process."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from rapidformer_templates.commands.main import main
from rapidformer_templates.models.blocks import canonical_name
from rapidformer_templates.planning.registry import REGISTRY
from rapidformer_templates.planning.resolve import resolve
from rapidformer_templates.planning.switch import Measured
from tests.support.jobs import OTHERS, PretrainedJob
from tests.support.parallel_jobs import JOBS, begin
from tests.support.parity import Trained, trained, weights_apart
from tests.support.requests import CPU, codes, config_of, on
from tests.support.selection import by_default, selected
from tests.support.worker_pool import run_in_workers

pytest.importorskip("peft", reason="needs peft: pip install 'rapidformer_templates[peft]'")
pytestmark = [pytest.mark.distributed, pytest.mark.deepspeed]

FOUR = "nf4" if importlib.util.find_spec("bitsandbytes") else "int4"
STEPS = (
    "--train-iters 4 --eval-interval 2 --global-batch-size 8 --clip-grad 0.1 --weight-decay 0.1 --no-export-model"
    " --lr 1e-3 --log-interval 1 --lora-rank 3 --lora-alpha 24"
)
FSDP, PAIR = "--fsdp-memory-optimization", "--fsdp-shard-size 2"
ZERO = "--zero-3-memory-optimization --zero-3-param-persistence-threshold 40"
BF16 = "--mixed-precision bf16"
LAYOUTS = {  # name: (workers, job, fp64, base, other flags)
    "4 bits": (2, "gpt2-4-tied", True, FOUR, f"{FSDP} --micro-batch-size 2"),
    "int8": (2, "llama-4-tied", True, "int8", f"{FSDP} --micro-batch-size 4"),
    "int4, recomputed": (2, "bert-4-untied", True, "int4", f"{FSDP} --micro-batch-size 1 --checkpoint-activations"),
    "int8, whole until the backward": (
        2, "gpt2-4-tied", True, "int8", f"{FSDP} --micro-batch-size 2 --no-fsdp-reshard-after-forward",
    ),
    "int8, bf16": (2, "llama-4-tied", False, "int8", f"{FSDP} --micro-batch-size 4 {BF16} --checkpoint-activations"),
    "4 bits, bf16": (2, "gpt2-4-tied", False, FOUR, f"{FSDP} --micro-batch-size 2 {BF16}"),
    "half": (2, "gpt2-4-tied", False, "half", f"{FSDP} --micro-batch-size 4 {BF16}"),
    "int4, four workers": (4, "neox-4-untied", True, "int4", f"{FSDP} --micro-batch-size 2"),
    "4 bits, copies": (4, "gpt2-4-tied", True, FOUR, f"{FSDP} --micro-batch-size 1 {PAIR}"),
    "int8, copies": (4, "llama-4-tied", True, "int8", f"{FSDP} --micro-batch-size 2 {PAIR} --checkpoint-activations"),
    "int8, zero-3": (2, "llama-4-tied", False, "int8", f"{ZERO} --micro-batch-size 2 --checkpoint-activations"),
    "4 bits, zero-3": (4, "gpt2-4-tied", False, FOUR, f"{ZERO} --micro-batch-size 1"),
    "int4, zero-3, bf16": (2, "gpt2-4-tied", False, "int4", f"{ZERO} --micro-batch-size 4 {BF16}"),
}  # fmt: skip


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


def _in_workers(workers: Any, layouts: list[str]) -> dict[str, Observed]:
    return {name: _observe(name, LAYOUTS[name][4]) for name in layouts}


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> dict[str, list[Observed]]:
    """The runs of all workers by layout."""
    found: dict[str, list[Observed]] = {}
    for world in (2, 4):
        layouts = [name for name in selected(request, "layout") if LAYOUTS[name][0] == world]
        if layouts:
            of_ranks = run_in_workers(world, _in_workers, layouts)
            found |= {name: [runs[name] for runs in of_ranks] for name in layouts}
    return found


@pytest.fixture(scope="module")
def references(request: pytest.FixtureRequest) -> dict[str, Observed]:
    """The runs in one process, with one micro batch per step."""
    return {
        name: _observe(name, f"--micro-batch-size 8 {BF16 if BF16 in LAYOUTS[name][4] else ''}")
        for name in selected(request, "layout")
    }


PARAMETERS = by_default(["4 bits"], LAYOUTS)


@pytest.mark.parametrize("layout", PARAMETERS)
def test_layout_follows_one_process(
    layout: str, runs: dict[str, list[Observed]], references: dict[str, Observed]
) -> None:
    wanted, double = references[layout], LAYOUTS[layout][2]
    assert len({loss for loss, _ in wanted["curve"]}) == 4
    # In bf16, products of half a batch are rounded apart from those of the other half.
    rtol = 1e-10 if double else 2**-7 if BF16 in LAYOUTS[layout][4] else 1e-5
    limits = {"rtol": rtol, "atol": 1e-12 if double else 1e-6}
    for found in runs[layout]:
        for key in ("curve", "evaluations"):
            torch.testing.assert_close(
                *(torch.tensor(run[key], dtype=torch.float64) for run in (found, wanted)),  # type: ignore[literal-required]
                **limits,
            )
        assert found["weights"].keys() == wanted["weights"].keys()
        assert weights_apart(found["weights"], wanted["weights"]) < 10 * rtol


@pytest.mark.parametrize("layout", PARAMETERS)
def test_each_worker_has_its_share_of_the_same_codes(
    layout: str, runs: dict[str, list[Observed]], references: dict[str, Observed]
) -> None:
    world, _, _, base, flags = LAYOUTS[layout]
    shares, wanted = 2 if PAIR in flags else world, references[layout]
    receipts = wanted["summary"]["receipts"]
    for found in runs[layout]:
        assert found["codes"].keys() == wanted["codes"].keys()
        for name, codes_of_layer in wanted["codes"].items():
            assert torch.equal(found["codes"][name], codes_of_layer), name
            assert wanted["held"][name] == codes_of_layer.nbytes
            least = codes_of_layer.nbytes / shares  # the rows of a matrix in 16 bits are not cut
            assert least <= found["held"][name] < least + (codes_of_layer[0].nbytes if base == "half" else 0) + 1
        same = ["frozen_parameters", "quantized_layers", "quantized_bytes", "trained_parameters"]
        if not (ZERO in flags and BF16 in flags):  # DeepSpeed rounds what is not quantized
            same.append("frozen_bytes")
        assert {name: found["summary"]["receipts"][name] for name in same} == {name: receipts[name] for name in same}
    if base != "half":
        assert receipts["quantized_layers"] == receipts["adapted_layers"] == len(wanted["codes"]) > 0


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


@pytest.mark.parametrize(("torch_version", "refused"), [("2.11.0+cu130", ["RF140"]), ("2.12.1", [])])
def test_older_versions_of_torch_cannot_shard_codes(torch_version: str, refused: list[str]) -> None:
    place = on(CPU, packages={"peft": "0.17", "torch": torch_version})
    assert codes(f"--lora-rank 8 --quantize-base int8 {FSDP}", place) == refused
    assert codes("--lora-rank 8 --quantize-base int8", place) == []
    assert codes(f"--lora-rank 8 --quantize-base half --mixed-precision bf16 {FSDP}", place) == []


RESUMED = (
    "--train-iters 10 --save-interval 2 --global-batch-size 8 --lr 1e-2 --no-export-model"
    f" --lora-rank 3 --lora-alpha 24 --quantize-base {FOUR}"
)
CHAIN = (
    (2, f"--micro-batch-size 2 {FSDP}", 3),
    (1, "--micro-batch-size 8 --resume", 5),
    (4, f"--micro-batch-size 1 {FSDP} {PAIR} --resume", 7),
    (2, f"--micro-batch-size 4 {FSDP} --resume", None),
)
"""Parts of a run: workers, flags, and the step after which it dies."""


class Double(JOBS["gpt2-4-tied"]):  # type: ignore[misc]
    double = True


OTHERS["gpt2-4-double"] = Double


def _begin(workers: Any, folder: str, flags: str, dies_after: int | None) -> list[tuple[float, float]]:
    return begin("gpt2-4-double", folder, f"{RESUMED} {flags}", dies_after)


@pytest.mark.longer
def test_checkpoints_move_to_one_process_and_back(tmp_path: Path) -> None:
    curve: list[tuple[float, float]] = []
    for workers, flags, dies_after in CHAIN:  # each part begins at the last checkpoint, one step before the death
        arguments = str(tmp_path / "parts"), flags, dies_after
        part = _begin(None, *arguments) if workers == 1 else run_in_workers(workers, _begin, *arguments)[0]
        curve = [*curve[:-1], *part]
    whole = _begin(None, str(tmp_path / "whole"), "--micro-batch-size 8", None)
    torch.testing.assert_close(torch.tensor(curve), torch.tensor(whole), rtol=1e-9, atol=1e-11)


def _exported(workers: Any, base: str, folder: str, flags: str) -> None:
    kind = type("Job", (PretrainedJob,), {"folder": base})
    words = f"--train-iters 3 --global-batch-size 8 --lr 1e-3 --lora-rank 4 --quantize-base int8 {flags}"
    kind([*words.split(), "--save", folder]).fit()


@pytest.mark.longer
def test_export_and_merge_equal_those_of_one_process(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _exported(None, str(base), str(tmp_path / "one"), "--micro-batch-size 8")
    run_in_workers(2, _exported, str(base), str(tmp_path / "two"), f"--micro-batch-size 4 {FSDP}")
    merged = []
    for name in ("one", "two"):
        assert main(["export", str(tmp_path / name), "--merge"]) == 0
        model = AutoModelForCausalLM.from_pretrained(tmp_path / name / "merged").state_dict()
        merged.append((load_file(tmp_path / name / "export/adapter_model.safetensors"), model))
    capsys.readouterr()
    for one, two in zip(*merged, strict=True):
        assert one.keys() == two.keys()
        for name, tensor in one.items():
            torch.testing.assert_close(two[name], tensor, rtol=1e-4, atol=1e-6)
