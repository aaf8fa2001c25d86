"""The hours, the cost and the checkpoints of a whole training, compared with arithmetic and with real files."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from rapidformer_templates import Trainer
from rapidformer_templates.commands.main import main
from rapidformer_templates.planning.environment import DEVICE_KINDS
from rapidformer_templates.planning.flag_values import TokenCount
from tests.support.selection import by_default
from tests.support.texts import DOCUMENTS

TINY = "--model-type gpt2 --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32"
GPUS = f"{TINY} --device-kind h100-80gb --world-size 4 --global-batch-size 16 --micro-batch-size 2"
PARAMETERS = 50257 * 32 + 1024 * 32 + 4 * (12 * 32**2 + 13 * 32) + 2 * 32


def plan_json(flags: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["plan", *flags.split(), "--json"]) == 0
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    return printed


@pytest.mark.parametrize(
    ("text", "count"),
    [("300B", 300 * 10**9), ("1.5T", 1_500_000_000_000), ("2e9", 2 * 10**9), ("20m", 20_000_000), ("1_000", 1000)],
)
def test_token_counts_have_units(text: str, count: int) -> None:
    assert TokenCount(text) == count


@pytest.mark.parametrize("text", ["300X", "B", "-3B", "0", "0.5", "1e-3B", ""])
def test_a_wrong_token_count_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *TINY.split(), f"--tokens={text}"]) == 2
    assert f"--tokens needs a number of tokens, such as 300B, 1.5T, 20M or 2e9, not '{text}'" in capsys.readouterr().err


def test_two_lengths_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *TINY.split(), "--tokens", "3B", "--train-iters", "5"]) == 2
    assert "--tokens and --train-iters both set the length of the training" in capsys.readouterr().err


def test_a_training_is_its_steps(capsys: pytest.CaptureFixture[str]) -> None:
    """The layout of the flags is predicted, and all numbers follow from the seconds of a step."""
    printed = plan_json(f"{GPUS} --tokens 1M --price-per-hour 2.5 --disk-gb-per-second 0.5", capsys)
    prediction, training = printed["prediction"], printed["prediction"]["training"]
    assert printed["plan"]["sizes"]["data"] == prediction["data"] == 4
    seconds = prediction["step_seconds"]
    assert training["steps"] == math.ceil(10**6 / (16 * 32))
    assert training["tokens"] == training["steps"] * 16 * 32 >= 10**6
    assert training["hours"] == pytest.approx(training["steps"] * seconds / 3600)
    assert training["gpu_hours"] == pytest.approx(4 * training["hours"])
    assert training["cost"] == pytest.approx(2.5 * 4 * training["hours"])
    assert training["tokens_per_second"] == pytest.approx(16 * 32 / seconds)
    assert training["checkpoint_seconds"] == pytest.approx(training["checkpoint_gb"] / 0.5)
    # 6 operations per token and parameter of a matrix, which includes the head (Kaplan et al., 2020), and 12 per token,
    # position, block and width for attention (Chowdhery et al., 2022). The weights of this table are the head, too.
    matrices = 50257 * 32 + 4 * 12 * 32**2
    operations = 16 * 32 * (6 * matrices + 12 * 4 * 32 * 32)
    peak = 4 * DEVICE_KINDS["h100-80gb"].fp32_tflops * 1e12
    assert training["mfu"] == pytest.approx(operations / (peak * seconds), rel=0.01)
    again = plan_json(f"{GPUS} --train-iters 7 --price-per-hour 1 --checkpoint-activations", capsys)["prediction"]
    assert again["training"]["hours"] == pytest.approx(7 * again["step_seconds"] / 3600)
    # Recomputation takes time, but its operations do not count.
    assert again["training"]["mfu"] * again["step_seconds"] == pytest.approx(training["mfu"] * seconds)


@pytest.mark.parametrize(
    "more",
    by_default(
        ["--tensor-model-parallel-size 2"],
        [
            "--tensor-model-parallel-size 2",
            "--pipeline-model-parallel-size 2",
            "--context-parallel-size 2",
            "--fsdp-memory-optimization",
        ],
    ),
)
def test_layouts_do_not_change_the_work(more: str, capsys: pytest.CaptureFixture[str]) -> None:
    plain, divided = (plan_json(f"{GPUS} --price-per-hour 1 {flags}", capsys)["prediction"] for flags in ("", more))
    work = [each["training"]["mfu"] * each["step_seconds"] for each in (plain, divided)]
    assert work[1] == pytest.approx(work[0], rel=0.01)
    assert divided["training"]["checkpoint_gb"] == plain["training"]["checkpoint_gb"]


def test_epochs_are_counted_from_the_data(
    tmp_path: Path, bert_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [json.dumps({"text": "some words", "label": number % 2}) for number in range(50)]
    (tmp_path / "train.jsonl").write_text("\n".join(rows), encoding="utf-8")
    task = (
        f"--task sequence_classification --data-dir {tmp_path} --tokenizer-path {bert_folder} --validation-fraction 0"
    )
    flags = f"{GPUS} {task} --epochs 3 --price-per-hour 1".replace("gpt2", "bert").replace("size 2", "size 4")
    assert plan_json(flags, capsys)["prediction"]["training"]["steps"] == 3 * math.ceil(50 / 16)


@pytest.mark.slow
def test_the_best_layout_shows_its_training(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DEVICE_MEMORY_GB", "4")
    flags = f"{TINY} --auto-strategy --world-size 2 --device cpu --tokens 2M --price-per-hour 3 --micro-batch-size 1"
    flags += " --no-checkpoint-activations --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1"
    for layout in plan_json(flags, capsys)["layouts"]:
        training = layout["training"]
        assert training["steps"] == math.ceil(2_000_000 / (32 * layout["global_batch_size"]))
        assert training["cost"] == pytest.approx(3 * 2 * training["steps"] * layout["step_seconds"] / 3600)
        assert training["mfu"] is None  # the peak of a CPU is unknown
    assert main(["plan", *flags.split()]) == 0
    assert "worker-hours = " in capsys.readouterr().out


def test_without_terms_a_plan_predicts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert "prediction" not in plan_json(f"{GPUS} --train-iters 10", capsys)


OPTIMIZERS = ["", "--optimizer lion", "--optimizer adafactor", "--ema-decay 0.9", "--mixed-precision bf16"]


@pytest.mark.parametrize("more", by_default(["", "--mixed-precision bf16"], OPTIMIZERS))
def test_a_real_checkpoint_has_the_predicted_size(
    more: str, tmp_path: Path, gpt_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "corpus.txt").write_text("\n".join(DOCUMENTS), encoding="utf-8")
    flags = f"{TINY} --tokenizer-path {gpt_folder} --micro-batch-size 2 --device cpu --train-iters 1 --lr 1e-3 {more}"
    predicted = plan_json(f"{flags} --disk-gb-per-second 1", capsys)["prediction"]["training"]["checkpoint_gb"] * 1e9
    data = f"--task pretraining --data-path {tmp_path}/corpus.txt --data-cache-dir {tmp_path}/cache"
    Trainer([*flags.split(), *data.split(), "--save", str(tmp_path / "run")]).fit()
    (folder,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    files = [*folder.glob("weights-*"), *folder.glob("optimizer-*")]
    sizes = []
    for file in files:
        with file.open("rb") as opened:  # a file of safetensors begins with the size of its header
            header = 8 + int.from_bytes(opened.read(8), "little")
        sizes.append(file.stat().st_size - header)
    assert sum(sizes) == pytest.approx(predicted, rel=0.02)
