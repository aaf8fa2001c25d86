"""Several sizes of a cluster, and the comparison of a layout with the best one, against single searches."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from rapidformer_templates.commands.main import main
from tests.support.messages import Says
from tests.support.plans import planned

JOB = "--model-type gpt2 --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --device cpu"
FLAGS = f"{JOB} --auto-strategy --micro-batch-size 1 --global-batch-size 4 --no-checkpoint-activations"
FLAGS += " --tensor-model-parallel-size 1 --context-parallel-size 1"


@pytest.mark.slow
def test_each_size_has_the_best_layout_of_its_own_search(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("DEVICE_MEMORY_GB", "0.84")  # between what two workers and what four need
    more = f"{FLAGS} --use-distributed-optimizer --tokens 1M --price-per-hour 2"
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


@pytest.mark.slow
def test_a_named_layout_is_compared_by_component(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DEVICE_MEMORY_GB", "4")
    words = f"{FLAGS} --world-size 2 --compare '--pipeline-model-parallel-size 2 --virtual-pipeline-size 1'"
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


@pytest.mark.slow
def test_a_refused_size_is_in_the_table() -> None:
    flags = f"{FLAGS} --pipeline-model-parallel-size 2"
    refused, fits = planned(f"{flags} --world-size 1,2", 4)["clusters"]
    assert (refused["best"], refused["constraint"][:2]) == (None, "RF")
    assert fits["best"]["pipeline"] == 2
    assert planned(f"{flags} --world-size 1,3", 4, status=2)["errors"]  # no size is possible
