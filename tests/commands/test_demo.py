"""What ``rapidformer demo`` and ``rapidformer new`` write: data, a model, scripts that run as they are, examples."""

import csv
import filecmp
import json
import subprocess
import sys
from pathlib import Path

import pytest

from rapidformer_templates.commands import demo
from rapidformer_templates.commands.demo import demo_model_folder, make_demo_data
from rapidformer_templates.commands.main import main
from rapidformer_templates.errors import DataError, ModelError
from tests.support.demo import needs_packages
from tests.support.messages import Says
from tests.support.selection import by_default


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


@pytest.mark.longer
@needs_packages
@pytest.mark.slow
@pytest.mark.distributed
def test_the_demo_trains_and_leaves_an_earlier_one_alone(tmp_path: Path) -> None:
    earlier = tmp_path / "demo"
    earlier.mkdir()
    words = ["demo", "--data", str(tmp_path / "data"), "--train", "32", "--held-out", "16", "--save", str(earlier)]
    command = [sys.executable, "-m", "rapidformer_templates", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    run, shown = tmp_path / "demo-2", done.stdout
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


@needs_packages
def test_the_status_is_that_of_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The training takes the place of the demo, which then has its exit status and gets its signals."""
    started: list[list[str]] = []
    monkeypatch.setattr(demo.os, "execv", lambda program, words: started.append([program, *words]))
    assert not main(
        ["demo", "--data", str(tmp_path), "--train", "6", "--held-out", "3", "--save", str(tmp_path / "run")]
    )
    assert [words[:4] for words in started] == [[sys.executable, sys.executable, "-m", "rapidformer_templates"]]
    assert str(tmp_path / "run") in started[0]


EXAMPLES = Path(__file__).parents[2] / "examples"
KINDS = ("finetuner", "pretrainer", "trainer")


@pytest.mark.parametrize("kind", by_default(["finetuner", "trainer"], KINDS))
def test_a_new_script_is_planned_and_trains(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    script = "tasks/reviews.py"
    assert main(["new", kind, script]) == 0
    assert capsys.readouterr().out == f"wrote {script}; run it with: python {script}\n"
    text = Path(script).read_text(encoding="utf-8")
    assert "my_task" not in text
    assert f"python {script}\n" in text
    assert len([line for line in text.splitlines() if line.strip()]) < 40
    assert main(["plan", "--user-script", script, "--device", "cpu"]) == 0
    assert f"{script}: MyTask, own hooks: build_model, build_data" in capsys.readouterr().out
    assert main(["--user-script", script, "--train-iters", "6", "--device", "cpu"]) == 0
    summary = json.loads(Path("runs/reviews/summary.json").read_text(encoding="utf-8"))
    assert summary["steps"] == 6
    assert Path("runs/reviews/export").is_dir()


@pytest.mark.longer
def test_a_new_script_learns_what_it_says(tmp_path: Path) -> None:
    assert main(["new", "finetuner", str(tmp_path / "task.py")]) == 0
    words = [sys.executable, "task.py", "--device", "cpu"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "runs/task/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    accuracies = [line["accuracy"] for line in map(json.loads, lines) if "accuracy" in line]
    assert len(accuracies) == 3
    assert max(accuracies) > 0.85


@pytest.mark.parametrize("name", sorted(path.stem for path in (EXAMPLES / "recipes").glob("*.py")))
def test_a_recipe_speaks_of_its_new_file(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new", "recipe", name]) == 0
    assert filecmp.cmp(f"{name}.py", EXAMPLES / "recipes" / f"{name}.py", shallow=False)
    assert main(["new", "recipe", name, "mine.py"]) == 0
    text = Path("mine.py").read_text(encoding="utf-8")
    assert "python mine.py\n" in text
    assert f"{name}.py" not in text
    assert f"runs/{name}" not in text


def test_what_is_there_stays_as_it_is(tmp_path: Path, says: Says) -> None:
    script = tmp_path / "train.py"
    script.write_text("mine\n", encoding="utf-8")
    for words in (
        f"trainer {script}",
        f"examples {tmp_path}",
        "trainer train",
        "tuner train.py",
        "",
        "recipe none a.py",
        "recipe sweep a.py b.py",
        "trainer a.py b.py",
    ):
        says.command(f"new {words}")
    assert script.read_text(encoding="utf-8") == "mine\n"


def test_the_examples_are_those_of_the_repository(tmp_path: Path) -> None:
    assert main(["new", "examples", str(tmp_path / "examples")]) == 0
    files = [str(file.relative_to(EXAMPLES)) for file in EXAMPLES.rglob("*") if file.suffix not in ("", ".pyc")]
    assert {"sentiment.py", "sentiment.yaml", "slurm/train.sbatch"} <= set(files)
    same, *others = filecmp.cmpfiles(EXAMPLES, tmp_path / "examples", files, shallow=False)
    assert (sorted(same), others) == (sorted(files), [[], []])
