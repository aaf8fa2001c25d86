"""The demo: its data, its model, its command."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from rapidformer_templates.commands import demo
from rapidformer_templates.commands.demo import demo_model_folder, make_demo_data
from rapidformer_templates.commands.main import main
from rapidformer_templates.errors import DataError, ModelError
from tests.support.demo import needs_packages
from tests.support.messages import Says


def _rows(file: Path) -> list[dict[str, str]]:
    with file.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


def test_absent_packages_name_the_command_that_installs_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says
) -> None:
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None)
    with says(DataError):
        make_demo_data(tmp_path)
    with says(ModelError):
        demo_model_folder()


@needs_packages
def test_no_held_out_tweet_is_trained_on(tmp_path: Path) -> None:
    make_demo_data(tmp_path, train=2000, held_out=1000)
    train, valid = _rows(tmp_path / "tweets-train.csv"), _rows(tmp_path / "tweets-valid.csv")
    assert (len(train), len(valid)) == (2000, 1000)
    texts = [row["text"] for row in (*train, *valid)]
    assert len(set(texts)) == 3000
    assert {row["label"] for row in train} == {"negative", "neutral", "positive"}


@needs_packages
def test_the_seed_decides_the_draw(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        make_demo_data(tmp_path / name, train=20, held_out=5, seed=seed)
    a, b, c = ((tmp_path / name / "tweets-train.csv").read_bytes() for name in "abc")
    assert a == b != c
    with pytest.raises(DataError, match="the corpus holds 37243 tweets, not 41000"):
        make_demo_data(tmp_path, train=40_000, held_out=1000)


@pytest.mark.longer
@needs_packages
@pytest.mark.slow
@pytest.mark.distributed
def test_the_demo_trains_and_leaves_an_earlier_one_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    earlier = tmp_path / "demo"
    earlier.mkdir()
    words = ["demo", "--data", str(tmp_path / "data"), "--train", "32", "--held-out", "16", "--save", str(earlier)]
    assert main(words) == 0
    run = tmp_path / "demo-2"
    shown = capfd.readouterr().out
    assert f"{earlier} already exists and is left unchanged; this run goes to {run}" in shown
    assert "rapidformer --task sequence_classification --pretrained-model-name-or-path" in shown
    joined = "".join(shown.replace("│", " ").split())  # the table breaks long paths
    assert joined.count("curves.png") == joined.count(f"{run}/export") == 1
    assert "accuracy" in shown
    assert list(earlier.iterdir()) == []
    assert (run / "export/model.safetensors").exists()


@needs_packages
def test_the_data_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--prepare", "--data", str(tmp_path), "--train", "6", "--held-out", "3"]) == 0
    assert capsys.readouterr().out == f"{demo_model_folder()}\n"
    assert [len(_rows(tmp_path / f"tweets-{part}.csv")) for part in ("train", "valid")] == [6, 3]


def test_the_status_is_that_of_the_training() -> None:
    assert demo._run(["false"]) == 1
    assert demo._run(["sh", "-c", "kill -TERM $$"]) == 143
