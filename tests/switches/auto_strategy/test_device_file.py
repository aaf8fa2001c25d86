"""Device files: they are read back as written, damage is named, and their rates decide the predicted seconds."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rapidformer_templates.errors import ConfigError
from rapidformer_templates.planning.environment import Environment
from rapidformer_templates.switches.auto_strategy.device_file import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    EXCHANGES,
    DeviceFile,
    ExchangeRate,
    PrecisionRates,
    WorkerRates,
    read_device_file,
)
from rapidformer_templates.switches.auto_strategy.layouts import Layout, MemoryOptions
from rapidformer_templates.switches.auto_strategy.step_seconds import (
    CommunicationSizes,
    Timing,
    exchange_seconds,
    predict_seconds,
)
from rapidformer_templates.switches.auto_strategy.timing import ASSUMED, GIVEN, find_hardware
from rapidformer_templates.switches.auto_strategy.trace import Phase, Product, Trace
from tests.support.messages import Says
from tests.support.plans import planned

NARROW = {
    "fp32": PrecisionRates(tflops=0.1, kernel_seconds=2e-5, attention_tflops=0.02, activation_bandwidth=4.0),
    "bf16": PrecisionRates(tflops=0.4, kernel_seconds=3e-5, attention_tflops=0.03, activation_bandwidth=2.0),
}
ONE = WorkerRates(1, NARROW, memory_bandwidth=8.0, update_bandwidth=3.0, launch_seconds=1e-5)
FOUR = replace(
    ONE,
    workers=4,
    memory_bandwidth=2.0,
    exchanges={kind: ExchangeRate(1e-4 * (i + 1), 0.5 * (i + 1)) for i, kind in enumerate(EXCHANGES)},
)
TINY = "--model-type gpt2 --num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16"
DEVICE = DeviceFile("cpu", "A processor", 32.0, None, 0, (ONE, FOUR))


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in GIVEN.values():
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "new folder" / "device.json"
    DEVICE.write(path)
    return path


def test_a_file_is_read_back_as_written(file: Path) -> None:
    assert read_device_file(str(file)) == DEVICE
    gpu = replace(DEVICE, device="cuda", compute_capability=(9, 0), multiprocessors=132)
    gpu.write(file)
    assert read_device_file(str(file)) == gpu


def without(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda document: document.pop(name)


def in_rates(**values: object) -> Callable[[dict[str, Any]], object]:
    return lambda document: document["rates"][1].update(values)


DAMAGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "another format": lambda document: document.update(format="another 1"),
    "no rates": without("rates"),
    "a negative rate": in_rates(memory_bandwidth=-1),
    "no number": in_rates(launch_seconds=float("nan")),
    "a word as a rate": in_rates(update_bandwidth="3"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_named(name: str, file: Path, says: Says) -> None:
    document = json.loads(file.read_text(encoding="utf-8"))
    DAMAGES[name](document)
    file.write_text(json.dumps(document), encoding="utf-8")
    with says(ConfigError, FILE=file):
        read_device_file(str(file))


@pytest.mark.parametrize("content", [b"\xff\x00", b"[1, 2]", b'{"format": "rapidformer device 2", "rates"'])
def test_a_foreign_file_is_refused(content: bytes, file: Path, says: Says) -> None:
    file.write_bytes(content)
    with says(ConfigError, FILE=file):
        read_device_file(str(file))


@pytest.mark.parametrize(
    "flags",
    [
        "--device-file nowhere.json",
        "--device-file '{file}' --device-kind h100-80gb",
        "--device-file '{file}' --device cuda",
        "--device-kind h100-80gb --device cpu",
    ],
)
def test_one_description_of_devices_that_is_there(flags: str, file: Path, says: Says) -> None:
    says.command(f"plan {TINY} {flags.format(file=file)}", FILE=file)


def seconds_with(file: Path, layout: Layout, precision: str = "fp32") -> Timing:
    """Predict a block with one product of 10^9 operations, 10^6 bytes of operands and 7 other operations."""
    product = Product(1, 10**3, 500, 10**3, 4, 10**6, 10**9)
    sizes = {"peak_beside_earlier": 0, "end": 0}
    trace = Trace((Phase("forward", ("", 0), **sizes, products=(product,), launches=7),))
    place = Environment(local_world_size=layout.world, device_file=str(file))
    facts = CommunicationSizes(parameters=10**6, blocks=1, hidden=64, tokens=100)
    return predict_seconds(layout, MemoryOptions(), trace, facts, find_hardware(place, precision), layout.world)


def test_the_rates_of_a_file_decide_the_seconds(file: Path) -> None:
    """The expected seconds are the sizes divided by the rates of the file."""
    alone = seconds_with(file, Layout())
    assert alone.products == pytest.approx(2e-5 + 1e9 / 0.1e12)
    assert alone.memory == pytest.approx(1e6 / 4e9 + 10 * 1e6 / 8e9)  # and the gradients of a million parameters
    assert alone.launches == pytest.approx(8 * 1e-5)  # a CPU computes nothing while it starts an operation
    assert alone.update == pytest.approx(36 * 1e6 / 3e9)
    assert seconds_with(file, Layout(), "bf16").products == pytest.approx(3e-5 + 1e9 / 0.4e12)
    # An all-reduce of the gradients of a million parameters, of which the backward hides a part.
    four = seconds_with(file, Layout(data=4))
    sent = 1e-4 + 2 * 3 / 4 * 4e6 / 0.5e9
    assert four.data == pytest.approx(sent - 0.2 * four.hidden)


def test_factors_of_real_steps_multiply_what_is_computed_and_what_is_exchanged(tmp_path: Path) -> None:
    file, timings = tmp_path / "device.json", []
    slower = replace(NARROW["fp32"], computation_factor=1.5, exchange_factor=0.5)
    for rates in (FOUR, replace(FOUR, precisions={"fp32": slower})):
        replace(DEVICE, rates=(rates,)).write(file)
        timings.append(seconds_with(file, Layout(data=2, pipeline=2, accumulation=2)))
    exchanged = ("tensor", "pipeline", "data", "experts", "hidden")
    expected = {name: (0.5 if name in exchanged else 1.5) * value for name, value in vars(timings[0]).items()}
    assert vars(timings[1]) == pytest.approx(expected)
    assert min(timings[0].pipeline, timings[0].data, timings[0].bubble, timings[0].products) > 0
    shown = find_hardware(Environment(local_world_size=4, device_file=str(file)), "fp32").lines()
    assert "computation in real steps × 1.50, exchanges × 0.50 (measured)" in shown


def test_an_exchange_is_its_delay_and_its_bytes(file: Path) -> None:
    hardware = find_hardware(Environment(local_world_size=4, device_file=str(file)), "fp32")
    assert exchange_seconds(1e9, 4, 1, 4, hardware, ALL_REDUCE) == pytest.approx(1e-4 + 1.5 / 0.5)
    assert exchange_seconds(1e9, 4, 1, 4, hardware, ALL_GATHER) == pytest.approx(2e-4 + 0.75 / 1.0)
    assert exchange_seconds(1e9, 2, 2, 4, hardware, ALL_TO_ALL) == pytest.approx(4e-4 + 0.5 / 2.0)
    assert find_hardware(Environment(local_world_size=4, device_file=str(file)), "fp32").memory_gb == 8  # of 32
    with pytest.raises(ConfigError, match="has no rates for fp16, only for fp32, bf16"):
        find_hardware(Environment(device_file=str(file)), "fp16")


# Devices from a data sheet or from variables.


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "gigabytes", "devices", "rate"),
    [
        pytest.param(
            "",
            4,
            ["GPUs (DEVICE_MEMORY_GB without --device; --device cpu plans for CPUs)"],
            "17.9",
            marks=pytest.mark.longer,
        ),
        pytest.param("--device cpu", 4, [], "0.05", marks=pytest.mark.longer),
        ("--device-kind l4-24gb", None, ["GPUs (--device-kind l4-24gb)"], "27.9"),
    ],
)
def test_the_plan_says_which_devices_it_is_for(
    flags: str, gigabytes: float | None, devices: list[str], rate: str
) -> None:
    more = f"--auto-strategy --micro-batch-size 1 --no-checkpoint-activations {TINY}"
    assumed = planned(f"{more} {flags}", gigabytes)["assumed"]
    assert [line for line in assumed if line.startswith("GPUs")] == devices
    assert assumed[-2].startswith(f"{rate} TFLOP/s" if rate == "0.05" else rate)
