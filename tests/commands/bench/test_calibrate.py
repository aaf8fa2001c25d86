"""The fit of measured seconds, and a calibration of this machine. No test checks how fast anything was."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rapidformer_templates.commands.bench.calibrate import fit_rates
from rapidformer_templates.commands.bench.calibrate_worker import Measurements, Stopwatch
from rapidformer_templates.commands.bench.cli import main
from rapidformer_templates.commands.bench.reference_steps import fit_factors, predict_steps
from rapidformer_templates.switches.auto_strategy.device_file import (
    EXCHANGES,
    DeviceFile,
    PrecisionRates,
    read_device_file,
)
from rapidformer_templates.switches.auto_strategy.step_seconds import Timing
from rapidformer_templates.system.workers import Workers
from tests.support.selection import by_default

FAST = PrecisionRates(tflops=0.1, kernel_seconds=2e-5, attention_tflops=0.02, activation_bandwidth=4.0)
SIZES = (2.0**12, 2.0**16, 2.0**20, 2.0**24)


def synthetic(factor: float) -> Measurements:
    """Return the seconds of a device with known rates, times ``factor``."""
    shapes = [(64, 64, 64), (256, 512, 128), (1024, 512, 1024)]
    return Measurements(
        name="A processor",
        memory_gb=32.0,
        products={"fp32": [(m, k, n, factor * (2e-5 + 2 * m * k * n / 0.1e12)) for m, k, n in shapes]},
        attention={"fp32": [(flops, factor * (1e-4 + flops / 0.02e12)) for flops in (1e7, 1e8, 1e9)]},
        activations={"fp32": [(size, factor * (1e-4 + size / 4e9)) for size in SIZES]},
        exchanges={
            kind: [(size, factor * (i * 1e-4 + size / 0.5e9)) for size in SIZES] for i, kind in enumerate(EXCHANGES)
        },
        copy=(1e9, factor * 1e9 / 8e9),
        update=(1e6, factor * 36e6 / 3e9),
        launch_seconds=factor * 1e-5,
    )


def test_the_fit_recovers_the_rates_of_a_device() -> None:
    rates = fit_rates([synthetic(0.5), synthetic(1.5)])  # two workers, whose mean is the device
    assert rates.workers == 2
    found = rates.precisions["fp32"]
    assert found.tflops == pytest.approx(0.1)
    assert found.kernel_seconds == pytest.approx(2e-5)
    assert found.attention_tflops == pytest.approx(0.02)
    assert found.activation_bandwidth == pytest.approx(4.0)
    assert (rates.memory_bandwidth, rates.update_bandwidth) == pytest.approx((8.0, 3.0))
    assert (rates.launch_seconds, rates.host_link) == (pytest.approx(1e-5), None)
    for i, kind in enumerate(EXCHANGES):
        assert rates.exchanges[kind].seconds == pytest.approx(i * 1e-4, abs=1e-12)
        assert rates.exchanges[kind].gbs == pytest.approx(0.5)


def test_a_gpu_is_rated_by_its_waves_of_tiles() -> None:
    """A hundred full tiles on a hundred multiprocessors are one wave, and one row more are two."""
    full, more = 2 * 2560 * 8192 * 1280, 2 * 2 * 2560 * 8192 * 1280
    measured = synthetic(1.0)
    measured.multiprocessors = 100
    measured.products = {"fp32": [(2560, 8192, 1280, full / 50e12), (5120, 8192, 1280, more / 50e12)]}
    assert fit_rates([measured]).precisions["fp32"].tflops == pytest.approx(50)


def test_an_operation_longer_than_the_measurement_is_still_measured() -> None:
    calls = []
    watch = Stopwatch(Workers(0, 0, 1, torch.device("cpu")), seconds=0.0)
    seconds = watch.time(lambda: calls.append(0))
    assert seconds > 0
    assert len(calls) == 4  # two to warm up, one to choose the number of calls, and one that is measured


def test_factors_of_steps_are_recovered() -> None:
    predicted = {"replicas": Timing(products=2.0, data=1.0), "tensor": Timing(memory=1.0, update=0.5, tensor=3.0)}
    measured = {"replicas": 2.0 * 1.5 + 1.0 * 0.7, "tensor": 1.5 * 1.5 + 3.0 * 0.7}
    assert fit_factors(predicted, measured) == pytest.approx((1.5, 0.7))
    assert fit_factors({"replicas": Timing(products=2.0)}, {"replicas": 3.0}) == (1.5, 1.0)  # nothing is exchanged


@pytest.mark.parametrize("precision", by_default(["bf16"], ["fp32", "bf16"]))
def test_the_reference_model_is_predicted_in_each_layout(precision: str, tmp_path: Path) -> None:
    file = tmp_path / "device.json"
    rates = replace(fit_rates([synthetic(1.0)] * 2), precisions=dict.fromkeys(["fp32", "bf16"], FAST))
    DeviceFile("cpu", "A processor", 32.0, None, 0, (rates,)).write(file)
    predicted = predict_steps(file, "cpu", precision, 2)
    assert list(predicted) == ["replicas", "fsdp", "tensor", "pipeline"]
    assert all(timing.communication > 0 for timing in predicted.values())
    assert predicted["tensor"].tensor > 0
    assert predicted["pipeline"].bubble > 0


@pytest.mark.longer
def test_a_calibration_measures_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "device.json"
    words = f"calibrate --device cpu --workers 2 1 --seconds 0.001 --output {file}"
    assert main(words.split()) == 0
    device = read_device_file(str(file))
    assert [rates.workers for rates in device.rates] == [1, 2]
    assert device.rates[0].precisions.keys() == device.rates[1].precisions.keys() == {"fp32", "bf16"}
    assert set(device.rates[1].exchanges) == set(EXCHANGES)
    assert not device.rates[0].exchanges
    for of_precision in device.rates[1].precisions.values():
        assert of_precision.computation_factor > 0
        assert of_precision.exchange_factor >= 0
    shown = capsys.readouterr().out
    assert all(kind in shown for kind in EXCHANGES)
    assert f"--device-file {file}" in shown.replace("\n", "")
