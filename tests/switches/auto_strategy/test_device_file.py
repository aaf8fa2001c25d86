"""Device files: they are read back as written, damage is named, and their rates decide the predicted seconds."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rapidformer_templates.commands.main import main
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
from rapidformer_templates.switches.auto_strategy.timing import GIVEN, find_hardware
from rapidformer_templates.switches.auto_strategy.trace import Phase, Product, Trace

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


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda document: document.update(format="another 1"), "its 'format' is not 'rapidformer device 2'"),
        (without("rates"), "'rates' is missing"),
        (lambda document: document.update(rates=[]), "'rates' is not a list with measurements"),
        (lambda document: document.update(device=3), "'device' is 3"),
        (lambda document: document.update(compute_capability="9.0"), "'compute_capability' is 9.0"),
        (in_rates(memory_bandwidth=-1), "'memory_bandwidth' is -1, not a positive number"),
        (in_rates(launch_seconds=float("nan")), "'launch_seconds' is nan, not a number"),
        (in_rates(update_bandwidth="3"), "'update_bandwidth' is 3, not a number"),
        (in_rates(precisions={"fp8": {}}), "'precisions' has 'fp8', which is not one of fp32, bf16, fp16"),
        (in_rates(exchanges=[1]), "'exchanges' is not a mapping of mappings"),
    ],
)
def test_damage_is_named(damage: Callable[[dict[str, Any]], object], reason: str, file: Path) -> None:
    document = json.loads(file.read_text(encoding="utf-8"))
    damage(document)
    file.write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(ConfigError) as raised:
        read_device_file(str(file))
    assert raised.value.message == f"cannot use {file}: {reason}"
    assert "rapidformer bench calibrate" in str(raised.value.hint)


@pytest.mark.parametrize("content", [b"", b"\xff\x00", b"[1, 2]", b'{"format": "rapidformer device 2", "rates"'])
def test_a_foreign_file_is_refused(content: bytes, file: Path) -> None:
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"cannot use .*device\.json"):
        read_device_file(str(file))


def test_a_plan_names_a_file_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split("plan --device-file nowhere.json")) == 2
    assert "cannot use nowhere.json: No such file or directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--device-kind h100-80gb", "--device-kind and --device-file both describe the devices"),
        ("--device cuda", "describes cpu, not --device cuda"),
    ],
)
def test_a_file_is_the_only_description(
    flags: str, message: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--device-file", str(file), *flags.split()]) == 2
    assert message in capsys.readouterr().err


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
