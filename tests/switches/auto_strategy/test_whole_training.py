"""Hours, cost and checkpoints of a whole training, several sizes of a cluster, and layouts that are compared."""

import json
import math
import shlex
from pathlib import Path

import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from rapidformer_templates import Trainer
from rapidformer_templates.commands.main import main
from rapidformer_templates.planning.environment import DEVICE_KINDS
from rapidformer_templates.planning.flag_values import TokenCount
from tests.support.messages import Says
from tests.support.plans import planned
from tests.support.selection import by_default
from tests.support.texts import DOCUMENTS

TINY = "--model-type gpt2 --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32"
GPUS = f"{TINY} --device-kind h100-80gb --world-size 4 --global-batch-size 16 --micro-batch-size 2"


@pytest.mark.parametrize(
    ("text", "count"),
    [("300B", 300 * 10**9), ("1.5T", 1_500_000_000_000), ("2e9", 2 * 10**9), ("20m", 20_000_000), ("1_000", 1000)],
)
def test_token_counts_have_units(text: str, count: int) -> None:
    assert TokenCount(text) == count


@pytest.mark.parametrize(
    "flags",
    [
        *(f"--tokens={text}" for text in ("300X", "-3B", "0", "1e-3B", "")),
        "--tokens 3B --train-iters 5",
        "--engine-memory --world-size 4 --zero-2-memory-optimization --template Trainer",
        "--engine-memory --auto-strategy",
    ],
)
def test_what_cannot_be_predicted_is_refused(flags: str, says: Says) -> None:
    says.command(f"plan {TINY} {flags}")


def test_a_training_is_its_steps() -> None:
    """The layout of the flags is predicted, and all numbers follow from the seconds of a step."""
    printed = planned(f"{GPUS} --tokens 1M --price-per-hour 2.5 --disk-gb-per-second 0.5")
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
    again = planned(f"{GPUS} --train-iters 7 --price-per-hour 1 --checkpoint-activations")["prediction"]
    assert again["training"]["hours"] == pytest.approx(7 * again["step_seconds"] / 3600)
    # Recomputation takes time, but its operations do not count.
    assert again["training"]["mfu"] * again["step_seconds"] == pytest.approx(training["mfu"] * seconds)


@pytest.mark.longer
@pytest.mark.parametrize(
    "more",
    [
        "--tensor-model-parallel-size 2",
        "--fsdp-memory-optimization",
    ],
)
def test_layouts_do_not_change_the_work(more: str) -> None:
    plain, divided = (planned(f"{GPUS} --price-per-hour 1 {flags}")["prediction"] for flags in ("", more))
    work = [each["training"]["mfu"] * each["step_seconds"] for each in (plain, divided)]
    assert work[1] == pytest.approx(work[0], rel=0.01)
    assert divided["training"]["checkpoint_gb"] == plain["training"]["checkpoint_gb"]


@pytest.mark.longer
def test_epochs_are_counted_from_the_data(tmp_path: Path, bert_folder: Path) -> None:
    rows = [json.dumps({"text": "some words", "label": number % 2}) for number in range(50)]
    (tmp_path / "train.jsonl").write_text("\n".join(rows), encoding="utf-8")
    task = (
        f"--task sequence_classification --data-dir {tmp_path} --tokenizer-path {bert_folder} --validation-fraction 0"
    )
    flags = f"{GPUS} {task} --epochs 3 --price-per-hour 1".replace("gpt2", "bert").replace("size 2", "size 4")
    assert planned(flags)["prediction"]["training"]["steps"] == 3 * math.ceil(50 / 16)


@pytest.mark.longer
def test_the_best_layout_shows_its_training(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DEVICE_MEMORY_GB", "4")
    flags = f"{TINY} --auto-strategy --world-size 2 --device cpu --tokens 2M --price-per-hour 3 --micro-batch-size 1"
    flags += " --no-checkpoint-activations --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1"
    for layout in planned(flags)["layouts"]:
        training = layout["training"]
        assert training["steps"] == math.ceil(2_000_000 / (32 * layout["global_batch_size"]))
        assert training["cost"] == pytest.approx(3 * 2 * training["steps"] * layout["step_seconds"] / 3600)
        assert training["mfu"] is None  # the peak of a CPU is unknown
    assert main(["plan", *flags.split()]) == 0
    assert "worker-hours = " in capsys.readouterr().out


def test_without_terms_a_plan_predicts_nothing() -> None:
    assert "prediction" not in planned(f"{GPUS} --train-iters 10")


OPTIMIZERS = ["", "--optimizer lion", "--optimizer adafactor", "--ema-decay 0.9", "--mixed-precision bf16"]


@pytest.mark.longer
@pytest.mark.parametrize("more", by_default(OPTIMIZERS[-1:], OPTIMIZERS))
def test_a_real_checkpoint_has_the_predicted_size(more: str, tmp_path: Path, gpt_folder: Path) -> None:
    (tmp_path / "corpus.txt").write_text("\n".join(DOCUMENTS), encoding="utf-8")
    flags = f"{TINY} --tokenizer-path {gpt_folder} --micro-batch-size 2 --device cpu --train-iters 1 --lr 1e-3 {more}"
    predicted = planned(f"{flags} --disk-gb-per-second 1")["prediction"]["training"]["checkpoint_gb"] * 1e9
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


BATCH = "--world-size 4 --micro-batch-size 2 --global-batch-size 16 --device cpu"
ENGINES = [
    "--tensor-model-parallel-size 2 --use-distributed-optimizer",  # buckets leave after the peak of the activations
    "--num-experts 4 --expert-model-parallel-size 2",  # DDP's buckets are without the experts
    "--fsdp-memory-optimization --mixed-precision bf16",
]


@pytest.mark.longer
@pytest.mark.parametrize("flags", by_default(ENGINES[:1], ENGINES))
def test_the_engine_on_tensors_without_data_agrees_with_the_rules(flags: str) -> None:
    """Both are compared with real runs elsewhere: benchmarks/planner.py, and test_own_hooks.py for the engine."""
    common = f"{TINY.replace('32', '64', 1)} {BATCH} {flags}"
    by_engine, by_rules = (planned(f"{common} {more}") for more in ("--engine-memory", "--tokens 1M"))
    by_engine, by_rules = by_engine["prediction"], by_rules["prediction"]
    assert (by_engine["memory_from"], by_rules["memory_from"]) == ("engine", "rules")
    engine, rules = by_engine["memory_gb"], by_rules["memory_gb"]
    kept = ("parameters", "gradients", "optimizer")
    assert [engine[name] for name in kept] == pytest.approx([rules[name] for name in kept], abs=2e-6)
    assert engine["total"] == pytest.approx(rules["total"], rel=0.03)
    assert by_engine["step_seconds"] == by_rules["step_seconds"]


JOB = f"{TINY} --device cpu"
OF_SIZES = f"{JOB} --auto-strategy --micro-batch-size 1 --global-batch-size 4 --no-checkpoint-activations"
OF_SIZES += " --tensor-model-parallel-size 1 --context-parallel-size 1"


@pytest.mark.longer
def test_each_size_has_the_best_layout_of_its_own_search(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("DEVICE_MEMORY_GB", "0.84")  # between what two workers and what four need
    more = f"{OF_SIZES} --use-distributed-optimizer --tokens 1M --price-per-hour 2"
    picture = tmp_path / "sizes.png"
    result = planned(f"{more} --world-size 1,2,4 --plot {picture}")
    single = [planned(f"{more} --world-size 2", status=1), planned(f"{more} --world-size 4")]
    sizes = {each["world_size"]: each for each in result["clusters"]}
    assert list(sizes) == [1, 2, 4]
    assert sizes[4]["best"] == single[1]["layouts"][0]
    assert sizes[4]["constraint"] is None
    for size in (1, 2):
        assert sizes[size]["best"] is None
        assert sizes[size]["constraint"]
    assert sizes[2]["constraint"] in {each["constraint"] for each in single[0]["rejected"]}
    assert result["smallest"] == 4
    is_bar = abs(imread(picture)[..., :3] - to_rgb("#4477aa")).max(axis=2) < 0.01
    assert 0.05 < is_bar.mean() < 0.5  # one of three sizes fits
    assert main(["plan", *more.split(), "--world-size", "1,2,4"]) == 0
    shown = capsys.readouterr().out
    assert "smallest that fits: 4 workers" in shown
    assert shown.count("nothing fits: ") == 2


@pytest.mark.longer
def test_a_named_layout_is_compared_by_component(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DEVICE_MEMORY_GB", "4")
    words = f"{OF_SIZES} --world-size 2 --compare '--pipeline-model-parallel-size 2 --virtual-pipeline-size 1'"
    result = planned(words)
    best = result["layouts"][0]
    piped = next(each for each in result["layouts"] if each["pipeline"] == 2 and each["virtual"] == 1)
    compared = {(each["name"], each["unit"]): each for each in result["compared"]["differences"]}
    assert result["compared"]["flags"] == piped["flags"] != best["flags"]
    for unit, total, key in (("ms", "step", "step_seconds"), ("GB", "needed", "memory_gb")):
        for column, layout in (("best", best), ("named", piped)):
            value = compared[total, unit][column]
            expected = layout[key] * 1000 / 4 if unit == "ms" else layout[key]["needed"]
            assert value == pytest.approx(expected, rel=0.01)  # the best layout of a search is traced exactly
    times = [each for (name, unit), each in compared.items() if unit == "ms" and name != "step"]
    for column in ("best", "named"):
        assert sum(each[column] for each in times) == pytest.approx(compared["step", "ms"][column])
    assert compared["bubble", "ms"]["best"] == 0 < compared["bubble", "ms"]["named"]
    assert main(["plan", *shlex.split(words)]) == 0
    assert "time per sample" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags",
    [
        "--world-size 2,2",
        "--world-size 0",
        "--world-size 1000001",
        "--world-size 2,4",
        "--world-size 2 --plot a.png",
        "--auto-strategy --world-size 2,4 --plot a.gif",
        "--compare=--zero-2-memory-optimization",
        "--auto-strategy --compare=--lr=3",
        "--auto-strategy --micro-batch-size 2 --compare=--micro-batch-size=1",
    ],
)
def test_mistakes_are_refused(flags: str, says: Says) -> None:
    says.command(f"plan {JOB} {flags}")


@pytest.mark.longer
def test_a_refused_size_is_in_the_table() -> None:
    flags = f"{OF_SIZES} --pipeline-model-parallel-size 2"
    refused, fits = planned(f"{flags} --world-size 1,2", 4)["clusters"]
    assert (refused["best"], refused["constraint"][:2]) == (None, "RF")
    assert fits["best"]["pipeline"] == 2
    assert planned(f"{flags} --world-size 1,3", 4, status=2)["errors"]  # no size is possible
