"""The devices that a plan is for: from a data sheet, from variables, or from this machine."""

from __future__ import annotations

import json

import pytest

from rapidformer_templates.commands.main import main
from rapidformer_templates.planning.environment import DEVICE_KINDS, Environment
from rapidformer_templates.switches.auto_strategy.timing import ASSUMED, GIVEN, find_hardware

TINY = "--model-type gpt2 --num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16"


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in GIVEN.values():
        monkeypatch.delenv(variable, raising=False)


def of_kind(name: str, precision: str = "bf16") -> dict[str, object]:
    return vars(find_hardware(Environment(device="cuda", device_kind=name, device_origin="a name"), precision))


def test_a_kind_is_its_data_sheet_times_what_training_reaches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner assumes an A100 of 80 GB for every GPU whose kind the user does not name."""
    found, assumed = of_kind("a100-80gb"), ASSUMED["cuda"]
    assert found["memory_gb"] == 80
    assert found["tflops"] == pytest.approx(assumed.tflops["bf16"], rel=0.01)
    assert of_kind("a100-80gb", "fp32")["tflops"] == pytest.approx(assumed.tflops["fp32"], rel=0.01)
    assert found["memory_bandwidth"] == pytest.approx(assumed.memory_bandwidth, rel=0.02)
    assert found["attention_tflops"] == pytest.approx(assumed.attention_tflops, rel=0.01)
    assert (found["intra_node"], found["inter_node"]) == (assumed.intra_node, assumed.inter_node)
    assert of_kind("v100-32gb")["tflops"] == of_kind("v100-32gb", "fp32")["tflops"]  # no units for bf16
    monkeypatch.setenv("DEVICE_MEMORY_GB", "70")
    assert of_kind("a100-80gb")["memory_gb"] == 70


def test_faster_kinds_have_larger_figures() -> None:
    older, newer = DEVICE_KINDS["a100-80gb"], DEVICE_KINDS["h100-80gb"]
    assert newer.bf16_tflops > older.bf16_tflops
    assert all(
        kind.memory_gb == float(name.rsplit("-", 1)[1].removesuffix("gb")) for name, kind in DEVICE_KINDS.items()
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "memory", "devices"),
    [
        ("", "4", "GPUs (DEVICE_MEMORY_GB without --device; --device cpu plans for CPUs)"),
        ("--device cpu", "4", None),
        ("--device-kind l4-24gb", None, "GPUs (--device-kind l4-24gb)"),
    ],
)
def test_the_plan_says_which_devices_it_is_for(
    flags: str,
    memory: str | None,
    devices: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if memory:
        monkeypatch.setenv("DEVICE_MEMORY_GB", memory)
    words = f"plan --auto-strategy --json --micro-batch-size 1 {TINY} {flags}"
    assert main(words.split()) == 0
    assumed = json.loads(capsys.readouterr().out)["assumed"]
    assert [line for line in assumed if line.startswith("GPUs")] == ([devices] if devices else [])
    assert assumed[-2].startswith("0.05 TFLOP/s" if devices is None else ("27.9" if memory is None else "17.9"))


def test_a_kind_of_gpu_is_no_processor(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--device-kind", "h100-80gb", "--device", "cpu", *TINY.split()]) == 2
    assert "--device-kind h100-80gb is a GPU, and --device cpu none" in capsys.readouterr().err
