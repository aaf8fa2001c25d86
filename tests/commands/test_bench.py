"""``rapidformer bench``: what it measures and writes, FLOPs of a model, and a calibration. No test checks a speed."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rapidformer_templates.commands.bench import calibrate, models
from rapidformer_templates.commands.bench.calibrate import Stopwatch, fit_factors, fit_line, fit_parts, predict_steps
from rapidformer_templates.commands.bench.models import cpu_is_fast_at_bf16, fast_precision, training_flops
from rapidformer_templates.commands.bench.run import figures_of
from rapidformer_templates.commands.main import main
from rapidformer_templates.switches.auto_strategy import device_file
from rapidformer_templates.switches.auto_strategy.step_seconds import Timing
from rapidformer_templates.system.workers import Workers
from tests.support.messages import Says
from tests.support.texts import write_jsonl

TINY = ["mfu", "--scale", "tiny", "--device", "cpu", "--turns", "2"]


@pytest.mark.slow
def test_one_configuration_is_measured(tmp_path: Path, bert_folder: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", ({"text": f"line {i} says {i}", "label": i % 2} for i in range(40)))
    flags = (
        f"--task sequence_classification --model-type bert --num-layers 1 --hidden-size 16 --num-attention-heads 2"
        f" --seq-length 16 --data-dir {tmp_path} --data-name train --tokenizer-path {bert_folder} --lr 1e-3"
        " --micro-batch-size 4 --device cpu"
    ).split()
    assert main(["bench", "run", "--turns", "2", "--json", str(tmp_path / "run.json"), *flags]) == 0
    result = json.loads((tmp_path / "run.json").read_text())
    assert result["samples_per_second"] > 0
    assert len(result["seconds"]) == 2
    assert 0 < result["utilisation"] < 2
    assert result["plan"]["sizes"]["global_batch"] == 4
    assert result["flags"] == flags


@pytest.mark.longer
def test_a_model_of_known_size_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *TINY, "--steps-a-turn", "2", "--output", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "mfu.json").read_text())
    # A GPT of 2 layers and width 32: blocks of 12 h² + 13 h, tables of 128 words and 16 positions, and the last norm.
    assert result["parameters"] == 2 * (12 * 32**2 + 13 * 32) + (128 + 16) * 32 + 2 * 32
    decoder = 6 * (2 * 12 * 32**2 + 128 * 32) + 12 * 2 * 32 * 16  # FLOPs of a token, with the tied head
    assert result["flops_a_step"] == pytest.approx(decoder * 16 * 2, rel=0.01)
    assert len(result["seconds"]) == 2
    assert 100 < result["peak_mb"] < 10_000
    assert 4 < result["loss"] < 6
    assert result["plan"]["precision"] == fast_precision("cpu")
    assert (tmp_path / "mfu.png").stat().st_size > 0
    shown = capsys.readouterr().out
    assert "utilisation" in shown
    assert "wall time" not in shown  # the results of the run itself


@pytest.mark.longer
@pytest.mark.slow
@pytest.mark.distributed
def test_several_workers_and_more_flags_are_measured(tmp_path: Path) -> None:
    more = ["--nproc-per-node", "2", "--fsdp-memory-optimization", "--micro-batch-size", "1"]
    command = [sys.executable, "-m", "rapidformer_templates", "bench", *TINY, *more, "--json", str(tmp_path / "f.json")]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    result = json.loads((tmp_path / "f.json").read_text())
    assert len(result["seconds"]) == 2
    assert result["plan"]["sizes"]["world"] == result["plan"]["sizes"]["global_batch"] == 2
    assert "fsdp" in result["plan"]["switches"]


def test_the_warm_up_does_not_count_and_utilisation_is_that_of_each_turn() -> None:
    figures = figures_of([9.0, 9.0, 1.0, 2.0], [1.0, 1.0, 80.0, 80.0, 0.0], batch=4, flops=40.0)
    assert figures["samples_per_second"] == pytest.approx(8 / 3)
    assert figures["utilisation"] == pytest.approx(0.5)  # 40 / 1 / 80 and 40 / 2 / 40
    assert figures["seconds"] == [1.0, 2.0]
    assert figures_of([1.0] * 3, [1.0] * 4, 4, 0.0)["utilisation"] is None


@pytest.mark.parametrize(("instructions", "precision"), [({"avx512_bf16": True}, "bf16"), ({"avx2": True}, "fp32")])
def test_a_cpu_computes_in_bf16_where_it_has_instructions_for_it(
    instructions: dict[str, bool], precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: instructions)
    monkeypatch.setattr(models, "cpu_is_fast_at_bf16", cpu_is_fast_at_bf16.__wrapped__)
    assert fast_precision("cpu") == precision


@pytest.mark.parametrize(
    "words",
    ["partitioning --scale small", "mfu --scale huge", "calibrate --turns 3", "run --task causal_lm --epochs 3",
     "mfu --scale tiny --nothing"],
)  # fmt: skip
def test_mistakes_are_named(words: str, says: Says) -> None:
    says.command(f"bench {words}")


def test_a_decoder_s_flops_are_those_of_the_formula() -> None:
    """6 N + 12 L H S per token, where N excludes the table that is only looked up (PaLM, appendix B)."""
    layers, hidden, length, vocabulary, rows = 3, 64, 32, 512, 2
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=4,
        intermediate_size=128, max_position_embeddings=length, tie_word_embeddings=False,
    )  # fmt: skip
    ids = torch.zeros(rows, length, dtype=torch.long)
    counted = training_flops(lambda: LlamaForCausalLM(config), {"input_ids": ids, "labels": ids})
    with torch.device("meta"):
        parameters = sum(p.numel() for p in LlamaForCausalLM(config).parameters() if p.ndim > 1) - vocabulary * hidden
    expected = (6 * parameters + 12 * layers * hidden * length) * rows * length
    assert counted == pytest.approx(expected, rel=0.01)


ALONE = Workers(0, 0, 1, torch.device("cpu"))
FAST = device_file.PrecisionRates(tflops=0.1, kernel_seconds=2e-5, attention_tflops=0.02, activation_bandwidth=4.0)
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
    predicted = [Timing(products=2.0, data=1.0), Timing(memory=1.0, update=0.5, tensor=3.0)]
    measured = [2.0 * 1.5 + 1.0 * 0.7, 1.5 * 1.5 + 3.0 * 0.7]
    assert fit_factors(predicted, measured) == pytest.approx((1.5, 0.7))
    assert fit_factors([Timing(products=2.0)], [3.0]) == (1.5, 1.0)  # nothing is exchanged


@pytest.mark.longer
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_reference_model_is_predicted_in_each_layout(precision: str, tmp_path: Path) -> None:
    file = tmp_path / "device.json"
    exchanges = {kind: device_file.ExchangeRate(i * 1e-4, 0.5) for i, kind in enumerate(device_file.EXCHANGES)}
    rates = device_file.WorkerRates(2, dict.fromkeys(["fp32", "bf16"], FAST), 8.0, 3.0, 1e-5, exchanges=exchanges)
    device_file.DeviceFile("cpu", "A processor", 32.0, None, 0, (rates,)).write(file)
    predicted = predict_steps(str(file), "cpu", precision, 2)
    _, _, tensor, pipeline = predicted
    assert all(timing.communication > 0 for timing in predicted)
    assert tensor.tensor > 0
    assert pipeline.bubble > 0


@pytest.mark.longer
def test_a_calibration_measures_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "device.json"
    words = f"bench calibrate --device cpu --workers 2 1 --seconds 0.001 --output {file}"
    assert main(words.split()) == 0
    device = device_file.read_device_file(str(file))
    assert [rates.workers for rates in device.rates] == [1, 2]
    assert device.rates[0].precisions.keys() == device.rates[1].precisions.keys() == {"fp32", "bf16"}
    assert set(device.rates[1].exchanges) == set(device_file.EXCHANGES)
    assert not device.rates[0].exchanges
    for of_precision in device.rates[1].precisions.values():
        assert of_precision.computation_factor > 0
        assert of_precision.exchange_factor >= 0
    assert f"--device-file {file}" in capsys.readouterr().out
