"""``rapidformer new``: scripts that run without changes, and the examples."""

from __future__ import annotations

import filecmp
import json
import subprocess
import sys
from pathlib import Path

import pytest

from rapidformer_templates.commands.main import main
from tests.support.messages import Says

EXAMPLES = Path(__file__).parents[2] / "examples"
KINDS = ("finetuner", "pretrainer", "trainer")


@pytest.mark.parametrize("kind", KINDS)
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


def test_what_is_there_stays_as_it_is(tmp_path: Path, says: Says) -> None:
    script = tmp_path / "train.py"
    script.write_text("mine\n", encoding="utf-8")
    for words in (f"trainer {script}", f"examples {tmp_path}", "trainer train", "tuner train.py", ""):
        says.command(f"new {words}")
    assert script.read_text(encoding="utf-8") == "mine\n"


def test_the_examples_are_those_of_the_repository(tmp_path: Path) -> None:
    assert main(["new", "examples", str(tmp_path / "examples")]) == 0
    files = [str(file.relative_to(EXAMPLES)) for file in EXAMPLES.rglob("*") if file.suffix not in ("", ".pyc")]
    assert {"sentiment.py", "sentiment.yaml", "slurm/train.sbatch"} <= set(files)
    same, *others = filecmp.cmpfiles(EXAMPLES, tmp_path / "examples", files, shallow=False)
    assert (sorted(same), others) == (sorted(files), [[], []])
