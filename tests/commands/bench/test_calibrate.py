"""The fit of measured seconds, and a calibration of this machine. No test checks how fast anything was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rapidformer_templates.commands.bench import calibrate
from rapidformer_templates.commands.bench.calibrate import Stopwatch, fit_factors, fit_line, fit_parts, predict_steps
from rapidformer_templates.commands.bench.cli import main
from rapidformer_templates.switches.auto_strategy.device_file import (
    EXCHANGES,
    DeviceFile,
    ExchangeRate,
    PrecisionRates,
    WorkerRates,
    read_device_file,
)
from rapidformer_templates.switches.auto_strategy.step_seconds import Timing
from rapidformer_templates.system.workers import Workers
from tests.support.selection import by_default

ALONE = Workers(0, 0, 1, torch.device("cpu"))
FAST = PrecisionRates(tflops=0.1, kernel_seconds=2e-5, attention_tflops=0.02, activation_bandwidth=4.0)
SIZES = (2.0**12, 2.0**16, 2.0**20, 2.0**24)


def test_a_line_recovers_its_delay_and_its_rate() -> None:
    delay, per_byte = fit_line([(size, 3e-5 + size / 2e9) for size in SIZES])
    assert (delay, per_byte) == pytest.approx((3e-5, 1 / 2e9))
    assert fit_line([(size, size / 2e9) for size in SIZES]) == pytest.approx((0.0, 1 / 2e9), abs=1e-12)
    # Errors in either direction move a rate less than the errors themselves.
    noisy = fit_line([(size, (3e-5 + size / 2e9) * (1 + 0.1 * (-1) ** i)) for i, size in enumerate(SIZES)])
    assert noisy == pytest.approx((3e-5, 1 / 2e9), rel=0.2)
    assert fit_line([(1.0, 2.0), (2.0, 1.0)])[0] == 0  # faster if it is larger: there is no such delay
    slowest = [(amount, 1e-5 + amount / 50e12) for amount in (1e9, 1e11, 1e13)]  # operations of a GPU
    assert fit_line(slowest) == pytest.approx((1e-5, 1 / 50e12))


def test_parts_are_fitted_and_never_negative() -> None:
    assert fit_parts([(0.5, 0.25), (0.25, 0.375)]) == pytest.approx((1.0, 2.0))
    assert fit_parts([(0.5, 0.0), (0.5, 0.0)]) == pytest.approx((2.0, 0.0))
    # The exact solution is (3, -1). The closest one without a negative factor has only the first part.
    assert fit_parts([(0.5, 0.5), (0.75, 1.25)]) == pytest.approx((1.25 / 0.8125, 0.0))


class Clock(Stopwatch):
    """Gives each operation the seconds of a device with known rates, from the tensors that it takes."""

    def __init__(self) -> None:
        super().__init__(ALONE, 0.0)

    def time(self, run: Callable[[], object]) -> float:
        operands = next(cell.cell_contents for cell in run.__closure__ if hasattr(cell.cell_contents, "__next__"))
        left, right = (operand.shape for operand in next(operands)[:2])
        return 2e-5 + 2 * left[0] * left[1] * right[-1] / 0.1e12


def test_the_rates_of_products_are_recovered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "OPERAND_BYTES", 1)
    monkeypatch.setattr(calibrate, "ATTENTION", {"cpu": ((1, 1, 8, 4), (1, 1, 16, 4))})
    found = calibrate._precision_rates(Clock(), "fp32", 0)
    assert found.tflops == pytest.approx(0.1)
    assert found.kernel_seconds == pytest.approx(2e-5)


def test_a_gpu_is_rated_by_its_waves_of_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred full tiles on a hundred multiprocessors are one wave, and two hundred are two."""
    monkeypatch.setattr(calibrate, "OPERAND_BYTES", 1)
    monkeypatch.setattr(calibrate, "PRODUCTS", {"cpu": ((2560, 64, 1280), (5120, 64, 1280))})
    monkeypatch.setattr(calibrate, "ATTENTION", {"cpu": ((1, 1, 8, 4), (1, 1, 16, 4))})
    wave = 2 * 2560 * 64 * 1280
    seconds = iter([wave / 50e12, 2 * wave / 50e12, *range(1, 9)])
    watch = Clock()
    monkeypatch.setattr(watch, "time", lambda run: next(seconds))
    assert calibrate._precision_rates(watch, "fp32", 100).tflops == pytest.approx(50)


def test_factors_of_steps_are_recovered() -> None:
    predicted = {"replicas": Timing(products=2.0, data=1.0), "tensor": Timing(memory=1.0, update=0.5, tensor=3.0)}
    measured = {"replicas": 2.0 * 1.5 + 1.0 * 0.7, "tensor": 1.5 * 1.5 + 3.0 * 0.7}
    assert fit_factors(predicted, measured) == pytest.approx((1.5, 0.7))
    assert fit_factors({"replicas": Timing(products=2.0)}, {"replicas": 3.0}) == (1.5, 1.0)  # nothing is exchanged


@pytest.mark.parametrize("precision", by_default(["bf16"], ["fp32", "bf16"]))
def test_the_reference_model_is_predicted_in_each_layout(precision: str, tmp_path: Path) -> None:
    file = tmp_path / "device.json"
    exchanges = {kind: ExchangeRate(i * 1e-4, 0.5) for i, kind in enumerate(EXCHANGES)}
    rates = WorkerRates(2, dict.fromkeys(["fp32", "bf16"], FAST), 8.0, 3.0, 1e-5, exchanges=exchanges)
    DeviceFile("cpu", "A processor", 32.0, None, 0, (rates,)).write(file)
    predicted = predict_steps(str(file), "cpu", precision, 2)
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
    assert all(f"{kind} gbs" in shown for kind in EXCHANGES)
    assert "bf16 computation_factor" in shown
    assert f"--device-file {file}" in shown.replace("\n", "")
